"""An HTTP server with a bound on everything: connections at a time, time of a request, optional TLS.

Model: one thread accepts, each connection has its own, at most `max_requests` at a time; further ones are closed.
A connection that is not done after `deadline_s`, TLS handshake included, is cut, however slowly it still talks.
`on_refused` hears of both by name, `on_error` of a request that failed on our side; nothing is printed.

Thread safety: hooks are called from request threads. Must not: know what is served.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUSY = "busy"
TOO_SLOW = "too_slow"
OTHER_METHODS = ("HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "GET")
"""Methods that a handler may be asked for; those that it does not serve get 405."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bounds of one server."""

    max_requests: int
    """Connections at a time."""
    deadline_s: float
    """Longest life of a connection (seconds)."""


class BoundedServer(ThreadingHTTPServer):
    """Listens from construction on; answers once a `ServerThread` runs it. Raises `OSError` if it cannot bind."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    allow_reuse_port = False

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        limits: ServerLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._slots = threading.BoundedSemaphore(limits.max_requests)
        self._deadline_s = limits.deadline_s
        self._tls = tls
        self.on_error: Callable[[str], None] = lambda _: None
        self.on_refused: Callable[[str], None] = lambda _: None
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    @property
    def base_url(self) -> str:
        """Scheme, host and real port."""
        host, port = self.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        shown = f"[{name}]" if ":" in name else name
        return f"{'http' if self._tls is None else 'https'}://{shown}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.on_refused(BUSY)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        connection: Any = request
        if self._tls is not None:
            # The handshake belongs to this thread: in the accepting one a silent client would stop the server.
            connection = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        timer = threading.Timer(self._deadline_s, self._cut, (connection,))
        timer.daemon = True
        timer.start()
        try:
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            super().finish_request(connection, client_address)
        finally:
            timer.cancel()
            if connection is not request:
                self.shutdown_request(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or broke the handshake, is no event; our own failure is told."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            self.on_error(f"{type(error).__name__}: {error}")

    def _cut(self, connection: socket.socket) -> None:
        self.on_refused(TOO_SLOW)
        with contextlib.suppress(OSError):
            # Of the plain socket: that of an SSLSocket would drop the session under a reader's hands.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


def body_bytes(headers: Any) -> int | None:
    """Content-Length if it is a plain number and nothing else says how long the body is."""
    text = headers.get("Content-Length", "")
    if headers.get("Transfer-Encoding") is not None or not (text.isascii() and text.isdigit()):
        return None
    return int(text) if len(text) < 16 else None


class ServerThread:
    """Runs a `BoundedServer` on a thread of its own, which sleeps until somebody comes. `start` once."""

    def __init__(self, server: BoundedServer, name: str) -> None:
        self._server = server
        self._server.timeout = 0
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening; blocks until the accepting thread has ended. Requests under way end with the process."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        self._server.server_close()
        self._wake.close()
        self._woken.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not any(key.fileobj is self._woken for key, _ in selector.select()):
                self._server.handle_request()
