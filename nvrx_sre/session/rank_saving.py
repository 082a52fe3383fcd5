"""Durable saves that the ranks write themselves, where a slot cannot hold the state (`checkpoint.supported`).

    boundary of step s     the step is reported; if its save is due, every rank
        takes its state    into memory of its own, through stand-ins (`checkpoint.stand_ins`)
        writes its part    `checkpoint.save`, one part a rank, joined through the attempt's directory
    rank 0                 commits, reads the commit back, tells the launcher of each stage

The training stands still for it; there are no hot captures. Ranks meet in files and not in a process group, so a save
can neither be mixed up with the training's collectives nor outlive its generation, and a rank that cannot write ends
it for all at once. Only FSDP1 needs its own group, to hand out its parameters, at the same place on every rank.

A save that fails is told and not raised: the next due one tries again. Memory: one more copy of the rank's state.
Thread safety: main thread. Must not: leave a file or descriptor behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nvrx_sre.checkpoint import discover, supported
from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.commit import SaveRefused, SaveRequest, failure_of, verify_committed
from nvrx_sre.checkpoint.parts import Share
from nvrx_sre.checkpoint.save import Saver, Source
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.checkpoint.stand_ins import StandIns
from nvrx_sre.checkpoint.storage import WriteOptions
from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import StorageError, UserError
from nvrx_sre.core.output import print_masked
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import Phase, SaveFailure
from nvrx_sre.session.process import RankProcess
from nvrx_sre.session.saving import NOT_DUE, Captured

ATTEMPT = "ranks"
"""Name of an attempt: a step of a generation is saved once."""


def needed_by_any(found: list[str], device: torch.device) -> bool:
    """True on every rank if some rank found state that only the ranks can save. Collective if there is a group."""
    if not dist.is_initialized():
        return bool(found)
    some = torch.tensor([len(found)], device=device)
    dist.all_reduce(some, op=dist.ReduceOp.MAX)
    return bool(some.item())


def explain(found: list[str]) -> str:
    """The message that names what keeps a run from having a hot tier."""
    what = supported.listed(found) if found else "some state of another rank"
    return f"not captured in memory: {what}: the ranks save it themselves, durably, while training waits"


class RankSaver:
    """Saves of one generation on one rank; in the place of `HotSaver`."""

    num_captured = 0
    num_skipped = 0

    def __init__(
        self, process: RankProcess, tracked: Mapping[str, object], go: wire.Go, rank: int, restored_step: int
    ) -> None:
        self._process = process
        self._tracked = tracked
        self._go = go
        self._rank = rank
        self._run_dir = Path(process.settings.run_dir)
        self._saver = Saver(self._run_dir, WriteOptions())
        self._memory: SlotFile | None = None
        self._newest = restored_step
        """Newest step that was saved, or tried."""
        self._is_requested = False
        if rank == 0:
            discover.clear_attempts(self._run_dir, ATTEMPT, go.generation)

    def request_durable(self) -> None:
        """The next boundary is saved."""
        self._is_requested = True

    def is_durable_due(self, step: int) -> bool:
        """True if the boundary of `step` is to be saved."""
        return self._is_requested or step % self._process.settings.save_every == 0

    def at_boundary(self, step: int) -> Captured:
        """Nothing is captured; a save that is due follows the report of the step."""
        return Captured(slot=-1, durable=False, save=self.save) if self.is_durable_due(step) else NOT_DUE

    def take_waited_ns(self) -> int:
        """Optimizers wait for nothing."""
        return 0

    def begin_step(self) -> None:
        """Nothing is captured between commits."""

    def let_change(self) -> None:
        """Nothing is copied beside the training."""

    def finish(self, step: int) -> None:
        """Training is over at `step`: save it unless it is."""
        if step > self._newest:
            self._process.control.enter(Phase.SAVE, tell=False)
            self.save(step)

    def close(self) -> None:
        """The generation is over."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def save(self, step: int) -> None:
        """Save the state as it is now. Collective; blocks until this rank's part is done, on rank 0 for all of it."""
        self._is_requested, self._newest = False, step
        started_ns = self._process.control.clock.monotonic_ns()
        self._tell("started", step, started_ns)
        try:
            self._write(step, started_ns)
        except SaveRefused as error:
            self._failed(step, started_ns, error.reason, error)
        except StorageError as error:
            self._failed(step, started_ns, failure_of(error), error)

    def _write(self, step: int, started_ns: int) -> None:
        settings, clock = self._process.settings, self._process.control.clock
        source = Source(slot_files=[self._capture(step, started_ns)], slots=[0], share=self._share())
        request = SaveRequest(
            run=settings.run,
            step=step,
            epoch=self._go.epoch,
            generation=self._go.generation,
            captured_ns=clock.to_wall_ns(started_ns),
            world_size=self._go.world_size,
        )
        saved = self._saver.save(request, source, lambda size: self._tell("written", step, started_ns, size_bytes=size))
        if saved.directory is None:
            return
        about: dict[str, Any] = {"directory": saved.directory.name, "size_bytes": saved.size_bytes}
        self._tell("committed", step, started_ns, **about)
        read_ns = clock.monotonic_ns()
        verify_committed(self._run_dir, saved.directory, settings.run)
        discover.record_verified(self._run_dir, saved.directory.name, clock.wall_ns())
        self._tell("verified", step, read_ns, **about)

    def _share(self) -> Share:
        return Share(part=self._rank, num_parts=self._go.world_size, first_rank=self._rank, attempt=ATTEMPT)

    def _capture(self, step: int, now_ns: int) -> SlotFile:
        """This rank's state, in memory that no step changes."""
        capturer = Capturer(StandIns(self._tracked).tracked, supported.refusals)
        capturer.refresh()
        data_bytes, blob_bytes = capturer.required_bytes()
        memory = self._memory
        if memory is None or memory.data_bytes < data_bytes or memory.blob_bytes < blob_bytes:
            self.close()
            try:
                memory = SlotFile.create(data_bytes, blob_bytes, num_slots=1, name=f"nvrx-save-{self._rank}")
            except UserError as error:
                raise UserError(f"a save needs one more copy of the state of rank {self._rank}: {error}") from error
            self._memory = memory
        capturer.capture(memory, 0, self._go.generation, step, True, now_ns)
        return memory

    def _failed(self, step: int, started_ns: int, reason: SaveFailure, error: Exception) -> None:
        print_masked(f"nvrx-sre: save of step {step} failed ({reason}): {error}")
        self._tell("failed", step, started_ns, reason=reason.value, message=str(error)[:500])

    def _tell(self, stage: str, step: int, since_ns: int, **about: Any) -> None:
        """Rank 0 speaks for all."""
        if self._rank != 0:
            return
        control = self._process.control
        now_ns = control.clock.monotonic_ns()
        told = {"directory": "", "size_bytes": 0, "reason": "", "message": "", **about}
        control.send(
            wire.RankSave(
                generation=self._go.generation,
                step=step,
                stage=stage,
                seconds=seconds(now_ns - since_ns),
                mono_ns=since_ns,
                **told,
            )
        )
