"""Incidents: from the first fault until confirmed recovery. A pure fold over records.

One incident is open at most. It opens with `FaultDetected`; faults before its end are further attempts of
it. `ProgressResumed` marks the first step above H committed on the slowest rank and fixes the outage; the
incident closes `recovered` (or `flapping`) when that progress would survive the same fault again: sealed
hot on all ranks if the cure was in process or a worker's, else a verified durable commit. It closes
`exhausted` when the launcher stops for good. A launcher that dies or is preempted leaves it open, and the
next one goes on with it.

Numbers: outage = last step committed before the first fault -> first step above H on
the slowest rank; detection = evidence -> `FaultDetected`; resume = evidence -> first step started;
rollback = H at the first fault - deepest step restored.

`apply` returns the events to emit. They are derived from the records alone and change nothing when they
come back, so a replay that ignores them ends in the same state. Invariants: numbers of incidents rise by
one; a trace id depends on run and number only. Not thread-safe.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import (
    Action,
    Detector,
    Event,
    FaultClass,
    IncidentClosed,
    Layer,
    ProgressResumed,
    Record,
    Verdict,
)
from nvrx_sre.events.snapshot import Snapshotted, keep_stored
from nvrx_sre.goodput.verdict import ends_incident, verdict_open, verdict_recovered

MAX_CLOSED = 1000
"""Closed incidents kept for the summary; beyond it the oldest are forgotten (`num_closed` counts all)."""
_LADDER = tuple(Layer)

FollowUp = tuple[Event, int | None]
"""An event to emit and the rank of its record."""


def incident_trace_id(run: str, number: int) -> str:
    """Trace id of an incident: 32 hex digits, the same on every replay."""
    return hashlib.sha256(f"{run}/incident/{number}".encode()).hexdigest()[:32]


@dataclass(kw_only=True)
class Incident:
    """One incident so far. Times are wall ns; None while unknown."""

    number: int
    trace_id: str
    generation: int
    fault: FaultClass
    detector: Detector
    rank: int | None
    step: int
    opened_ns: int
    detected_ns: int
    first_high_water: int
    """H at the first fault: what rollback is measured from."""
    high_water: int
    """H at the newest fault: what progress has to pass."""
    last_commit_ns: int
    """Last step committed before the first fault; without one, the evidence itself."""
    attempts: int = 1
    layer: Layer = Layer.IN_PROCESS
    verdict: Verdict = Verdict.RECOVERING
    degraded: bool = False
    deepest_restored: int | None = None
    first_step_started_ns: int | None = None
    resumed_ns: int | None = None
    attempt_ns: list[int] = field(default_factory=list)
    """Evidence of each attempt's fault."""

    @property
    def detection_s(self) -> float:
        return seconds(max(0, self.detected_ns - self.opened_ns))

    @property
    def outage_s(self) -> float | None:
        return None if self.resumed_ns is None else seconds(max(0, self.resumed_ns - self.last_commit_ns))

    @property
    def resume_s(self) -> float | None:
        started_ns = self.first_step_started_ns
        return None if started_ns is None else seconds(max(0, started_ns - self.opened_ns))

    @property
    def rollback_steps(self) -> int:
        restored = self.deepest_restored
        return 0 if restored is None else max(0, self.first_high_water - restored)


class IncidentTracker(Snapshotted):
    """Fold of records into incidents. `open` is the current one or None, `closed` the ended ones.

    `caps` are those of the constructor until the run's own are on record.
    """

    STATE = (
        *("caps", "open", "closed", "num_opened", "num_closed", "_recovered_ns", "_last_commit_ns"),
        *("_configured_world", "_save_every_steps", "_verified_step"),
    )
    STORED = (Incident, CapLimits)

    def __init__(self, run: str, caps: CapLimits | None = None) -> None:
        self._run = run
        self.caps = caps or CapLimits()
        self.open: Incident | None = None
        self.closed: deque[Incident] = deque(maxlen=MAX_CLOSED)
        self.num_opened = 0
        self.num_closed = 0
        self._recovered_ns: deque[int] = deque(maxlen=self.caps.flapping_faults)
        self._last_commit_ns: int | None = None
        self._configured_world = 0
        self._save_every_steps = 0
        self._verified_step = -1
        self._handlers: dict[type[Event], Callable[[Record, Any], list[FollowUp]]] = {
            schema.RunStarted: self._on_run_started,
            schema.FaultDetected: self._on_fault_detected,
            schema.RestartDecided: self._on_restart_decided,
            schema.RankReplaced: self._on_rank_replaced,
            schema.GenerationFormed: self._on_generation_formed,
            schema.StateRestored: self._on_state_restored,
            schema.CheckpointRejected: self._on_checkpoint_rejected,
            schema.StepsCommitted: self._on_steps_committed,
            schema.SaveVerified: self._on_save_verified,
            schema.RunFinished: self._on_run_finished,
        }

    def apply(self, record: Record) -> list[FollowUp]:
        """Fold one record; returns events to emit (none for most records)."""
        handler = self._handlers.get(type(record.event))
        return [] if handler is None else handler(record, record.event)

    def _on_run_started(self, _: Record, event: schema.RunStarted) -> list[FollowUp]:
        self._configured_world = event.nproc
        self._save_every_steps = event.save_every_steps
        self.caps = self.caps.updated(event.limits)
        self._recovered_ns = deque(self._recovered_ns, maxlen=self.caps.flapping_faults)
        return []

    def _on_fault_detected(self, record: Record, event: schema.FaultDetected) -> list[FollowUp]:
        evidence_ns = min(event.evidence_ns, record.time_ns)
        incident = self.open
        if incident is None:
            self.num_opened += 1
            last_commit_ns = evidence_ns if self._last_commit_ns is None else self._last_commit_ns
            self.open = incident = Incident(
                number=self.num_opened,
                trace_id=incident_trace_id(self._run, self.num_opened),
                generation=record.generation,
                fault=event.fault,
                detector=event.detector,
                rank=record.rank,
                step=event.step,
                opened_ns=evidence_ns,
                detected_ns=record.time_ns,
                first_high_water=event.high_water,
                high_water=event.high_water,
                last_commit_ns=min(last_commit_ns, evidence_ns),
            )
        else:
            incident.attempts += 1
            incident.high_water = max(incident.high_water, event.high_water)
            incident.resumed_ns = incident.first_step_started_ns = None
        incident.attempt_ns.append(evidence_ns)
        del incident.attempt_ns[:-100]
        incident.verdict = verdict_open(incident.attempts, self.caps)
        return []

    def _on_restart_decided(self, record: Record, event: schema.RestartDecided) -> list[FollowUp]:
        incident = self.open
        if incident is None:
            return []
        if _LADDER.index(event.layer) > _LADDER.index(incident.layer):
            incident.layer = event.layer
        incident.degraded |= event.checkpoints_back > 0
        if event.action is Action.STOP and ends_incident(event.exit_code):
            return [self._close(Verdict.EXHAUSTED, record.time_ns)]
        return []

    def _on_rank_replaced(self, _: Record, __: schema.RankReplaced) -> list[FollowUp]:
        """A rank that could not be interrupted was replaced: the recovery took a layer more than decided."""
        if self.open is not None and self.open.layer is Layer.IN_PROCESS:
            self.open.layer = Layer.WORKER
        return []

    def _on_generation_formed(self, _: Record, event: schema.GenerationFormed) -> list[FollowUp]:
        if self.open is not None:
            self.open.degraded |= event.world_size < self._configured_world
        return []

    def _on_state_restored(self, _: Record, event: schema.StateRestored) -> list[FollowUp]:
        incident = self.open
        if incident is not None:
            deepest = incident.deepest_restored
            incident.deepest_restored = event.step if deepest is None else min(deepest, event.step)
            incident.degraded |= incident.rollback_steps > self._save_every_steps > 0
        return []

    def _on_checkpoint_rejected(self, _: Record, __: schema.CheckpointRejected) -> list[FollowUp]:
        if self.open is not None:
            self.open.degraded = True
        return []

    def _on_steps_committed(self, record: Record, event: schema.StepsCommitted) -> list[FollowUp]:
        if event.proven_by_restore:
            self._raise_high_water(event.last_step)
            return []
        self._last_commit_ns = max(self._last_commit_ns or 0, min(event.committed_ns, record.time_ns))
        incident = self.open
        if incident is None:
            return []
        follow_ups: list[FollowUp] = []
        if incident.first_step_started_ns is None:
            incident.first_step_started_ns = event.started_ns
        finite = event.loss is None or math.isfinite(event.loss)
        if incident.resumed_ns is None and event.last_step > incident.high_water and finite:
            follow_ups.append(self._resume(incident, event))
        sealed = event.hot_sealed_step if incident.layer is not Layer.JOB else -1
        return follow_ups + self._confirm(max(sealed, self._verified_step), record.time_ns)

    def _raise_high_water(self, step: int) -> None:
        """Steps up to `step` were executed before the newest fault: passing them is no progress."""
        incident = self.open
        if incident is None:
            return
        incident.high_water = max(incident.high_water, step)
        if incident.attempts == 1:
            incident.first_high_water = max(incident.first_high_water, step)

    def _resume(self, incident: Incident, event: schema.StepsCommitted) -> FollowUp:
        """The first step above H inside an aggregate is placed evenly; alone it is exact."""
        num_steps = event.last_step - event.first_step + 1
        position = max(1, incident.high_water + 1 - event.first_step + 1)
        committed_ns = event.started_ns + (event.committed_ns - event.started_ns) * position // num_steps
        incident.resumed_ns = committed_ns
        started_ns = incident.first_step_started_ns
        resumed = ProgressResumed(
            step=max(incident.high_water + 1, event.first_step),
            committed_ns=committed_ns,
            first_step_started_ns=event.started_ns if started_ns is None else started_ns,
        )
        return resumed, incident.rank

    def _on_save_verified(self, record: Record, event: schema.SaveVerified) -> list[FollowUp]:
        self._verified_step = max(self._verified_step, event.step)
        return self._confirm(self._verified_step, record.time_ns)

    def _confirm(self, safe_step: int, now_ns: int) -> list[FollowUp]:
        """Close the open incident if it has resumed and `safe_step` holds the progress."""
        incident = self.open
        if incident is None or incident.resumed_ns is None or safe_step <= incident.high_water:
            return []
        self._recovered_ns.append(incident.opened_ns)
        return [self._close(verdict_recovered(self._recovered_ns, now_ns, self.caps), now_ns)]

    def _on_run_finished(self, record: Record, event: schema.RunFinished) -> list[FollowUp]:
        if self.open is None:
            return []
        if event.exit_code == ExitCode.FINISHED:
            return [self._close(Verdict.RECOVERED, record.time_ns)]
        if ends_incident(event.exit_code):
            return [self._close(Verdict.EXHAUSTED, record.time_ns)]
        return []

    def _close(self, verdict: Verdict, now_ns: int) -> FollowUp:
        incident = self.open
        assert incident is not None
        incident.verdict = verdict
        keep_stored(incident)
        self.open = None
        self.closed.append(incident)
        self.num_closed += 1
        closed = IncidentClosed(
            incident=incident.number,
            verdict=verdict,
            degraded=incident.degraded,
            fault=incident.fault,
            step=incident.step,
            layer=incident.layer,
            attempts=incident.attempts,
            opened_ns=incident.opened_ns,
            detection_s=incident.detection_s,
            outage_s=incident.outage_s,
            resume_s=incident.resume_s,
            rollback_steps=incident.rollback_steps,
            trace_id=incident.trace_id,
        )
        return closed, incident.rank
