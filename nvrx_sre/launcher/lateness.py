"""Which rank makes the others wait: how long after the first one each comes to the first collective of a step.

Synchronous ranks all show the same step time, so the slow one is found by when it arrives. Arrivals are monotonic
stamps of one host, sent with each step by scripts that call `ctx.mark("collective")`. Pure. Bounded: a step that some
rank never reports is forgotten with the next ones. Not thread-safe.
"""

from __future__ import annotations

from nvrx_sre.core.clock import seconds

SMOOTHING = 0.1
"""Weight of the newest step: ten steps make a rank's lateness, one slow step does not."""
MAX_STEPS = 16
"""Steps that may wait for their slowest rank."""


class Lateness:
    """Smoothed lateness of each rank of one generation (seconds)."""

    def __init__(self) -> None:
        self._generation = -1
        self._arrivals: dict[int, dict[int, int]] = {}
        self._smoothed: dict[int, float] = {}

    def report(self, generation: int, world_size: int, rank: int, step: int, arrived_ns: int) -> None:
        """`rank` came to the first collective of `step` at `arrived_ns` (0: it has no such mark)."""
        if generation < self._generation:
            return
        if generation > self._generation:
            self._generation = generation
            self._arrivals.clear()
            self._smoothed.clear()
        if arrived_ns <= 0:
            return
        arrivals = self._arrivals.setdefault(step, {})
        arrivals[rank] = arrived_ns
        if len(arrivals) >= world_size:
            self._settle(self._arrivals.pop(step))
        while len(self._arrivals) > MAX_STEPS:
            del self._arrivals[min(self._arrivals)]

    def _settle(self, arrivals: dict[int, int]) -> None:
        first_ns = min(arrivals.values())
        for rank, arrived_ns in arrivals.items():
            late_s = seconds(arrived_ns - first_ns)
            before_s = self._smoothed.get(rank, late_s)
            self._smoothed[rank] = before_s + SMOOTHING * (late_s - before_s)

    def of(self, rank: int) -> float:
        """Smoothed lateness of `rank`, 0 while none is known."""
        return self._smoothed.get(rank, 0.0)
