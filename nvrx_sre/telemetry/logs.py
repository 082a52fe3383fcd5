"""The structured log: one JSON object a line, pretty on a terminal; and each record as a readable line.

Every line carries run, generation, rank, step, trace_id and span_id as far as they are known
(`telemetry.context`). Thread safety: a configured logger may be used from any thread.
Must not: write an unredacted text.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TextIO

import structlog

from nvrx_sre.core.clock import seconds
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Action, Record, StepKind
from nvrx_sre.telemetry.context import add_ambient
from nvrx_sre.telemetry.redact import Redactor

Processor = Callable[[Any, str, Any], Any]


def configure(
    stream: TextIO, *, redactor: Redactor | None = None, pretty: bool | None = None, level: int = logging.INFO
) -> Any:
    """A structlog logger on `stream`: JSON lines, or pretty (default: if the stream is a terminal).

    Nothing global is changed; each caller has a logger of its own.
    """
    wanted = stream.isatty() if pretty is None else pretty
    redact = (redactor or Redactor()).value

    def mask(_logger: Any, _method: str, event: Any) -> Any:
        return redact(event)

    processors: list[Processor] = [add_ambient, structlog.processors.add_log_level, mask]
    if wanted:
        processors += [structlog.processors.TimeStamper(fmt="%H:%M:%S"), structlog.dev.ConsoleRenderer(colors=True)]
    else:
        processors += [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(sort_keys=False, default=str),
        ]
    return structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )


_WARNINGS = (
    schema.SaveFailed,
    schema.SaveUnverified,
    schema.CheckpointRejected,
    schema.TelemetryDegraded,
    schema.RankExcluded,
    schema.NodeLost,
    schema.DecisionUnrecorded,
)


def level_of(record: Record) -> str:
    """structlog level name of a record."""
    event = record.event
    if isinstance(event, (schema.FaultDetected, schema.CapReached, schema.ReplayDiverged, schema.LeaderLost)):
        return "error"
    if isinstance(event, _WARNINGS):
        return "warning"
    if isinstance(event, (schema.StepsCommitted, schema.PhaseEntered, schema.SaveStarted, schema.SaveSealed)):
        return "debug"
    return "info"


def log_fields(record: Record) -> dict[str, Any]:
    """Fields of a record's log line: the stamp, then the event's own."""
    fields = {"epoch": record.epoch, "generation": record.generation, "rank": record.rank, "seq": record.seq}
    for item in dataclasses.fields(record.event):
        fields[item.name if item.name not in ("rank", "epoch") else f"event_{item.name}"] = getattr(
            record.event, item.name
        )
    return {name: value for name, value in fields.items() if value is not None}


def _who(record: Record) -> str:
    return "rank unknown" if record.rank is None else f"rank {record.rank}"


def _fault(record: Record, event: schema.FaultDetected) -> str:
    after_s = seconds(max(0, record.time_ns - event.evidence_ns))
    detail = event.exception_type or (f"signal {event.signal}" if event.signal else "")
    return (
        f"fault: {event.fault} on {_who(record)} at step {event.step} in {event.phase}"
        f"{f' ({detail})' if detail else ''}, detected after {after_s:.3f} s"
    )


def _decision(_: Record, event: schema.RestartDecided) -> str:
    if event.action is Action.STOP:
        return f"decision: stop with exit {event.exit_code}: {event.reason}"
    wait = f", back-off {event.backoff_s:.0f} s" if event.backoff_s else ""
    return f"decision: restart at layer {event.layer}{wait}: {event.reason}"


def _closed(record: Record, event: schema.IncidentClosed) -> str:
    outage = "" if event.outage_s is None else f", outage {event.outage_s:.3f} s"
    mark = " (degraded)" if event.degraded else ""
    return (
        f"incident {event.incident} {event.verdict}{mark}: {event.fault} on {_who(record)} at step {event.step}, "
        f"layer {event.layer}, {event.attempts} attempt{'s' if event.attempts != 1 else ''}"
        f"{outage}, rolled back {event.rollback_steps} steps"
    )


def _steps(_: Record, event: schema.StepsCommitted) -> str:
    spent_s = seconds(max(1, event.committed_ns - event.started_ns))
    if event.proven_by_restore:
        return f"step {event.last_step} was executed before the restart, as the restored state proves"
    loss = "" if event.loss is None else f", loss {event.loss:.4f}"
    kind = "" if event.kind is StepKind.NEW else " (redone)"
    return f"step {event.last_step}{kind}{loss}, {event.tokens / spent_s:,.0f} tokens/s"


def _stopped(_: Record, event: schema.RunFinished) -> str:
    return f"run ended at step {event.step} with exit {event.exit_code}: {event.reason}"


_LINES: dict[type[schema.Event], Callable[[Record, Any], str]] = {
    schema.FaultDetected: _fault,
    schema.RestartDecided: _decision,
    schema.IncidentClosed: _closed,
    schema.StepsCommitted: _steps,
    schema.RunFinished: _stopped,
    schema.FaultInjected: lambda record, event: f"injecting {event.spec} at step {event.step}",
    schema.GenerationFormed: lambda record, event: (
        f"generation {record.generation} formed with {event.world_size} ranks"
    ),
    schema.StateRestored: lambda _, event: (
        f"restored step {event.step} from {event.source} in {event.seconds:.3f} s"
        if event.source is not schema.RestoredFrom.FRESH
        else "started fresh at step 0"
    ),
    schema.RankReplaced: lambda record, event: (
        f"{_who(record)} moved from pid {event.old_pid} to {event.new_pid}"
        f" ({'standby' if event.warm else 'cold start'})"
    ),
    schema.CheckpointRejected: lambda _, event: f"checkpoint of step {event.step} rejected: {event.reason}",
    schema.SaveVerified: lambda _, event: f"checkpoint of step {event.step} committed and verified",
    schema.SaveUnverified: lambda _, event: f"save of step {event.step} committed, not verified: {event.reason}",
    schema.SaveFailed: lambda _, event: f"save of step {event.step} failed: {event.reason}",
    schema.PreemptionReceived: lambda _, event: f"signal {event.signal} received: draining",
    schema.RankExcluded: lambda _, event: (
        f"device {event.device} takes no further part, {event.world_size} ranks go on: {event.reason}"
    ),
    schema.NodeJoined: lambda _, event: f"node {event.node} joined as node {event.node_rank}",
    schema.NodeLost: lambda _, event: f"node {event.node} lost with {event.ranks} ranks: {event.reason}",
    schema.DecisionUnrecorded: lambda _, event: (
        f"the decision was not on disk after {event.waited_s:g} s: the restart goes on without that"
    ),
    schema.DeadlineChosen: lambda _, event: (
        f"progress deadline of {event.phase} is {event.limit_s:.1f} s now (p99 {event.p99_s:.3f} s): {event.reason}"
    ),
    schema.HaltRequested: lambda _, event: f"halt requested: {event.reason}",
    schema.CapReached: lambda _, event: f"retry cap {event.cap} reached ({event.used} of {event.limit})",
    schema.LeaderLost: lambda record, event: (
        f"launcher of epoch {event.lost_epoch} was lost; "
        f"its last record is {max(0.0, seconds(record.time_ns - event.last_seen_ns)):.1f} s old"
    ),
    schema.ReplayDiverged: lambda _, event: f"step {event.step} differs from its first execution",
}


def event_line(record: Record) -> str | None:
    """A line for people, or None for events that need none."""
    line = _LINES.get(type(record.event))
    return None if line is None else line(record, record.event)


class EventLog:
    """Writes each record as one line of the structured log."""

    def __init__(
        self, stream: TextIO, redactor: Redactor, *, pretty: bool | None = False, level: int = logging.DEBUG
    ) -> None:
        self._stream = stream
        self._logger = configure(stream, redactor=redactor, pretty=pretty, level=level)

    def write(self, record: Record, trace_id: str | None = None, span_id: str | None = None) -> None:
        """Log `record`, in the trace of the open incident if there is one."""
        fields = {"run": record.run, "time_ns": record.time_ns, **log_fields(record)}
        if trace_id is not None:
            fields.update(trace_id=trace_id, span_id=span_id)
        line = event_line(record)
        if line is not None:
            fields["message_text"] = line
        getattr(self._logger, level_of(record))(type(record.event).__name__, **fields)

    def note(self, text: str) -> None:
        """A line of telemetry about itself."""
        self._logger.warning(text)

    def close(self) -> None:
        """Flush and close the stream."""
        self._stream.close()
