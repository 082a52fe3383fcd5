"""The brake's listener: one POST of Alertmanager's webhook JSON, with a token, within bounds.

Model: method, token, type and size are checked before a byte of the body is parsed, in this order, so that a
stranger learns nothing but that the brake is there. What is understood is answered 200 with one line an alert, also
when nothing is done; 503 asks Alertmanager to send again (the token file or a run directory cannot be used now, or a
run was halted minutes ago); everything else is 4xx, which it does not repeat.

Bounds: `BODY_BYTES_MAX`, `DEADLINE_S` a connection with its TLS handshake, `MAX_REQUESTS` at a time, two tokens.
Off loopback there is no listener without TLS. Thread safety: `start` and `close` from one thread.
Must not: log or answer with anything of a token, or take a request for a person's.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from nvrx_sre.core import http_server
from nvrx_sre.core.clock import Clock, seconds
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.secret_files import is_one_of, read_secret_lines
from nvrx_sre.core.tls import is_loopback
from nvrx_sre.monitoring.brake import NOT_NOW, Brake, Handled, Outcome
from nvrx_sre.monitoring.brake_metrics import BrakeMetrics, RequestOutcome
from nvrx_sre.monitoring.webhook import parse_notification

BODY_BYTES_MAX = 64 * 1024
DISCARD_BYTES_MAX = 1 << 20
"""Of a refused body so much is read and thrown away, so that the sender gets our answer and not a reset."""
DEADLINE_S = 5.0
MAX_REQUESTS = 4
TOKENS_MAX = 2
"""The one in use, and the next one while it is handed out."""
TOKEN_CHARACTERS_MIN = 16


@dataclass(frozen=True, kw_only=True)
class BrakeConfig:
    """Where the brake listens. Validated at construction."""

    host: str = "127.0.0.1"
    port: int = 0
    token_file: Path
    """Private file of one or two tokens, a line each; read again at every request."""
    tls: ssl.SSLContext | None = None
    deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        if self.tls is None and not is_loopback(self.host):
            raise UserError(f"the brake would listen on {self.host} without TLS: give --tls-cert and --tls-key")
        read_tokens(self.token_file)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Status and what to say."""

    status: int
    outcome: RequestOutcome
    handled: tuple[Handled, ...] = ()
    detail: str = ""

    def body(self) -> bytes:
        """JSON for the log of the sender."""
        lines = [{"alert": item.alert, "run": item.run, "outcome": item.outcome, "reason": item.reason}
                 for item in self.handled]  # fmt: skip
        return json.dumps({"outcome": self.outcome, "detail": self.detail, "alerts": lines}).encode() + b"\n"


def read_tokens(path: Path) -> list[str]:
    """Tokens in force. Raises `UserError` if the file is not private or does not hold one or two good ones."""
    tokens = read_secret_lines(path)
    if len(tokens) > TOKENS_MAX:
        raise UserError(f"token file {path} has {len(tokens)} lines: use one token, or two during a rotation")
    if any(len(token) < TOKEN_CHARACTERS_MIN for token in tokens):
        raise UserError(f"token file {path}: a token needs at least {TOKEN_CHARACTERS_MIN} characters")
    return tokens


class BrakeServer:
    """Listens from construction on. Raises `UserError` if the address cannot be bound."""

    def __init__(
        self, config: BrakeConfig, brake: Brake, metrics: BrakeMetrics, clock: Clock, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._brake = brake
        self._metrics = metrics
        self._clock = clock
        self._say = say
        limits = http_server.ServerLimits(max_requests=MAX_REQUESTS, deadline_s=config.deadline_s)
        try:
            self._server = http_server.BoundedServer((config.host, config.port), _handler_for(self), limits, config.tls)
        except OSError as error:
            raise UserError(
                f"the brake cannot listen on {config.host}:{config.port}: {error.strerror or error}; "
                "choose another address with --listen"
            ) from error
        self._server.on_refused = lambda reason: metrics.count_request(RequestOutcome(reason))
        self._server.on_error = self._note_error
        self._thread = http_server.ServerThread(self._server, "nvrx-brake")

    @property
    def url(self) -> str:
        """Address for Alertmanager's webhook."""
        return f"{self._server.base_url}/"

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._thread.close()

    def refusal(self, headers: Any) -> Answer | None:
        """Why the request is refused by its headers alone; None if the body is to be read."""
        try:
            tokens = read_tokens(self._config.token_file)
        except UserError as error:
            self._say(str(error))
            return Answer(status=503, outcome=RequestOutcome.TOKEN_UNAVAILABLE)
        scheme, _, token = str(headers.get("Authorization", "")).partition(" ")
        if scheme.lower() != "bearer" or not is_one_of(token.strip(), tokens):
            return Answer(status=401, outcome=RequestOutcome.UNAUTHORIZED)
        if headers.get_content_type() != "application/json":
            return Answer(status=415, outcome=RequestOutcome.NOT_JSON, detail="use application/json")
        length = http_server.body_bytes(headers)
        if length is None:
            return Answer(status=411, outcome=RequestOutcome.NO_LENGTH)
        if length > BODY_BYTES_MAX:
            return Answer(status=413, outcome=RequestOutcome.TOO_LARGE, detail=f"at most {BODY_BYTES_MAX} bytes")
        return None

    def act(self, body: bytes) -> Answer:
        """Read the notification and let the brake decide."""
        try:
            handled = self._brake.handle(parse_notification(body).alerts)
        except ValueError as error:
            return Answer(status=400, outcome=RequestOutcome.MALFORMED, detail=str(error)[:200])
        for item in handled:
            self._metrics.count_alert(item.outcome)
            if item.outcome is Outcome.HALTED:
                self._metrics.note_halt(seconds(self._clock.wall_ns()))
            self._say(f"{item.alert} for run {item.run or '?'}: {item.outcome}: {item.reason}")
        again = any(item.outcome in NOT_NOW for item in handled)
        return Answer(status=503 if again else 200, outcome=RequestOutcome.UNDERSTOOD, handled=tuple(handled))

    def count(self, outcome: RequestOutcome) -> None:
        """One request ended so."""
        self._metrics.count_request(outcome)

    def _note_error(self, message: str) -> None:
        self.count(RequestOutcome.ERROR)
        self._say(f"a request failed: {message}")


def _handler_for(server: BrakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "nvrx-sre"
        sys_version = ""

        def do_POST(self) -> None:  # the name is http.server's
            answer = server.refusal(self.headers)
            length = http_server.body_bytes(self.headers) or 0
            if answer is not None:
                self.rfile.read(min(length, DISCARD_BYTES_MAX))
                self.reply(answer)
                return
            body = self.rfile.read(length)
            if len(body) == length:  # else the connection was cut, and has been counted as such
                self.reply(server.act(body))

        def refuse_method(self) -> None:
            """Anything but POST."""
            self.reply(Answer(status=405, outcome=RequestOutcome.NOT_POST))

        def reply(self, answer: Answer) -> None:
            """Count, then answer."""
            server.count(answer.outcome)
            body = answer.body()
            self.send_response(answer.status)
            if answer.status == 405:
                self.send_header("Allow", "POST")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Outcomes are said, requests are not."""

    for method in http_server.OTHER_METHODS:
        if method != "POST":
            setattr(Handler, f"do_{method}", Handler.refuse_method)
    return Handler
