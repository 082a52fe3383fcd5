"""What the run has been through, as far as decisions need it: a fold over the journal.

Model: faults without progress between them form an *episode*; each is one failed attempt. Progress since a
fault is a state above H-at-the-fault that would survive the same fault again: sealed hot on every rank if
the cure was in_process or worker (a lost node loses its hot slots, so there it takes more), else a verified
durable commit. Progress ends the episode, and with it the budgets spent.

Invariants: replaying the journal gives the same history, so that no restart of worker, launcher or pod
refills a budget or brings an excluded device back; only progress and `BudgetReset` do. Memory is bounded.
Preemptions are no faults: they are counted apart, and a newer verified checkpoint is their progress.
Thread safety: none; one owner. Must not: read a clock, read message texts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from nvrx_sre.core.clock import to_ns
from nvrx_sre.events.schema import (
    Action,
    BudgetReset,
    DecisionUnrecorded,
    Event,
    FaultClass,
    FaultDetected,
    Layer,
    PreemptionReceived,
    RankExcluded,
    Record,
    RestartDecided,
    SaveVerified,
    StateRestored,
    StepsCommitted,
    TelemetryDegraded,
)
from nvrx_sre.events.snapshot import Snapshotted

_MAX_REMEMBERED = 256
"""Faults remembered; every cap and window is far smaller."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One fault: an attempt that ended."""

    time_ns: int
    fault: FaultClass
    fingerprint: str
    device: str
    high_water: int


class History(Snapshotted):
    """Fold of the journal for the policy. All times are wall nanoseconds, as in `Record.time_ns`."""

    STATE = (
        *("high_water", "first_step_ns", "durable_step", "restored_step", "attempts", "progress_unknown"),
        *("excluded", "num_faults", "num_unrecorded", "num_preempted"),
        *("_progress", "_cure", "_fruitless", "_num_journal_dropped", "_preempted_at_step"),
    )
    STORED = (Attempt,)

    def __init__(self) -> None:
        self.high_water = 0
        """H: highest step ever committed."""
        self.first_step_ns: int | None = None
        """When the first step ever was recorded; None before it."""
        self.durable_step = -1
        """Newest verified durable step, -1 if none."""
        self.restored_step: int | None = None
        """Step that the last restore gave, None before any."""
        self.attempts: deque[Attempt] = deque(maxlen=_MAX_REMEMBERED)
        """Faults since progress, oldest first."""
        self.progress_unknown = False
        """The journal lost records since the last fault, so progress cannot be known."""
        self.excluded: list[str] = []
        """Devices that take no further part, in the order of their exclusion."""
        self.num_faults = 0
        """Faults in the whole life of the run, or since its budgets were reset."""
        self.num_unrecorded = 0
        """Restarts since progress whose decision was not on disk in time."""
        self.num_preempted = 0
        """Preemptions in a row without a newer verified checkpoint between them."""
        self._preempted_at_step = -1
        """`durable_step` at the newest preemption."""
        self._progress = False
        self._cure = Layer.IN_PROCESS
        self._fruitless: deque[int] = deque(maxlen=_MAX_REMEMBERED)
        self._num_journal_dropped = 0

    def apply(self, record: Record) -> None:
        """Fold one record. Records come in the order of the journal."""
        event = record.event
        if isinstance(event, StepsCommitted):
            self._on_steps(record, event)
        elif isinstance(event, FaultDetected):
            self._on_fault(record, event)
        elif isinstance(event, RestartDecided):
            self._cure = Layer.JOB if event.action is Action.STOP else event.layer
        elif isinstance(event, SaveVerified):
            self.durable_step = max(self.durable_step, event.step)
            self._progress = self._progress or self._beyond_fault(event.step)
        elif isinstance(event, StateRestored):
            self.restored_step = event.step
        else:
            self._apply_rare(event)

    def _apply_rare(self, event: Event) -> None:
        if isinstance(event, RankExcluded):
            self.excluded.append(event.device)
        elif isinstance(event, DecisionUnrecorded):
            self.num_unrecorded += 1
        elif isinstance(event, PreemptionReceived):
            self._on_preemption(event)
        elif isinstance(event, BudgetReset):
            self._reset()
        elif isinstance(event, TelemetryDegraded):
            self._on_degraded(event)

    @property
    def is_unused(self) -> bool:
        """No budget is used and no device excluded: there is nothing to reset."""
        counted = (self.num_faults, self.num_unrecorded, self.num_preempted, self.progress_unknown)
        return not any((self.attempts, self._fruitless, self.excluded, *counted))

    def has_progress(self, hot_sealed_step: int = -1) -> bool:
        """True if there is progress since the last fault, or no fault yet.

        `hot_sealed_step`: newest step sealed on all ranks that is not in the journal yet.
        """
        return not self.attempts or self._progress or (self._hot_counts() and self._beyond_fault(hot_sealed_step))

    def num_fruitless(self, now_ns: int, window_s: float) -> int:
        """Attempts within the window that began after a fault and ended without progress."""
        start_ns = now_ns - to_ns(window_s)
        return sum(1 for time_ns in self._fruitless if time_ns > start_ns)

    def preemptions(self) -> int:
        """Preemptions in a row without a newer verified checkpoint, one that comes now included."""
        return 1 if self.durable_step > self._preempted_at_step else self.num_preempted + 1

    def incident_high_water(self) -> int | None:
        """H at the first fault of an incident that has not passed it again, None if there is none."""
        if not self.attempts or self.high_water > self.attempts[0].high_water:
            return None
        return self.attempts[0].high_water

    def _on_steps(self, record: Record, event: StepsCommitted) -> None:
        self.high_water = max(self.high_water, event.last_step)
        if self.first_step_ns is None:
            self.first_step_ns = record.time_ns
        if self._hot_counts() and self._beyond_fault(event.hot_sealed_step):
            self._progress = True

    def _on_fault(self, record: Record, event: FaultDetected) -> None:
        self.num_faults += 1
        if self.has_progress(event.hot_sealed_step):
            self.attempts.clear()
            self.num_unrecorded = 0
        else:
            self._fruitless.append(record.time_ns)
        self.attempts.append(
            Attempt(
                time_ns=record.time_ns,
                fault=event.fault,
                fingerprint=event.fingerprint,
                device=event.device,
                high_water=event.high_water,
            )
        )
        self.high_water = max(self.high_water, event.high_water)
        self._progress = False
        self.progress_unknown = False

    def _on_preemption(self, event: PreemptionReceived) -> None:
        """A person's interruption is no preemption."""
        if not event.by_person:
            self.num_preempted, self._preempted_at_step = self.preemptions(), self.durable_step

    def _on_degraded(self, event: TelemetryDegraded) -> None:
        if event.component == "journal" and event.dropped > self._num_journal_dropped:
            self.progress_unknown = True
            self._num_journal_dropped = event.dropped

    def _reset(self) -> None:
        self.attempts.clear()
        self._fruitless.clear()
        self.excluded.clear()
        self.num_faults = self.num_unrecorded = self.num_preempted = 0
        self._progress = False
        self.progress_unknown = False

    def _hot_counts(self) -> bool:
        lost_node = bool(self.attempts) and self.attempts[-1].fault is FaultClass.NODE_LOST
        return self._cure is not Layer.JOB and not lost_node

    def _beyond_fault(self, step: int) -> bool:
        return bool(self.attempts) and step > self.attempts[-1].high_water
