"""What outlives a generation inside a rank's process: settings, control, hot slots.

One per process, set by `bootstrap` before user code runs; absent when a script runs without a launcher.
"""

from __future__ import annotations

import threading

from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.core.errors import InternalError
from nvrx_sre.events import channel as wire
from nvrx_sre.events.settings import ChildSettings
from nvrx_sre.restart.control import RankControl
from nvrx_sre.session.slots_ahead import SlotsAhead


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
        self.hot_schedule = HotSchedule(0)
        self.knows_no_hot_tier = False
        """It was said that this run has none."""
        self._granted = threading.Condition()
        self._grant: tuple[int, int, int] | None = None
        self._ahead = SlotsAhead()
        control.on_slots = self._on_slots
        control.on_map = self._ahead.map
        control.on_dropped = self._ahead.drop
        control.on_interval = lambda message: self.hot_schedule.change(message.every, message.from_step)

    def map_slots(self, descriptor: int, data_bytes: int, blob_bytes: int) -> SlotFile:
        """Map the rank's memfd, replacing an earlier mapping."""
        if self.slots is not None:
            self.slots.close()
        self.slots = SlotFile.map(descriptor, data_bytes, blob_bytes)
        return self.slots

    def take_slots(self, assign: wire.Assign, descriptor: int | None) -> None:
        """Map the slots that come with a rank; without a descriptor it has none, and a mapping of before is dropped."""
        if self.slots is not None:
            self.slots.close()
            self.slots = None
        if descriptor is None:
            self._ahead.drop()
        else:
            self.slots = self._ahead.take(assign.rank, descriptor, assign.slot_data_bytes, assign.slot_blob_bytes)

    def slots_for(self, generation: int, layout_hash: str, data_bytes: int, blob_bytes: int) -> SlotFile:
        """Slots that hold at least these sizes; blocks until the launcher grants them if there are none."""
        slots = self.slots
        if slots is not None and slots.data_bytes >= data_bytes and slots.blob_bytes >= blob_bytes:
            return slots
        with self._granted:
            self._grant = None
        self.control.send(
            wire.SlotsWanted(
                generation=generation, layout_hash=layout_hash, data_bytes=data_bytes, blob_bytes=blob_bytes
            )
        )
        return self.map_slots(*self._wait_grant())

    def _wait_grant(self) -> tuple[int, int, int]:
        with self._granted:
            while self._grant is None:
                self._granted.wait()
            return self._grant

    def _on_slots(self, message: wire.SlotsGranted, descriptor: int) -> None:
        with self._granted:
            self._grant = (descriptor, message.data_bytes, message.blob_bytes)
            self._granted.notify_all()


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
