"""Simulated storage: hot slots, durable commits, fences, and the writer process.

Contents are modelled by the step and the hash of the training line that led to it, so that a torn slot, a
lost step or an abandoned line is visible. A slot is (generation, step, state) or None while it is empty or
being filled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NUM_SLOTS = 3


@dataclass(frozen=True, kw_only=True)
class Content:
    """A state of training on one rank."""

    generation: int
    step: int
    state: str


@dataclass(kw_only=True)
class Slots:
    """Hot slots of one rank with the launcher's control words."""

    contents: list[Content | None] = field(default_factory=lambda: [None] * NUM_SLOTS)
    sealed_step: int = -1
    held_slot: int = -1
    stranded: tuple[int, int] = (0, 0)

    def free_slot(self, generation: int, restored_step: int) -> int | None:
        """Slot that may be overwritten: unsealed, older than what all sealed, of an abandoned line, stranded."""
        free = []
        for slot, content in enumerate(self.contents):
            if slot == self.held_slot:
                continue
            if content is None:
                free.append((-1, slot))
            elif (
                content.step < self.sealed_step
                or (content.generation < generation and content.step > restored_step)
                or (
                    content.generation == generation == self.stranded[0]
                    and self.sealed_step < content.step <= self.stranded[1]
                )
            ):
                free.append((content.step, slot))
        return min(free)[1] if free else None


@dataclass(kw_only=True)
class Commit:
    """A durable checkpoint: one content a rank."""

    step: int
    generation: int
    contents: list[Content]


@dataclass(kw_only=True)
class Storage:
    """What a node keeps: `slots` die with launcher or node, `commits` and `fences` do not."""

    num_ranks: int
    slots: list[Slots] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    fences: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drop_slots()

    def drop_slots(self, num_ranks: int | None = None) -> None:
        """Every hot slot is lost; `num_ranks` ranks get new ones (None: all there can be)."""
        self.slots = [Slots() for _ in range(self.num_ranks if num_ranks is None else num_ranks)]

    def is_abandoned(self, generation: int, step: int) -> bool:
        """A fence of a later generation lies below the step."""
        return any(generation < fence and step > at for fence, at in self.fences)

    def common_hot(self) -> list[Content]:
        """States that every rank has sealed in one generation and nobody abandoned (rank 0's copy)."""
        rows = [[item for item in slots.contents if item is not None] for slots in self.slots]
        keys = set.intersection(*({(item.generation, item.step) for item in row} for row in rows))
        return [item for item in rows[0] if (item.generation, item.step) in keys and self._is_current(item)]

    def candidates(self, *, checkpoints_back: int, hot_allowed: bool) -> list[tuple[str, Content]]:
        """What a generation may restore, best first: newest step, the hot tier before the durable one."""
        durable = sorted(
            (commit for commit in self.commits if not self.is_abandoned(commit.generation, commit.step)),
            key=lambda commit: (commit.step, commit.generation),
            reverse=True,
        )
        durable = durable[min(checkpoints_back, max(0, len(durable) - 1)) :]
        hot = self.common_hot() if hot_allowed and not checkpoints_back else []
        found = [("hot", item) for item in hot] + [("durable", commit.contents[0]) for commit in durable]
        return sorted(found, key=lambda item: (item[1].step, item[0] == "hot", item[1].generation), reverse=True)

    def _is_current(self, content: Content) -> bool:
        return not self.is_abandoned(content.generation, content.step)
