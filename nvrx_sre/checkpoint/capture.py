"""A rank's state into a slot, synchronously, at a step boundary.

    refresh()          what is there now: layout (cached while nothing new appeared) and the blob
    required_bytes()   what a slot must hold for it
    capture(...)       begin -> copy -> blob -> digest -> seal

The cost is the copy (memory bandwidth) and the digest (23 GB/s); sources and destinations are found once and
kept. Optimizer state that comes into being later, or is replaced, gives a new layout by itself. A capture
that is cut short leaves an unsealed slot, which nothing restores.

Thread safety: main thread of the rank only. Must not: run a collective, change the state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.checkpoint.layout import ItemKind, Layout, LayoutItem, from_json, pack
from nvrx_sre.checkpoint.slots import NUM_SLOTS, SlotFile, SlotHeader
from nvrx_sre.checkpoint.tracked import Source
from nvrx_sre.core.errors import InternalError, UserError

BLOB_BYTES_MIN = 64 * 1024
"""Smallest blob area. Small state grows (histories, positions), and new slots cost more than the room."""


class Capturer:
    """Captures one generation's tracked objects. `tracked` is read anew at each `refresh`."""

    def __init__(self, tracked: Mapping[str, object]) -> None:
        self._tracked = tracked
        self._fixed: list[Source] | None = None
        self._names: dict[torch.Tensor, str] = {}
        self._groups: dict[str, list[list[str]]] = {}
        self._sources: list[Source] = []
        self._layout = Layout(())
        self._blob: bytes | None = None
        self._slot_file: SlotFile | None = None
        self._views: list[list[torch.Tensor] | None] = [None] * NUM_SLOTS

    @property
    def layout(self) -> Layout:
        """Layout as of the last `refresh`."""
        return self._layout

    @property
    def layout_hash(self) -> str:
        """Hash of the layout as of the last `refresh`."""
        return self._layout.hash

    def build_layout(self) -> Layout:
        """`refresh`, then the layout."""
        self.refresh()
        return self._layout

    @torch.no_grad()
    def refresh(self) -> None:
        """Look at the tracked objects as they are now: the next `capture` takes this small state.

        Raises `UserError` for state that cannot be saved.
        """
        if self._fixed is None:
            self._fixed = tracking.fixed_sources(self._tracked)
            self._names = tracking.parameter_names(self._tracked)
        sources = list(self._fixed)
        scalars = {}
        for name, optimizer in tracking.optimizers(self._tracked):
            if len(self._groups.get(name, ())) != len(optimizer.param_groups):
                self._groups[name] = tracking.group_names(name, optimizer, self._names)
            found, scalars[name] = tracking.optimizer_sources(name, optimizer, self._names)
            sources += found
        state, big = tracking.small_state(self._tracked, self._groups, scalars)
        sources += big
        if not self._is_known(sources):
            self._set_layout(sources)
        self._sources = sources
        self._blob = f'{{"layout":{self._layout.json},"state":{json.dumps(state)}}}'.encode()

    def required_bytes(self) -> tuple[int, int]:
        """(data, blob) bytes that a slot needs, with room for the blob to grow; stable while it fits that room."""
        blob_bytes = BLOB_BYTES_MIN
        while blob_bytes < len(self._blob or b"") * 5 // 4:
            blob_bytes *= 2
        return self._layout.data_bytes, blob_bytes

    @torch.no_grad()
    def capture(
        self, slot_file: SlotFile, slot_index: int, generation: int, step: int, durable: bool, now_mono_ns: int
    ) -> None:
        """Fill and seal a slot with the state as it is now. Blocks for the copy.

        Refreshes first unless the caller just did. Raises `InternalError` if the slot is smaller than
        `required_bytes()`; the slot is then untouched.
        """
        if self._blob is None:
            self.refresh()
        blob, self._blob = self._blob, None
        assert blob is not None
        data_bytes = self._layout.data_bytes
        if data_bytes > slot_file.data_bytes or len(blob) > slot_file.blob_bytes:
            raise InternalError(
                f"a slot of {slot_file.data_bytes} + {slot_file.blob_bytes} bytes cannot take "
                f"{data_bytes} + {len(blob)} bytes"
            )
        views = self._views_of(slot_file, slot_index)
        slot_file.begin(slot_index, generation, step, durable)
        torch._foreach_copy_(views, [_local(source.tensor) for source in self._sources])
        slot_file.blob(slot_index)[: len(blob)] = blob
        header = SlotHeader(
            generation=generation,
            step=step,
            durable=durable,
            sealed_mono_ns=now_mono_ns,
            data_bytes=data_bytes,
            blob_bytes=len(blob),
            layout_hash=self._layout.hash,
            digest=slot_file.digest(slot_index, data_bytes, len(blob)),
        )
        slot_file.seal(slot_index, header)

    def _is_known(self, sources: list[Source]) -> bool:
        """True if no tensor appeared, vanished or changed its shape since the layout was made."""
        if len(sources) != len(self._sources):
            return False
        return all(_same_item(new, old) for new, old in zip(sources, self._sources, strict=True))

    def _set_layout(self, sources: list[Source]) -> None:
        layout = pack([layout_item(source) for source in sources])
        if len(layout.by_fqn) != len(layout.items):
            raise UserError("two tracked tensors have one name: choose other names in track()")
        if layout.hash != self._layout.hash:
            self._views = [None] * NUM_SLOTS
        self._layout = layout

    def _views_of(self, slot_file: SlotFile, slot_index: int) -> list[torch.Tensor]:
        if slot_file is not self._slot_file:
            self._slot_file = slot_file
            self._views = [None] * NUM_SLOTS
        views = self._views[slot_index]
        if views is None:
            views = list(slot_views(slot_file, slot_index, self._layout).values())
            self._views[slot_index] = views
        return views


def _same_item(new: Source, old: Source) -> bool:
    """True if both give the same layout item: one tensor, or a plain one that took the other's place."""
    if new is old or (new.tensor is old.tensor and new.fqn == old.fqn):
        return True
    if isinstance(new.tensor, DTensor) or isinstance(old.tensor, DTensor):
        return False
    same_form = new.tensor.shape == old.tensor.shape and new.tensor.dtype == old.tensor.dtype
    return same_form and new.fqn == old.fqn and new.tensor.requires_grad == old.tensor.requires_grad


def layout_item(source: Source) -> LayoutItem:
    """Layout item of a live tensor, not placed yet. Raises `UserError` for placements that cannot be saved."""
    tensor = source.tensor
    local = _local(tensor)
    kind, offset = ItemKind.TENSOR, (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        kind = ItemKind.SHARD
        if any(placement.is_partial() for placement in tensor.placements):
            raise UserError(f"{source.fqn} is a partial sum over ranks, which cannot be saved: reduce it first")
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if tuple(shape) != tuple(local.shape):
            raise UserError(f"{source.fqn} has local shape {tuple(local.shape)} where its placement says {shape}")
    return LayoutItem(
        fqn=source.fqn,
        kind=kind,
        role=source.role,
        dtype=str(tensor.dtype).removeprefix("torch."),
        local_shape=tuple(local.shape),
        global_offset=tuple(offset),
        global_shape=tuple(tensor.shape),
        offset_bytes=0,
        size_bytes=local.numel() * local.element_size(),
        requires_grad=tensor.requires_grad,
    )


def parse_blob(slot_file: SlotFile, slot: int, header: SlotHeader) -> tuple[Layout, dict[str, Any]]:
    """(layout, small state) of a sealed slot whose digest matches. Raises `ValueError` if it does not."""
    if slot_file.digest(slot, header.data_bytes, header.blob_bytes) != header.digest:
        raise ValueError("its bytes do not match their digest")
    blob = json.loads(bytes(slot_file.blob(slot)[: header.blob_bytes]))
    parsed = from_json(blob["layout"])
    if parsed.hash != header.layout_hash or parsed.data_bytes > header.data_bytes:
        raise ValueError("its layout is not the one it was sealed with")
    return parsed, blob["state"]


def slot_views(slot_file: SlotFile, slot_index: int, layout: Layout) -> dict[str, torch.Tensor]:
    """fqn -> tensor over the slot's memory, no copy; each has a storage of exactly its own bytes."""
    data = slot_file.data(slot_index)
    return {item.fqn: _view(data, item) for item in layout.items}


def _view(data: memoryview, item: LayoutItem) -> torch.Tensor:
    dtype = getattr(torch, item.dtype)
    count = item.size_bytes // dtype.itemsize
    if count == 0:  # frombuffer refuses an empty range
        return torch.empty(item.local_shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=item.offset_bytes).view(item.local_shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part. Call under no_grad: the local tensor itself then, not a view of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
