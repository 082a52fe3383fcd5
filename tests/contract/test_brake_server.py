"""The brake's listener over real sockets: who may speak, what is understood, what is counted."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nvrx_sre.core import http_server
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.tls import server_context
from nvrx_sre.monitoring.brake import Brake, BrakePolicy, Outcome
from nvrx_sre.monitoring.brake_metrics import ALERTS, BRAKE_METRICS, REQUESTS, BrakeMetrics, RequestOutcome
from nvrx_sre.monitoring.brake_server import BODY_BYTES_MAX, DEADLINE_S, BrakeConfig, BrakeServer
from tests.certificates import make_certificate
from tests.unit.test_monitoring_brake import MemoryStore, braked

TOKEN = "first-token-of-the-site"
NEXT = "second-token-of-the-site"
WAIT_S = 60.0
ALERT = {
    "status": "firing",
    "labels": {"alertname": "NvrxCrashLooping", "action": "halt", "run": "demo"},
    "annotations": {},
    "startsAt": "2099-01-01T00:00:00.123456789Z",
    "endsAt": "0001-01-01T00:00:00Z",
}


@dataclass
class Site:
    """A brake that listens, and what it did."""

    server: BrakeServer
    metrics: BrakeMetrics
    store: MemoryStore
    tokens: Path
    said: list[str] = field(default_factory=list)

    def post(self, body: object, token: str | None = TOKEN, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a POST."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **headers}
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        return self.ask("POST", content, sent)

    def ask(self, method: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """Status and JSON of any request."""
        connection = http.client.HTTPConnection(*self.address, timeout=WAIT_S)
        try:
            connection.request(method, "/", body, headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else {}
        finally:
            connection.close()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.server.url.split("/")[2].rsplit(":", 1)
        return host, int(port)

    def count(self, outcome: RequestOutcome) -> float:
        """Requests that ended so."""
        return self.metrics.registry.get_sample_value(REQUESTS.name, {"outcome": outcome}) or 0.0


def open_site(directory: Path, **changes: Any) -> Site:
    """A brake on loopback with one token and one run that opted in."""
    tokens = directory / "token"
    tokens.write_text(f"{TOKEN}\n")
    tokens.chmod(0o600)
    store, metrics, said = MemoryStore(braked()), BrakeMetrics(), []
    brake = Brake(BrakePolicy(alerts=frozenset({"NvrxCrashLooping"})), store, SystemClock())
    server = BrakeServer(BrakeConfig(token_file=tokens, **changes), brake, metrics, SystemClock(), said.append)
    server.start()
    return Site(server, metrics, store, tokens, said)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A brake on loopback."""
    opened = open_site(tmp_path)
    yield opened
    opened.server.close()


def notification(*alerts: dict[str, Any]) -> dict[str, Any]:
    """Alertmanager's webhook JSON."""
    return {"version": "4", "receiver": "brake", "status": "firing", "alerts": list(alerts)}


def test_an_alert_that_fits_halts_the_run(site: Site) -> None:
    """200, what was done in the answer, one line said, both counters and the stamp moved."""
    status, answer = site.post(notification(ALERT))
    assert (status, answer["outcome"], answer["alerts"][0]["outcome"]) == (200, "understood", "halted")
    assert site.store.requests[0][0] == "/runs/demo"
    assert site.said == ["NvrxCrashLooping for run demo: halted: the run was asked to halt"]
    assert site.metrics.registry.get_sample_value(ALERTS.name, {"outcome": "halted"}) == 1
    assert site.count(RequestOutcome.UNDERSTOOD) == 1
    assert (site.metrics.registry.get_sample_value("nvrx_brake_last_halt_timestamp_seconds") or 0) > 1.7e9


def test_what_is_not_for_the_brake_is_answered_200(site: Site) -> None:
    """Alertmanager must not send it again; each alert has its own reason."""
    resolved = {**ALERT, "status": "resolved"}
    silent = {**ALERT, "labels": {"alertname": "NvrxCrashLooping", "run": "demo"}}
    status, answer = site.post(notification(resolved, silent))
    assert status == 200
    assert [item["outcome"] for item in answer["alerts"]] == [Outcome.NOT_FIRING, Outcome.NO_ACTION]
    assert site.store.requests == []


def test_what_may_be_done_later_is_answered_503(site: Site) -> None:
    """Alertmanager sends it again: a run was halted minutes ago, or the disk refused."""
    site.store.last_ns = SystemClock().wall_ns()
    status, answer = site.post(notification(ALERT))
    assert (status, answer["alerts"][0]["outcome"]) == (503, Outcome.TOO_SOON)


@pytest.mark.parametrize("token", [None, "", "wrong-token-of-the-site", TOKEN[:-1], TOKEN + "x", NEXT])
def test_without_the_token_nothing_is_read(site: Site, token: str | None) -> None:
    """401 for a body that would have been malformed as well."""
    status, answer = site.post(b"{", token)
    assert (status, answer) == (401, {"outcome": "unauthorized", "detail": "", "alerts": []})
    assert site.count(RequestOutcome.UNAUTHORIZED) == 1


def test_tokens_rotate_without_a_restart(site: Site) -> None:
    """Old and new are both good while the file holds both; then only the new one."""
    site.tokens.write_text(f"{TOKEN}\n{NEXT}\n")
    assert [site.post(notification(), token)[0] for token in (TOKEN, NEXT)] == [200, 200]
    site.tokens.write_text(f"{NEXT}\n")
    assert [site.post(notification(), token)[0] for token in (TOKEN, NEXT)] == [401, 200]


@pytest.mark.parametrize("content", ["", "short\n", f"{TOKEN}\n{NEXT}\nthird-token-of-the-site\n", "x" * 5000])
def test_a_token_file_that_went_bad_closes_the_brake(site: Site, content: str) -> None:
    """503, counted and said: the sender comes again when the file is mended. No secret is in the message."""
    site.tokens.write_text(content)
    assert site.post(notification(ALERT))[0] == 503
    assert (site.count(RequestOutcome.TOKEN_UNAVAILABLE), site.store.requests) == (1, [])
    assert len(site.said) == 1
    assert TOKEN not in site.said[0]


def test_a_token_file_that_others_can_read_closes_the_brake(site: Site) -> None:
    """Its mode is looked at on every request."""
    site.tokens.chmod(0o640)
    assert site.post(notification(ALERT))[0] == 503
    assert "chmod 600" in site.said[0]


@pytest.mark.parametrize("method", [item for item in http_server.OTHER_METHODS if item != "POST"])
def test_only_post_is_served(site: Site, method: str) -> None:
    """405, also with the token; there is no page and no metric here."""
    assert site.ask(method, None, {"Authorization": f"Bearer {TOKEN}"})[0] == 405
    assert site.count(RequestOutcome.NOT_POST) == 1


def test_only_json_is_read(site: Site) -> None:
    """415 for a form."""
    assert site.post(b"a=1", **{"Content-Type": "application/x-www-form-urlencoded"})[0] == 415
    assert site.count(RequestOutcome.NOT_JSON) == 1


def test_a_body_is_at_most_64_kib(site: Site) -> None:
    """The limit itself is read (and is no JSON), one byte more is refused with an answer."""
    assert site.post(b" " * BODY_BYTES_MAX)[0] == 400
    assert site.post(b" " * (BODY_BYTES_MAX + 1))[0] == 413
    assert (site.count(RequestOutcome.MALFORMED), site.count(RequestOutcome.TOO_LARGE)) == (1, 1)


@pytest.mark.parametrize(
    "headers", [{"Content-Length": "-1"}, {"Content-Length": "1_0"}, {"Transfer-Encoding": "chunked"}]
)
def test_a_body_without_plain_length_is_refused(site: Site, headers: dict[str, str]) -> None:
    """411: no guessing where a body ends."""
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}", **headers}
    with socket.create_connection(site.address, timeout=WAIT_S) as connection:
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        connection.sendall(f"POST / HTTP/1.1\r\n{head}\r\n".encode())
        assert connection.recv(64).startswith(b"HTTP/1.0 411")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * BODY_BYTES_MAX,
        {"alerts": 1},
        notification({"status": "firing"}),
        notification({**ALERT, "labels": {"alertname": ["x"]}}),
        notification({**ALERT, "labels": {**ALERT["labels"], "run": {"a": 1}}}),
        notification({**ALERT, "startsAt": "soon"}),
        notification(ALERT, {**ALERT, "startsAt": None}),
    ],
)
def test_what_is_not_understood_is_malformed_and_does_nothing(site: Site, body: object) -> None:
    """400, which Alertmanager does not repeat; the alerts beside a bad one are not acted on either."""
    assert site.post(body)[0] == 400
    assert (site.count(RequestOutcome.MALFORMED), site.store.requests) == (1, [])


def test_a_slow_sender_is_cut(tmp_path: Path) -> None:
    """The connection ends at the deadline although bytes still come; it is counted; the next one is served."""
    assert DEADLINE_S == 5.0
    slow = open_site(tmp_path, deadline_s=0.2)
    try:
        with socket.create_connection(slow.address, timeout=WAIT_S) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n")
            assert connection.recv(1) == b""
        assert slow.count(RequestOutcome.TOO_SLOW) == 1
        slow.server._server._deadline_s = WAIT_S  # what comes now is to be served, however busy the machine is
        assert slow.post(notification())[0] == 200
    finally:
        slow.server.close()


def test_another_host_than_loopback_needs_tls(tmp_path: Path) -> None:
    """Refused before anything listens."""
    tokens = tmp_path / "token"
    tokens.write_text(TOKEN)
    tokens.chmod(0o600)
    for host in ("0.0.0.0", "::", "10.0.0.1", "brake.example"):
        with pytest.raises(UserError, match="without TLS"):
            BrakeConfig(host=host, token_file=tokens)
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert BrakeConfig(host=host, token_file=tokens).tls is None


def test_with_tls_the_same_request_works_and_plain_text_does_not(tmp_path: Path) -> None:
    """A client that trusts the certificate is served; a plain one gets nothing; a silent one stops nobody."""
    made = make_certificate(tmp_path)
    secure = open_site(tmp_path, tls=server_context(made.certificate, made.key))
    try:
        assert secure.server.url.startswith("https://127.0.0.1:")
        with socket.create_connection(secure.address, timeout=WAIT_S) as silent:
            connection = http.client.HTTPSConnection(*secure.address, timeout=WAIT_S, context=made.client_context())
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
            connection.request("POST", "/", json.dumps(notification(ALERT)), headers)
            assert connection.getresponse().status == 200
            connection.close()
            silent.sendall(b"POST / HTTP/1.1\r\n\r\n")
            assert not silent.recv(64).startswith(b"HTTP")
        assert [item[0] for item in secure.store.requests] == ["/runs/demo"]
    finally:
        secure.server.close()


def test_tls_files_that_do_not_fit_are_one_clear_error(tmp_path: Path) -> None:
    """One without the other, or no key in the file."""
    made = make_certificate(tmp_path)
    with pytest.raises(UserError, match="given together"):
        server_context(made.certificate, None)
    with pytest.raises(UserError, match="cannot be used"):
        server_context(made.certificate, made.certificate)
    context = server_context(made.certificate, made.key)
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_all_outcomes_are_exported_from_the_start() -> None:
    """The first refusal of a kind is an increase (C63); names and labels are those that are declared."""
    registry = BrakeMetrics().registry
    for metric in BRAKE_METRICS:
        for values in metric.label_values():
            labels = dict(zip(metric.label_names, values, strict=True))
            assert registry.get_sample_value(metric.name, labels) == 0.0


def test_a_busy_address_is_a_user_error(site: Site, tmp_path: Path) -> None:
    """Where, and what to do."""
    config = BrakeConfig(token_file=site.tokens, port=site.address[1])
    brake = Brake(BrakePolicy(alerts=frozenset()), site.store, SystemClock())
    with pytest.raises(UserError, match="choose another address with --listen"):
        BrakeServer(config, brake, site.metrics, SystemClock(), site.said.append)
