"""DCP's metadata as JSON in the manifest, and back.

    {"tensors": {key: {"dtype", "size", "chunks": [[offsets, sizes], ...]}},
     "items": [[key, offset, file, position, length, xxh3_64 of the tensor's bytes], ...], "paths": {key: [parts]}}

`.metadata` is a pickle and is written only so that plain `torch.distributed.checkpoint.load` works; we never
read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult


@dataclass(frozen=True)
class StoredTensor:
    """Dtype (torch's name) and global shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


def to_items(results: Iterable[WriteResult], digests: Iterable[str]) -> list[list[Any]]:
    """Where each piece of a tensor lies, and its digest: [key, offset, file, position, length, xxh3_64]."""
    items = []
    for result, digest in zip(results, digests, strict=True):
        place: _StorageInfo = result.storage_data
        offset = None if result.index.offset is None else list(result.index.offset)
        items.append([result.index.fqn, offset, place.relative_path, place.offset, place.length, digest])
    return items


def to_results(items: Iterable[list[Any]]) -> list[WriteResult]:
    """Inverse of `to_items`, as far as `FileSystemWriter.finish` reads it."""
    return [
        WriteResult(
            index=MetadataIndex(key, None if offset is None else torch.Size(offset)),
            size_in_bytes=length,
            storage_data=_StorageInfo(file, position, length),
        )
        for key, offset, file, position, length, _ in items
    ]


def to_json(metadata: Metadata, items: list[list[Any]]) -> dict[str, Any]:
    """JSON form of what `FileSystemWriter.finish` would pickle; `items` as `to_items` gives them."""
    tensors = {}
    for key, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)  # the writer's plans hold tensors only
        tensors[key] = {
            "dtype": str(stored.properties.dtype).removeprefix("torch."),
            "size": list(stored.size),
            "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in stored.chunks],
        }
    paths = {key: list(path) for key, path in (metadata.planner_data or {}).items()}
    return {"tensors": tensors, "items": items, "paths": paths}


def from_json(value: dict[str, Any]) -> Metadata:
    """Inverse of `to_json`."""
    tensors = {
        key: TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, stored["dtype"])),
            size=torch.Size(stored["size"]),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                for offsets, sizes in stored["chunks"]
            ],
        )
        for key, stored in value["tensors"].items()
    }
    places = {
        MetadataIndex(key, offset): _StorageInfo(file, position, length)
        for key, offset, file, position, length, _ in value["items"]
    }
    paths = {key: tuple(path) for key, path in value["paths"].items()}
    return Metadata(dict(tensors), planner_data=paths, storage_data=places, storage_meta=StorageMeta())


def stored_tensors(value: dict[str, Any]) -> dict[str, StoredTensor]:
    """What is stored under each key."""
    return {key: StoredTensor(item["dtype"], tuple(item["size"])) for key, item in value["tensors"].items()}
