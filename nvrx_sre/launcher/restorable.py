"""What a generation may start from: hot slots and durable commits, with everything unusable said and moved aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvrx_sre.checkpoint import agree, discover
from nvrx_sre.checkpoint.slots import NONE, SlotHeader
from nvrx_sre.core.errors import StorageError
from nvrx_sre.events.schema import CheckpointRejected, Event, RejectReason, SaveFailed, SaveFailure, Tier
from nvrx_sre.launcher.started_saves import StartedSaves

EmitEvent = Callable[[Event], None]
Headers = Sequence[Sequence[SlotHeader | None]]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Answer to 'what can generation g restore?'. `for_rank(r)` gives the list that goes into `Go`."""

    entries: list[dict[str, Any]]
    require_restore: bool

    @property
    def best_step(self) -> int:
        """Step of the best one, `slots.NONE` without any."""
        return int(self.entries[0]["step"]) if self.entries else NONE

    def for_rank(self, rank: int) -> list[dict[str, Any]]:
        """Candidates as `rank` sees them, best first."""
        return agree.for_rank(self.entries, rank)


class Restorables:
    """Finds candidates and keeps the checkpoint directory honest. Blocking: reads manifests."""

    def __init__(self, run: str, run_dir: Path, emit: EmitEvent) -> None:
        self._run = run
        self._run_dir = run_dir
        self._emit = emit
        self._known_markerless: set[str] = set()

    def clear_interrupted(self, saves: StartedSaves) -> None:
        """Remove attempts of a dead writer; one that the journal does not know is an interrupted save as well."""
        for name in discover.clear_interrupted(self._run_dir):
            step, generation = discover.attempt_of(name)
            if not saves.is_known(step, generation):
                self._emit(
                    SaveFailed(
                        step=step, tier=Tier.DURABLE, reason=SaveFailure.INTERRUPTED, message=f"{name} never committed"
                    )
                )

    def find(self, headers: Headers, *, checkpoints_back: int, hot_allowed: bool, commits_ever: bool) -> Candidates:
        """Candidates for the world whose slots are `headers[rank][slot]`, best first."""
        fences = discover.read_fences(self._run_dir)
        found = discover.discover(self._run_dir, fences, run=self._run)
        for rejected in found.rejected:
            self._set_aside(rejected)
        hot = agree.common_hot(headers, fences) if hot_allowed else []
        durable = [item.candidate() for item in found.restorable]
        entries = agree.order(hot, durable, checkpoints_back=checkpoints_back, hot_allowed=hot_allowed)
        return Candidates(entries=entries, require_restore=commits_ever or bool(found.restorable))

    def _set_aside(self, rejected: discover.Rejected) -> None:
        """Damaged commits go to rejected/. What has no marker was never one, and what a newer release wrote is not
        damaged: both are left alone."""
        reason = RejectReason(rejected.reason)
        if reason in (RejectReason.NO_COMMIT_MARKER, RejectReason.VERSION):
            if rejected.directory in self._known_markerless:
                return
            self._known_markerless.add(rejected.directory)
            self._reject(rejected.directory, rejected.step, reason, rejected.message, "")
            return
        self.move(rejected.directory, rejected.step, reason, rejected.message)

    def move(self, directory: str, step: int, reason: RejectReason, message: str) -> None:
        """Move a rejected checkpoint aside and say so. A storage error leaves it where it is, still counted."""
        try:
            place = discover.move_aside(self._run_dir, directory, reason)
        except StorageError as error:
            place, message = "", f"{message}; {error}"
        self._reject(directory, step, reason, message, place)

    def _reject(self, directory: str, step: int, reason: RejectReason, message: str, place: str) -> None:
        self._emit(
            CheckpointRejected(
                step=step, tier=Tier.DURABLE, directory=directory, reason=reason, message=message[:500], moved_to=place
            )
        )
