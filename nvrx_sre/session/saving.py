"""Hot captures of one generation on one rank.

    boundary of step s     begin the capture in the main thread, go on training
    thread                 copy -> seal -> tell the launcher
    before an optimizer    wait for the copy (a hook on every tracked optimizer); a device waits by itself. So do an
                           evaluation and the end of a pass over a tracked loader, where weights are changed by hand;
                           a step that was not due is captured there
    next capture, the end  wait for the seal

On a device the first captures are skipped while slots are mapped and locked, which takes seconds; on the CPU they wait.

A capture that is cut short leaves an unsealed slot, which no restore uses; an interrupt lets a running copy
finish, so an exception costs no step. A tensor that something else than a tracked optimizer changes during the
copy voids that capture, and the generation's later ones are taken at the boundary in one go. Which slot may be
overwritten is the slot file's rule (`SlotFile.free_slot`); a capture that finds none is skipped and counted.

Thread safety: one capture is in flight at a time; hooks may run in any thread, all else in the main thread.
Invariant: no thread of it outlives `close`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.filling import Filling
from nvrx_sre.checkpoint.kept import Kept
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import Phase
from nvrx_sre.session.process import RankProcess


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Result of a step boundary: the slot that takes the step (-1: none) and whether a durable save is due."""

    slot: int
    durable: bool
    save: Callable[[int], None] | None = None
    """Where the ranks write a due save themselves: to be called with the step once it is reported."""


NOT_DUE = Captured(slot=-1, durable=False)
"""The result of most boundaries. Made once: to make one took a rank 6 to 9 us, half as long as its report."""


@dataclass(kw_only=True)
class _LeftOut:
    """A committed step that no slot of this rank takes."""

    step: int
    is_begun: bool = False
    """Something of the next step has begun, or weights may have been changed by hand."""
    is_gone: bool = False
    """An optimizer has stepped."""


class HotSaver:
    """Decides when a capture is due and takes it."""

    def __init__(self, process: RankProcess, capturer: Capturer, generation: int, restored_step: int) -> None:
        self._process = process
        self._capturer = capturer
        self._generation = generation
        self._restored_step = restored_step
        self._newest = restored_step
        """Newest step that a slot holds or is taking."""
        self._left_out: _LeftOut | None = None
        """The newest step, if no slot takes it."""
        self._save_requested = False
        self._is_owed = False
        """A due save found no free slot, which the launcher was told once: made up for at the next boundary."""
        self._is_overlapped = True
        self._has_prepared = False
        self._waited_ns = 0
        self._filling: Filling | None = None
        """The newest capture, until an optimizer steps."""
        self._copied: Future[None] | None = None
        self._sealed: Future[None] | None = None
        self._untold: wire.Sealed | None = None
        """End of the newest capture, if the channel had no room for it."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nvrx-capture")
        self._hooks = [item.register_step_pre_hook(self._before_step) for item in capturer.optimizers]
        self.num_captured = 0
        self.num_skipped = 0

    def request_durable(self) -> None:
        """The next boundary is also saved durably."""
        self._save_requested = True

    def is_durable_due(self, step: int) -> bool:
        """True if the boundary of `step` is to be saved durably."""
        return self._save_requested or step % self._process.settings.save_every == 0

    def at_boundary(self, step: int) -> Captured:
        """Begin to capture `step` if it is due. Blocks for what cannot be copied later."""
        is_due = self.is_durable_due(step)
        durable = is_due or self._is_owed
        if not durable and not self._process.hot_schedule.is_due(step):
            self._prepare_slots()
            slot = -1
        else:
            slot = self._capture(step, durable, waits=durable)
            self._save_requested, self._is_owed = False, durable and slot < 0
        # Not before: if taking this step raises, the one before it is the newest, and may be left out still.
        self._left_out = _LeftOut(step=step) if slot < 0 else None
        if slot < 0:
            self._capturer.keep()
        return Captured(slot=slot, durable=is_due) if is_due or slot >= 0 else NOT_DUE

    def let_change(self) -> None:
        """The script may change by hand what is tracked. Blocks until the newest step's state is copied.

        Also that of a step whose capture was not due: it may be the last one, and at the end its state could be gone.
        Where no slot is free, or the next step has begun, it is left to the end.
        """
        left_out = self._left_out
        if left_out is not None and not left_out.is_gone:
            clock, kept = self._process.control.clock, self._capturer.kept
            started_ns = clock.monotonic_ns()
            stays = left_out.is_begun or kept.has_changed()
            if stays or self._capture(left_out.step, durable=False, waits=False, kept=kept) < 0:
                left_out.is_begun = True
                kept.know_values()
            else:
                self._left_out = None
            self._waited_ns += clock.monotonic_ns() - started_ns
        self._wait_copied()

    def begin_step(self) -> None:
        """Something of the next step has begun: what is tracked is not all the newest commit's state any more."""
        if self._left_out is not None:
            self._left_out.is_begun = True

    def take_waited_ns(self) -> int:
        """Time that optimizers and changes by hand have waited for the copy since the last call."""
        waited_ns, self._waited_ns = self._waited_ns, 0
        return waited_ns

    def finish(self, step: int) -> None:
        """Training is over at `step`: capture it unless it is, and wait until it is sealed.

        What the script has begun of another step is left out; where that cannot be, the step is not captured.
        Blocks while no slot is free: the writer holds one, or the launcher has yet to hear from other ranks that the
        capture before this one is sealed everywhere.
        """
        if step > self._newest and not self._is_gone():
            self._process.control.enter(Phase.SAVE, tell=False)
            self._wait_sealed()
            self._tell_untold()
            slots = self._process.slots
            if slots is not None:
                self._process.control.wait_until(lambda: self._is_slot_free(slots, step))
            self._capture(step, durable=False, waits=True, kept=self._capturer.kept)
        self._wait_sealed()
        self._tell_untold()

    def _is_gone(self) -> bool:
        """True if the state of the newest step, which is in no slot, is not there any more, which is said."""
        left_out = self._left_out
        assert left_out is not None, "a step that no slot takes was left out at its boundary"
        if left_out.is_gone:
            why = "an optimizer has stepped since, without a commit"
        elif self._capturer.kept.has_changed():
            why = 'parameters were changed since, outside of ctx.phase("evaluate")'
        else:
            return False
        print(f"nvrx-sre: step {left_out.step} cannot be saved: {why}", file=sys.stderr)
        return True

    def _tell_untold(self) -> None:
        """What the launcher has not heard may be what keeps every slot from being free. Waits for room."""
        if self._untold is not None:
            self._process.control.send(self._untold)
            self._untold = None

    def _is_slot_free(self, slots: SlotFile, step: int) -> bool:
        """True if `step` may be captured. Waiting for the writer is no hang of this rank: it has its own deadline."""
        if slots.held_slot >= 0:
            self._process.control.pass_point()
        return self._free_slot(slots, step) is not None

    def close(self) -> None:
        """Let a running copy finish and end the thread. The generation is over; nothing is interrupted any more."""
        for hook in self._hooks:
            hook.remove()
        self._thread.shutdown(wait=True)
        self._filling = None

    def _capture(self, step: int, durable: bool, *, waits: bool, kept: Kept | None = None) -> int:
        """The slot, -1 if none is free. `waits`: also on a device for slots that are not mapped yet."""
        self._wait_sealed()
        if self._untold is not None and self._process.control.channel.send_nowait(self._untold):
            self._untold = None
        needs = self._needs(kept)
        waits = waits or self._capturer.ring is None
        if not waits and not self._process.has_slots(self._generation, *needs):
            self.num_skipped += 1
            return -1
        slots = self._process.slots_for(self._generation, *needs)
        slot = self._free_slot(slots, step)
        if slot is None:
            self.num_skipped += 1
            return -1
        self.num_captured += 1
        self._newest = step
        self._start(slots, slot, step, durable)
        return slot

    def _needs(self, kept: Kept | None = None) -> tuple[str, int, int]:
        """Layout and sizes of the state as it is now, or was kept."""
        self._capturer.refresh(kept)
        data_bytes, blob_bytes = self._capturer.required_bytes()
        if self._capturer.ring is not None:
            self._capturer.ring.choose(data_bytes)
        return self._capturer.layout_hash, data_bytes, blob_bytes

    def _prepare_slots(self) -> None:
        """Have the first slots made while training goes on: a second a gigabyte that no capture waits for then."""
        if self._process.slots is None and not self._has_prepared:
            self._has_prepared = True
            self._process.ask_slots(self._generation, *self._needs())

    def _free_slot(self, slots: SlotFile, step: int) -> int | None:
        return slots.free_slot(step, generation=self._generation, restored_step=self._restored_step)

    def _start(self, slots: SlotFile, slot: int, step: int, durable: bool) -> None:
        filling = self._capturer.begin(
            slots,
            slot,
            generation=self._generation,
            step=step,
            durable=durable,
            now_mono_ns=self._process.control.clock.monotonic_ns(),
        )
        filling.counts = lambda: self._process.control.interrupted < self._generation
        self._say_how(filling.header.data_bytes)
        self._filling = filling if self._is_overlapped else None
        if self._is_overlapped or filling.let_change():
            self._copied = self._thread.submit(filling.copy)
        else:
            filling.copy()
        self._sealed = self._thread.submit(self._seal, filling, step)

    def _say_how(self, data_bytes: int) -> None:
        """Once a process, and again if it has changed: whether a device has room for a snapshot."""
        ring = self._capturer.ring
        if ring is None or ring.is_snapshot is self._process.told_snapshot:
            return
        self._process.told_snapshot = ring.is_snapshot
        how = "a snapshot on the device" if ring.is_snapshot else "a few pieces of the device's memory, which is short"
        print(f"nvrx-sre: captures of {data_bytes / 1e6:,.1f} MB go through {how}", file=sys.stderr)

    def _seal(self, filling: Filling, step: int) -> None:
        """In the thread, after the copy: publish the slot, or say that nobody will."""
        copied = self._copied
        if copied is not None and copied.exception() is not None:
            return  # raised in the main thread, which ends the generation
        if filling.is_whole:
            filling.seal()
        elif self._is_overlapped and filling.counts():
            self._is_overlapped = False
            print(
                f"nvrx-sre: something else than a tracked optimizer changed parameters after the commit of step "
                f"{step}: its capture is void, and later ones are copied inside ctx.commit()",
                file=sys.stderr,
            )
        control = self._process.control
        told = wire.Sealed(
            generation=self._generation,
            step=step,
            slot=filling.slot if filling.is_whole else -1,
            mono_ns=control.clock.monotonic_ns(),
        )
        self._untold = None if control.channel.send_nowait(told) else told

    def _before_step(self, *_: Any) -> None:
        """Hook of every tracked optimizer."""
        if self._left_out is not None:
            self._left_out.is_begun = self._left_out.is_gone = True
        self._wait_copied()

    def _wait_copied(self) -> None:
        """What was left to copy at the boundary may be changed after this; blocks for the copy."""
        filling, self._filling = self._filling, None
        copied = self._copied
        if filling is None or filling.let_change() or copied is None:
            return
        clock = self._process.control.clock
        started_ns = clock.monotonic_ns()
        copied.result()
        self._waited_ns += clock.monotonic_ns() - started_ns
        self._copied = None

    def _wait_sealed(self) -> None:
        """Raises what the copy or the seal raised."""
        if self._copied is not None:
            self._copied.result()
        if self._sealed is not None:
            self._sealed.result()
        self._copied = self._sealed = None
