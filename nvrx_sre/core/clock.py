"""Time, in one place.

The rest of the package receives time as an argument or through a `Clock`; only this module reads the
system clocks. Inside one process wall time is *anchored*: the wall clock is read once and advanced by the
monotonic clock, so stamps never go backwards when NTP steps the machine. All processes of a host share
CLOCK_MONOTONIC, hence a rank's monotonic stamp can be converted by its launcher.

Thread safety: `SystemClock` is immutable after construction.
"""

from __future__ import annotations

import time
from typing import Protocol

NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """Source of time. Both readings are integers in nanoseconds."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of the host's monotonic clock; comparable between processes of one host."""

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch, never decreasing within the process."""

    def to_wall_ns(self, monotonic_ns: int) -> int:
        """Convert a monotonic stamp of this host to anchored wall time."""


class SystemClock:
    """The real clock, anchored at construction."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    monotonic_ns = staticmethod(time.monotonic_ns)
    """Without a call of ours around it: read several times a step by each rank, and for each message by a launcher."""

    def wall_ns(self) -> int:
        return time.monotonic_ns() + self._offset_ns

    def to_wall_ns(self, monotonic_ns: int) -> int:
        return monotonic_ns + self._offset_ns


def seconds(ns: int) -> float:
    """Nanoseconds as float seconds."""
    return ns / NS_PER_S


def to_ns(seconds_value: float) -> int:
    """Seconds as integer nanoseconds, rounded to the nearest."""
    return round(seconds_value * NS_PER_S)
