"""What the GPU benchmark's runs say: steps, captures, saves and recoveries, read from journals. Pure.

    step            wall time of a step: that between two commits, whatever it was spent on
    hot             all steps with captures as `--hot-every auto` chose them, without those beside a durable write
    free            those among them that are no capture and come some steps after one
    writing         steps beside a durable write or its reading back
    recovery        fault -> first new step on the slowest rank, less what was trained again (`recovery_reading`)

Each recovery is told apart by the fault's kind, in the order of the plan. Must not: read a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nvrx_sre.bench.recovery_reading import Measured, Recovery
from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import InternalError
from nvrx_sre.events.schema import (
    HotIntervalChosen,
    Record,
    SaveStarted,
    SaveVerified,
    SaveWritten,
    StepsCommitted,
)
from nvrx_sre.faults.plan import FaultSpec

NUM_WARM_UP_STEPS = 5
"""First steps of a generation, which are no ordinary ones."""
NUM_DRAIN_STEPS = 3
"""Steps after a capture that it may still be drained beside."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps that were committed together: when, how many, how long in all, and what of it they waited for captures."""

    started_ns: int
    committed_ns: int
    num_steps: int
    block_s: float
    num_captured: int

    @property
    def step_s(self) -> float:
        """A step of it."""
        return seconds(self.committed_ns - self.started_ns) / self.num_steps


@dataclass(frozen=True, kw_only=True)
class Steady:
    """A run without faults."""

    free: Sequence[Stretch]
    hot: Sequence[Stretch]
    """From the first choice of an interval on."""
    writing: Sequence[Stretch]
    chosen: Sequence[HotIntervalChosen]
    """In order; an interval that was confirmed is chosen again."""
    written: Sequence[SaveWritten]
    verified: Sequence[SaveVerified]


def steady_of(records: Iterable[Record]) -> Steady:
    """A run without faults. Raises `InternalError` if it chose no interval of captures, or could capture nothing."""
    found = list(records)
    chosen = [(record.time_ns, record.event) for record in found if isinstance(record.event, HotIntervalChosen)]
    if not chosen:
        raise InternalError("the benchmark's run is too short: it chose no interval of captures")
    for _, event in chosen:
        if event.every_steps == 0:
            raise InternalError(f"the benchmark's run captures nothing: {event.reason}")
    stretches = stretches_of(found)
    writes = _writes(found)
    hot = [item for item in stretches if item.started_ns >= chosen[0][0] and not _is_beside(item, writes)]
    return Steady(
        free=free_of(hot),
        hot=hot,
        writing=[item for item in stretches if _is_beside(item, writes) and item.started_ns >= chosen[0][0]],
        chosen=[event for _, event in chosen],
        written=[record.event for record in found if isinstance(record.event, SaveWritten)],
        verified=[record.event for record in found if isinstance(record.event, SaveVerified)],
    )


def stretches_of(records: Sequence[Record]) -> list[Stretch]:
    """Steps of a run, as they were recorded, without the first ones of each generation."""
    found: list[Stretch] = []
    generation, num_seen = -1, 0
    for record in records:
        event = record.event
        if not isinstance(event, StepsCommitted):
            continue
        if record.generation != generation:
            generation, num_seen = record.generation, 0
        num_steps = event.last_step - event.first_step + 1
        num_seen += num_steps
        if num_seen - num_steps < NUM_WARM_UP_STEPS:
            continue
        found.append(
            Stretch(
                started_ns=event.started_ns,
                committed_ns=event.committed_ns,
                num_steps=num_steps,
                block_s=event.checkpoint_block_s,
                num_captured=event.hot_captured,
            )
        )
    return found


def free_of(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Those that no capture is in, or shortly before."""
    found: list[Stretch] = []
    num_since = 0
    for item in stretches:
        if item.num_captured:
            num_since = 0
            continue
        if num_since >= NUM_DRAIN_STEPS:
            found.append(item)
        num_since += item.num_steps
    return found


def mean_step_s(stretches: Sequence[Stretch]) -> float:
    """Mean step of several stretches: what captures cost lies in a few steps, which a median would not see."""
    num_steps = sum(item.num_steps for item in stretches)
    if not num_steps:
        raise InternalError("the benchmark's run has no steps of a kind that it compares")
    return sum(seconds(item.committed_ns - item.started_ns) for item in stretches) / num_steps


def by_kind(measured: Measured, specs: Sequence[str]) -> dict[str, Measured]:
    """Recoveries by the kind of their fault. Raises `InternalError` unless each planned fault was recovered from."""
    planned = sorted((FaultSpec.parse(spec) for spec in specs), key=lambda item: item.step)
    if len(planned) != len(measured.recoveries):
        raise InternalError(f"{len(planned)} faults were planned and {len(measured.recoveries)} recovered from")
    kinds: dict[str, list[Recovery]] = {}
    for spec, recovery in zip(planned, measured.recoveries, strict=True):
        kinds.setdefault(str(spec.kind.value), []).append(recovery)
    return {
        kind: Measured(recoveries=tuple(found), step_s=measured.step_s, note=measured.note)
        for kind, found in kinds.items()
    }


def without_redone_s(measured: Measured) -> list[float]:
    """Fault to first step done: each total less the steps that were trained again. That first step is in it."""
    return [overhead_s + measured.step_s for overhead_s in measured.overheads_s()]


def _writes(records: Sequence[Record]) -> list[tuple[int, int]]:
    """When the writer worked: from the start of each save until it was read back, or the end."""
    spans: list[tuple[int, int]] = []
    started_ns: int | None = None
    for record in records:
        if isinstance(record.event, SaveStarted):
            started_ns = record.time_ns
        elif isinstance(record.event, SaveVerified) and started_ns is not None:
            spans.append((started_ns, record.time_ns))
            started_ns = None
    return spans


def _is_beside(stretch: Stretch, spans: Sequence[tuple[int, int]]) -> bool:
    return any(stretch.committed_ns > start and stretch.started_ns < end for start, end in spans)
