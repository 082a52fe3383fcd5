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
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nvrx_sre import __version__
from nvrx_sre.core.errors import UserError
from nvrx_sre.telemetry.spans import FinishedSpan

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan
    from requests import Response

SERVICE_NAME = "nvrx-sre"
TRACES_PATH = "/v1/traces"
"""Where a collector takes traces, by OTLP's convention."""


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


def traces_url(endpoint: str) -> str:
    """The URL that spans are sent to: a base URL gets `TRACES_PATH`, one with a path is taken as it is.

    Raises `UserError` for what is no URL of HTTP.
    """
    try:
        parts = urlsplit(endpoint)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not match
        is_http = False
    if not is_http:
        raise UserError(f"--otlp-endpoint {endpoint}: give a URL, e.g. http://collector:4318")
    return endpoint if parts.path.strip("/") else parts._replace(path=TRACES_PATH).geturl()


NO_ANSWER = "no answer"


class ExportError(Exception):
    """The collector did not take a batch."""


class OtlpSink:
    """Sends batches of finished spans to `endpoint` (as `traces_url` has it).

    `timeout_s` bounds one export, retries included. `run`, `epoch`: of the emitting launcher.
    """

    def __init__(self, endpoint: str, timeout_s: float, run: str, epoch: int) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._resource = resource_of(run, epoch)
        self._exporter: OTLPSpanExporter | None = None
        self._answer = NO_ANSWER
        """What the collector said last to the batch under way."""

    def write(self, spans: Sequence[FinishedSpan]) -> None:
        """Send `spans`. Blocks up to the timeout; raises `ExportError` if the collector did not take them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        exporter = self._exporter or self._create()
        self._answer = NO_ANSWER
        if exporter.export(_readable(spans, self._resource)) is not SpanExportResult.SUCCESS:
            raise ExportError(f"collector at {self._endpoint} did not take {len(spans)} spans: {self._answer}")

    def _create(self) -> OTLPSpanExporter:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        for name in ("opentelemetry.exporter", "opentelemetry.sdk", "urllib3"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        session = requests.Session()
        session.hooks["response"].append(self._note_answer)
        self._exporter = OTLPSpanExporter(endpoint=self._endpoint, timeout=self._timeout_s, session=session)
        return self._exporter

    def _note_answer(self, response: Response, *_: Any, **__: Any) -> None:
        """The exporter tells no caller what was answered, only whether it was a yes."""
        self._answer = f"HTTP {response.status_code} {response.reason}".rstrip()


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
