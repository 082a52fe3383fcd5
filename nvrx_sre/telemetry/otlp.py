"""Finished spans to an OpenTelemetry collector over OTLP/HTTP. Best effort, on a sink's own thread.

The exporter's own timeout bounds each request; nothing is registered at exit and no batch processor runs,
so a dead or silent collector costs neither a step nor the exit (failure case C61). The SDK is imported when
the first batch is sent, in the process that sends it: nothing of it is inherited by a fork (C59). Must not: be
called from the launcher's loop; log on its own (C62).
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvrx_sre import __version__
from nvrx_sre.telemetry.spans import FinishedSpan

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan

SERVICE_NAME = "nvrx-sre"


Resource = dict[str, str | int]


def resource_of(run: str, epoch: int) -> Resource:
    """Who emits the spans, in the names of OpenTelemetry's conventions: one instance is one launcher of the run."""
    return {
        "service.name": SERVICE_NAME,
        "service.version": __version__,
        "service.instance.id": f"{run}/{epoch}",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "process.executable.path": sys.executable,
        "process.runtime.name": sys.implementation.name,
        "process.runtime.version": platform.python_version(),
        "nvrx.run": run,
        "nvrx.epoch": epoch,
    }


class ExportError(Exception):
    """The collector did not take a batch."""


class OtlpSink:
    """Sends batches of finished spans to `endpoint` (a full traces URL).

    `timeout_s` bounds one export, retries included. `run`, `epoch`: of the emitting launcher.
    """

    def __init__(self, endpoint: str, timeout_s: float, run: str, epoch: int) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._resource = resource_of(run, epoch)
        self._exporter: OTLPSpanExporter | None = None

    def write(self, spans: Sequence[FinishedSpan]) -> None:
        """Send `spans`. Blocks up to the timeout; raises `ExportError` if the collector did not take them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        exporter = self._exporter or self._create()
        if exporter.export(_readable(spans, self._resource)) is not SpanExportResult.SUCCESS:
            raise ExportError(f"collector at {self._endpoint} did not take {len(spans)} spans")

    def _create(self) -> OTLPSpanExporter:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        for name in ("opentelemetry.exporter", "opentelemetry.sdk", "urllib3"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=self._endpoint, timeout=self._timeout_s)
        return self._exporter


def _readable(spans: Sequence[FinishedSpan], resource: Resource) -> list[ReadableSpan]:
    """The SDK's form, with our times and ids."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    def context(trace_id: str, span_id: str) -> SpanContext:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=sampled)

    shared, scope = Resource(resource), InstrumentationScope("nvrx_sre.telemetry")
    return [
        ReadableSpan(
            name=span.name,
            context=context(span.trace_id, span.span_id),
            parent=None if span.parent_span_id is None else context(span.trace_id, span.parent_span_id),
            resource=shared,
            attributes=span.attributes,
            links=[Link(context(*link)) for link in span.links],
            events=[Event(point.name, point.attributes, point.time_ns) for point in span.points],
            status=Status(StatusCode.ERROR if span.error else StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )
        for span in spans
    ]
