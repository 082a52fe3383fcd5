"""The metrics endpoint: GET /metrics, /healthz, /readyz, and nothing else.

Up before the first worker and through every restart. `/metrics` answers 503 until the journal was replayed
(a counter must not be seen at less than it was), OpenMetrics if the scraper accepts it; `/healthz` answers
503 when the launcher's loop has not turned for a while. A port asked for explicitly that is busy is a
`UserError`; without one the kernel picks a free port (failure case C58).

TLS and basic authentication are optional (`EndpointSecurity`). Control has no place here: the brake has a listener
of its own.

However many scrape at a time, one rendering is under way and serves all who asked before it began: a storm of
scrapers takes no more of the interpreter from the launcher's loop than one that never stops.

Thread safety: one thread accepts, each request has its own, at most `MAX_REQUESTS` at a time. Must not:
change anything in the run.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import selectors
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from nvrx_sre.core import http_server
from nvrx_sre.core.clock import Clock, SystemClock, seconds, to_ns
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.secret_files import is_one_of, read_secret_lines
from nvrx_sre.core.signals import SignalPipe
from nvrx_sre.core.tls import is_loopback, server_context
from nvrx_sre.telemetry import exposition

MAX_REQUESTS = 32
"""Requests served at a time; further connections are closed. Scrapes wait for one rendering that they share."""
REQUEST_TIMEOUT_S = 10.0
"""Longest life of a connection, however slow the client is."""
REST_FACTOR = 9
"""A rendering may take a tenth of the time, however many scrape: the launcher's loop shares the interpreter with it."""
MAX_REST_S = 0.2
"""Longest rest; a rendering that was slow waited for a disk."""
MAX_KEPT = 4
"""Forms of the exposition whose newest rendering is kept."""
LIMITS = http_server.ServerLimits(max_requests=MAX_REQUESTS, deadline_s=REQUEST_TIMEOUT_S)


_REFUSALS = {
    http_server.BUSY: f"a request was refused, {MAX_REQUESTS} are served already",
    http_server.TOO_SLOW: f"a request was cut, it took longer than {REQUEST_TIMEOUT_S:.0f} s",
}


@dataclass(frozen=True, kw_only=True)
class EndpointSecurity:
    """TLS and basic authentication of the endpoint; neither by default."""

    tls_cert: Path | None = None
    """PEM certificate; with `tls_key`."""
    tls_key: Path | None = None
    users: Path | None = None
    """Private file of `user:password` lines, read again at each scrape. Health checks stay open: they show nothing."""

    def context(self, host: str) -> ssl.SSLContext | None:
        """TLS context of a listener on `host`. Raises `UserError` for files that cannot be used, or a bare password."""
        context = server_context(self.tls_cert, self.tls_key)
        if self.users is None:
            return context
        if context is None and not is_loopback(host):
            raise UserError(
                f"a password would be sent in the clear to {host}: give --metrics-tls-cert and --metrics-tls-key too"
            )
        if not all(":" in line for line in read_secret_lines(self.users)):
            raise UserError(f"{self.users}: each line must be user:password")
        return context

    def allows(self, authorization: str) -> bool:
        """Whether a scrape with this header is answered. A file that cannot be read any more allows none."""
        if self.users is None:
            return True
        scheme, _, encoded = authorization.partition(" ")
        try:
            given = base64.b64decode(encoded.strip(), validate=True).decode()
            users = read_secret_lines(self.users)
        except (binascii.Error, UnicodeDecodeError, UserError):
            return False
        return scheme.lower() == "basic" and is_one_of(given, users)


class SharedAnswers:
    """One `make` at a time; its answer goes to everybody who asked for the same `key` before it began.

    After each it rests for as long as it worked, times `REST_FACTOR`: whoever asks again at once waits, and a lone
    scraper never notices. Thread-safe. Bounded: it keeps the newest answer of at most `MAX_KEPT` keys.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._rests_until_ns = 0
        self._changed = threading.Condition()
        self._num_begun = 0
        self._is_making = False
        self._answers: dict[str, tuple[int, bytes]] = {}

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """An answer whose making began after this call. Blocks for it; raises what `make` raises, to its caller."""
        with self._changed:
            wanted = self._num_begun + 1
            while not self._may_begin():
                number, answer = self._answers.get(key, (0, b""))
                if number >= wanted:
                    return answer
            self._is_making = True
            self._num_begun += 1
            number = self._num_begun
        made, begun_ns = None, self._clock.monotonic_ns()
        try:
            made = make()
            return made
        finally:
            with self._changed:
                self._is_making = False
                now_ns = self._clock.monotonic_ns()
                self._rests_until_ns = now_ns + min(to_ns(MAX_REST_S), REST_FACTOR * (now_ns - begun_ns))
                if made is not None:
                    self._keep(key, number, made)
                self._changed.notify_all()

    def _may_begin(self) -> bool:
        """True if nothing is being made and the rest after the last one is over; else waits for a change."""
        if self._is_making:
            self._changed.wait()
            return False
        rest_ns = self._rests_until_ns - self._clock.monotonic_ns()
        if rest_ns > 0:
            self._changed.wait(seconds(rest_ns))
        return rest_ns <= 0

    def _keep(self, key: str, number: int, answer: bytes) -> None:
        if key not in self._answers and len(self._answers) >= MAX_KEPT:
            self._answers.clear()
        self._answers[key] = (number, answer)


@dataclass(kw_only=True)
class _Waiter:
    """A wait for scrapes."""

    number: int
    wake: int
    """Descriptor that is written to after each scrape that counts."""
    num_scrapes: int = 0
    """Scrapes that were asked for since it began, and answered."""


class MetricsServer:
    """Serves one registry. Listens from construction on; `start` begins to answer.

    Raises `UserError` if `port` (None: any free one) cannot be bound on `host`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int | None,
        health: Callable[[], bool],
        ready: Callable[[], bool],
        security: EndpointSecurity | None = None,
    ) -> None:
        self.security = security or EndpointSecurity()
        tls = self.security.context(host)
        self._registry = registry
        self._health = health
        self._ready = ready
        self._lock = threading.Lock()
        self._renderings = SharedAnswers()
        self.num_scrapes = 0
        self.wait_number = 0
        """Waits for scrapes begun so far."""
        self._waiters: list[_Waiter] = []
        """Those that have not ended."""
        try:
            self._server = http_server.BoundedServer((host, port or 0), _handler(self), LIMITS, tls)
        except OSError as error:
            where = f"{host}:{port}" if port else host
            raise UserError(
                f"metrics endpoint cannot listen on {where}: {error.strerror or error}; "
                "choose another port with --metrics-port, or leave it out to get a free one"
            ) from error
        self._scheme = "http" if tls is None else "https"
        self.host = host
        self.port = int(self._server.server_address[1])
        self._thread = http_server.ServerThread(self._server, "nvrx-endpoint")

    @property
    def url(self) -> str:
        """Where Prometheus scrapes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self._scheme}://{host}:{self.port}/metrics"

    def start(self, on_error: Callable[[str], None] | None = None) -> None:
        """Begin to answer. `on_error` hears of a request that failed on our side, or was refused or cut."""
        if on_error is not None:
            self._server.on_error = on_error
            self._server.on_refused = lambda reason: on_error(_REFUSALS[reason])
        self._thread.start()

    def wait_for_scrapes(self, count: int, timeout_s: float, signals: SignalPipe | None = None) -> bool:
        """Block until `count` scrapes were answered that were asked for after this call; True if they were.

        Ends after `timeout_s`, and with a signal. What was asked for before may show the state before.
        """
        clock = SystemClock()
        until_ns = clock.monotonic_ns() + to_ns(timeout_s)
        with selectors.DefaultSelector() as selector, self._waiting() as waiter:
            selector.register(waiter.wake, selectors.EVENT_READ)
            if signals is not None:
                selector.register(signals, selectors.EVENT_READ)
            while waiter.num_scrapes < count:
                ready = selector.select(seconds(max(0, until_ns - clock.monotonic_ns())))
                if [key.fileobj for key, _ in ready] != [waiter.wake]:
                    break
                os.eventfd_read(waiter.wake)
            return waiter.num_scrapes >= count

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[_Waiter]:
        """Counts scrapes from now on, and writes to the descriptor after each."""
        wake = os.eventfd(0)
        with self._lock:
            self.wait_number += 1
            waiter = _Waiter(number=self.wait_number, wake=wake)
            self._waiters.append(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters.remove(waiter)
            os.close(wake)

    def close(self) -> None:
        """Stop listening. Requests under way end with the process."""
        self._thread.close()

    def respond(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Status, content type and body for GET `path`."""
        route = path.partition("?")[0]
        if route == "/metrics":
            return self._respond_metrics(accept)
        checks = {"/healthz": self._health, "/readyz": self._ready}
        if route not in checks:
            return 404, "text/plain; charset=utf-8", b"not found: /metrics, /healthz, /readyz\n"
        good = checks[route]()
        return (200 if good else 503), "text/plain; charset=utf-8", b"ok\n" if good else b"not ok\n"

    def _respond_metrics(self, accept: str) -> tuple[int, str, bytes]:
        if not self._ready():
            return 503, "text/plain; charset=utf-8", b"replaying the journal\n"
        kind = exposition.content_type_for(accept)
        return 200, kind, self._renderings.get(kind, lambda: exposition.write(self._registry.collect(), kind))

    def note_scrape(self, wait_number: int) -> None:
        """A scrape was answered completely. `wait_number`: as it was when it was asked for."""
        with self._lock:
            self.num_scrapes += 1
            for waiter in self._waiters:
                if waiter.number <= wait_number:
                    waiter.num_scrapes += 1
                    os.eventfd_write(waiter.wake, 1)


def _handler(server: MetricsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "nvrx-sre"
        sys_version = ""

        def do_GET(self) -> None:
            is_scrape = self.path.partition("?")[0] == "/metrics"
            if is_scrape and not server.security.allows(self.headers.get("Authorization", "")):
                self.reply(401, "text/plain; charset=utf-8", b"unauthorized\n", ("WWW-Authenticate", "Basic"))
                return
            wait_number = server.wait_number
            status, content_type, body = server.respond(self.path, self.headers.get("Accept", ""))
            self.reply(status, content_type, body)
            if status == 200 and is_scrape:
                server.note_scrape(wait_number)

        def refuse_method(self) -> None:
            """Anything but GET."""
            self.reply(405, "text/plain; charset=utf-8", b"only GET\n", ("Allow", "GET"))

        def reply(self, status: int, content_type: str, body: bytes, header: tuple[str, str] | None = None) -> None:
            """Answer once."""
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            if header is not None:
                self.send_header(*header)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged."""

    for method in http_server.OTHER_METHODS:
        if method != "GET":
            setattr(Handler, f"do_{method}", Handler.refuse_method)
    return Handler
