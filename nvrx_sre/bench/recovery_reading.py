"""What a fault cost: read from our journal and from the peers' stamp files. Pure.

Model: per fault

    total    = fault -> first new step committed on the slowest rank
    overhead = total - (redone + 1) x median fault-free step [- detection, where a deadline decided how long it took]

so that a rollback's repeated work is not counted as recovery. A contestant's median step is its own, of the same run.
Our marks (`Recovery.marks_s`) say where the time went: fault detected, every survivor out of the old generation, go for
the next, state restored on every rank.

A fault of kind `slow` is no fault here: it only makes the others wait. Must not: read a file other than stamps.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import InternalError
from nvrx_sre.events.schema import (
    FaultDetected,
    FaultInjected,
    GenerationFormed,
    ProgressResumed,
    RankReplaced,
    Record,
    Role,
    RolledBack,
    StandbyReady,
    StateRestored,
    StepKind,
    StepsCommitted,
    TeardownFinished,
    WorkerStarted,
)
from nvrx_sre.faults.plan import FaultKind, FaultSpec

DETECTED = "detected"
MARKS = (DETECTED, "torn down", "go", "restored")
"""What a recovery passes, in order."""
STANDBY_S = 4.0
"""Warm-up of a standby where the calibration saw none become ready (seconds)."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One fault and what it cost. `marks_s`: name in `MARKS` -> seconds after the fault."""

    total_s: float
    redone_steps: int
    marks_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All faults of one case and contestant, in order of time."""

    recoveries: tuple[Recovery, ...]
    step_s: float
    """Median fault-free step."""
    note: str

    def totals_s(self) -> list[float]:
        """Total of each fault."""
        return [item.total_s for item in self.recoveries]

    def overheads_s(self, *, after: str | None = None) -> list[float]:
        """Overhead of each fault, counted from the fault or from one of `MARKS`."""
        return [
            item.total_s - (item.redone_steps + 1) * self.step_s - (item.marks_s[after] if after else 0.0)
            for item in self.recoveries
        ]

    def marks_s(self, name: str) -> list[float]:
        """When each recovery passed the mark, seconds after its fault."""
        return [item.marks_s[name] for item in self.recoveries if name in item.marks_s]


class _Reading:
    """A fold over the records of one run of ours."""

    def __init__(self) -> None:
        self.recoveries: list[Recovery] = []
        self.steps: list[tuple[float, int]] = []
        self.num_warm = self.num_replaced = 0
        self._injected_ns: int | None = None
        self._marks: dict[str, float] = {}
        self._redone = 0
        self._is_fresh = True
        """No step of this generation has been seen: its first is not an ordinary one."""

    def take(self, record: Record) -> None:
        event = record.event
        if isinstance(event, FaultInjected) and self._injected_ns is None:
            if FaultSpec.parse(event.spec).kind is not FaultKind.SLOW:
                self._injected_ns, self._redone, self._marks = event.injected_ns, 0, {}
        elif isinstance(event, RolledBack):
            self._redone = max(0, event.high_water - event.step)
        elif isinstance(event, RankReplaced):
            self.num_replaced += 1
            self.num_warm += event.warm
        elif isinstance(event, StepsCommitted):
            self._take_steps(event)
        elif isinstance(event, FaultDetected):
            self._mark(DETECTED, record.time_ns)
        elif isinstance(event, TeardownFinished):
            self._mark("torn down", record.time_ns)
        elif isinstance(event, GenerationFormed):
            self._is_fresh = True
            self._mark("go", event.go_ns)
        elif isinstance(event, StateRestored):
            self._mark("restored", event.restored_ns)
        elif isinstance(event, ProgressResumed):
            self._end(event.committed_ns)

    def _take_steps(self, event: StepsCommitted) -> None:
        if event.kind is StepKind.NEW and not event.proven_by_restore:
            if not self._is_fresh:
                self.steps.append(_per_step(event))
            self._is_fresh = False

    def _mark(self, name: str, time_ns: int) -> None:
        if self._injected_ns is not None:
            self._marks.setdefault(name, seconds(time_ns - self._injected_ns))

    def _end(self, committed_ns: int) -> None:
        if self._injected_ns is not None:
            total_s = seconds(committed_ns - self._injected_ns)
            self.recoveries.append(Recovery(total_s=total_s, redone_steps=self._redone, marks_s=self._marks))
            self._injected_ns = None


def from_records(records: Iterable[Record]) -> Measured:
    """Faults of a run of ours, from its journal's records. Raises `InternalError` if none was recovered."""
    reading = _Reading()
    for record in records:
        reading.take(record)
    if not reading.recoveries or not reading.steps:
        raise InternalError("the benchmark's run recorded no recovery or no fault-free step")
    note = "no process replaced"
    if reading.num_replaced:
        note = f"{reading.num_warm} of {reading.num_replaced} replacements by a warm standby"
    return Measured(recoveries=tuple(reading.recoveries), step_s=weighted_median(reading.steps), note=note)


def _per_step(event: StepsCommitted) -> tuple[float, int]:
    num_steps = event.last_step - event.first_step + 1
    return seconds(event.committed_ns - event.started_ns) / num_steps, num_steps


def weighted_median(values: Sequence[tuple[float, int]]) -> float:
    """Median of values that stand for so many steps each."""
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    seen = 0
    for value, weight in ordered:
        seen += weight
        if seen >= half:
            return value
    raise InternalError("a median of nothing was asked for")


# --- how fast this machine is now: decides only how far apart faults stand -------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A step and the warm-up of a standby, both beside training (seconds)."""

    step_s: float
    standby_s: float

    def steps_in(self, span_s: float) -> int:
        """Steps that take about that long, at least 6."""
        return max(6, round(span_s / self.step_s))


def pace_of(records: Iterable[Record]) -> Pace:
    """Pace from the records of a run without faults. Raises `InternalError` if it took no step."""
    total_s, total_steps, standby_s = 0.0, 0, STANDBY_S
    started_ns: int | None = None
    for record in records:
        event = record.event
        if isinstance(event, StepsCommitted):
            value_s, num_steps = _per_step(event)
            total_s, total_steps = total_s + value_s * num_steps, total_steps + num_steps
        elif isinstance(event, WorkerStarted) and event.role is Role.STANDBY:
            started_ns = record.time_ns
        elif isinstance(event, StandbyReady) and started_ns is not None:
            standby_s = seconds(record.time_ns - started_ns)
    if not total_steps:
        raise InternalError("the benchmark's calibration took no step")
    return Pace(step_s=total_s / total_steps, standby_s=standby_s)


# --- the peers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """One line of a peer's stamp files."""

    kind: str
    step: int
    ns: int


def read_stamps(path: Path) -> list[Stamp]:
    """Stamps of one rank, in order. Raises `InternalError` if the rank left none."""
    if not path.exists():
        raise InternalError(f"the peer's {path.stem} took no step")
    return [Stamp(**json.loads(line)) for line in path.read_text().splitlines()]


def from_stamps(ranks: Sequence[Sequence[Stamp]], save_every: int) -> Measured:
    """Faults of a run of a peer, from each rank's stamps in order of time."""
    faults = sorted((stamp for stamps in ranks for stamp in stamps if stamp.kind == "fault"), key=lambda item: item.ns)
    recoveries = []
    for fault in faults:
        first_new_ns = [_first_after(stamps, "step", fault).ns for stamps in ranks]
        restored = _first_after(ranks[0], "restored", fault)
        recoveries.append(
            Recovery(total_s=seconds(max(first_new_ns) - fault.ns), redone_steps=max(0, fault.step - 1 - restored.step))
        )
    if not recoveries:
        raise InternalError("the peer met none of its planned faults")
    return Measured(
        recoveries=tuple(recoveries),
        step_s=_median_step_s(ranks[0], save_every),
        note=f"a DCP save every {save_every} steps",
    )


def _first_after(stamps: Sequence[Stamp], kind: str, fault: Stamp) -> Stamp:
    """First stamp of `kind` after the fault; for steps, the first above the high water mark."""
    for stamp in stamps:
        if stamp.kind == kind and stamp.ns > fault.ns and (kind != "step" or stamp.step >= fault.step):
            return stamp
    raise InternalError(f"the peer did not come back from its fault at step {fault.step}")


def _median_step_s(stamps: Sequence[Stamp], save_every: int) -> float:
    """Median time between two steps without a save between them."""
    return statistics.median(
        seconds(later.ns - earlier.ns)
        for earlier, later in itertools.pairwise(stamps)
        if earlier.kind == later.kind == "step" and earlier.step % save_every
    )
