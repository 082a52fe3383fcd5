"""What must hold of every decision in a journal, recounted from faults and progress.

Attempts without progress never exceed the caps, over all launchers; a run with progress is never stopped by one, nor a
run stopped before a cap is reached; waits are served; a third attempt at one fault begins further back. Shares no code
with the policy but the table of fault classes. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvrx_sre.core.clock import seconds, to_ns
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Action, FaultClass, FaultDetected, Layer, Record, RestartDecided
from nvrx_sre.policy.classify import RULES, RetryClass

_INCURABLE = frozenset({FaultClass.USER_ERROR, FaultClass.PREEMPTION, FaultClass.CHECKPOINT_CORRUPT})
_WAITING = frozenset({RetryClass.TRANSIENT, RetryClass.NODE})


def check_policy(records: Sequence[Record], caps: CapLimits) -> list[str]:
    """Decisions that break a rule, each with the record's number; empty if all hold."""
    fold = _Decisions(caps=caps)
    for record in records:
        fold.apply(record)
    return fold.problems


@dataclass(kw_only=True)
class _Decisions:
    """Attempts since progress, and the decision that is in force."""

    caps: CapLimits
    problems: list[str] = field(default_factory=list)
    faults: list[Record] = field(default_factory=list)
    """Faults since progress."""
    fruitless_ns: list[int] = field(default_factory=list)
    """Attempts that began after a fault and ended without progress, in the order of time."""
    last: FaultDetected | None = None
    layer: Layer = Layer.IN_PROCESS
    has_progress: bool = True
    is_decided: bool = True
    decided: tuple[int, int, RestartDecided] | None = None
    """(epoch, time, decision) that the next generation follows from."""
    is_excluding: bool = False
    """The newest decision excludes a device."""
    excluded: set[str] = field(default_factory=set)

    def apply(self, record: Record) -> None:
        """Fold one record."""
        handler = _HANDLERS.get(type(record.event))
        if handler is not None:
            handler(self, record, record.event)

    def _problem(self, record: Record, text: str) -> None:
        self.problems.append(f"record {record.seq} ({type(record.event).__name__}): {text}")

    def on_fault(self, record: Record, event: FaultDetected) -> None:
        self._progressed(event.hot_sealed_step, is_hot=True)
        if self.has_progress:
            self.faults = []
        else:
            self.fruitless_ns.append(record.time_ns)
        self.faults.append(record)
        self.last = event
        self.has_progress = self.is_decided = False

    def on_decided(self, record: Record, event: RestartDecided) -> None:
        if self.is_decided or self.last is None:
            self._problem(record, "a decision without a fault")
            return
        self.is_decided = True
        self.layer = Layer.JOB if event.action is Action.STOP else event.layer
        self.decided = (record.epoch, record.time_ns, event)
        if event.restarts_since_progress != len(self.faults):
            counted = event.restarts_since_progress
            self._problem(record, f"counts {counted} attempts, there were {len(self.faults)}")
        if event.action is Action.STOP:
            self._check_stop(record)
        else:
            self._check_restart(record, event, self.last)

    def _check_stop(self, record: Record) -> None:
        fault = self.last
        assert fault is not None
        if fault.fault in _INCURABLE:
            return
        num_attempts = len(self.faults)
        if num_attempts == 1:
            self._problem(record, "a run with progress was stopped")
            return
        is_startup = fault.high_water == 0
        if fault.fault is not FaultClass.NONFINITE and not is_startup and self._is_in_grace(record):
            self._problem(record, f"stopped {self._age_s(record):.1f} s after the first of {num_attempts} attempts")
        is_early = num_attempts < min(self.caps.consecutive_attempts, self.caps.same_fingerprint_attempts)
        in_window = sum(1 for at in self.fruitless_ns if at > record.time_ns - to_ns(self.caps.window_s))
        if is_early and fault.fault is not FaultClass.NONFINITE and in_window + 1 < self.caps.window_attempts:
            self._problem(record, f"stopped at attempt {num_attempts}, before any cap")

    def _check_restart(self, record: Record, event: RestartDecided, fault: FaultDetected) -> None:
        num_attempts = len(self.faults)
        if fault.fault in _INCURABLE and fault.fault is not FaultClass.CHECKPOINT_CORRUPT:
            self._problem(record, f"restart after {fault.fault.value}")
        self.is_excluding = event.is_excluding
        if event.is_excluding:
            return
        if num_attempts >= self.caps.consecutive_attempts and not self._is_in_grace(record):
            self._problem(record, f"restart after {num_attempts} attempts without progress")
        if num_attempts == 1 and event.backoff_s > 0:
            self._problem(record, "back-off although there was progress")
        same = sum(1 for item in self.faults if _fingerprint(item) == fault.fingerprint)
        if same == self.caps.same_fingerprint_attempts - 1 and not event.checkpoints_back:
            self._problem(record, f"attempt {same + 1} at one fault, and not from an older checkpoint")

    def _is_in_grace(self, record: Record) -> bool:
        fault = self.last
        assert fault is not None
        waits = RULES[fault.fault].retry in _WAITING
        return waits and record.time_ns - self.faults[0].time_ns < to_ns(self.caps.transient_grace_s)

    def _age_s(self, record: Record) -> float:
        return seconds(record.time_ns - self.faults[0].time_ns)

    def on_excluded(self, record: Record, event: schema.RankExcluded) -> None:
        if event.device in self.excluded:
            self._problem(record, f"{event.device} was excluded before")
        if not self.is_excluding:
            self._problem(record, f"{event.device} was excluded and nobody decided it")
        self.excluded.add(event.device)

    def on_formed(self, record: Record, event: schema.GenerationFormed) -> None:
        back = sorted(self.excluded.intersection(event.devices))
        if back:
            self._problem(record, f"{', '.join(back)} takes part and was excluded")
        decided, self.decided = self.decided, None
        if decided is None or decided[0] != record.epoch:
            return
        if decided[2].action is Action.STOP:
            self._problem(record, "a generation was formed after the run was stopped")
        elif event.go_ns < decided[1] + to_ns(decided[2].backoff_s):
            self._problem(record, f"a generation began before the back-off of {decided[2].backoff_s:g} s had passed")

    def on_restored(self, record: Record, event: schema.StateRestored) -> None:
        self.decided = None

    def on_steps(self, record: Record, event: schema.StepsCommitted) -> None:
        self._progressed(event.hot_sealed_step, is_hot=True)

    def on_verified(self, record: Record, event: schema.SaveVerified) -> None:
        self._progressed(event.step, is_hot=False)

    def on_reset(self, record: Record, event: schema.BudgetReset) -> None:
        self.faults, self.fruitless_ns, self.excluded = [], [], set()
        self.has_progress = True

    def _progressed(self, step: int, *, is_hot: bool) -> None:
        fault = self.last
        if fault is None or step <= fault.high_water:
            return
        if not is_hot or (self.layer is not Layer.JOB and fault.fault is not FaultClass.NODE_LOST):
            self.has_progress = True


def _fingerprint(record: Record) -> str:
    assert isinstance(record.event, FaultDetected)
    return record.event.fingerprint


_HANDLERS: dict[type[schema.Event], Callable[[_Decisions, Record, Any], None]] = {
    schema.FaultDetected: _Decisions.on_fault,
    schema.RestartDecided: _Decisions.on_decided,
    schema.RankExcluded: _Decisions.on_excluded,
    schema.GenerationFormed: _Decisions.on_formed,
    schema.StateRestored: _Decisions.on_restored,
    schema.StepsCommitted: _Decisions.on_steps,
    schema.SaveVerified: _Decisions.on_verified,
    schema.BudgetReset: _Decisions.on_reset,
}
