"""Spans: a fold of records into finished spans with explicit times and deterministic ids.

    nvrx.run          trace of the run, from the first record to a terminal exit
      nvrx.generation       one formation of the group; an error if a fault ended it
      nvrx.save             one durable save: nvrx.seal, nvrx.write, nvrx.commit, nvrx.verify
      nvrx.reject           the moment at which a checkpoint was found unusable; in an incident, a part of that
    nvrx.incident     a trace of its own, linked to the generation that failed
      nvrx.detect, nvrx.teardown, nvrx.rendezvous, nvrx.restore, nvrx.first_step   once an attempt

An event that begins and ends no span is a point in the innermost one that is open: a decision in its incident, a
preemption in its generation, a launcher's start in the run. No event is without a place in the trace.

Ids are hashes of what a span stands for, so a replay gives the same ones and a span is written once. A
recovered incident is no error, nor is the run that contains it. The spans that a killed launcher left open
are closed when the records of the next epoch arrive, at the last moment that the old one recorded; an open
incident goes on. Not thread-safe. Must not: read a clock.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record, Verdict
from nvrx_sre.events.snapshot import Snapshotted
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.verdict import FINAL_STATES, run_state_after
from nvrx_sre.telemetry.context import hash_id, run_trace_id, traceparent

LAUNCHER_LOST = "launcher_lost"
"""`error.type` of what a launcher's death cut short."""
_ORDERLY = (ExitCode.FINISHED, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
_AFTER_END = (schema.LauncherStopped, schema.IncidentClosed, schema.ProgressResumed, schema.BudgetReset)
"""Records that begin no new run span."""
MAX_POINTS = 128
"""Points of one span; further ones are only counted, in the attribute `nvrx.points_dropped`."""
Attributes = dict[str, str | int | float | bool]


@dataclass(frozen=True, kw_only=True)
class SpanPoint:
    """An event inside a span. Time is wall ns."""

    name: str
    time_ns: int
    attributes: Attributes


@dataclass(frozen=True, kw_only=True)
class FinishedSpan:
    """A span that has ended. Times are wall ns; ids are lower-case hex (32 and 16 digits)."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_ns: int
    end_ns: int
    attributes: Attributes
    error: bool = False
    links: tuple[tuple[str, str], ...] = ()
    """(trace id, span id) of related spans in other traces."""
    points: tuple[SpanPoint, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, one line of spans.jsonl."""
        return {
            "name": self.name,
            "trace_id": self.trace_id,
            "span_id": self.span_id,
            "parent_span_id": self.parent_span_id,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "status": "error" if self.error else "unset",
            "attributes": self.attributes,
            "links": [{"trace_id": trace_id, "span_id": span_id} for trace_id, span_id in self.links],
            "events": [
                {"name": point.name, "time_ns": point.time_ns, "attributes": point.attributes} for point in self.points
            ],
        }


@dataclass(kw_only=True)
class OpenSpan:
    """A span that has not ended."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_ns: int
    attributes: Attributes = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()
    points: list[SpanPoint] = field(default_factory=list)
    num_points_dropped: int = 0

    def add_point(self, point: SpanPoint) -> None:
        """Remember an event inside the span, if there is room."""
        if len(self.points) < MAX_POINTS:
            self.points.append(point)
        else:
            self.num_points_dropped += 1

    def finish(self, end_ns: int, error_type: str | None = None) -> FinishedSpan:
        attributes = dict(self.attributes)
        if error_type is not None:
            attributes["error.type"] = error_type
        if self.num_points_dropped:
            attributes["nvrx.points_dropped"] = self.num_points_dropped
        return FinishedSpan(
            name=self.name,
            trace_id=self.trace_id,
            span_id=self.span_id,
            parent_span_id=self.parent_span_id,
            start_ns=self.start_ns,
            end_ns=max(end_ns, self.start_ns),
            attributes=attributes,
            error=error_type is not None,
            links=self.links,
            points=tuple(self.points),
        )


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; the number itself for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class SpanFold(Snapshotted):
    """Fold of records into spans. The tracker has seen a record before `apply` does."""

    STATE = (
        *("_run", "_generation", "_incident", "_stage", "_attempt", "_saves", "_sealed_ns", "_epoch", "_last_ns"),
        "num_finished",
    )
    STORED = (OpenSpan, SpanPoint)

    def __init__(self, run: str, tracker: IncidentTracker) -> None:
        self._name = run
        self._tracker = tracker
        self._trace_id = run_trace_id(run)
        self._run: OpenSpan | None = None
        self._generation: OpenSpan | None = None
        self._incident: OpenSpan | None = None
        self._stage: OpenSpan | None = None
        self._attempt = 0
        self._saves: dict[int, tuple[OpenSpan, OpenSpan]] = {}
        self._sealed_ns: dict[int, int] = {}
        self._epoch = 0
        self._last_ns = 0
        self.num_finished = 0
        self._handlers: dict[type[schema.Event], Callable[[Record, Any], list[FinishedSpan]]] = {
            schema.GenerationFormed: self._on_generation_formed,
            schema.FaultDetected: self._on_fault_detected,
            schema.TeardownFinished: self._on_teardown_finished,
            schema.StateRestored: self._on_state_restored,
            schema.StepsCommitted: self._on_steps_committed,
            schema.IncidentClosed: self._on_incident_closed,
            schema.SaveSealed: self._on_save_sealed,
            schema.SaveStarted: self._on_save_started,
            schema.SaveWritten: self._on_save_written,
            schema.SaveCommitted: self._on_save_committed,
            schema.SaveVerified: self._on_save_verified,
            schema.SaveUnverified: self._on_save_unverified,
            schema.SaveFailed: self._on_save_failed,
            schema.CheckpointRejected: self._on_checkpoint_rejected,
            schema.RunFinished: self._on_run_finished,
            schema.LauncherStopped: self._on_launcher_stopped,
        }

    @property
    def current_trace(self) -> tuple[str, str] | None:
        """(trace id, span id) that a log line of now belongs to: the open incident, else the run."""
        span = self._incident or self._generation or self._run
        return None if span is None else (span.trace_id, span.span_id)

    @property
    def run_traceparent(self) -> str:
        """W3C form of the run's span, '' while none is open: what a process of the run inherits."""
        return "" if self._run is None else traceparent(self._run.trace_id, self._run.span_id)

    def apply(self, record: Record) -> list[FinishedSpan]:
        """Fold one record; returns the spans that it finished, inner before outer."""
        finished: list[FinishedSpan] = []
        if record.epoch > self._epoch:
            if self._epoch:
                finished += self._close_working(self._last_ns, LAUNCHER_LOST)
            self._epoch = record.epoch
        if self._run is None and not isinstance(record.event, _AFTER_END):
            self._run = self._open("nvrx.run", None, record.time_ns, ("run", record.epoch if self._last_ns else 0))
        self._last_ns = max(self._last_ns, record.time_ns)
        handler = self._handlers.get(type(record.event))
        if handler is not None:
            finished += handler(record, record.event)
        else:
            self._add_point(record)
        self.num_finished += len(finished)
        return finished

    def _open(
        self, name: str, parent: OpenSpan | None, start_ns: int, key: tuple[object, ...], **attributes: Any
    ) -> OpenSpan:
        trace_id = self._trace_id if parent is None else parent.trace_id
        return OpenSpan(
            name=name,
            trace_id=trace_id,
            span_id=hash_id(16, self._name, *key),
            parent_span_id=None if parent is None else parent.span_id,
            start_ns=start_ns,
            attributes={"nvrx.run": self._name, **{f"nvrx.{key}": item for key, item in attributes.items()}},
        )

    def _add_point(self, record: Record) -> None:
        span = self._incident or self._generation or self._run
        if span is not None:
            point = SpanPoint(
                name=type(record.event).__name__, time_ns=record.time_ns, attributes=_point_attributes(record)
            )
            span.add_point(point)

    # --- generations and incidents ------------------------------------------------------------------------

    def _on_generation_formed(self, record: Record, event: schema.GenerationFormed) -> list[FinishedSpan]:
        finished = self._end_stage(record.time_ns)
        finished += self._end_generation(record.time_ns, None)
        self._generation = self._open(
            "nvrx.generation",
            self._run,
            event.go_ns,
            ("generation", record.generation),
            generation=record.generation,
            world_size=event.world_size,
            epoch=record.epoch,
        )
        self._begin_stage("nvrx.restore", record.time_ns)
        return finished

    def _on_fault_detected(self, record: Record, event: schema.FaultDetected) -> list[FinishedSpan]:
        evidence_ns = min(event.evidence_ns, record.time_ns)
        failed = self._generation
        finished = self._end_stage(evidence_ns, event.fault)
        finished += self._end_generation(evidence_ns, event.fault)
        incident = self._tracker.open
        if incident is None:
            return finished
        self._attempt = incident.attempts
        if self._incident is None:
            self._incident = OpenSpan(
                name="nvrx.incident",
                trace_id=incident.trace_id,
                span_id=hash_id(16, self._name, "incident", incident.number),
                parent_span_id=None,
                start_ns=incident.opened_ns,
                attributes={**_fault_attributes(record, event), "nvrx.incident": incident.number},
                links=() if failed is None else ((failed.trace_id, failed.span_id),),
            )
        self._begin_stage("nvrx.detect", evidence_ns, **_fault_attributes(record, event))
        finished += self._end_stage(record.time_ns)
        self._begin_stage("nvrx.teardown", record.time_ns)
        return finished

    def _on_teardown_finished(self, record: Record, event: schema.TeardownFinished) -> list[FinishedSpan]:
        if self._stage is not None:
            self._stage.attributes.update({"nvrx.num_kept": len(event.kept), "nvrx.num_killed": len(event.killed)})
        finished = self._end_stage(record.time_ns)
        self._begin_stage("nvrx.rendezvous", record.time_ns)
        return finished

    def _on_state_restored(self, _: Record, event: schema.StateRestored) -> list[FinishedSpan]:
        if self._stage is not None:
            self._stage.attributes.update(
                {"nvrx.step": event.step, "nvrx.source": str(event.source), "nvrx.load_s": event.seconds}
            )
        finished = self._end_stage(event.restored_ns)
        self._begin_stage("nvrx.first_step", event.restored_ns)
        return finished

    def _on_steps_committed(self, _: Record, event: schema.StepsCommitted) -> list[FinishedSpan]:
        if self._stage is None or self._stage.name != "nvrx.first_step":
            return []
        num_steps = event.last_step - event.first_step + 1
        first_ns = event.started_ns + (event.committed_ns - event.started_ns) // num_steps
        self._stage.attributes["nvrx.step"] = event.first_step
        return self._end_stage(first_ns)

    def _on_incident_closed(self, record: Record, event: schema.IncidentClosed) -> list[FinishedSpan]:
        finished = self._end_stage(record.time_ns)
        incident, self._incident = self._incident, None
        if incident is None:
            return finished
        incident.attributes.update(
            {
                "nvrx.verdict": str(event.verdict),
                "nvrx.degraded": event.degraded,
                "nvrx.layer": str(event.layer),
                "nvrx.attempts": event.attempts,
                "nvrx.rollback_steps": event.rollback_steps,
                "nvrx.detection_s": event.detection_s,
            }
        )
        if event.outage_s is not None:
            incident.attributes["nvrx.outage_s"] = event.outage_s
        recovered = event.verdict in (Verdict.RECOVERED, Verdict.FLAPPING)
        return [*finished, incident.finish(record.time_ns, None if recovered else str(event.fault))]

    def _begin_stage(self, name: str, start_ns: int, **attributes: str | int | float | bool) -> None:
        """A step of the recovery, if an incident is open."""
        incident = self._incident
        if incident is None:
            return
        self._stage = self._open(
            name, incident, start_ns, (incident.span_id, self._attempt, name), attempt=self._attempt
        )
        self._stage.attributes.update(attributes)

    def _end_stage(self, end_ns: int, error_type: str | None = None) -> list[FinishedSpan]:
        stage, self._stage = self._stage, None
        return [] if stage is None else [stage.finish(end_ns, error_type)]

    def _end_generation(self, end_ns: int, error_type: str | None) -> list[FinishedSpan]:
        generation, self._generation = self._generation, None
        return [] if generation is None else [generation.finish(end_ns, error_type)]

    # --- saves --------------------------------------------------------------------------------------------

    def _on_save_sealed(self, _: Record, event: schema.SaveSealed) -> list[FinishedSpan]:
        self._sealed_ns = {event.step: event.sealed_ns}
        return []

    def _on_save_started(self, record: Record, event: schema.SaveStarted) -> list[FinishedSpan]:
        finished = self._end_save(event.step, record.time_ns, "superseded")
        sealed_ns = self._sealed_ns.pop(event.step, event.captured_ns)
        key = ("save", record.epoch, record.generation, event.step)
        save = self._open("nvrx.save", self._run, sealed_ns, key, step=event.step, generation=record.generation)
        seal = self._open("nvrx.seal", save, sealed_ns, (*key, "seal"))
        self._saves[event.step] = (save, self._open("nvrx.write", save, record.time_ns, (*key, "write")))
        return [*finished, seal.finish(record.time_ns)]

    def _on_save_written(self, record: Record, event: schema.SaveWritten) -> list[FinishedSpan]:
        return self._next_save_stage(record, event.step, "nvrx.commit", size_bytes=event.size_bytes)

    def _on_save_committed(self, record: Record, event: schema.SaveCommitted) -> list[FinishedSpan]:
        return self._next_save_stage(record, event.step, "nvrx.verify", directory=event.directory)

    def _next_save_stage(self, record: Record, step: int, name: str, **attributes: str | int) -> list[FinishedSpan]:
        if step not in self._saves:
            return []
        save, stage = self._saves[step]
        save.attributes.update({f"nvrx.{key}": value for key, value in attributes.items()})
        self._saves[step] = (save, self._open(name, save, record.time_ns, (save.span_id, name)))
        return [stage.finish(record.time_ns)]

    def _on_save_verified(self, record: Record, event: schema.SaveVerified) -> list[FinishedSpan]:
        return self._end_save(event.step, record.time_ns, None)

    def _on_save_unverified(self, record: Record, event: schema.SaveUnverified) -> list[FinishedSpan]:
        """The save itself is good: the error is that of its last stage."""
        return self._end_save(event.step, record.time_ns, None, stage_error_type=str(event.reason))

    def _on_save_failed(self, record: Record, event: schema.SaveFailed) -> list[FinishedSpan]:
        return self._end_save(event.step, record.time_ns, str(event.reason))

    def _on_checkpoint_rejected(self, record: Record, event: schema.CheckpointRejected) -> list[FinishedSpan]:
        """A moment, and a span of its own: it belongs to the recovery in hand, or to the start of the run."""
        parent = self._incident or self._run
        key = ("reject", record.epoch, record.seq)
        rejected = self._open("nvrx.reject", parent, record.time_ns, key, step=event.step, tier=str(event.tier))
        return [rejected.finish(record.time_ns, str(event.reason))]

    def _end_save(
        self, step: int, end_ns: int, error_type: str | None, *, stage_error_type: str | None = None
    ) -> list[FinishedSpan]:
        if step not in self._saves:
            return []
        save, stage = self._saves.pop(step)
        return [stage.finish(end_ns, stage_error_type or error_type), save.finish(end_ns, error_type)]

    # --- ends ---------------------------------------------------------------------------------------------

    def _close_working(self, end_ns: int, error_type: str | None) -> list[FinishedSpan]:
        """What cannot outlive a launcher: saves, the stage of a recovery, the generation."""
        finished = [span for step in list(self._saves) for span in self._end_save(step, end_ns, error_type)]
        finished += self._end_stage(end_ns, error_type)
        return finished + self._end_generation(end_ns, error_type)

    def _on_run_finished(self, record: Record, event: schema.RunFinished) -> list[FinishedSpan]:
        return self._end_run(record, event.exit_code)

    def _on_launcher_stopped(self, record: Record, event: schema.LauncherStopped) -> list[FinishedSpan]:
        return self._end_run(record, event.exit_code)

    def _end_run(self, record: Record, exit_code: int) -> list[FinishedSpan]:
        error_type = None if exit_code in _ORDERLY else f"exit_{exit_code}"
        finished = self._close_working(record.time_ns, error_type)
        if self._run is not None and run_state_after(exit_code) in FINAL_STATES:
            self._run.attributes["nvrx.exit_code"] = exit_code
            finished.append(self._run.finish(record.time_ns, error_type))
            self._run = None
        return finished


def _point_attributes(record: Record) -> Attributes:
    """The event's own scalars; enums as their values."""
    attributes: Attributes = {} if record.rank is None else {"nvrx.rank": record.rank}
    for item in dataclasses.fields(record.event):
        value = getattr(record.event, item.name)
        if isinstance(value, str | int | float | bool):
            attributes[f"nvrx.{item.name}"] = str(value) if isinstance(value, str) else value
    return attributes


def _fault_attributes(record: Record, event: schema.FaultDetected) -> Attributes:
    attributes: Attributes = {
        "nvrx.fault": str(event.fault),
        "nvrx.detector": str(event.detector),
        "nvrx.phase": str(event.phase),
        "nvrx.step": event.step,
        "nvrx.generation": record.generation,
    }
    if record.rank is not None:
        attributes["nvrx.root_rank"] = record.rank
    if event.signal is not None:
        attributes["nvrx.signal"] = signal_name(event.signal)
    if event.exception_type:
        attributes["exception.type"] = event.exception_type
    if event.pid is not None:
        attributes["process.pid"] = event.pid
    if event.exit_code is not None:
        attributes["process.exit.code"] = event.exit_code
    if event.device:
        attributes["host.name"] = event.device.rpartition("/")[0]
    return attributes
