"""The metrics endpoint's TLS and basic authentication, its methods and its bounds, over real sockets."""

from __future__ import annotations

import base64
import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from nvrx_sre.core import http_server
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.http_server import BoundedServer, ServerLimits, ServerThread
from nvrx_sre.telemetry import endpoint
from nvrx_sre.telemetry.endpoint import EndpointSecurity, MetricsServer
from tests.certificates import Certificate, make_certificate

WAIT_S = 60.0
USER = "prometheus:a-long-password"


def basic(user: str) -> dict[str, str]:
    """Header of a user."""
    return {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def serve(security: EndpointSecurity | None = None) -> MetricsServer:
    """An endpoint with one series."""
    registry = CollectorRegistry()
    Gauge("seen", "One series.", registry=registry).set(1)
    server = MetricsServer(registry, "127.0.0.1", None, lambda: True, lambda: True, security)
    server.start()
    return server


def ask(server: MetricsServer, path: str, method: str = "GET", **options: object) -> http.client.HTTPResponse:
    """The answer, read."""
    made = options.get("certificate")
    headers = options.get("headers")
    if isinstance(made, Certificate):
        connection = http.client.HTTPSConnection(
            server.host, server.port, timeout=WAIT_S, context=made.client_context()
        )
    else:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
    connection.request(method, path, headers=dict(headers) if isinstance(headers, dict) else {})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A private file of one user."""
    file = tmp_path / "users"
    file.write_text(f"{USER}\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def guarded(users: Path) -> Iterator[MetricsServer]:
    """An endpoint that wants a password."""
    server = serve(EndpointSecurity(users=users))
    yield server
    server.close()


def test_three_paths_and_get_alone() -> None:
    """Anything else is 404 or 405, whatever the method; nothing here takes a command."""
    server = serve()
    try:
        assert [ask(server, path).status for path in ("/metrics", "/healthz", "/readyz")] == [200, 200, 200]
        assert [ask(server, path).status for path in ("/", "/halt", "/metrics/x")] == [404, 404, 404]
        others = [item for item in http_server.OTHER_METHODS if item != "GET"]
        assert {ask(server, "/metrics", method).status for method in others} == {405}
        assert server.num_scrapes <= 1  # the one good answer may not be counted yet
    finally:
        server.close()


def test_a_scrape_needs_the_password_and_a_probe_does_not(guarded: MetricsServer) -> None:
    """401 asks for it; wrong ones and other schemes are refused and are no scrape."""
    refused = ask(guarded, "/metrics")
    assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, "Basic")
    wrong = [basic("prometheus:wrong"), {"Authorization": "Basic %%%"}, {"Authorization": f"Bearer {USER}"}]
    assert [ask(guarded, "/metrics", headers=headers).status for headers in wrong] == [401, 401, 401]
    assert guarded.num_scrapes == 0
    assert ask(guarded, "/metrics", headers=basic(USER)).status == 200
    assert ask(guarded, "/healthz").status == 200


def test_a_password_changes_without_a_restart(guarded: MetricsServer, users: Path) -> None:
    """The file is read at each scrape; one that others can read allows nobody."""
    users.write_text("prometheus:another-password\n")
    assert ask(guarded, "/metrics", headers=basic(USER)).status == 401
    assert ask(guarded, "/metrics", headers=basic("prometheus:another-password")).status == 200
    users.chmod(0o644)
    assert ask(guarded, "/metrics", headers=basic("prometheus:another-password")).status == 401


def test_with_tls_the_address_says_https(tmp_path: Path) -> None:
    """A client that trusts the certificate reads; the announced address has the scheme."""
    made = make_certificate(tmp_path)
    server = serve(EndpointSecurity(tls_cert=made.certificate, tls_key=made.key))
    try:
        assert server.url == f"https://127.0.0.1:{server.port}/metrics"
        assert ask(server, "/metrics", certificate=made).status == 200
    finally:
        server.close()


def test_a_password_is_not_sent_in_the_clear_to_another_host(users: Path) -> None:
    """Off loopback it needs TLS; a file without passwords is refused."""
    with pytest.raises(UserError, match="in the clear"):
        EndpointSecurity(users=users).context("0.0.0.0")
    assert EndpointSecurity(users=users).context("127.0.0.1") is None
    users.write_text("only-a-name\n")
    with pytest.raises(UserError, match="user:password"):
        EndpointSecurity(users=users).context("127.0.0.1")


def open_bounded(refused: list[str], limits: ServerLimits) -> tuple[BoundedServer, ServerThread]:
    """A server that tells what it refuses."""
    metrics = MetricsServer(CollectorRegistry(), "127.0.0.1", None, lambda: True, lambda: True)
    metrics.close()
    server = BoundedServer(("127.0.0.1", 0), endpoint._handler(metrics), limits)
    server.on_refused = refused.append
    thread = ServerThread(server, "bounded")
    thread.start()
    return server, thread


def test_a_connection_that_drips_is_cut() -> None:
    """The deadline counts from its begin, whatever still comes."""
    refused: list[str] = []
    server, thread = open_bounded(refused, ServerLimits(max_requests=1, deadline_s=0.1))
    with socket.create_connection(server.server_address[:2], timeout=WAIT_S) as slow:
        slow.sendall(b"GET /metr")
        assert slow.recv(1) == b""
    thread.close()
    assert refused == [http_server.TOO_SLOW]


def test_beyond_the_bound_a_connection_is_closed() -> None:
    """The one before it is not disturbed."""
    refused: list[str] = []
    server, thread = open_bounded(refused, ServerLimits(max_requests=1, deadline_s=WAIT_S))
    with socket.create_connection(server.server_address[:2], timeout=WAIT_S) as first:
        with socket.create_connection(server.server_address[:2], timeout=WAIT_S) as second:
            assert second.recv(1) == b""
        assert refused == [http_server.BUSY]
        first.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert first.recv(64).startswith(b"HTTP/1.0 200")
    thread.close()
