"""Hot slots of a node: created on a rank's request, published, held for the writer, lost with the node.

The launcher owns the memfds; ranks and writer map them by descriptor. It is the only one that writes the three
control words: a slot is held *before* `sealed_step` passes its step, so a rank can never overwrite what the
writer reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_sre.checkpoint.slots import NONE, SlotFile, SlotHeader
from nvrx_sre.events.schema import HotSlotsAllocated


class HotSlots:
    """Slot files by rank: `num_slots` for each of the `num_ranks` of the node."""

    def __init__(self, run: str, num_slots: int, num_ranks: int) -> None:
        self._run = run
        self._num_slots = num_slots
        self.num_ranks = num_ranks
        """Ranks of the node that will want slots."""
        self._files: dict[int, SlotFile] = {}
        self._with_snapshots: set[int] = set()

    def note_snapshots(self, rank: int, *, taken: bool) -> None:
        """Whether captures of `rank` go through a snapshot on its device."""
        (self._with_snapshots.add if taken else self._with_snapshots.discard)(rank)

    def grant(self, rank: int, data_bytes: int, blob_bytes: int) -> SlotFile:
        """Slots of `rank` with at least these sizes, new ones if need be. Blocks while pages are cleared.

        The ranks that have none yet will want about as much: without room for all of them none is begun. Raises
        `UserError` or `StorageError` if the memory cannot be had.
        """
        old = self._files.get(rank)
        if old is not None and old.data_bytes >= data_bytes and old.blob_bytes >= blob_bytes:
            return old
        new = SlotFile.create(
            data_bytes,
            blob_bytes,
            num_slots=self._num_slots,
            num_alike=max(1, self.num_ranks - len(self._files.keys() - {rank})),
            name=f"nvrx-hot-{self._run}-{rank}",
        )
        if old is not None:
            old.close()
        self._files[rank] = new
        return new

    def allocated(self) -> HotSlotsAllocated | None:
        """What all of them take, once every rank of the node has its slots."""
        if len(self._files) < self.num_ranks:
            return None
        files = self._files.values()
        return HotSlotsAllocated(
            num_slots=self._num_slots,
            slot_bytes=max(file.data_bytes + file.blob_bytes for file in files),
            total_bytes=sum(file.size_bytes for file in files),
            num_snapshots=len(self._with_snapshots & self._files.keys()),
        )

    def get(self, rank: int) -> SlotFile | None:
        """Slots of `rank`, None if it has none."""
        return self._files.get(rank)

    def files(self) -> dict[int, SlotFile]:
        """All slot files by rank."""
        return dict(self._files)

    def headers(self, world_size: int) -> Sequence[Sequence[SlotHeader | None]]:
        """Headers of every rank's slots; a rank without slots has an empty row."""
        return [self._files[rank].headers() if rank in self._files else [] for rank in range(world_size)]

    def publish(self, step: int) -> None:
        """`step` is sealed on every rank."""
        for file in self._files.values():
            file.sealed_step = step

    def strand(self, generation: int, step: int) -> None:
        """What ranks hold of `generation` between the newest sealed step and `step` will never be common to all."""
        for file in self._files.values():
            file.strand(generation, step)

    def hold(self, slots: Sequence[int], first_rank: int = 0) -> None:
        """The writer reads `slots[i]` of rank `first_rank + i` from now on."""
        for rank, slot in enumerate(slots, first_rank):
            self._files[rank].held_slot = slot

    def release(self) -> None:
        """The writer is done."""
        for file in self._files.values():
            file.held_slot = NONE

    def drop(self, num_ranks: int | None = None) -> None:
        """Every slot is lost; `num_ranks` ranks of the node will want new ones (None: as many as before)."""
        self.num_ranks = self.num_ranks if num_ranks is None else num_ranks
        for file in self._files.values():
            file.close()
        self._files.clear()
