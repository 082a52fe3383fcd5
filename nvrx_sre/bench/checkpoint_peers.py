"""How the other contestants of the checkpoint benchmark save: torch's own ways, each set up as well as it can be.

    dcp.save                        blocks until the files are synced
    dcp.async_save thread           default stager: copies, then writes in a thread of the trainer
    dcp.async_save thread best      one stager kept, copying in a thread; awaited before the optimizer
    dcp.async_save process          default stager, writes in a process of its own
    dcp.async_save process best     one stager kept, into shared memory, copying in a thread

Pinned memory and non-blocking copies need an accelerator and are off. The state dict is built once and kept, which
spares the peers the time to gather it at each save; it refers to the live tensors, which AdamW changes in place.
Each asynchronous contestant gets a process group of its own: on the trainer's it deadlocks.

Collective: constructing, `save` and `finish`. Must not: use any of our checkpoint code.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save

from nvrx_sre.bench.checkpoint_reading import NOTHING, OURS, PROCESS, PROCESS_BEST, SYNC, THREAD, THREAD_BEST

ASYNC = {
    THREAD: (AsyncCheckpointerType.THREAD, None),
    THREAD_BEST: (AsyncCheckpointerType.THREAD, False),
    PROCESS: (AsyncCheckpointerType.PROCESS, None),
    PROCESS_BEST: (AsyncCheckpointerType.PROCESS, True),
}
"""Contestant -> (kind of checkpointer, whether its kept stager shares memory; None for the default stager)."""


class Saver(Protocol):
    """What the training loop calls."""

    def save(self, step: int) -> None:
        """At the boundary of a step whose save is due. Returns when training may go on."""

    def before_optimizer(self) -> None:
        """Before parameters change."""

    def finish(self) -> None:
        """Wait for what is being saved."""


class NoSaver:
    """Saves nothing itself: the launcher's business, or nobody's."""

    def save(self, step: int) -> None:
        """Nothing to do."""

    def before_optimizer(self) -> None:
        """Nothing to wait for."""

    def finish(self) -> None:
        """Nothing to wait for."""


class _State:
    """The state dict, built when the optimizer has state."""

    def __init__(self, root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._root = root
        self._model = model
        self._optimizer = optimizer
        self._state: dict[str, Any] = {}

    def get(self) -> dict[str, Any]:
        """References to the live tensors."""
        if not self._state:
            model, optimizer = get_state_dict(self._model, self._optimizer)
            self._state = {"model": model, "optimizer": optimizer}
        return self._state

    def place(self, step: int) -> Path:
        """Directory of a step."""
        return self._root / f"step-{step:08d}"


class SyncSaver(NoSaver):
    """`dcp.save`."""

    def __init__(self, state: _State) -> None:
        self._state = state

    def save(self, step: int) -> None:
        """Blocks until it is on the disk."""
        save(self._state.get(), checkpoint_id=self._state.place(step))


class AsyncSaver:
    """`dcp.async_save`."""

    def __init__(self, state: _State, kind: AsyncCheckpointerType, shared: bool | None) -> None:
        self._state = state
        self._kind = kind
        self._group = dist.new_group(backend="gloo")
        self._stager = None if shared is None else _stager(shared)
        self._upload: Future[Any] | None = None
        self._staging: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Waits for the save before, then for as much of the staging as is not asynchronous."""
        self._wait_upload()
        response = async_save(
            self._state.get(),
            checkpoint_id=self._state.place(step),
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        if isinstance(response, AsyncSaveResponse):
            self._staging, self._upload = response.staging_completion, response.upload_completion
        else:
            self._upload = response

    def before_optimizer(self) -> None:
        """Asynchronous staging must be done, or the save would hold values of the next step."""
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def finish(self) -> None:
        """Wait for the upload and let go of the stager."""
        self.before_optimizer()
        self._wait_upload()
        if self._stager is not None:
            self._stager.close()

    def _wait_upload(self) -> None:
        if self._upload is not None:
            self._upload.result()
            self._upload = None


def _stager(shared: bool) -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=shared, use_async_staging=True, use_non_blocking_copy=False
        )
    )


def make_saver(contestant: str, root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Saver:
    """Saver of a contestant. Collective. Raises `KeyError` for an unknown one."""
    if contestant in (OURS, NOTHING):
        return NoSaver()
    state = _State(root, model, optimizer)
    return SyncSaver(state) if contestant == SYNC else AsyncSaver(state, *ASYNC[contestant])
