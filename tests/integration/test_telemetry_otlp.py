"""OTLP export: a real receiver gets every span; a dead or silent one costs nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.core.limits import Limits, TelemetryLimits
from nvrx_sre.goodput.incidents import incident_trace_id
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.telemetry.hub import Telemetry, TelemetryConfig
from tests.stories import RUN, exception_story, ns


class Receiver:
    """A small OTLP/HTTP traces endpoint that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        receiver.spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A live collector."""
    started = Receiver()
    yield started
    started.close()


def export(run_dir: Path, endpoint: str, timeout_s: float) -> Telemetry:
    """Record a whole run with an exporter at `endpoint`, closed."""
    limits = Limits(telemetry=TelemetryLimits(exporter_timeout_s=timeout_s))
    config = TelemetryConfig(run=RUN, run_dir=run_dir, epoch=1, otlp_endpoint=endpoint, limits=limits)
    telemetry = Telemetry(config)
    telemetry.replay()
    for record in exception_story().records:
        telemetry.record(record)
    telemetry.close()
    return telemetry


def test_a_collector_gets_every_span_with_our_times_and_ids(tmp_path: Path, receiver: Receiver) -> None:
    """Ids, parents, explicit times, status and attributes arrive as they stand in spans.jsonl."""
    telemetry = export(tmp_path, receiver.url, 30.0)
    assert len(receiver.spans) == telemetry.spans.num_finished
    incident = next(span for span in receiver.spans if span.name == "nvrx.incident")
    assert incident.trace_id.hex() == incident_trace_id(RUN, 1)
    assert (incident.start_time_unix_nano, incident.end_time_unix_nano) == (ns(12.9), ns(14.6))
    assert incident.status.code == Status.StatusCode.STATUS_CODE_UNSET
    assert len(incident.links) == 1
    failed = next(span for span in receiver.spans if span.name == "nvrx.generation")
    assert failed.status.code == Status.StatusCode.STATUS_CODE_ERROR
    stages = [span for span in receiver.spans if span.parent_span_id == incident.span_id]
    assert len(stages) == 5
    assert telemetry.num_errors()[Component.OTLP] == 0


def test_a_dead_collector_is_counted_and_the_file_is_whole(tmp_path: Path) -> None:
    """Connection refused: spans.jsonl has everything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    telemetry = export(tmp_path, f"http://127.0.0.1:{port}/v1/traces", 0.3)
    assert len((tmp_path / "spans.jsonl").read_text().splitlines()) == telemetry.spans.num_finished
    counts = telemetry.num_errors()[Component.OTLP], telemetry.num_dropped()[Component.OTLP]
    assert sum(counts) >= 1


def test_a_silent_collector_does_not_hold_the_exit(tmp_path: Path) -> None:
    """It accepts and never answers: recording takes no longer, closing at most the flush bounds."""
    clock = SystemClock()
    with socket.create_server(("127.0.0.1", 0)) as server:
        before_ns = clock.monotonic_ns()
        export(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}/v1/traces", 0.3)
        spent_s = seconds(clock.monotonic_ns() - before_ns)
    assert spent_s < 15.0, "the SDK's own exit would still be retrying"
