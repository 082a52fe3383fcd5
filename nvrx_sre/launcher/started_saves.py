"""Durable saves that were started and did not end: what a launcher that died leaves on record.

A fold over the journal. A save ends verified or failed; one that is still open when the next launcher starts was
interrupted, whatever of it lies on the disk. Pure.
"""

from __future__ import annotations

from nvrx_sre.events.schema import Record, SaveCommitted, SaveFailed, SaveFailure, SaveStarted, SaveVerified, Tier
from nvrx_sre.events.snapshot import Snapshotted


class StartedSaves(Snapshotted):
    """Saves by (step, generation)."""

    STATE = ("_open", "_known")

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], bool] = {}
        self._known: set[tuple[int, int]] = set()

    def apply(self, record: Record) -> None:
        """Take in a record; those of saves count."""
        event = record.event
        if isinstance(event, SaveStarted | SaveCommitted | SaveVerified | SaveFailed):
            key = (event.step, record.generation)
            if isinstance(event, SaveStarted):
                self._known.add(key)
                self._open[key] = False
            elif isinstance(event, SaveCommitted):
                self._open[key] = True
            else:
                self._open.pop(key, None)

    def is_known(self, step: int, generation: int) -> bool:
        """A save of this step and generation was ever started."""
        return (step, generation) in self._known

    def interrupted(self) -> list[tuple[SaveFailed, int]]:
        """How each open save ended when its launcher died: (event, generation)."""
        return [(_interrupted(step, is_committed), at) for (step, at), is_committed in self._open.items()]


def _interrupted(step: int, is_committed: bool) -> SaveFailed:
    how_far = "committed, not verified" if is_committed else "not committed"
    message = f"the launcher ended before the save did: {how_far}"
    return SaveFailed(step=step, tier=Tier.DURABLE, reason=SaveFailure.INTERRUPTED, message=message)
