"""Committed checkpoints with real tensors in them, cut into chunks by hand: no process group, no slots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from nvrx_sre.checkpoint import discover, manifest
from nvrx_sre.checkpoint.layout import ItemKind, ItemRole, LayoutItem
from nvrx_sre.checkpoint.manifest import FileEntry, Manifest

Cut = tuple[tuple[int, int], ...]
"""(begin, end) in each dimension."""


@dataclass(frozen=True)
class Part:
    """A tensor and the chunks that each rank holds of it: `cuts[rank]`, none for a rank without any."""

    whole: torch.Tensor
    cuts: Sequence[Cut | None]
    path: tuple[str, ...]


class _Planner(DefaultSavePlanner):
    def __init__(self, parts: Mapping[str, Part], rank: int) -> None:
        super().__init__()
        self._parts = parts
        self._rank = rank

    def lookup_object(self, index: MetadataIndex) -> Any:
        part = self._parts[index.fqn]
        cut = part.cuts[self._rank]
        assert cut is not None
        return part.whole[tuple(slice(*ends) for ends in cut)].clone()


def commit_tensors(
    run_dir: Path, step: int, parts: Mapping[str, Part], state: dict[str, Any], *, rank_bytes: Sequence[int] = ()
) -> Path:
    """A good, verified checkpoint of `parts` with the small state `state` on every rank.

    `rank_bytes`: what each rank's layout says that it holds; empty layouts by default.
    """
    name = manifest.directory_name(step, 1)
    path = discover.checkpoints_path(run_dir) / name
    path.mkdir(parents=True)
    world_size = max(len(part.cuts) for part in parts.values())
    plans = [SavePlan(_items(parts, rank), planner_data=_paths(parts, rank)) for rank in range(world_size)]
    merged, metadata = DefaultSavePlanner().create_global_plan(plans)
    writer = FileSystemWriter(path, sync_files=False)
    writer.set_up_storage_writer(True)
    results = []
    for rank, plan in enumerate(writer.prepare_global_plan(merged)):
        planner = _Planner(parts, rank)
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(replace(metadata), results)
    for rank in range(max(world_size, len(rank_bytes))):
        layout = [_layout_item(rank_bytes[rank])] if rank_bytes else []
        (path / manifest.rank_file_name(rank)).write_text(json.dumps({"rank": rank, "layout": layout, "state": state}))
    described = Manifest(
        run="demo",
        step=step,
        epoch=1,
        generation=1,
        world_size=world_size,
        captured_ns=step * 1_000_000_000,
        layout_hashes=["ab" * 32] * world_size,
        torch_version=torch.__version__,
        files=_listed(path),
        dcp=_dcp(metadata, [item for ranked in results for item in ranked]),
    )
    manifest.write(path, described)
    discover.write_verified(run_dir, {**discover.read_verified(run_dir), name: 1})
    return path


def _layout_item(size_bytes: int) -> dict[str, Any]:
    item = LayoutItem(
        fqn="m.w",
        kind=ItemKind.TENSOR,
        role=ItemRole.PARAMETER,
        dtype="uint8",
        local_shape=(size_bytes,),
        global_offset=(0,),
        global_shape=(size_bytes,),
        offset_bytes=0,
        size_bytes=size_bytes,
        requires_grad=False,
    )
    return asdict(item)


def _dcp(metadata: Metadata, results: Sequence[WriteResult]) -> dict[str, Any]:
    """The manifest's form of DCP's metadata (docs/reference/contracts.md)."""
    tensors = {}
    for key, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        tensors[key] = {
            "dtype": str(stored.properties.dtype).removeprefix("torch."),
            "size": list(stored.size),
            "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in stored.chunks],
        }
    items = [
        [item.index.fqn, list(item.index.offset or ()), place.relative_path, place.offset, place.length, ""]
        for item in results
        for place in (item.storage_data,)
    ]
    return {
        "tensors": tensors,
        "items": items,
        "paths": {key: list(path) for key, path in metadata.planner_data.items()},
    }


def _listed(path: Path) -> dict[str, FileEntry]:
    sums = {file.name: manifest.checksum_file(file) for file in sorted(path.iterdir())}
    return {name: FileEntry(size_bytes=size_bytes, xxh3_128=digest) for name, (size_bytes, digest) in sums.items()}


def _items(parts: Mapping[str, Part], rank: int) -> list[WriteItem]:
    return [_item(key, part, cut) for key, part in parts.items() if (cut := part.cuts[rank]) is not None]


def _paths(parts: Mapping[str, Part], rank: int) -> dict[str, tuple[str, ...]]:
    return {key: part.path for key, part in parts.items() if part.cuts[rank] is not None}


def _item(key: str, part: Part, cut: Cut) -> WriteItem:
    offset = torch.Size(begin for begin, _ in cut)
    return WriteItem(
        index=MetadataIndex(key, offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(end - begin for begin, end in cut)),
            properties=TensorProperties(dtype=part.whole.dtype),
            size=part.whole.shape,
        ),
    )
