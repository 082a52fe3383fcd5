"""How long each rank's GPU takes for a stretch of a step that is the rank's own, smoothed like its lateness.

Together with the lateness it says why a rank is slow: above the others, its GPU (or more work for it); late and not
above them, its host. Ranks measure stretches that wait for nobody (`session.gpu_time`). Pure. Not thread-safe.
"""

from __future__ import annotations

from nvrx_sre.core.clock import seconds
from nvrx_sre.launcher.lateness import SMOOTHING

FORGOTTEN_AFTER_STEPS = 100
"""Steps in a row without a measurement after which what was measured before says nothing any more."""


class GpuTimes:
    """Smoothed GPU time of each rank of one generation (seconds)."""

    def __init__(self) -> None:
        self._generation = -1
        self._smoothed: dict[int, float] = {}
        self._num_without: dict[int, int] = {}
        """Steps since the newest measurement, of ranks that have one."""

    def report(self, generation: int, rank: int, gpu_ns: int) -> None:
        """The GPU of `rank` took so long for its newest stretch (0: none was over)."""
        if generation < self._generation:
            return
        if generation > self._generation:
            self._generation = generation
            self._smoothed.clear()
            self._num_without.clear()
        if gpu_ns > 0:
            self._num_without[rank] = 0
            before_s = self._smoothed.get(rank, seconds(gpu_ns))
            self._smoothed[rank] = before_s + SMOOTHING * (seconds(gpu_ns) - before_s)
        elif rank in self._smoothed:
            self._num_without[rank] += 1
            if self._num_without[rank] >= FORGOTTEN_AFTER_STEPS:
                del self._smoothed[rank]

    def of(self, rank: int) -> float | None:
        """Smoothed GPU time of `rank`, None while none is known."""
        return self._smoothed.get(rank)
