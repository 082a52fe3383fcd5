"""Durable saves that the ranks write themselves: rank 0's reports, as the events of any other save.

Model: a save begins and ends within its generation. One that is not committed when the generation is left has failed;
one that is committed and not read back stays unverified, and is found by discovery like any other commit. The writer
deletes what is surplus after it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_sre.events.messages import RankSave
from nvrx_sre.events.schema import (
    Event,
    HotIntervalChosen,
    SaveCommitted,
    SaveFailed,
    SaveFailure,
    SaveStarted,
    SaveVerified,
    SaveWritten,
    Tier,
)
from nvrx_sre.launcher.commands import RetainSaves
from nvrx_sre.launcher.machine_job import Job
from nvrx_sre.launcher.machine_saves import Saves
from nvrx_sre.launcher.save_endings import failure, given_up


@dataclass(kw_only=True)
class _Save:
    step: int
    generation: int
    captured_ns: int
    is_committed: bool = False


class RankSaves:
    """What the ranks of the open generation save."""

    def __init__(self, job: Job, saves: Saves) -> None:
        self._job = job
        self._saves = saves
        self._save: _Save | None = None
        self._is_told = False

    def on_report(self, message: RankSave) -> None:
        """Rank 0 of the open generation tells of a stage."""
        if message.stage == "begun":
            self._tell_no_hot_tier(message.message)
        elif message.stage == "started":
            captured_ns = self._job.wall_ns(message.mono_ns)
            self._save = _Save(step=message.step, generation=message.generation, captured_ns=captured_ns)
            self._emit(SaveStarted(step=message.step, tier=Tier.DURABLE, captured_ns=captured_ns))
        elif self._save is not None and self._save.step == message.step:
            self._on_stage(self._save, message)

    def leave(self) -> None:
        """The generation is left, or the run ends: a save in hand goes no further."""
        if self._save is not None:
            self._fail(SaveFailure.INTERRUPTED, "its generation was left before the save was done")

    def _on_stage(self, save: _Save, message: RankSave) -> None:
        step, directory = message.step, message.directory
        if message.stage == "written":
            self._emit(SaveWritten(step=step, size_bytes=message.size_bytes, seconds=message.seconds))
        elif message.stage == "committed":
            save.is_committed = True
            self._saves.on_commit_of(step)
            self._emit(
                SaveCommitted(
                    step=step,
                    directory=directory,
                    size_bytes=message.size_bytes,
                    seconds=message.seconds,
                    captured_ns=save.captured_ns,
                )
            )
        elif message.stage == "verified":
            self._emit(
                SaveVerified(step=step, directory=directory, seconds=message.seconds, captured_ns=save.captured_ns)
            )
            self._save = None
            self._job.command(RetainSaves())
        elif message.stage == "failed":
            self._fail(failure(message.reason), message.message)

    def _fail(self, reason: SaveFailure, text: str) -> None:
        assert self._save is not None
        event = given_up(self._save.step, reason, text, is_committed=self._save.is_committed)
        if isinstance(event, SaveFailed):
            self._saves.last_failure = f"{reason}: {text}"
        self._emit(event)
        self._save = None

    def _tell_no_hot_tier(self, reason: str) -> None:
        """Once a launcher: every generation finds the same."""
        if not self._is_told:
            self._is_told = True
            self._job.emit(HotIntervalChosen(every_steps=0, cost_s=0.0, step_s=0.0, reason=reason))

    def _emit(self, event: Event) -> None:
        assert self._save is not None
        self._job.emit(event, generation=self._save.generation)
