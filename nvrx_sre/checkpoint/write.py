"""Sealed slots into the files of a DCP checkpoint, without a process group.

    read      header, digest and layout of each rank's slot; nothing is trusted before the digest matched
    scan      a state with NaN, or with infinities in what is trained, is never committed
    plan      from the layouts of all ranks and the forms of their plain tensors: the same on every writer
    write     `.tmp-...`: this writer's ranks' DCP files and rank-0000N.json, all synced, checksums on the way
    describe  the pieces of all writers together: `.metadata` and the manifest that `commit` publishes

Keys are those of `tracked`. A plain tensor is stored once, from the lowest rank; a rank whose bytes differ
keeps its own copy under `<key>@rank-0000N`, so that a restore into the same world is exact.

Process safety: one writer a node and a run; slots are held by the launcher while this reads them, and the
headers are compared again before the commit. Blocking throughout: runs in the writer process.
Must not: run a collective, delete anything.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from nvrx_sre.checkpoint import dcp_metadata, manifest
from nvrx_sre.checkpoint import layout as layouts
from nvrx_sre.checkpoint.capture import parse_blob, slot_views
from nvrx_sre.checkpoint.commit import SaveRefused, SaveRequest
from nvrx_sre.checkpoint.layout import ItemKind, ItemRole, Layout, LayoutItem
from nvrx_sre.checkpoint.manifest import FileEntry, Manifest
from nvrx_sre.checkpoint.slots import SlotFile, SlotHeader
from nvrx_sre.checkpoint.storage import ChecksumFileSystem, WriteOptions
from nvrx_sre.checkpoint.tracked import split_state_key
from nvrx_sre.core.atomic import PRIVATE_DIRECTORY_MODE
from nvrx_sre.core.errors import StorageError
from nvrx_sre.events.schema import SaveFailure


@dataclass(frozen=True)
class RankState:
    """One rank's sealed slot, checked: tensors are views of the slot, `state` is its small state."""

    rank: int
    slot_file: SlotFile
    slot: int
    header: SlotHeader
    layout: Layout
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class RankPlan:
    """What every writer must know of a rank: its layout, and the form of each of its plain tensors."""

    rank: int
    layout: Layout
    forms: Mapping[str, str]
    """fqn -> dtype, shape and digest of the bytes."""

    def to_json(self) -> dict[str, Any]:
        """Form for `parts`."""
        return {"rank": self.rank, "layout": json.loads(self.layout.json), "forms": dict(self.forms)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankPlan:
        """Inverse of `to_json`."""
        return cls(value["rank"], layouts.from_json(value["layout"]), value["forms"])


@dataclass(frozen=True)
class Plans:
    """Merged plans of all ranks. `sources[rank]`: key -> item of that rank's layout."""

    save_plans: list[SavePlan]
    metadata: Metadata
    sources: list[dict[str, LayoutItem]]


@dataclass(frozen=True)
class Written:
    """What this writer has put into the attempt: its files, and where each piece of a tensor lies."""

    files: dict[str, FileEntry]
    items: list[list[Any]]

    def to_json(self) -> dict[str, Any]:
        """Form for `parts`."""
        return {"files": {name: dataclasses.asdict(entry) for name, entry in self.files.items()}, "items": self.items}

    @classmethod
    def merged(cls, parts: Sequence[Mapping[str, Any]]) -> Written:
        """All writers' parts as one."""
        files = {name: FileEntry(**entry) for part in parts for name, entry in part["files"].items()}
        return cls(files, [item for part in parts for item in part["items"]])


class PlanCache:
    """The newest merged plans. Layouts rarely change, and merging costs milliseconds a save."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._plans: Plans | None = None

    def plans_for(self, ranks: Sequence[RankPlan]) -> Plans:
        """Plans for these layouts and this set of differing plain tensors. `ranks`: all of the run, in order."""
        differing = _differing(ranks)
        key = (tuple(rank.layout.hash for rank in ranks), frozenset(differing))
        if self._plans is None or key != self._key:
            self._plans = _merge([rank.layout for rank in ranks], differing)
            self._key = key
        return self._plans


def read_slots(
    slot_files: Sequence[SlotFile], slots: Sequence[int], request: SaveRequest, first_rank: int = 0
) -> list[RankState]:
    """Check and open the slot of each rank. Raises `SaveRefused` if one is not what was asked for."""
    return [
        _read_slot(first_rank + index, slot_file, slot, request)
        for index, (slot_file, slot) in enumerate(zip(slot_files, slots, strict=True))
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
    return RankState(rank, slot_file, slot, header, parsed, state, slot_views(slot_file, slot, parsed))


def check_untouched(ranks: Sequence[RankState]) -> None:
    """Raise `SaveRefused` unless every slot is still the one that was read."""
    for rank in ranks:
        if rank.slot_file.header(rank.slot) != rank.header:
            raise SaveRefused(f"the slot of rank {rank.rank} changed during the save", reason=SaveFailure.INTERRUPTED)


def plan_of(rank: RankState) -> RankPlan:
    """What the other writers must know of a rank. Reads its plain tensors."""
    data = rank.slot_file.data(rank.slot)
    forms = {}
    for item in rank.layout.items:
        if item.kind is ItemKind.TENSOR:
            content = data[item.offset_bytes : item.offset_bytes + item.size_bytes]
            forms[item.fqn] = f"{item.dtype} {list(item.local_shape)} {xxhash.xxh3_128_hexdigest(content)}"
    return RankPlan(rank.rank, rank.layout, forms)


def check_finite(ranks: Sequence[RankState]) -> None:
    """Raise `SaveRefused` (nonfinite) naming the first tensor that must not be saved.

    NaN is refused anywhere. Infinities are refused in trained parameters and optimizer state; buffers may
    hold them by design (attention masks).
    """
    for rank in ranks:
        for item in rank.layout.items:
            tensor = rank.tensors[item.fqn]
            if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            trained = item.requires_grad or item.role is ItemRole.OPTIMIZER
            if not _is_sound(tensor, trained):
                raise SaveRefused(
                    f"{item.fqn} on rank {rank.rank} is not finite at step {rank.header.step}",
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


def make_attempt(directory: Path) -> None:
    """Create the attempt's directory; another writer of the same save may have been first. Raises `OSError`."""
    directory.mkdir(mode=PRIVATE_DIRECTORY_MODE, exist_ok=True)


@contextmanager
def _as_storage_error(temporary: Path, files: ChecksumFileSystem) -> Iterator[None]:
    """Below torch's C++ writer an `OSError` arrives as a `RuntimeError`; anything else is a bug and goes on."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else files.error
        if cause is None:
            raise
        raise StorageError(f"cannot write {temporary}: {cause.strerror or cause}") from cause


def write_files(temporary: Path, ranks: Sequence[RankState], plans: Plans, options: WriteOptions) -> Written:
    """The files of these ranks into the directory `temporary`, synced. Raises `StorageError`."""
    files = ChecksumFileSystem(options)
    with _as_storage_error(temporary, files):
        make_attempt(temporary)
        items = _write_tensors(temporary, ranks, plans, files)
        for rank in ranks:
            content = {"rank": rank.rank, "layout": json.loads(rank.layout.json), "state": rank.state}
            files.write_file(temporary / manifest.rank_file_name(rank.rank), json.dumps(content).encode())
    return Written(files.sums, items)


def describe(
    temporary: Path, request: SaveRequest, layout_hashes: Sequence[str], plans: Plans, written: Written
) -> Manifest:
    """DCP's `.metadata` into `temporary`, and the manifest of the whole, which `commit` writes.

    `written` is of all writers. Raises `StorageError`.
    """
    files = ChecksumFileSystem(WriteOptions())
    with _as_storage_error(temporary, files):
        writer = _Writer(temporary, sync_files=True)
        writer.fs = files
        # `finish` changes the metadata it is given; the cached one stays clean.
        writer.finish(dataclasses.replace(plans.metadata), [dcp_metadata.to_results(written.items)])
    return Manifest(
        run=request.run,
        step=request.step,
        epoch=request.epoch,
        generation=request.generation,
        world_size=request.world_size,
        captured_ns=request.captured_ns,
        layout_hashes=list(layout_hashes),
        torch_version=torch.__version__,
        files=dict(sorted((written.files | files.sums).items())),
        dcp=dcp_metadata.to_json(plans.metadata, written.items),
    )


def _differing(ranks: Sequence[RankPlan]) -> set[tuple[int, str]]:
    """(rank, fqn) of plain tensors whose bytes or shape are not those of the lowest rank that has them."""
    first: dict[str, str] = {}
    return {
        (rank.rank, fqn) for rank in ranks for fqn, form in rank.forms.items() if first.setdefault(fqn, form) != form
    }


def _merge(layouts: Sequence[Layout], differing: set[tuple[int, str]]) -> Plans:
    """One plan a rank, merged and validated by DCP's own planner."""
    plain_seen: set[str] = set()
    plans, sources = [], []
    parameters = _parameter_names(layouts)
    for index, ranked in enumerate(layouts):
        chosen: dict[str, LayoutItem] = {}
        for item in ranked.items:
            key = _key_of(item, index, differing, plain_seen)
            if key is not None:
                chosen[key] = item
        sources.append(chosen)
        items = [_write_item(key, item) for key, item in chosen.items()]
        plans.append(SavePlan(items, planner_data={key: _path(key, item, parameters) for key, item in chosen.items()}))
    merged, metadata = DefaultSavePlanner().create_global_plan(plans)
    _add_aliases(metadata, layouts)
    return Plans(FileSystemWriter("unused").prepare_global_plan(merged), metadata, sources)


def _add_aliases(metadata: Metadata, layouts: Sequence[Layout]) -> None:
    """Tied weights are stored once and listed under each of their names."""
    for item in (item for ranked in layouts for item in ranked.items):
        for alias in item.aliases:
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[item.fqn]
            metadata.planner_data[alias] = _path(alias, item, ())  # of parameters and buffers, never of their state


def _alias_items(items: list[list[Any]], layouts: Sequence[Layout]) -> list[list[Any]]:
    """Where tied weights lie, under their further names; `items` as `dcp_metadata.to_items` gives them."""
    aliases = {item.fqn: item.aliases for layout in layouts for item in layout.items}
    return [[alias, *place] for key, *place in items for alias in aliases.get(key, ())]


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


def _parameter_names(layouts: Sequence[Layout]) -> set[str]:
    """Names of parameters as optimizer state has them: with the module's own where there are several."""
    names = (item.fqn for ranked in layouts for item in ranked.items if item.role is ItemRole.PARAMETER)
    return {name for fqn in names for name in (fqn, fqn.partition(".")[2])}


def _path(key: str, item: LayoutItem, parameters: Container[str]) -> tuple[str, ...]:
    """Where `dcp_to_torch_save` puts the key: {name: {fqn: ...}} and {name: {"state": {fqn: {key: ...}}}}."""
    name, _, rest = key.partition(".")
    if item.role is ItemRole.OPTIMIZER:
        return name, "state", *(split_state_key(rest.removeprefix("state."), parameters) or (rest,))
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


def _digest(rank: RankState, item: LayoutItem) -> str:
    """Lets a reader check this piece without reading the rest of its file."""
    start = item.offset_bytes
    return xxhash.xxh3_64_hexdigest(rank.slot_file.data(rank.slot)[start : start + item.size_bytes])


def _write_tensors(
    temporary: Path, ranks: Sequence[RankState], plans: Plans, files: ChecksumFileSystem
) -> list[list[Any]]:
    writer = _Writer(temporary, sync_files=True, thread_count=1)
    writer.fs = files
    writer.set_up_storage_writer(True)
    items: list[list[Any]] = []
    for rank in ranks:
        plan, source = plans.save_plans[rank.rank], plans.sources[rank.rank]
        planner = _SlotPlanner({key: rank.tensors[item.fqn] for key, item in source.items()})
        results: list[WriteResult] = writer.write_data(planner.finish_plan(plan), planner).wait()
        items += dcp_metadata.to_items(results, [_digest(rank, source[result.index.fqn]) for result in results])
    return items + _alias_items(items, [rank.layout for rank in ranks])
