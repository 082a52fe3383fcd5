"""Growing waits between attempts, with jitter, so that many who fail together do not come back together. Pure."""

from __future__ import annotations

from nvrx_sre.core.rng import Generator

JITTER = 0.5
"""A wait is drawn from this share of it up to the whole."""


class Backoff:
    """Waits that double from `first_s` up to `most_s` (seconds)."""

    def __init__(self, first_s: float, most_s: float, rng: Generator) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._rng = rng
        self._num_taken = 0

    def next_s(self) -> float:
        """The next wait in seconds."""
        # Bounded before the power is taken: a float has an end.
        whole_s = min(self._most_s, self._first_s * 2.0 ** min(self._num_taken, 60))
        self._num_taken += 1
        return whole_s * self._rng.uniform(JITTER, 1.0)
