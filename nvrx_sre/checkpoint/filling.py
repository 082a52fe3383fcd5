"""A slot that is being filled: what was left at the boundary, and the seal.

    HostFilling     copy() copies in the thread that calls it; until then nothing may change the tensors
    DeviceFilling   the device copies by itself (`ring.Drain`); copy() waits for it, changes wait on the device

Thread safety: `copy`, then `seal`, in one thread, once each; `let_change` in the main thread beside it.
Must not: raise for what a capture cannot help; it is then not whole, and nobody seals it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from nvrx_sre.checkpoint.ring import Drain
from nvrx_sre.checkpoint.slots import SlotFile, SlotHeader


def always() -> bool:
    """Nothing interrupts it."""
    return True


@dataclass(kw_only=True)
class Filling:
    """`copy`, then `seal`, once each; without both the slot holds nothing for anyone."""

    slot_file: SlotFile
    slot: int
    header: SlotHeader
    """Without its digest until the seal."""
    watched: Sequence[torch.Tensor]
    """Those that are left, which only a tracked optimizer changes: a DTensor and this rank's part of it, since a change
    through either moves the counter of that one alone."""
    versions: list[int]
    """Version counters at the boundary: one that moves is proof of a change, one that does not is none."""
    is_whole: bool = False
    """`copy` is done and nothing is known to have changed meanwhile."""
    counts: Callable[[], bool] = always
    """Whether what a device gathers counts: not once its generation is interrupted, since an abort frees kernels that
    then go on with whatever they have. What is in host memory is as the boundary found it."""

    def copy(self) -> None:
        """Copy what was left. Blocks for the copy, without the interpreter's lock."""
        raise NotImplementedError

    def seal(self) -> None:
        """Publish the slot. Only after a whole `copy`."""
        raise NotImplementedError

    def let_change(self) -> bool:
        """Called before a tracked optimizer steps. False: the caller must wait for `copy`."""
        raise NotImplementedError

    def _is_as_it_was(self) -> bool:
        return self.versions == [tensor._version for tensor in self.watched]


@dataclass(kw_only=True)
class HostFilling(Filling):
    """From host memory."""

    views: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]

    def copy(self) -> None:
        if self.tensors:
            with torch.no_grad():
                torch._foreach_copy_(list(self.views), list(self.tensors))
        self.is_whole = self._is_as_it_was()
        self.views = self.tensors = self.watched = ()

    def seal(self) -> None:
        """Blocks for the digest, about 23 GB/s."""
        assert self.is_whole
        digest = self.slot_file.digest(self.slot, self.header.data_bytes, self.header.blob_bytes)
        self.slot_file.seal(self.slot, replace(self.header, digest=digest))

    def let_change(self) -> bool:
        return False


@dataclass(kw_only=True)
class DeviceFilling(Filling):
    """From a device, on which all of it is queued."""

    drain: Drain
    _sums: bytes = b""
    _was_intact: list[bool] = field(default_factory=list)
    """Whether nothing had changed when the optimizer was let go on; empty until then."""

    def copy(self) -> None:
        self.drain.gathered.wait()
        counts = self.counts()
        self._sums = self.drain.wait()
        # Read in this order: what is let go on has its verdict before it changes anything.
        is_as_it_was = self._is_as_it_was()
        self.is_whole = counts and (is_as_it_was or self._was_intact == [True])
        self.watched = ()

    def seal(self) -> None:
        """Blocks for nothing: the device has made the sums."""
        assert self.is_whole
        digest = self.slot_file.digest_of_sums(self.slot, self._sums, self.header.blob_bytes)
        self.slot_file.seal(self.slot, replace(self.header, digest=digest, is_summed=True))

    def let_change(self) -> bool:
        """The device makes whatever is queued from here on wait until the tensors are gathered."""
        if not self._was_intact:
            self._was_intact.append(self._is_as_it_was())
            self.drain.gathered.hold_back()
        return True
