"""What must hold in every journal, recounted from the records alone.

`check_safety` names each rule that a list of records breaks; `check_liveness` what keeps a run from having
ended. They share no code with the folds they check. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Action, FaultClass, Record, StepKind
from nvrx_sre.policy.classify import RULES, RetryClass


def check_safety(records: Sequence[Record], caps: CapLimits | None = None) -> list[str]:
    """Broken rules, each with the record's number; empty if all hold."""
    fold = _Safety(caps=caps or CapLimits())
    for record in records:
        fold.apply(record)
    return fold.problems


def check_liveness(records: Sequence[Record]) -> list[str]:
    """Why these records are not those of a run that ended; empty if it did."""
    if not records:
        return ["no record at all"]
    ends = [record for record in records if isinstance(record.event, schema.RunFinished)]
    if not ends:
        return ["the run never finished"]
    if records[-1] is not ends[-1]:
        return [f"something was recorded after the end: {type(records[-1].event).__name__}"]
    return []


@dataclass(kw_only=True)
class _Safety:
    """Fold that recounts what matters."""

    caps: CapLimits
    problems: list[str] = field(default_factory=list)
    high_water: int = 0
    formed: int = 0
    restored: int = -1
    step: int = 0
    new_steps: set[int] = field(default_factory=set)
    seq: int = 0
    epoch: int = 0
    time_ns: int = 0
    faults: list[Record] = field(default_factory=list)
    """Faults since progress."""
    last_fault: Record | None = None
    faulted_generations: set[int] = field(default_factory=set)
    is_decided: bool = True
    has_finished: bool = False
    has_progress: bool = True
    layer: schema.Layer = schema.Layer.IN_PROCESS
    saves: dict[tuple[int, int], str] = field(default_factory=dict)
    """Stage of the save of (generation, step)."""
    fences: list[tuple[int, int]] = field(default_factory=list)

    def apply(self, record: Record) -> None:
        self._check_stamp(record)
        handler = _HANDLERS.get(type(record.event))
        if handler is not None:
            handler(self, record, record.event)

    def problem(self, record: Record, text: str) -> None:
        self.problems.append(f"record {record.seq} ({type(record.event).__name__}): {text}")

    def _check_stamp(self, record: Record) -> None:
        if record.epoch > self.epoch:
            self.epoch, self.has_finished = record.epoch, False
            self.saves.clear()
        elif record.epoch < self.epoch or self.has_finished:
            self.problem(record, "recorded after the end of its epoch")
        if record.seq <= self.seq or record.time_ns < self.time_ns:
            self.problem(record, "sequence or time went back")
        self.seq, self.time_ns = record.seq, record.time_ns
        needs_decision = not self.is_decided and not isinstance(record.event, schema.RestartDecided)
        if needs_decision:
            self.problem(record, "follows a fault that nobody decided on")

    def on_formed(self, record: Record, event: schema.GenerationFormed) -> None:
        if record.generation <= self.formed:
            self.problem(record, f"generation {record.generation} formed after {self.formed}")
        self.formed = record.generation

    def on_rolled_back(self, record: Record, event: schema.RolledBack) -> None:
        if event.high_water != self.high_water:
            self.problem(record, f"says H is {event.high_water}, it is {self.high_water}")
        self.fences.append((record.generation, event.step))

    def on_restored(self, record: Record, event: schema.StateRestored) -> None:
        if record.generation != self.formed:
            self.problem(record, f"generation {record.generation} restored, {self.formed} is formed")
        if event.step < self.high_water and (record.generation, event.step) not in self.fences:
            self.problem(record, f"went back to {event.step} below {self.high_water} without a fence")
        if event.step > self.high_water:
            self.problem(record, f"restored step {event.step}, which was executed and never counted")
        self.restored = record.generation
        self.step = event.step

    def on_steps(self, record: Record, event: schema.StepsCommitted) -> None:
        if event.proven_by_restore:
            self._check_proven(record, event)
        elif record.generation != self.restored:
            self.problem(record, f"steps of generation {record.generation}, {self.restored} is restored")
        elif event.first_step != self.step + 1:
            self.problem(record, f"steps {event.first_step}..{event.last_step} follow {self.step}")
        if event.last_step < event.first_step:
            self.problem(record, f"steps {event.first_step}..{event.last_step}")
        is_new = event.first_step > self.high_water
        if is_new != (event.kind is StepKind.NEW) or (not is_new and event.last_step > self.high_water):
            self.problem(record, f"{event.kind} steps {event.first_step}..{event.last_step}, H is {self.high_water}")
        if event.committed_ns < event.started_ns:
            self.problem(record, "committed before it started")
        self.step = event.last_step
        self.high_water = max(self.high_water, event.last_step)
        if event.kind is StepKind.NEW:
            self.new_steps.update(range(event.first_step, event.last_step + 1))
        if len(self.new_steps) != self.high_water:
            self.problem(record, f"{len(self.new_steps)} new steps were counted, H is {self.high_water}")
        self._progressed(event.hot_sealed_step, is_hot=True)

    def _check_proven(self, record: Record, event: schema.StepsCommitted) -> None:
        if record.generation != self.formed or self.restored == self.formed:
            self.problem(record, "proven by a restore, but not just before one")
        if event.committed_ns != event.started_ns or event.tokens or event.hot_sealed_step >= 0:
            self.problem(record, "what a restore proves has no time, no tokens and no seal of its own")

    def on_fault(self, record: Record, event: schema.FaultDetected) -> None:
        if event.high_water != self.high_water:
            self.problem(record, f"says H is {event.high_water}, it is {self.high_water}")
        if record.generation == self.formed and record.generation in self.faulted_generations:
            self.problem(record, f"second root fault of generation {record.generation}")
        if record.generation == self.formed:
            self.faulted_generations.add(record.generation)
        if self.has_progress:
            self.faults = []
        self.faults.append(record)
        self.last_fault = record
        self.has_progress = self.is_decided = False

    def on_decided(self, record: Record, event: schema.RestartDecided) -> None:
        if self.is_decided:
            self.problem(record, "a decision without a fault")
            return
        self.is_decided = True
        self.layer = schema.Layer.JOB if event.action is Action.STOP else event.layer
        fault = self.faults[-1].event
        assert isinstance(fault, schema.FaultDetected)
        num_attempts = len(self.faults)
        if event.restarts_since_progress != num_attempts:
            self.problem(record, f"counts {event.restarts_since_progress} attempts, there were {num_attempts}")
        waits = RULES[fault.fault].retry in (RetryClass.TRANSIENT, RetryClass.NODE)
        age_ns = record.time_ns - self.faults[0].time_ns
        is_over = num_attempts >= self.caps.consecutive_attempts
        is_in_grace = waits and age_ns < to_ns(self.caps.transient_grace_s)
        if event.action is Action.RESTART and is_over and not is_in_grace and not event.is_excluding:
            self.problem(record, f"restart after {num_attempts} attempts without progress")
        if event.action is Action.STOP and num_attempts == 1 and fault.fault not in _INCURABLE:
            self.problem(record, "a run with progress was stopped")
        if event.action is Action.RESTART and num_attempts == 1 and event.backoff_s > 0:
            self.problem(record, "back-off although there was progress")

    def on_reset(self, record: Record, event: schema.BudgetReset) -> None:
        self.faults = []
        self.has_progress = True

    def on_finished(self, record: Record, event: schema.RunFinished) -> None:
        self.has_finished = True

    def on_save_started(self, record: Record, event: schema.SaveStarted) -> None:
        busy = [key for key, stage in self.saves.items() if stage in ("started", "committed")]
        if busy:
            self.problem(record, f"save of step {event.step} started while {busy} is in flight")
        self.saves[record.generation, event.step] = "started"

    def on_save_committed(self, record: Record, event: schema.SaveCommitted) -> None:
        if self.saves.get((record.generation, event.step)) != "started":
            self.problem(record, f"commit of step {event.step} that had not started")
        if any(record.generation < generation and event.step > step for generation, step in self.fences):
            self.problem(record, f"commit of step {event.step} of an abandoned line")
        self.saves[record.generation, event.step] = "committed"

    def on_save_verified(self, record: Record, event: schema.SaveVerified) -> None:
        if self.saves.get((record.generation, event.step)) != "committed":
            self.problem(record, f"verified step {event.step} that was not committed")
        self.saves[record.generation, event.step] = "verified"
        self._progressed(event.step, is_hot=False)

    def on_save_failed(self, record: Record, event: schema.SaveFailed) -> None:
        self.saves[record.generation, event.step] = "failed"

    def _progressed(self, step: int, *, is_hot: bool) -> None:
        if self.last_fault is None:
            return
        fault = self.last_fault.event
        assert isinstance(fault, schema.FaultDetected)
        survives = not is_hot or (self.layer is not schema.Layer.JOB and fault.fault is not FaultClass.NODE_LOST)
        if survives and step > fault.high_water:
            self.has_progress = True


_INCURABLE = frozenset({FaultClass.USER_ERROR, FaultClass.PREEMPTION, FaultClass.CHECKPOINT_CORRUPT})
_HANDLERS: dict[type[schema.Event], Callable[[_Safety, Record, Any], None]] = {
    schema.GenerationFormed: _Safety.on_formed,
    schema.RolledBack: _Safety.on_rolled_back,
    schema.StateRestored: _Safety.on_restored,
    schema.StepsCommitted: _Safety.on_steps,
    schema.FaultDetected: _Safety.on_fault,
    schema.RestartDecided: _Safety.on_decided,
    schema.BudgetReset: _Safety.on_reset,
    schema.RunFinished: _Safety.on_finished,
    schema.SaveStarted: _Safety.on_save_started,
    schema.SaveCommitted: _Safety.on_save_committed,
    schema.SaveVerified: _Safety.on_save_verified,
    schema.SaveFailed: _Safety.on_save_failed,
}
