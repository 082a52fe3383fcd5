"""Memory for optimizer state that a restore makes: what the generation before left in this process, else fetched ahead.

    keep(tracked)       at a generation's end: the memory of its optimizers' state in host memory
    fetch_ahead(slots)  a process that has just become a rank: as much as its slots hold of optimizer state
    provide(tensor)     in a restore: `tensor`, new and unfilled, gets memory that is there already
    release()           after the restore: what nobody wanted goes back to the allocator

A page that the kernel must fetch, clear and map costs more than the copy into it (docs/adr/0023). A new process fetches
them while it joins its group and builds its model, in a thread (0030). Kept memory is handed out only while nobody else
refers to it, which torch counts; state of the old generation that something still holds therefore stays as it is, and
the new generation gets other memory.

Thread safety: main thread of the rank, between two generations. Must not: look at what is in the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from torch.distributed.tensor import DTensor

from nvrx_sre.checkpoint import pages
from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.checkpoint.capture import open_blob
from nvrx_sre.checkpoint.layout import ItemRole
from nvrx_sre.checkpoint.slots import SlotFile

KEPT_BYTES_MIN = 128 * 1024
"""Smaller blocks do not come from the kernel one by one: M_MMAP_THRESHOLD of mallopt(3)."""
_OURS = 1
"""Use count of a storage that only our own reference holds."""


class Spare:
    """Memory kept from one generation to the next."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[torch.UntypedStorage]] = {}
        self._ahead: Future[list[torch.UntypedStorage]] | None = None

    @torch.no_grad()
    def keep(self, tracked: Mapping[str, object]) -> None:
        """Hold on to the memory of the tracked optimizers' state, whatever becomes of the optimizers."""
        states = [state for _, optimizer in tracking.optimizers(tracked) for state in optimizer.state.values()]
        found = [_storage_of(value) for state in states if isinstance(state, dict) for value in state.values()]
        once = {storage.data_ptr(): storage for storage in found if storage is not None}
        self._add(list(once.values()))

    def fetch_ahead(self, slots: SlotFile | None) -> None:
        """Begin to fetch memory for the optimizer state in the newest of `slots`. Does not wait for it."""
        if slots is None:
            return
        sizes = _optimizer_sizes(slots)
        storages = [torch.empty(size_bytes, dtype=torch.uint8).untyped_storage() for size_bytes in sizes]
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nvrx-fetch")
        self._ahead = pool.submit(_fetch, storages)
        pool.shutdown(wait=False)

    def provide(self, tensor: torch.Tensor) -> None:
        """Put memory that is there already under `tensor`, whose content does not matter. Call under no_grad."""
        self.settle()
        local = _host_part(tensor)
        if local is None:
            return
        storage = self._take(local.numel() * local.element_size())
        if storage is None:
            _fetch([local.untyped_storage()])
        else:
            local.set_(storage, 0, local.shape, local.stride())

    def release(self) -> None:
        """Keep nothing any more. Waits for what is being fetched."""
        self.settle()
        self._by_size.clear()

    def settle(self) -> None:
        """Wait until what is fetched ahead is here; without it a restore would fetch as much itself."""
        if self._ahead is not None:
            self._add(self._ahead.result())
            self._ahead = None

    def _add(self, storages: Sequence[torch.UntypedStorage]) -> None:
        for storage in storages:
            self._by_size.setdefault(storage.nbytes(), []).append(storage)

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


def _optimizer_sizes(slots: SlotFile) -> list[int]:
    """Bytes of each big tensor of optimizer state in the newest sealed slot; none if it cannot be read.

    A damaged slot is the restore's to find: sizes beyond the slot's own are not believed.
    """
    sealed = [(header.step, slot, header) for slot, header in enumerate(slots.headers()) if header is not None]
    if not sealed:
        return []
    _, slot, header = max(sealed, key=lambda item: item[:2])
    if header.is_summed:
        return []  # the state is a device's
    try:
        layout, _ = open_blob(slots, slot, header)
    except ValueError:
        return []
    sizes = [item.size_bytes for item in layout.items if item.role is ItemRole.OPTIMIZER]
    return [size_bytes for size_bytes in sizes if size_bytes >= KEPT_BYTES_MIN]


def _fetch(storages: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """Have the pages of these mapped. Without memory for them it is left to whoever fills them."""
    for storage in storages:
        with suppress(OSError):
            pages.fetch(storage.data_ptr(), storage.nbytes())
    return storages
