"""Sealed slots of all ranks into one committed DCP checkpoint, without a process group.

    read      header, digest and layout of each rank's slot; nothing is trusted before the digest matched
    scan      a state with NaN, or with infinities in what is trained, is never committed
    write     `.tmp-...`: DCP files by hand-built plans, rank-0000N.json, all synced, checksums on the way
    commit    manifest, sync, not fenced, not superseded, one rename, sync
    verify    drop the page cache, read back, compare

Keys are those of `tracked`. A plain tensor is stored once, from the lowest rank; a rank whose bytes differ
keeps its own copy under `<key>@rank-0000N`, so that a restore into the same world is exact.

Process safety: one writer a node and a run; slots are held by the launcher while this reads them, and the
headers are compared again before the commit. Blocking throughout: runs in the writer process.
Must not: run a collective, delete anything but its own temporary directory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from nvrx_sre.checkpoint import dcp_metadata, discover, manifest
from nvrx_sre.checkpoint.agree import is_abandoned
from nvrx_sre.checkpoint.capture import parse_blob, slot_views
from nvrx_sre.checkpoint.layout import ItemKind, ItemRole, Layout, LayoutItem
from nvrx_sre.checkpoint.manifest import Manifest
from nvrx_sre.checkpoint.slots import SlotFile, SlotHeader
from nvrx_sre.checkpoint.storage import ChecksumFileSystem, WriteOptions
from nvrx_sre.core.atomic import fsync_directory, make_private_directory
from nvrx_sre.core.errors import CheckpointCorrupt, NvrxError, StorageError
from nvrx_sre.core.ids import random_hex
from nvrx_sre.events.schema import SaveFailure


class SaveRefused(NvrxError):
    """The save must not commit. `reason` is a `schema.SaveFailure`."""

    code = "save_refused"

    def __init__(self, message: str, *, reason: SaveFailure) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """What to write. `captured_ns` is wall time."""

    run: str
    step: int
    epoch: int
    generation: int
    captured_ns: int


@dataclass(frozen=True)
class RankState:
    """One rank's sealed slot, checked: tensors are views of the slot, `state` is its small state."""

    slot_file: SlotFile
    slot: int
    header: SlotHeader
    layout: Layout
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Plans:
    """Merged plans of all ranks. `sources[rank]`: key -> item of that rank's layout."""

    save_plans: list[SavePlan]
    metadata: Metadata
    sources: list[dict[str, LayoutItem]]


class PlanCache:
    """The newest merged plans. Layouts rarely change, and merging costs milliseconds a save."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._plans: Plans | None = None

    def plans_for(self, ranks: Sequence[RankState]) -> Plans:
        """Plans for these layouts and this set of differing plain tensors."""
        differing = _differing(ranks)
        key = (tuple(rank.header.layout_hash for rank in ranks), frozenset(differing))
        if self._plans is None or key != self._key:
            self._plans = _merge([rank.layout for rank in ranks], differing)
            self._key = key
        return self._plans


def read_slots(slot_files: Sequence[SlotFile], slots: Sequence[int], request: SaveRequest) -> list[RankState]:
    """Check and open the slot of each rank. Raises `SaveRefused` if one is not what was asked for."""
    return [
        _read_slot(rank, slot_file, slot, request)
        for rank, (slot_file, slot) in enumerate(zip(slot_files, slots, strict=True))
    ]


def _read_slot(rank: int, slot_file: SlotFile, slot: int, request: SaveRequest) -> RankState:
    header = slot_file.header(slot)
    if header is None or (header.step, header.generation) != (request.step, request.generation):
        raise SaveRefused(
            f"slot {slot} of rank {rank} does not hold step {request.step} of generation {request.generation}",
            reason=SaveFailure.INTERRUPTED,
        )
    try:
        parsed, state = parse_blob(slot_file, slot, header)
    except ValueError as error:
        raise SaveRefused(f"slot {slot} of rank {rank}: {error}", reason=SaveFailure.VERIFY) from error
    return RankState(slot_file, slot, header, parsed, state, slot_views(slot_file, slot, parsed))


def check_finite(ranks: Sequence[RankState]) -> None:
    """Raise `SaveRefused` (nonfinite) naming the first tensor that must not be saved.

    NaN is refused anywhere. Infinities are refused in trained parameters and optimizer state; buffers may
    hold them by design (attention masks).
    """
    for index, rank in enumerate(ranks):
        for item in rank.layout.items:
            tensor = rank.tensors[item.fqn]
            if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            trained = item.requires_grad or item.role is ItemRole.OPTIMIZER
            if not _is_sound(tensor, trained):
                raise SaveRefused(
                    f"{item.fqn} on rank {index} is not finite at step {rank.header.step}",
                    reason=SaveFailure.NONFINITE,
                )


def _is_sound(tensor: torch.Tensor, finite: bool) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype.itemsize == 1:  # float8 has no reductions
        tensor = tensor.to(torch.float32)
    low, high = torch.aminmax(tensor)  # one pass without a temporary; both are NaN if any element is
    if finite:
        return bool(torch.isfinite(low) & torch.isfinite(high))
    return not bool(torch.isnan(low))


def write_files(
    temporary: Path, request: SaveRequest, ranks: Sequence[RankState], plans: Plans, options: WriteOptions
) -> Manifest:
    """All files of the save into the new directory `temporary`, synced, and the manifest that describes them.

    Raises `StorageError`. The manifest is returned, not written: `commit` does that.
    """
    files = ChecksumFileSystem(options)
    try:
        temporary.mkdir(mode=0o700)
        results = _write_tensors(temporary, ranks, plans, files)
        for index, rank in enumerate(ranks):
            content = {"rank": index, "layout": json.loads(rank.layout.json), "state": rank.state}
            files.write_file(temporary / manifest.rank_file_name(index), json.dumps(content).encode())
    except (OSError, RuntimeError) as error:
        # Below torch's C++ writer an OSError arrives as a RuntimeError; anything else is a bug and goes on.
        cause = error if isinstance(error, OSError) else files.error
        if cause is None:
            raise
        raise StorageError(f"cannot write {temporary}: {cause.strerror or cause}") from error
    return Manifest(
        run=request.run,
        step=request.step,
        epoch=request.epoch,
        generation=request.generation,
        world_size=len(ranks),
        captured_ns=request.captured_ns,
        layout_hashes=[rank.header.layout_hash for rank in ranks],
        torch_version=torch.__version__,
        files=dict(sorted(files.sums.items())),
        dcp=dcp_metadata.to_json(plans.metadata, results),
    )


def temporary_path(run_dir: Path, request: SaveRequest) -> Path:
    """A new name for an attempt. Raises `StorageError` if `checkpoints/` cannot be made."""
    root = discover.checkpoints_path(run_dir)
    try:
        make_private_directory(root)
    except OSError as error:
        raise StorageError(f"cannot create {root}: {error.strerror}") from error
    name = manifest.directory_name(request.step, request.generation)
    return root / f"{discover.TEMPORARY_PREFIX}{name}-{os.getpid()}-{random_hex(4)}"


def commit(run_dir: Path, temporary: Path, described: Manifest, ranks: Sequence[RankState]) -> Path:
    """Publish `temporary` under its final name; the new path. Durable when it returns.

    A commit of this step and generation that is already there and good is kept. Raises `SaveRefused` if the
    line was abandoned, the launcher superseded or a slot changed meanwhile, `StorageError` otherwise.
    """
    manifest.write(temporary, described)
    final = temporary.with_name(manifest.directory_name(described.step, described.generation))
    check_current(run_dir, described, ranks)
    try:
        if final.exists():
            if _is_good(final, described.run):
                shutil.rmtree(temporary)
                return final
            discover.move_aside(run_dir, final.name, "replaced")
        os.rename(temporary, final)
        fsync_directory(final.parent)
    except OSError as error:
        raise StorageError(f"cannot commit {final}: {error.strerror or error}") from error
    return final


def check_current(run_dir: Path, described: Manifest, ranks: Sequence[RankState]) -> None:
    """Raise `SaveRefused` unless the save still belongs to the run's line and its slots are untouched."""
    epoch = discover.highest_epoch(run_dir)
    if epoch > described.epoch:
        raise SaveRefused(f"epoch {epoch} has taken over the run", reason=SaveFailure.ABANDONED_LINE)
    if is_abandoned(discover.read_fences(run_dir), described.generation, described.step):
        raise SaveRefused(
            f"step {described.step} of generation {described.generation} was abandoned by a rollback",
            reason=SaveFailure.ABANDONED_LINE,
        )
    for index, rank in enumerate(ranks):
        if rank.slot_file.header(rank.slot) != rank.header:
            raise SaveRefused(f"the slot of rank {index} changed during the save", reason=SaveFailure.INTERRUPTED)


def verify_committed(run_dir: Path, directory: Path, run: str) -> Manifest:
    """Read a commit back from the disk and compare every checksum.

    Damage moves the directory out of discovery at once. Raises `SaveRefused` (verify) or `StorageError`.
    """
    try:
        described = manifest.verify(directory, deep=False, run=run)
        manifest.drop_cached_pages(directory, [*described.files, manifest.MANIFEST_NAME])
        return manifest.verify(directory, deep=True, run=run)
    except OSError as error:
        raise StorageError(f"cannot read back {directory}: {error.strerror}") from error
    except CheckpointCorrupt as error:
        moved_to = discover.move_aside(run_dir, directory.name, error.reason)
        raise SaveRefused(f"{error}; moved to {moved_to}", reason=SaveFailure.VERIFY) from error


def _is_good(directory: Path, run: str) -> bool:
    try:
        manifest.verify(directory, deep=True, run=run)
    except CheckpointCorrupt:
        return False
    return True


def _differing(ranks: Sequence[RankState]) -> set[tuple[int, str]]:
    """(rank, fqn) of plain tensors whose bytes or shape are not those of the lowest rank that has them."""
    first: dict[str, tuple[Any, ...]] = {}
    differing = set()
    for index, rank in enumerate(ranks):
        data = rank.slot_file.data(rank.slot)
        for item in rank.layout.items:
            if item.kind is not ItemKind.TENSOR:
                continue
            content = data[item.offset_bytes : item.offset_bytes + item.size_bytes]
            form = (item.dtype, item.local_shape, xxhash.xxh3_128_digest(content))
            if first.setdefault(item.fqn, form) != form:
                differing.add((index, item.fqn))
    return differing


def _merge(layouts: Sequence[Layout], differing: set[tuple[int, str]]) -> Plans:
    """One plan a rank, merged and validated by DCP's own planner."""
    plain_seen: set[str] = set()
    plans, sources = [], []
    for index, ranked in enumerate(layouts):
        chosen: dict[str, LayoutItem] = {}
        for item in ranked.items:
            key = _key_of(item, index, differing, plain_seen)
            if key is not None:
                chosen[key] = item
        sources.append(chosen)
        items = [_write_item(key, item) for key, item in chosen.items()]
        plans.append(SavePlan(items, planner_data={key: _path(key, item) for key, item in chosen.items()}))
    merged, metadata = DefaultSavePlanner().create_global_plan(plans)
    return Plans(FileSystemWriter("unused").prepare_global_plan(merged), metadata, sources)


def _key_of(item: LayoutItem, rank: int, differing: set[tuple[int, str]], plain_seen: set[str]) -> str | None:
    """Key under which `rank` writes the item, None if it need not."""
    if item.kind is ItemKind.SHARD:
        is_empty_part = 0 in item.local_shape and 0 not in item.global_shape
        return None if is_empty_part else item.fqn
    if (rank, item.fqn) in differing:
        return manifest.own_key(item.fqn, rank)
    if item.fqn in plain_seen:
        return None
    plain_seen.add(item.fqn)
    return item.fqn


def _write_item(key: str, item: LayoutItem) -> WriteItem:
    offset = torch.Size(item.global_offset)
    return WriteItem(
        index=MetadataIndex(key, offset),
        type=WriteItemType.SHARD if item.kind is ItemKind.SHARD else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(item.local_shape)),
            properties=TensorProperties(dtype=getattr(torch, item.dtype), requires_grad=item.requires_grad),
            size=torch.Size(item.global_shape),
        ),
    )


def _path(key: str, item: LayoutItem) -> tuple[str, ...]:
    """Where `dcp_to_torch_save` puts the key: {name: {fqn: ...}} and {name: {"state": {fqn: {key: ...}}}}."""
    name, _, rest = key.partition(".")
    if item.role is ItemRole.OPTIMIZER:
        parameter, _, state_key = rest.removeprefix("state.").rpartition(".")
        return name, "state", parameter, state_key
    return (name, rest) if rest else (name,)


class _SlotPlanner(DefaultSavePlanner):
    """Resolves plan items to views over one rank's slot."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._tensors[index.fqn]


class _Writer(FileSystemWriter):
    """DCP's writer; its `.metadata` does not name the temporary directory."""

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(save_id=self.save_id)


def _write_tensors(
    temporary: Path, ranks: Sequence[RankState], plans: Plans, files: ChecksumFileSystem
) -> list[WriteResult]:
    writer = _Writer(temporary, sync_files=True, thread_count=1)
    writer.fs = files
    writer.set_up_storage_writer(True)
    results: list[list[WriteResult]] = []
    for rank, plan, source in zip(ranks, plans.save_plans, plans.sources, strict=True):
        planner = _SlotPlanner({key: rank.tensors[item.fqn] for key, item in source.items()})
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    # `finish` changes the metadata it is given; the cached one stays clean.
    writer.finish(dataclasses.replace(plans.metadata), results)
    return [result for ranked in results for result in ranked]
