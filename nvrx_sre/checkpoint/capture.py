"""A rank's state into a slot: part of it at the step boundary, the rest while the next step computes.

    refresh()    what is there now: layout (cached while nothing new appeared) and the blob
    begin(...)   at the boundary: blob, buffers and everything that a step may change early -> `Filling`
    Filling      copy()  parameters and state of the tracked optimizers, before any of them steps again
                 seal()  digest and header, at any time after that

Only tensors that a tracked optimizer alone changes are left to `copy`. With a `ring` (a rank on a device) everything
passes through the device: what may change early is copied there at the boundary, and the device does the rest by
itself. Without one everything is copied by the processor, and a frozen tensor once a slot: only an equal digest of its
bytes is proof that it did not change, since counters of versions are none (docs/adr/0013). A capture that is cut
short leaves an unsealed slot, which nothing restores.

Thread safety: `Capturer` in the main thread of the rank; a `Filling` in one thread at a time, beside it.
Must not: run a collective, change the state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nvrx_sre.checkpoint import supported
from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.checkpoint.filling import DeviceFilling, Filling, HostFilling
from nvrx_sre.checkpoint.fixed import Fixed
from nvrx_sre.checkpoint.kept import Kept, watched
from nvrx_sre.checkpoint.layout import ItemKind, ItemRole, Layout, LayoutItem, from_text, pack, text_hash
from nvrx_sre.checkpoint.ring import Gatherer, Ring
from nvrx_sre.checkpoint.routes import local_of
from nvrx_sre.checkpoint.slots import SlotFile, SlotHeader
from nvrx_sre.checkpoint.tracked import Source
from nvrx_sre.core.errors import InternalError, UserError

BLOB_BYTES_MIN = 64 * 1024
"""Smallest blob area. Small state grows (histories, positions), and new slots cost more than the room."""
FROZEN_BYTES_MIN = 64 * 1024
"""Smaller frozen tensors are copied each time: a copy costs less than looking."""
_BEFORE_LAYOUT, _BEFORE_STATE = '{"layout":', ',"state":'
"""A blob: one JSON object of these two, in this order, the layout in its canonical form."""


class Capturer:
    """Captures one generation's tracked objects. `tracked` is read anew at each `refresh`.

    `problems` says which sources it must refuse: by default those that a slot cannot hold at every step.
    """

    def __init__(
        self,
        tracked: Mapping[str, object],
        problems: Callable[[Iterable[Source]], list[str]] = supported.problems,
        ring: Ring | None = None,
    ) -> None:
        self._tracked = tracked
        self._ring = ring
        self._gatherer: Gatherer | None = None
        self._late_device = torch.device("cpu")
        self._problems = problems
        self._fixed = Fixed(tracked)
        self._kept: Kept | None = None
        self._sources: list[Source] = []
        self._is_late: list[bool] = []
        """Of each source: it is left to `Filling.copy`."""
        self._layout = Layout(())
        self._forms: list[tuple[torch.dtype, torch.Size]] = []
        """Of each fixed source when the layout was made: a module that is cast keeps its tensors and changes these."""
        self._blob: bytes | None = None
        self._slot_file: SlotFile | None = None
        self._views: dict[int, list[torch.Tensor]] = {}
        self._frozen = _Frozen()

    @property
    def layout(self) -> Layout:
        """Layout as of the last `refresh`."""
        return self._layout

    @property
    def layout_hash(self) -> str:
        """Hash of the layout as of the last `refresh`."""
        return self._layout.hash

    @property
    def ring(self) -> Ring | None:
        """What captures pass through on a device; None where the state, or most of it, is in host memory."""
        return None if self._gatherer is None else self._ring

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The tracked optimizers: none may step between `begin` and the end of `Filling.copy`."""
        return [optimizer for _, optimizer in tracking.optimizers(self._tracked)]

    @property
    def kept(self) -> Kept:
        """The newest state that `keep` was called for."""
        assert self._kept is not None
        return self._kept

    def keep(self) -> None:
        """No slot takes the state as it is now: keep of it what is cheap."""
        fixed = self._fixed.sources()
        if self._kept is None or self._kept.fixed is not fixed:
            self._kept = Kept(self._tracked, fixed)
        self._kept.keep()

    @torch.no_grad()
    def refresh(self, kept: Kept | None = None) -> None:
        """Look at the tracked objects as they are now: the next `begin` takes this small state.

        `kept`: what it holds is taken instead. Raises `UserError` for state that cannot be saved.
        """
        fixed = self._fixed.sources()
        sources = list(fixed) if kept is None else kept.put_in()
        scalars, groups = {}, {}
        trained: set[int] = set()
        for name, optimizer in tracking.optimizers(self._tracked):
            groups[name] = tracking.group_names(name, optimizer, self._fixed.names)
            found, scalars[name] = tracking.optimizer_sources(name, optimizer, self._fixed.names)
            sources += found
            trained.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        instead = (kept.random, kept.positions) if kept is not None else ()
        state, big = tracking.small_state(self._tracked, groups, scalars, *instead)
        sources += big
        forms = [(source.tensor.dtype, source.tensor.shape) for source in fixed]
        if forms != self._forms or not self._is_known(sources):
            self._set_layout(sources)
            self._forms = forms
            self._choose_road(sources)
        self._sources = sources
        self._is_late = [_is_late(source, trained, self._late_device) for source in sources]
        self._blob = f"{_BEFORE_LAYOUT}{self._layout.json}{_BEFORE_STATE}{json.dumps(state)}}}".encode()

    def required_bytes(self) -> tuple[int, int]:
        """(data, blob) bytes that a slot needs, with room for the blob to grow; stable while it fits that room."""
        blob_bytes = BLOB_BYTES_MIN
        while blob_bytes < len(self._blob or b"") * 5 // 4:
            blob_bytes *= 2
        return self._layout.data_bytes, blob_bytes

    def capture(
        self, slot_file: SlotFile, slot_index: int, generation: int, step: int, durable: bool, now_mono_ns: int
    ) -> None:
        """Fill and seal a slot with the state as it is now: `begin` and the rest of it at once."""
        filling = self.begin(
            slot_file, slot_index, generation=generation, step=step, durable=durable, now_mono_ns=now_mono_ns
        )
        filling.copy()
        filling.seal()

    @torch.no_grad()
    def begin(
        self, slot_file: SlotFile, slot_index: int, *, generation: int, step: int, durable: bool, now_mono_ns: int
    ) -> Filling:
        """Take everything that must be taken at the boundary. Blocks for that part of the copy.

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
        slot_file.begin(slot_index, generation, step, durable)
        slot_file.blob(slot_index)[: len(blob)] = blob
        header = SlotHeader(
            generation=generation,
            step=step,
            durable=durable,
            sealed_mono_ns=now_mono_ns,
            data_bytes=data_bytes,
            blob_bytes=len(blob),
            layout_hash=self._layout.hash,
            digest=bytes(16),
        )
        if self._gatherer is None:
            return self._begin_on_host(slot_file, slot_index, header)
        return self._begin_on_device(self._gatherer, slot_file, slot_index, header)

    def _begin_on_host(self, slot_file: SlotFile, slot_index: int, header: SlotHeader) -> HostFilling:
        views = self._views_of(slot_file, slot_index)
        late = self._copy_now(slot_index, views)
        tensors, versions = self._watch(late)
        return HostFilling(
            slot_file=slot_file,
            slot=slot_index,
            header=header,
            views=[views[index] for index in late],
            tensors=[local_of(self._sources[index].tensor) for index in late],
            watched=tensors,
            versions=versions,
        )

    def _begin_on_device(
        self, gatherer: Gatherer, slot_file: SlotFile, slot_index: int, header: SlotHeader
    ) -> DeviceFilling:
        tensors = [local_of(source.tensor) for source in self._sources]
        early = {index for index, is_late in enumerate(self._is_late) if not is_late}
        watching, versions = self._watch(index for index, is_late in enumerate(self._is_late) if is_late)
        drain = gatherer.begin(slot_file, slot_index, self._layout, tensors, early)
        return DeviceFilling(
            slot_file=slot_file, slot=slot_index, header=header, watched=watching, versions=versions, drain=drain
        )

    def _watch(self, late: Iterable[int]) -> tuple[list[torch.Tensor], list[int]]:
        """The tensors whose change would show, and their counters now."""
        tensors = watched(self._sources[index].tensor for index in late)
        return tensors, [tensor._version for tensor in tensors]

    def _copy_now(self, slot_index: int, views: list[torch.Tensor]) -> list[int]:
        """Copy what cannot wait; the indices of what can."""
        late, now = [], []
        for index, (source, is_late) in enumerate(zip(self._sources, self._is_late, strict=True)):
            if is_late:
                self._frozen.changes(index)
                late.append(index)
            elif not self._frozen.is_in_slot(source, index, slot_index):
                now.append(index)
        if now:
            torch._foreach_copy_(
                [views[index] for index in now], [local_of(self._sources[index].tensor) for index in now]
            )
        self._frozen.copied(slot_index, now)
        return late

    def _is_known(self, sources: list[Source]) -> bool:
        """True if no tensor appeared, vanished or was replaced by one of another form since the layout was made."""
        if len(sources) != len(self._sources):
            return False
        return all(_same_item(new, old) for new, old in zip(sources, self._sources, strict=True))

    def _set_layout(self, sources: list[Source]) -> None:
        supported.refuse(self._problems(sources))
        layout = pack([layout_item(source) for source in sources])
        if len(layout.by_fqn) != len(layout.items):
            raise UserError("two tracked tensors have one name: choose other names in track()")
        if layout.hash != self._layout.hash:
            self._forget_slots()
        self._layout = layout

    def _choose_road(self, sources: list[Source]) -> None:
        """Through the ring if most bytes are on its device: offloaded state would only take the longer way."""
        ring = self._ring
        if ring is None:
            return
        sizes = [
            (source.tensor.device, item.size_bytes) for source, item in zip(sources, self._layout.items, strict=True)
        ]
        on_device = sum(size_bytes for device, size_bytes in sizes if device == ring.device)
        is_on_device = 2 * on_device >= sum(size_bytes for _, size_bytes in sizes)
        if is_on_device and self._gatherer is None:
            self._gatherer = Gatherer(ring)
        elif not is_on_device:
            self._gatherer = None
        self._late_device = ring.device if is_on_device else torch.device("cpu")

    def _forget_slots(self) -> None:
        self._views = {}
        self._frozen = _Frozen()

    def _views_of(self, slot_file: SlotFile, slot_index: int) -> list[torch.Tensor]:
        if slot_file is not self._slot_file:
            self._slot_file = slot_file
            self._forget_slots()
        views = self._views.get(slot_index)
        if views is None:
            views = list(slot_views(slot_file, slot_index, self._layout).values())
            self._views[slot_index] = views
        return views


class _Frozen:
    """Which slots hold a frozen tensor already.

    A tensor that asks for no gradient may still change (an EMA copy does): its digest is compared at every
    capture, and one that differs once, or asks for a gradient once, is not looked at again.
    """

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}
        self._changing: set[int] = set()
        self._held: dict[int, set[int]] = {}

    def changes(self, index: int) -> None:
        """It is trained: what a slot once held says nothing about the slot any more."""
        self._changing.add(index)

    def is_in_slot(self, source: Source, index: int, slot: int) -> bool:
        """True if the slot holds these very bytes under this index."""
        if index in self._changing:
            return False
        if not _may_be_frozen(source):
            self.changes(index)
            return False
        digest = xxhash.xxh3_128_digest(local_of(source.tensor).reshape(-1).view(torch.uint8).numpy().data)
        if self._digests.setdefault(index, digest) != digest:
            self.changes(index)
            return False
        return index in self._held.get(slot, ())

    def copied(self, slot: int, indices: list[int]) -> None:
        """These were copied into the slot just now."""
        self._held.setdefault(slot, set()).update(index for index in indices if index in self._digests)


def _may_be_frozen(source: Source) -> bool:
    if source.role is not ItemRole.PARAMETER or source.tensor.requires_grad:
        return False
    local = local_of(source.tensor)
    is_big = local.numel() * local.element_size() >= FROZEN_BYTES_MIN
    return is_big and local.is_cpu and local.is_contiguous()


def _is_late(source: Source, trained: set[int], device: torch.device) -> bool:
    """True if only a step of a tracked optimizer changes the tensor, and it is where captures are copied from."""
    role, tensor = source.role, source.tensor
    is_trained = role is ItemRole.OPTIMIZER or (role is ItemRole.PARAMETER and id(tensor) in trained)
    return is_trained and tensor.device == device


def _same_item(new: Source, old: Source) -> bool:
    """True if both give the same layout item: one tensor, or a plain one that took the other's place."""
    if new is old or (new.tensor is old.tensor and new.fqn == old.fqn):
        return True
    if isinstance(new.tensor, DTensor) or isinstance(old.tensor, DTensor):
        return False
    same_form = new.tensor.shape == old.tensor.shape and new.tensor.dtype == old.tensor.dtype
    return same_form and new.fqn == old.fqn and new.tensor.requires_grad == old.tensor.requires_grad


def layout_item(source: Source) -> LayoutItem:
    """Layout item of a live tensor, not placed yet. The tensor is one that `supported.refusals` passes."""
    tensor = source.tensor
    local = local_of(tensor)
    kind, offset = ItemKind.TENSOR, (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        kind = ItemKind.SHARD
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
        aliases=source.aliases,
    )


def parse_blob(slot_file: SlotFile, slot: int, header: SlotHeader) -> tuple[Layout, dict[str, Any]]:
    """(layout, small state) of a sealed slot whose digest matches. Raises `ValueError` if it does not."""
    found = slot_file.digest(slot, header.data_bytes, header.blob_bytes, is_summed=header.is_summed)
    if found != header.digest:
        raise ValueError("its bytes do not match their digest")
    return open_blob(slot_file, slot, header)


def open_blob(slot_file: SlotFile, slot: int, header: SlotHeader) -> tuple[Layout, dict[str, Any]]:
    """(layout, small state) of a sealed slot. The layout is that of the header; the state is as good as the digest.

    Raises `ValueError` if the layout is another.
    """
    text = bytes(slot_file.blob(slot)[: header.blob_bytes]).decode()
    # No string inside a layout holds this, since its quotes would be escaped.
    head, _, tail = text.partition(_BEFORE_STATE)
    layout_text = head.removeprefix(_BEFORE_LAYOUT)
    if text_hash(layout_text) != header.layout_hash:
        raise ValueError("its layout is not the one it was sealed with")
    parsed = from_text(layout_text)
    if parsed.data_bytes > header.data_bytes:
        raise ValueError("its layout does not fit its data")
    state = json.loads(tail.removesuffix("}")) if tail.endswith("}") else None
    if not isinstance(state, dict):
        raise ValueError("it holds no small state")
    return parsed, state


def slot_views(slot_file: SlotFile, slot_index: int, layout: Layout) -> dict[str, torch.Tensor]:
    """fqn -> tensor over the slot's memory, no copy; each has a storage of exactly its own bytes."""
    data = slot_file.data(slot_index)
    return {item.fqn: view(data, item) for item in layout.items}


def view(data: memoryview, item: LayoutItem) -> torch.Tensor:
    """Tensor over the memory of one item, no copy. `data`: of its slot."""
    dtype = getattr(torch, item.dtype)
    count = item.size_bytes // dtype.itemsize
    if count == 0:  # frombuffer refuses an empty range
        return torch.empty(item.local_shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=item.offset_bytes).view(item.local_shape)
