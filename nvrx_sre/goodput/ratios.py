"""Goodput: ratios over the ledger's partition. Pure folds.

    training       = new / (W - suspended)
    durable        = first-execution time of steps <= D / (W - suspended), D the newest verified durable step
    infrastructure = 1 - (detect + teardown + rendezvous + rebuild + load + backoff + down + halted + other)
                         / (W - suspended)
    effective      = new tokens x reference seconds a token / (W - suspended)
    checkpoint_efficiency = (new + redo) / (new + redo + checkpoint_block)

The reference is the median over the first 200 new steps after warm-up at the configured world size. The
drain at the end of a run is booked as `checkpoint_block`. Memory is bounded: aggregates are merged when
they become many. Not thread-safe.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from enum import StrEnum

from nvrx_sre.events.schema import LedgerState
from nvrx_sre.events.snapshot import Snapshotted

REFERENCE_STEPS = 200
"""New steps whose time per token is the reference."""
MAX_AGGREGATES = 4096
"""Aggregates of first executions kept apart; beyond it neighbours are merged (resolution halves)."""
MAX_VERIFIED = 64
"""Verified durable steps remembered, so that a rejected one falls back to the one before."""

_INFRASTRUCTURE = (
    LedgerState.DETECT,
    LedgerState.TEARDOWN,
    LedgerState.RENDEZVOUS,
    LedgerState.REBUILD,
    LedgerState.LOAD,
    LedgerState.BACKOFF,
    LedgerState.DOWN,
    LedgerState.HALTED,
    LedgerState.OTHER,
)


class GoodputKind(StrEnum):
    """The ratios. Closed set; label of the goodput metric."""

    TRAINING = "training"
    DURABLE = "durable"
    INFRASTRUCTURE = "infrastructure"
    EFFECTIVE = "effective"
    CHECKPOINT_EFFICIENCY = "checkpoint_efficiency"


class FirstExecutions(Snapshotted):
    """Time of first executions up to a step, and how much of it a verified durable commit holds."""

    STATE = ("_steps", "_total_ns", "_verified_ns", "_new_ns")

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._total_ns: list[int] = []
        self._verified_ns: dict[int, int] = {}
        self._new_ns = 0

    def add(self, last_step: int, spent_ns: int) -> None:
        """New steps up to `last_step` took `spent_ns`."""
        self._new_ns += spent_ns
        self._steps.append(last_step)
        self._total_ns.append(self._new_ns)
        if len(self._steps) > MAX_AGGREGATES:
            self._steps = self._steps[1::2]
            self._total_ns = self._total_ns[1::2]

    def verified(self, step: int) -> None:
        """`step` is a verified durable commit."""
        if step in self._verified_ns:
            return
        self._verified_ns[step] = self._spent_until(step)
        if len(self._verified_ns) > MAX_VERIFIED:
            del self._verified_ns[min(self._verified_ns)]

    def rejected(self, step: int) -> None:
        """The durable commit of `step` is unusable."""
        self._verified_ns.pop(step, None)

    def abandoned_above(self, step: int) -> None:
        """Commits above `step` are out of discovery for ever."""
        for other in [item for item in self._verified_ns if item > step]:
            del self._verified_ns[other]

    @property
    def durable_ns(self) -> int:
        """First-execution time that the newest verified commit holds."""
        return self._verified_ns[max(self._verified_ns)] if self._verified_ns else 0

    def _spent_until(self, step: int) -> int:
        index = bisect.bisect_left(self._steps, step)
        if index == len(self._steps):
            return self._new_ns
        before_step = self._steps[index - 1] if index else 0
        before_ns = self._total_ns[index - 1] if index else 0
        share = (step - before_step) / max(1, self._steps[index] - before_step)
        return before_ns + round(max(0.0, share) * (self._total_ns[index] - before_ns))


class StepReference(Snapshotted):
    """Reference speed: weighted medians over the first new steps after each warm-up."""

    STATE = ("_tokens", "_steps", "_num_steps", "_warm")

    def __init__(self) -> None:
        self._tokens: list[tuple[float, int]] = []
        self._steps: list[tuple[float, int]] = []
        self._num_steps = 0
        self._warm = False

    def generation_formed(self) -> None:
        """The next aggregate holds a first step (lazy initialisation): not a reference."""
        self._warm = False

    def add(self, spent_s: float, tokens: int, num_steps: int) -> None:
        """`num_steps` new steps at the configured world size took `spent_s` for `tokens`."""
        if not self._warm:
            self._warm = True
            return
        if spent_s > 0 and self._num_steps < REFERENCE_STEPS:
            bisect.insort(self._steps, (spent_s / num_steps, num_steps))
            if tokens > 0:
                bisect.insort(self._tokens, (spent_s / tokens, num_steps))
            self._num_steps += num_steps

    @property
    def seconds_per_token(self) -> float | None:
        """The median so far, None before the first sample."""
        return _weighted_median(self._tokens)

    @property
    def step_s(self) -> float | None:
        """Median time of a step so far, None before the first sample."""
        return _weighted_median(self._steps)


def _weighted_median(samples: list[tuple[float, int]]) -> float | None:
    """Median of sorted (value, weight)."""
    half, seen = sum(weight for _, weight in samples) / 2, 0
    for value, weight in samples:
        seen += weight
        if seen >= half:
            return value
    return None


def ratios(
    booked_s: Mapping[LedgerState, float], wall_s: float, durable_s: float, effective_s: float | None
) -> dict[GoodputKind, float]:
    """All ratios. `effective_s`: new tokens times the reference, None where no tokens were reported
    (then effective equals training). A run without a measurable wall time has ratio 0."""
    new, redo = booked_s[LedgerState.NEW], booked_s[LedgerState.REDO]
    denominator = wall_s - booked_s[LedgerState.SUSPENDED]
    lost = sum(booked_s[state] for state in _INFRASTRUCTURE)
    stepping = new + redo + booked_s[LedgerState.CHECKPOINT_BLOCK]
    shares = {
        GoodputKind.TRAINING: new,
        GoodputKind.DURABLE: durable_s,
        GoodputKind.INFRASTRUCTURE: denominator - lost,
        GoodputKind.EFFECTIVE: new if effective_s is None else effective_s,
    }
    result = {kind: share / denominator if denominator > 0 else 0.0 for kind, share in shares.items()}
    result[GoodputKind.CHECKPOINT_EFFICIENCY] = (new + redo) / stepping if stepping > 0 else 1.0
    return result
