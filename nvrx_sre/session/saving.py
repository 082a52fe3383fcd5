"""Hot captures of one generation on one rank.

A capture runs in the main thread at a step boundary, masked against interrupts by nothing: a capture that is cut
short leaves an unsealed slot, which no restore uses. Which slot may be overwritten is the slot file's
rule (`SlotFile.free_slot`); a capture that finds none is skipped and counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.session.process import RankProcess


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Result of a step boundary: the slot that holds the step (-1: none) and whether a durable save is due."""

    slot: int
    durable: bool


class HotSaver:
    """Decides when a capture is due and takes it."""

    def __init__(self, process: RankProcess, capturer: Capturer, generation: int, restored_step: int) -> None:
        self._process = process
        self._capturer = capturer
        self._generation = generation
        self._restored_step = restored_step
        self._save_requested = False
        self.num_captured = 0
        self.num_skipped = 0

    def request_durable(self) -> None:
        """The next boundary is also saved durably."""
        self._save_requested = True

    def is_durable_due(self, step: int) -> bool:
        """True if the boundary of `step` is to be saved durably."""
        return self._save_requested or step % self._process.settings.save_every == 0

    def at_boundary(self, step: int) -> Captured:
        """Capture `step` if it is due."""
        durable = self.is_durable_due(step)
        hot_every = self._process.settings.hot_every
        if not durable and (hot_every == 0 or step % hot_every):
            return Captured(slot=-1, durable=False)
        slot = self._capture(step, durable)
        # A due save that found no free slot is made up for at the next boundary.
        self._save_requested = durable and slot < 0
        if slot < 0:
            self.num_skipped += 1
        else:
            self.num_captured += 1
        return Captured(slot=slot, durable=durable)

    def _capture(self, step: int, durable: bool) -> int:
        self._capturer.refresh()
        data_bytes, blob_bytes = self._capturer.required_bytes()
        slots = self._process.slots_for(self._generation, self._capturer.layout_hash, data_bytes, blob_bytes)
        slot = slots.free_slot(step, generation=self._generation, restored_step=self._restored_step)
        if slot is None:
            return -1
        self._capturer.capture(
            slots,
            slot,
            generation=self._generation,
            step=step,
            durable=durable,
            now_mono_ns=self._process.control.clock.monotonic_ns(),
        )
        return slot
