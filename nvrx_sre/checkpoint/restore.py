"""A state that a rank may restore: a hot slot, or a durable checkpoint of any world size.

Two steps, so that ranks can agree between them:
    check()  reads and verifies this rank's part; `CheckpointCorrupt` if it is bad
    load()   the rest; cannot fail for reasons of data any more

A slot is verified and copied in one go: each block is hashed and goes into the tensors while the processor's cache
holds it, so that memory is read once (docs/adr/0030). Hence `check` of a slot writes to parameters and buffers before
it knows that they are good: `is_touched` says so. Whoever called it must then load this candidate or another one, which
overwrites all of it because only a complete state loads (`fit`), or give the tracked objects up. A slot that is not
what its digest says is emptied, so that nothing is ever filled from it again. A durable checkpoint is verified as a
whole before anything is written.

A checkpoint that is sound but does not fit the tracked objects is the user's matter (`UserError`), except in the hot
tier, where it only means that the slot belongs to another model or world.

Into another world size DCP's planner finds what each rank needs of which shard; `install` says what becomes of
small state. Neither step runs a collective. Thread safety: main thread of the rank.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nvrx_sre.checkpoint import manifest
from nvrx_sre.checkpoint.capture import open_blob, view
from nvrx_sre.checkpoint.dcp_metadata import StoredTensor, from_json, stored_tensors
from nvrx_sre.checkpoint.fit import Mismatch, check_fit, check_tensors
from nvrx_sre.checkpoint.install import SmallState, Targets, check_resharding, install
from nvrx_sre.checkpoint.layout import Layout
from nvrx_sre.checkpoint.manifest import Manifest
from nvrx_sre.checkpoint.reading import CheckpointFiles, Place
from nvrx_sre.checkpoint.replicas import replica_names
from nvrx_sre.checkpoint.ring import Ring, fill
from nvrx_sre.checkpoint.slots import SlotFile, SlotHeader
from nvrx_sre.checkpoint.spare import Spare
from nvrx_sre.checkpoint.tracked import Source
from nvrx_sre.core.errors import CheckpointCorrupt, UserError
from nvrx_sre.events.schema import RejectReason

CHUNK_BYTES = 1 << 20
"""What is hashed and then copied: fits the cache of a core beside its copy."""
Lap = Callable[[str], None]
"""Told the name of each part of the work when it ends."""


def untimed(_: str) -> None:
    """Nobody wants to know how long it took."""


class HotCandidate:
    """A hot slot that this rank may restore from. `values`: plain values, after `load`."""

    is_touched = False
    """`check` has begun to write to the tracked objects' tensors."""

    def __init__(
        self,
        slot_file: SlotFile | None,
        slot: int,
        step: int,
        layout_hash: str,
        tracked: Mapping[str, object],
        spare: Spare | None = None,
    ) -> None:
        self.lap: Lap = untimed
        self.ring: Ring | None = None
        """On a device: what the state passes through."""
        self._spare = spare or Spare()
        self._slot_file = slot_file
        self._slot = slot
        self._step = step
        self._layout_hash = layout_hash
        self._tracked = tracked
        self._layout = Layout(())
        self._targets: Targets | None = None
        self._small: SmallState | None = None
        self._filled: set[str] = set()
        self.values: dict[str, Any] = {}

    @torch.no_grad()
    def check(self) -> None:
        """Raise `CheckpointCorrupt` if the slot is not that state any more; fill all that is host memory.

        Reads the whole slot. Writes nothing before names, types, shapes and sharding of all tensors are found to fit.
        """
        slot_file, header = self._slot_file, self._header()
        assert slot_file is not None
        try:
            layout, state = open_blob(slot_file, self._slot, header)
            stored = {item.fqn: StoredTensor(item.dtype, item.global_shape) for item in layout.items}
            self._targets = Targets(self._tracked, stored, self._spare)
            check_tensors(self._targets.sources, stored)
            _check_sharding(self._targets.sources, layout)
            self.lap("plan")
            self._fill(slot_file, header, layout)
            check_fit(self._tracked, self._targets.sources, stored, state)
        except ValueError as error:
            raise self._corrupt(RejectReason.DIGEST, f"slot {self._slot}: {error}") from error
        except Mismatch as error:
            raise self._corrupt(RejectReason.LAYOUT, str(error)) from error
        self._small = SmallState(own=state, rank=0, world_size=1)
        self._targets.add_big(self._small)
        self._layout = layout
        self.lap("plan")

    def _fill(self, slot_file: SlotFile, header: SlotHeader, layout: Layout) -> None:
        """Hash the slot and fill the targets on the way. Empties the slot and raises `ValueError` if it is damaged."""
        assert self._targets is not None
        self.is_touched = True
        if header.is_summed:
            assert self.ring is not None  # the rank that captured was on a device, and so is this one
            digest, self._filled = fill(self.ring, slot_file, self._slot, header, layout, self._targets.all())
        else:
            digest, self._filled = _digest_while_filling(slot_file, self._slot, header, layout, self._targets.all())
        self.lap("fill")
        if digest != header.digest:
            slot_file.begin(self._slot, header.generation, header.step, header.durable)
            raise ValueError("its bytes do not match their digest")

    @torch.no_grad()
    def load(self) -> None:
        """Copy what `check` left, install the rest of the state. Only after `check`."""
        assert self._targets is not None and self._small is not None
        for key, tensor in self._targets.all().items():
            if key not in self._filled:
                _local(tensor).copy_(self._stored(key))
        self.values = install(self._tracked, self._targets, self._small)
        self.lap("install")

    def replicas(self) -> dict[str, str]:
        """Digests of what other ranks must hold as well, by the name it has on all of them. Only after `check`."""
        assert self._targets is not None
        return {
            name: xxhash.xxh3_64_hexdigest(self._stored(fqn).reshape(-1).view(torch.uint8).numpy().data)
            for name, fqn in replica_names(self._tracked, self._targets.sources).items()
            if self._layout.by_fqn[fqn].size_bytes
        }

    def _stored(self, fqn: str) -> torch.Tensor:
        assert self._slot_file is not None
        return view(self._slot_file.data(self._slot), self._layout.by_fqn[fqn])

    def _header(self) -> SlotHeader:
        if self._slot_file is None:
            raise self._corrupt(RejectReason.UNREADABLE, "this rank has no hot slots")
        header = self._slot_file.header(self._slot)
        if header is None or header.step != self._step:
            raise self._corrupt(RejectReason.UNREADABLE, f"slot {self._slot} no longer holds it")
        if header.layout_hash != self._layout_hash:
            raise self._corrupt(RejectReason.LAYOUT, f"slot {self._slot} was sealed with another layout")
        return header

    def _corrupt(self, reason: RejectReason, message: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"hot state of step {self._step} is not usable: {message}", reason=reason.value)


class DurableCandidate:
    """A durable checkpoint that this rank may restore from. `values`: plain values, after `load`."""

    is_touched = False
    """Nothing is written before all of it was verified, on every rank."""

    def __init__(
        self,
        directory: Path,
        run: str,
        rank: int,
        world_size: int,
        tracked: Mapping[str, object],
        spare: Spare | None = None,
    ) -> None:
        self.lap: Lap = untimed
        self._spare = spare or Spare()
        self._directory = directory
        self._run = run
        self._rank = rank
        self._world_size = world_size
        self._tracked = tracked
        self._files: CheckpointFiles | None = None
        self._small: SmallState | None = None
        self._targets: Targets | None = None
        self._plan: Plan | None = None
        self.values: dict[str, Any] = {}

    @torch.no_grad()
    def check(self) -> None:
        """Read what this rank needs and its share of the files, which all ranks cover between them.

        Raises `CheckpointCorrupt` if it is damaged, `UserError` if it is of another model than what is tracked, or
        something tracked cannot go into this world size. Blocks for the disk.
        """
        described = manifest.verify(self._directory, deep=False, run=self._run)
        self._files = CheckpointFiles(self._directory, described, self._rank, self._world_size)
        self.lap("describe")
        visible = self._visible(described)
        self._files.share(meanwhile=lambda: self._make_targets(visible))
        self.lap("read")
        self._small = self._read_small(described)
        self._check_fit(visible)
        assert self._targets is not None  # made while the disk worked
        self._targets.add_big(self._small)
        self._plan = Plan(self._targets.all(), described, self._own_keys(described))
        self._plan.read(self._files)
        self.lap("plan")

    @torch.no_grad()
    def load(self) -> None:
        """Copy this rank's shards into the tracked objects. Only after `check` passed on every rank."""
        assert self._plan is not None and self._files is not None
        assert self._targets is not None and self._small is not None
        self._plan.copy()
        self._files.release()
        self.lap("copy")
        self.values = install(self._tracked, self._targets, self._small)
        self.lap("install")

    def replicas(self) -> dict[str, str]:
        """Nothing to compare: what is common to ranks is stored once and read by all."""
        return {}

    def _make_targets(self, visible: Mapping[str, StoredTensor]) -> None:
        """Most of the work is the kernel's, which fetches memory."""
        with self._fitting():
            self._targets = Targets(self._tracked, visible, self._spare)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            yield
        except Mismatch as error:
            raise UserError(
                f"checkpoint {self._directory.name} does not fit this script's state: {error}; "
                "use the model and track() names it was saved with, or another run directory"
            ) from error

    def _check_fit(self, visible: Mapping[str, StoredTensor]) -> None:
        assert self._small is not None and self._targets is not None
        with self._fitting():
            check_tensors(self._targets.sources, visible)
            check_fit(self._tracked, self._targets.sources, visible, self._small.own)
        if self._small.saved:
            check_resharding(self._tracked, self._small)

    def _read_small(self, described: Manifest) -> SmallState:
        """Small state of this rank; of all ranks where the world is another."""
        num_saved = described.world_size
        own = self._rank_state(described, self._rank % num_saved)
        if num_saved == self._world_size:
            return SmallState(own=own, rank=self._rank, world_size=self._world_size)
        stored = stored_tensors(described.dcp)
        return SmallState(
            own=own,
            rank=self._rank,
            world_size=self._world_size,
            saved=[self._rank_state(described, rank) for rank in range(num_saved)],
            own_copies={key: tensor for key, tensor in stored.items() if manifest.is_own_key(key)},
        )

    def _rank_state(self, described: Manifest, saved_rank: int) -> dict[str, Any]:
        assert self._files is not None
        name = manifest.rank_file_name(saved_rank)
        if name not in described.files:
            raise CheckpointCorrupt(
                f"checkpoint {self._directory.name} is not usable: it has no {name}",
                reason=RejectReason.MISSING_FILE.value,
            )
        state: dict[str, Any] = json.loads(bytes(self._files.content(name)))["state"]
        return state

    def _own_keys(self, described: Manifest) -> dict[str, str]:
        """Key -> this rank's own copy of it, where the old world had this rank and it had one."""
        suffix = manifest.own_key("", self._rank)
        return {key.removesuffix(suffix): key for key in described.dcp["tensors"] if key.endswith(suffix)}

    def _visible(self, described: Manifest) -> dict[str, StoredTensor]:
        """Stored tensors as this rank sees them: under plain keys, its own copies instead of the common ones."""
        stored = stored_tensors(described.dcp)
        visible = {key: tensor for key, tensor in stored.items() if not manifest.is_own_key(key)}
        visible.update({key: stored[own] for key, own in self._own_keys(described).items()})
        return visible


class Plan:
    """Which part of which stored piece goes where: planned by DCP, read and copied here."""

    def __init__(self, targets: Mapping[str, torch.Tensor], described: Manifest, own_keys: Mapping[str, str]) -> None:
        renamed: dict[str, Any] = {own_keys.get(key, key): tensor for key, tensor in targets.items()}
        metadata = from_json(described.dcp)
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(renamed, metadata, is_coordinator=True)
        plan: LoadPlan = self._planner.create_global_plan([self._planner.create_local_plan()])[0]
        self._places = {
            (key, None if offset is None else tuple(offset)): Place(file, position, length, digest)
            for key, offset, file, position, length, digest in described.dcp["items"]
        }
        self._shapes = {
            (key, tuple(chunk.offsets)): tuple(chunk.sizes)
            for key, stored in metadata.state_dict_metadata.items()
            for chunk in getattr(stored, "chunks", ())
        }
        self._dtypes = {key: getattr(torch, stored["dtype"]) for key, stored in described.dcp["tensors"].items()}
        self._reads: list[ReadItem] = self._planner.finish_plan(plan).items
        self._found: dict[Place, memoryview] = {}

    def read(self, files: CheckpointFiles) -> None:
        """Fetch every piece. Raises `CheckpointCorrupt`."""
        self._found = files.pieces(self._place(read) for read in self._reads)

    def copy(self) -> None:
        """Fill the targets."""
        for read in self._reads:
            piece = self._piece(read)
            for dimension, (start, length) in enumerate(zip(read.storage_offsets, read.lengths, strict=True)):
                piece = piece.narrow(dimension, start, length)
            target = self._planner.resolve_tensor(read).detach()
            target.copy_(piece)
            self._planner.commit_tensor(read, target)
        self._found = {}

    def _place(self, read: ReadItem) -> Place:
        index = read.storage_index
        return self._places[index.fqn, None if index.offset is None else tuple(index.offset)]

    def _piece(self, read: ReadItem) -> torch.Tensor:
        index = read.storage_index
        offset = tuple(index.offset) if index.offset is not None else ()
        shape, dtype = self._shapes[index.fqn, offset], self._dtypes[index.fqn]
        return tensor_over(self._found[self._place(read)], dtype).view(shape)


def tensor_over(content: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """1-D tensor over these bytes, no copy."""
    if not len(content):  # frombuffer refuses an empty range
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype)


def _digest_while_filling(
    slot_file: SlotFile, slot: int, header: SlotHeader, layout: Layout, targets: Mapping[str, torch.Tensor]
) -> tuple[bytes, set[str]]:
    """(digest of the slot, keys of `targets` that were filled on the way)."""
    data = slot_file.data(slot)
    state = xxhash.xxh3_128()
    hashed_bytes = 0
    filled = set()
    for item in layout.items:
        memory = _memory(targets.get(item.fqn), item.size_bytes)
        if memory is None:
            continue
        state.update(data[hashed_bytes : item.offset_bytes])
        hashed_bytes = item.offset_bytes + item.size_bytes
        for start in range(item.offset_bytes, hashed_bytes, CHUNK_BYTES):
            chunk = data[start : min(start + CHUNK_BYTES, hashed_bytes)]
            state.update(chunk)
            memory[start - item.offset_bytes :][: len(chunk)] = chunk
        filled.add(item.fqn)
    state.update(data[hashed_bytes : header.data_bytes])
    state.update(slot_file.blob(slot)[: header.blob_bytes])
    return state.digest(), filled


def _memory(tensor: torch.Tensor | None, size_bytes: int) -> memoryview | None:
    """Memory of a tensor, where it is one piece of host memory of this size."""
    if tensor is None:
        return None
    local = _local(tensor)
    if not local.is_cpu or not local.is_contiguous() or local.numel() * local.element_size() != size_bytes:
        return None
    if not size_bytes:
        return None
    # Not by way of `numpy()`, after which torch takes the memory for that of somebody else (`Spare` then leaves it).
    return memoryview((ctypes.c_char * size_bytes).from_address(local.data_ptr())).cast("B")


def _check_sharding(sources: Iterable[Source], layout: Layout) -> None:
    """Raise `Mismatch` unless every tensor is sharded as in the slot."""
    known: dict[Any, tuple[int, ...]] = {}
    for source in sources:
        tensor, saved = source.tensor, layout.by_fqn[source.fqn]
        offset = (0,) * tensor.dim()
        if isinstance(tensor, DTensor):
            form = (tensor.shape, tensor.device_mesh, tensor.placements)  # the same for many
            if form not in known:
                known[form] = compute_local_shape_and_global_offset(*form)[1]
            offset = tuple(known[form])
        if (tuple(_local(tensor).shape), offset) != (saved.local_shape, saved.global_offset):
            raise Mismatch(f"{source.fqn} is sharded differently")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
