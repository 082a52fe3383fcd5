"""What outlives a generation inside a rank's process: settings, control, hot slots.

Slots are asked for once the state is known and mapped by a thread of their own, so that the first capture finds them.

One per process, set by `bootstrap` before user code runs; absent when a script runs without a launcher.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from nvrx_sre.checkpoint.slots import SlotFile, SlotHeader
from nvrx_sre.core.errors import InternalError, StorageError, UserError
from nvrx_sre.events import messages as wire
from nvrx_sre.events.settings import ChildSettings
from nvrx_sre.restart.control import RankControl
from nvrx_sre.session.mapping import Mapper
from nvrx_sre.session.slots_ahead import SlotsAhead

if TYPE_CHECKING:
    from nvrx_sre.checkpoint.ring import Ring

T = TypeVar("T")


class HotSchedule:
    """Which steps are captured: every so many, from some step on every so many others.

    The same on all ranks, because it comes from the launcher, with 'go' and in mid-generation. Written by the
    monitor thread, read by the main thread: one tuple, replaced as a whole.
    """

    def __init__(self, every: int) -> None:
        self._plan = (every, 0, every)

    def change(self, every: int, from_step: int) -> None:
        """Capture steps divisible by `every` (0: none) from `from_step` on."""
        self._plan = (self._plan[2], from_step, every)

    def is_due(self, step: int) -> bool:
        """True if `step` is to be captured."""
        before, from_step, after = self._plan
        every = after if step >= from_step else before
        return every > 0 and step % every == 0


class RankProcess:
    """This process as the launcher knows it."""

    def __init__(self, settings: ChildSettings, control: RankControl) -> None:
        self.settings = settings
        self.control = control
        self.slots: SlotFile | None = None
        self.ring: Ring | None = None
        """What captures and restores pass through on a device, from the first restore on."""
        self.told_snapshot: bool | None = None
        """What its log says of how captures leave the device."""
        self.hot_schedule = HotSchedule(0)
        self.knows_no_hot_tier = False
        """It was said that this run has none."""
        self.restore_parts_s: dict[str, float] = {}
        """Where the time of the last restore went, by part (`checkpoint.restore`, and `agree`)."""
        self._granted = threading.Condition()
        self._grant: SlotFile | UserError | StorageError | None = None
        """Answer to the newest request, until the main thread takes it."""
        self._asked: tuple[int, int, int] | None = None
        """Generation and sizes of the newest request, until its answer was taken."""
        self._mapper = Mapper()
        self._ahead = SlotsAhead(self._mapper.map)
        control.on_slots = lambda message, descriptor: self._mapper.put(self._on_slots, message, descriptor)
        control.on_map = lambda message, descriptor: self._mapper.put(self._ahead.map, message, descriptor)
        control.on_dropped = lambda: self._mapper.put(self._ahead.drop)
        control.on_interval = lambda message: self.hot_schedule.change(message.every, message.from_step)

    def newest_ahead(self, read: Callable[[SlotFile, int, SlotHeader], T]) -> tuple[int, T] | None:
        """Of a standby: `SlotsAhead.newest`."""
        return self._ahead.newest(read)

    def settle_slots(self) -> None:
        """Wait until what the launcher has sent of slots so far is mapped, and locked where there is a device."""
        self._mapper.settle()

    def take_slots(self, assign: wire.Assign, descriptor: int | None) -> None:
        """Map the slots that come with a rank; without a descriptor it has none, and a mapping of before is dropped."""
        self._ahead.stop()
        self._mapper.settle()
        self._mapper.device_index = assign.local_rank
        with self._granted:
            self._asked = None
            self._put_grant(None)
        if self.slots is not None:
            self.slots.close()
            self.slots = None
        if descriptor is None:
            self._mapper.do(self._ahead.drop)
        else:
            sizes = assign.slot_data_bytes, assign.slot_blob_bytes
            self.slots = self._mapper.do(self._ahead.take, assign.rank, descriptor, *sizes)

    def ask_slots(self, generation: int, layout_hash: str, data_bytes: int, blob_bytes: int) -> None:
        """Have slots of at least these sizes made and mapped, unless they are there or on their way. Does not wait."""
        asked = (generation, data_bytes, blob_bytes)
        if _fits(self.slots, data_bytes, blob_bytes) or self._asked == asked:
            return
        with self._granted:
            self._asked = asked
            self._put_grant(None)
        self.control.send(
            wire.SlotsWanted(
                generation=generation,
                layout_hash=layout_hash,
                data_bytes=data_bytes,
                blob_bytes=blob_bytes,
                takes_snapshots=self.ring is not None and self.ring.is_snapshot is True,
            )
        )

    def has_slots(self, generation: int, layout_hash: str, data_bytes: int, blob_bytes: int) -> bool:
        """True if `slots_for` would not block; else they are asked for."""
        self.ask_slots(generation, layout_hash, data_bytes, blob_bytes)
        with self._granted:
            granted = self._grant
        if isinstance(granted, Exception) or _fits(granted, data_bytes, blob_bytes):
            return True
        return _fits(self.slots, data_bytes, blob_bytes)

    def slots_for(self, generation: int, layout_hash: str, data_bytes: int, blob_bytes: int) -> SlotFile:
        """Slots that hold at least these sizes; blocks until the launcher has granted them.

        Raises `UserError` or `StorageError` if they cannot be mapped.
        """
        if self.slots is None or not _fits(self.slots, data_bytes, blob_bytes):
            self.ask_slots(generation, layout_hash, data_bytes, blob_bytes)
            granted = self._take_grant(data_bytes, blob_bytes)
            if self.slots is not None:
                self.slots.close()
            self.slots = granted
        return self.slots

    def _take_grant(self, data_bytes: int, blob_bytes: int) -> SlotFile:
        with self._mapper.hurried(), self._granted:
            while not isinstance(self._grant, Exception) and not _fits(self._grant, data_bytes, blob_bytes):
                self._granted.wait()
            granted, self._grant, self._asked = self._grant, None, None
        if isinstance(granted, SlotFile):
            return granted
        assert granted is not None  # what fits or is an error is something
        raise granted

    def _on_slots(self, message: wire.SlotsGranted, descriptor: int) -> None:
        """In the mapper's thread, so that no step waits for it. Blocks for the page tables."""
        granted: SlotFile | UserError | StorageError
        try:
            granted = self._mapper.map(descriptor, message.data_bytes, message.blob_bytes)
        except (UserError, StorageError) as error:
            os.close(descriptor)
            granted = error
        with self._granted:
            self._put_grant(granted)
            self._granted.notify_all()

    def _put_grant(self, granted: SlotFile | UserError | StorageError | None) -> None:
        """Replace the answer; slots that nobody took are unmapped."""
        if isinstance(self._grant, SlotFile):
            self._grant.close()
        self._grant = granted


def _fits(slots: SlotFile | None, data_bytes: int, blob_bytes: int) -> bool:
    return slots is not None and slots.data_bytes >= data_bytes and slots.blob_bytes >= blob_bytes


_current: RankProcess | None = None


def set_control(settings: ChildSettings, control: RankControl) -> None:
    """Called once, by `bootstrap`."""
    global _current
    if _current is not None:
        raise InternalError("this process was already connected to a launcher")
    _current = RankProcess(settings, control)


def current() -> RankProcess | None:
    """The process as the launcher knows it, None without a launcher."""
    return _current
