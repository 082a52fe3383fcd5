"""Slots that a standby maps before it is a rank: those of its whole node, so that its first restore finds them mapped.

    MapSlots(rank) -> map ... Assign(rank) -> take(rank): that mapping, and the others are closed

Model: the launcher sends the descriptor of each rank's slots as they come to be; those of the rank that the standby
becomes come once more with the assignment, and are mapped then if they are others than were mapped ahead. A mapping
that fails is none: the one at the assignment says why.
Thread safety: `map`, `drop` and `take` are one thread's (`mapping`), `stop` and `newest` the main thread's. Once the
launcher has assigned a rank it sends no more of them. Must not: write a slot.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from nvrx_sre.checkpoint.slots import SlotFile, SlotHeader
from nvrx_sre.core.errors import StorageError, UserError
from nvrx_sre.events import messages as wire

T = TypeVar("T")


class SlotsAhead:
    """Mapped slots by rank."""

    def __init__(self, map_slots: Callable[[int, int, int], SlotFile] = SlotFile.map) -> None:
        """`map_slots`: as `SlotFile.map`."""
        self._map_slots = map_slots
        self._is_stopped = False
        self._by_rank: dict[int, SlotFile] = {}
        self._lock = threading.Lock()

    def map(self, message: wire.MapSlots, descriptor: int) -> None:
        """Map the slots of a rank in place of those it had before. Blocks for the page tables: 0.1 s a gigabyte."""
        if self._is_stopped:
            os.close(descriptor)
            return
        with self._lock:
            self._close(message.rank)
            try:
                self._by_rank[message.rank] = self._map_slots(descriptor, message.data_bytes, message.blob_bytes)
            except (UserError, StorageError):
                os.close(descriptor)

    def stop(self) -> None:
        """Map no more: the process is about to be a rank."""
        self._is_stopped = True

    def drop(self) -> None:
        """The node's slots are lost or of another world: their memory is free once nobody maps it."""
        with self._lock:
            for rank in list(self._by_rank):
                self._close(rank)

    def newest(self, read: Callable[[SlotFile, int, SlotHeader], T]) -> tuple[int, T] | None:
        """(rank, what `read` makes of its newest sealed slot) of the first rank where there is one.

        Its owner may overwrite a slot meanwhile: `read` raises `ValueError` for what makes no sense.
        """
        with self._lock:
            for rank, slots in sorted(self._by_rank.items()):
                sealed = [(slot, header) for slot, header in enumerate(slots.headers()) if header is not None]
                for slot, header in sorted(sealed, key=lambda item: item[1].step, reverse=True):
                    try:
                        return rank, read(slots, slot, header)
                    except ValueError:
                        continue
        return None

    def take(self, rank: int, descriptor: int, data_bytes: int, blob_bytes: int) -> SlotFile:
        """The slots behind `descriptor`, which is taken over, as this process's own; nothing is mapped ahead any more.

        Raises as `SlotFile.map` does.
        """
        ahead = self._by_rank.pop(rank, None)
        self.drop()
        if ahead is None:
            return self._map_slots(descriptor, data_bytes, blob_bytes)
        if not os.path.samestat(os.fstat(ahead.fd), os.fstat(descriptor)):
            ahead.close()
            return self._map_slots(descriptor, data_bytes, blob_bytes)
        os.close(descriptor)
        return ahead

    def _close(self, rank: int) -> None:
        slots = self._by_rank.pop(rank, None)
        if slots is not None:
            slots.close()
