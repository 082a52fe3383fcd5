"""The metrics endpoint: GET /metrics, /healthz, /readyz, and nothing else.

Up before the first worker and through every restart. `/metrics` answers 503 until the journal was replayed
(a counter must not be seen at less than it was), OpenMetrics if the scraper accepts it; `/healthz` answers
503 when the launcher's loop has not turned for a while. A port asked for explicitly that is busy is a
`UserError`; without one the kernel picks a free port (failure case C58).

Thread safety: one thread accepts, each request has its own, at most `MAX_REQUESTS` at a time. Must not:
change anything in the run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from nvrx_sre.core.errors import UserError

MAX_REQUESTS = 8
"""Requests served at a time; further connections are closed."""
REQUEST_TIMEOUT_S = 10.0
"""Longest wait for a slow client."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)
        self.on_error: Callable[[str], None] = lambda _: None
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """A client that went away is no event; our own failure is counted. Nothing is printed."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            self.on_error(f"{type(error).__name__}: {error}")


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
    ) -> None:
        self._registry = registry
        self._health = health
        self._ready = ready
        self._scraped = threading.Condition()
        self.num_scrapes = 0
        try:
            self._server = _Server((host, port or 0), _handler(self))
        except OSError as error:
            where = f"{host}:{port}" if port else host
            raise UserError(
                f"metrics endpoint cannot listen on {where}: {error.strerror or error}; "
                "choose another port with --metrics-port, or leave it out to get a free one"
            ) from error
        self.host = host
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="nvrx-endpoint", daemon=True)

    @property
    def url(self) -> str:
        """Where Prometheus scrapes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def start(self, on_error: Callable[[str], None] | None = None) -> None:
        """Begin to answer. `on_error` hears of a request that failed on our side."""
        if on_error is not None:
            self._server.on_error = on_error
        self._thread.start()

    def wait_for_scrapes(self, count: int, timeout_s: float) -> bool:
        """Block until `count` further scrapes were answered; False after `timeout_s`."""
        with self._scraped:
            wanted = self.num_scrapes + count
            return self._scraped.wait_for(lambda: self.num_scrapes >= wanted, timeout_s)

    def close(self) -> None:
        """Stop listening. Requests under way end with the process."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

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
        encode, content_type = choose_encoder(accept)
        return 200, content_type, encode(self._registry)

    def note_scrape(self) -> None:
        """A scrape was answered completely."""
        with self._scraped:
            self.num_scrapes += 1
            self._scraped.notify_all()


def _handler(server: MetricsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S
        server_version = "nvrx-sre"
        sys_version = ""

        def do_GET(self) -> None:
            status, content_type, body = server.respond(self.path, self.headers.get("Accept", ""))
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            if status == 200 and self.path.partition("?")[0] == "/metrics":
                server.note_scrape()

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged."""

    return Handler
