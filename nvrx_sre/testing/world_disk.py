"""Simulated storage: the hot slots of a launcher, and the shared disk with its epochs, commits and fences.

Contents are modelled by a real `SlotHeader` whose digest is the hash of the training line that led to the state, so
that a torn slot, a lost step or an abandoned line is visible. What may be overwritten, what all ranks have in common,
what is abandoned and what retention gives up are decided by the functions that the product uses.

The slots die with their launcher; the disk does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from nvrx_sre.checkpoint import agree
from nvrx_sre.checkpoint.agree import Fence
from nvrx_sre.checkpoint.discover import Found
from nvrx_sre.checkpoint.retention import KEEP_MIN, surplus
from nvrx_sre.checkpoint.slots import NONE, NUM_SLOTS, SlotHeader, choose_slot

LAYOUT = "layout"


def content(generation: int, step: int, state: str) -> SlotHeader:
    """A state of training on one rank, as a sealed slot describes it."""
    return SlotHeader(
        generation=generation,
        step=step,
        durable=False,
        sealed_mono_ns=0,
        data_bytes=0,
        blob_bytes=0,
        layout_hash=LAYOUT,
        digest=state.encode(),
    )


@dataclass(kw_only=True)
class Slots:
    """Hot slots of one rank with the launcher's control words; None while a slot is empty or being filled."""

    contents: list[SlotHeader | None] = field(default_factory=lambda: [None] * NUM_SLOTS)
    filling: list[int] = field(default_factory=lambda: [NONE] * NUM_SLOTS)
    """Step that a slot takes, or took last."""
    sealed_step: int = NONE
    held_slot: int = NONE
    stranded: tuple[int, int] = (0, 0)

    def free_slot(self, step: int, generation: int, restored_step: int) -> int | None:
        """A slot that may be overwritten with `step`."""
        return choose_slot(
            self.contents,
            held_slot=self.held_slot,
            sealed_step=min(self.sealed_step, step - 1),
            stranded=self.stranded,
            generation=generation,
            restored_step=restored_step,
        )


@dataclass(kw_only=True)
class Commit:
    """A durable checkpoint of the whole world, from one rank's content."""

    step: int
    generation: int
    epoch: int
    content: SlotHeader
    verified: bool = False
    is_damaged: bool = False

    @property
    def directory(self) -> str:
        """Its name in `checkpoints/`."""
        return f"step-{self.step:08d}-g{self.generation:05d}"

    def candidate(self) -> dict[str, Any]:
        """Form for `agree.order`."""
        return {"tier": "durable", "step": self.step, "generation": self.generation, "directory": self.directory}


@dataclass(kw_only=True)
class Attempt:
    """The directory of an attempt at a save, as far as its writers talk through it."""

    parts: set[int] = field(default_factory=set)
    """Shares that are there."""
    is_ended: bool = False
    """Somebody has given it up."""


@dataclass(kw_only=True)
class Disk:
    """The run directory: what every launcher of the run sees."""

    epoch: int = 0
    """Highest epoch taken."""
    commits: list[Commit] = field(default_factory=list)
    fences: list[Fence] = field(default_factory=list)
    num_commits_ever: int = 0
    attempts: dict[str, Attempt] = field(default_factory=dict)
    """Those of several writers, by the name that they agreed on."""

    def attempt(self, name: str) -> Attempt:
        """What the writers of an attempt have left each other; one writer alone has a directory of its own."""
        return self.attempts.setdefault(name, Attempt()) if name else Attempt()

    def take_epoch(self) -> int:
        """Exclusive creation of the next epoch's file."""
        self.epoch += 1
        return self.epoch

    def is_abandoned(self, generation: int, step: int) -> bool:
        """A fence of a later generation lies below the step."""
        return agree.is_abandoned(self.fences, generation, step)

    def restorable(self) -> list[Commit]:
        """Commits of the current line, damage undiscovered."""
        return [item for item in self.commits if not self.is_abandoned(item.generation, item.step)]

    def candidates(
        self, slots: list[Slots], *, checkpoints_back: int, hot_allowed: bool
    ) -> list[tuple[dict[str, Any], SlotHeader]]:
        """What a generation may restore, best first, with what rank 0 finds there."""
        hot = agree.common_hot([item.contents for item in slots], self.fences) if hot_allowed else []
        commits = {item.directory: item for item in self.restorable()}
        durable = [item.candidate() for item in commits.values()]
        entries = agree.order(hot, durable, checkpoints_back=checkpoints_back, hot_allowed=hot_allowed)
        return [(entry, self._found(entry, slots, commits)) for entry in entries]

    def _found(self, entry: dict[str, Any], slots: list[Slots], commits: dict[str, Commit]) -> SlotHeader:
        if entry["tier"] == "durable":
            return commits[entry["directory"]].content
        found = slots[0].contents[int(entry["slots"][0])]
        assert found is not None  # common to all ranks
        return found

    def get(self, directory: str) -> Commit | None:
        """The commit of this name, None if it is gone."""
        return next((item for item in self.commits if item.directory == directory), None)

    def commit(self, commit: Commit) -> None:
        """The rename: a directory of the same name takes the place of the older one."""
        self.commits = [item for item in self.commits if item.directory != commit.directory]
        self.commits.append(commit)
        self.num_commits_ever += 1

    def retain(self) -> list[Commit]:
        """Give up what is surplus, unless the newest verified commit reads back damaged; what is gone."""
        restorable = sorted(self.restorable(), key=lambda item: (item.step, item.generation), reverse=True)
        newest = next((item for item in restorable if item.verified), None)
        if newest is None or newest.is_damaged:
            return []
        gone = surplus(cast(list[Found], restorable), KEEP_MIN)
        names = {item.directory for item in gone}
        deleted = [item for item in self.commits if item.directory in names]
        self.commits = [item for item in self.commits if item.directory not in names]
        return deleted

    def damage_newest(self) -> bool:
        """Bit rot in the newest verified commit that is still good; False if there is none to spare."""
        good = [item for item in self.restorable() if item.verified and not item.is_damaged]
        if len(good) < KEEP_MIN:
            return False
        max(good, key=lambda item: (item.step, item.generation)).is_damaged = True
        return True
