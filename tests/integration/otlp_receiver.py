"""A small OTLP/HTTP traces endpoint that decodes what it gets."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATH = "/v1/traces"


class Receiver:
    """Keeps every span with the resource that sent it; knows one path, like a collector."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str | int]] = []
        """Of each span of `spans`."""
        receiver = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path != PATH:
                    self.send_error(404)
                    return
                with lock:
                    receiver.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{self.base_url}{PATH}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of a request."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
                self.resources.extend([attributes(resource.resource.attributes)] * len(scope.spans))

    def named(self, name: str) -> list[tuple[Span, dict[str, str | int]]]:
        """Spans of one name with their resources."""
        return [pair for pair in zip(self.spans, self.resources, strict=True) if pair[0].name == name]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(pairs: object) -> dict[str, str | int]:
    """Attributes as Python values; texts and integers are all that the tests ask for."""
    found: dict[str, str | int] = {}
    for pair in pairs:  # type: ignore[attr-defined]  # protobuf's containers have no public type
        assert isinstance(pair, KeyValue)
        found[pair.key] = pair.value.int_value if pair.value.HasField("int_value") else pair.value.string_value
    return found
