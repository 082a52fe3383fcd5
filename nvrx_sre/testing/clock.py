"""A clock that moves only when told to."""

from __future__ import annotations

from nvrx_sre.core.clock import to_ns

EPOCH_NS = 1_700_000_000 * 1_000_000_000
"""Wall time at monotonic zero: an arbitrary, fixed date, so that traces are reproducible."""


class ManualClock:
    """`core.clock.Clock` under a test's control. Not thread-safe; never goes backwards."""

    def __init__(self, *, start_ns: int = 0, wall_offset_ns: int = EPOCH_NS) -> None:
        self._now_ns = start_ns
        self.wall_offset_ns = wall_offset_ns

    def monotonic_ns(self) -> int:
        return self._now_ns

    def wall_ns(self) -> int:
        return self._now_ns + self.wall_offset_ns

    def to_wall_ns(self, monotonic_ns: int) -> int:
        return monotonic_ns + self.wall_offset_ns

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass. Raises `ValueError` if that is negative."""
        self.advance_to(self._now_ns + to_ns(seconds))

    def advance_to(self, monotonic_ns: int) -> None:
        """Jump forward to `monotonic_ns`. Raises `ValueError` if that lies in the past."""
        if monotonic_ns < self._now_ns:
            raise ValueError(f"time cannot go back from {self._now_ns} to {monotonic_ns} ns")
        self._now_ns = monotonic_ns
