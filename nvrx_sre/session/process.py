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


class RankProcess:
    """This process as the launcher knows it."""

    def __init__(self, settings: ChildSettings, control: RankControl) -> None:
        self.settings = settings
        self.control = control
        self.slots: SlotFile | None = None
        self._granted = threading.Condition()
        self._grant: tuple[int, int, int] | None = None
        control.on_slots = self._on_slots

    def map_slots(self, descriptor: int, data_bytes: int, blob_bytes: int) -> SlotFile:
        """Map the rank's memfd, replacing an earlier mapping."""
        if self.slots is not None:
            self.slots.close()
        self.slots = SlotFile.map(descriptor, data_bytes, blob_bytes)
        return self.slots

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
