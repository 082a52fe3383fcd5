"""Memory for optimizer state that a restore makes: what the generation before left in this process, else fetched ahead.

    keep(tracked)    at a generation's end: the memory of its optimizers' state in host memory
    provide(tensor)  in a restore: `tensor`, new and unfilled, gets memory that is there already
    release()        after the restore: what nobody wanted goes back to the allocator

A page that the kernel must fetch, clear and map costs more than the copy into it (docs/adr/0023). Kept memory is handed
out only while nobody else refers to it, which torch counts; state of the old generation that something still holds
therefore stays as it is, and the new generation gets other memory.

Thread safety: main thread of the rank, between two generations. Must not: look at what is in the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from nvrx_sre.checkpoint import pages
from nvrx_sre.checkpoint import tracked as tracking

KEPT_BYTES_MIN = 128 * 1024
"""Smaller blocks do not come from the kernel one by one: M_MMAP_THRESHOLD of mallopt(3)."""
_OURS = 1
"""Use count of a storage that only our own reference holds."""


class Spare:
    """Memory kept from one generation to the next."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[torch.UntypedStorage]] = {}

    @torch.no_grad()
    def keep(self, tracked: Mapping[str, object]) -> None:
        """Hold on to the memory of the tracked optimizers' state, whatever becomes of the optimizers."""
        states = [state for _, optimizer in tracking.optimizers(tracked) for state in optimizer.state.values()]
        found = [_storage_of(value) for state in states if isinstance(state, dict) for value in state.values()]
        once = {storage.data_ptr(): storage for storage in found if storage is not None}
        for storage in once.values():
            self._by_size.setdefault(storage.nbytes(), []).append(storage)

    def provide(self, tensor: torch.Tensor) -> None:
        """Put memory that is there already under `tensor`, whose content does not matter. Call under no_grad."""
        local = _host_part(tensor)
        if local is None:
            return
        storage = self._take(local.numel() * local.element_size())
        if storage is None:
            pages.fetch(local.data_ptr(), local.numel() * local.element_size())
        else:
            local.set_(storage, 0, local.shape, local.stride())

    def release(self) -> None:
        """Keep nothing any more."""
        self._by_size.clear()

    def _take(self, size_bytes: int) -> torch.UntypedStorage | None:
        kept = self._by_size.get(size_bytes, [])
        while kept:
            storage = kept.pop()
            # A tensor anywhere shows in the first count, another holder of this object in the second (two are ours).
            if torch._C._storage_Use_Count(storage._cdata) == _OURS and sys.getrefcount(storage) <= 2:
                return storage
        return None


def _storage_of(value: object) -> torch.UntypedStorage | None:
    """Memory that is of one tensor in host memory, of this process alone and the allocator's own."""
    local = _host_part(value) if isinstance(value, torch.Tensor) else None
    if local is None:
        return None
    storage = local.untyped_storage()
    is_own = storage.resizable() and not storage.is_shared()
    return storage if is_own and storage.nbytes() == local.numel() * local.element_size() else None


def _host_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's part, where it is a big piece of host memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_plain = type(local) is torch.Tensor and local.is_cpu and local.is_contiguous()
    return local if is_plain and local.numel() * local.element_size() >= KEPT_BYTES_MIN else None
