"""What another host's monotonic clock means here.

Model: a beat goes out with our time, comes back with theirs. Their clock then stood half a round trip after ours when
it went out, and the error is at most half that round trip. Of the newest beats the quickest counts, so a queue or a
slow link disturbs nothing, and drift (50 us in a second, at worst) stays within what is looked at.

Durations measured on the other host are passed on as they are. Pure.
"""

from __future__ import annotations

from collections import deque

NUM_BEATS = 32
"""Beats looked at: half a minute."""


class RemoteClock:
    """Converts stamps of one other host. Times are monotonic ns."""

    def __init__(self) -> None:
        self._beats: deque[tuple[int, int]] = deque(maxlen=NUM_BEATS)
        """(round trip, what is to be added to their stamps)."""

    def observe(self, sent_ns: int, remote_ns: int, received_ns: int) -> None:
        """A beat went out at `sent_ns`, was answered at their `remote_ns`, and is back at `received_ns`."""
        round_trip_ns = received_ns - sent_ns
        self._beats.append((round_trip_ns, sent_ns + round_trip_ns // 2 - remote_ns))

    @property
    def round_trip_ns(self) -> int:
        """The quickest of the newest beats, 0 before any."""
        return min(self._beats)[0] if self._beats else 0

    def here_ns(self, remote_ns: int, now_ns: int) -> int:
        """Their stamp as ours; never later than `now_ns`, since what is told has happened."""
        offset_ns = min(self._beats)[1] if self._beats else now_ns - remote_ns
        return min(now_ns, remote_ns + offset_ns)
