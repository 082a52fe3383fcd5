"""Durable saves that were started and did not end: what a launcher that died leaves on record.

A fold over the journal. A save ends verified, unverified or failed; one that is still open when the next launcher
starts was interrupted: it has failed, or is unverified if it had committed. Pure. Bounded, because each journal segment
begins with a copy of it.
"""

from __future__ import annotations

from collections import deque

from nvrx_sre.events.schema import (
    Record,
    SaveCommitted,
    SaveFailed,
    SaveFailure,
    SaveStarted,
    SaveUnverified,
    SaveVerified,
)
from nvrx_sre.events.snapshot import Snapshotted
from nvrx_sre.launcher.save_endings import given_up

MAX_KNOWN = 64
"""Newest saves that are remembered: each writer's start removes the attempts of the one before."""


class StartedSaves(Snapshotted):
    """Saves by (step, generation)."""

    STATE = ("_open", "_newest")

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], bool] = {}
        self._newest: deque[tuple[int, int]] = deque(maxlen=MAX_KNOWN)

    def apply(self, record: Record) -> None:
        """Take in a record; those of saves count."""
        event = record.event
        if isinstance(event, SaveStarted | SaveCommitted | SaveVerified | SaveUnverified | SaveFailed):
            key = (event.step, record.generation)
            if isinstance(event, SaveStarted):
                self._newest.append(key)
                self._open[key] = False
            elif isinstance(event, SaveCommitted):
                self._open[key] = True
            else:
                self._open.pop(key, None)

    def is_known(self, step: int, generation: int) -> bool:
        """A save of this step and generation was started, and is one of the newest."""
        return (step, generation) in self._newest

    def interrupted(self) -> list[tuple[SaveFailed | SaveUnverified, int]]:
        """How each open save ended when its launcher died: (event, generation)."""
        message = "the launcher ended before the save did"
        return [
            (given_up(step, SaveFailure.INTERRUPTED, message, is_committed=is_committed), at)
            for (step, at), is_committed in self._open.items()
        ]
