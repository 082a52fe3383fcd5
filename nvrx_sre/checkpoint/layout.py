"""What lies where in a slot's data area: the one contract between rank, launcher and writer.

A layout lists the tensors that one rank holds (its local shards), where each sits in the global tensor and
at which byte of the data area it starts. Its canonical JSON is hashed (sha256); the hash goes into every
sealed slot header, so that two processes agree on the meaning of the bytes without exchanging objects.

Invariants: offsets are multiples of 64 bytes, items do not overlap, `fqn` is unique. Immutable, hence safe
between threads. Must not: import torch, hold values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

ALIGNMENT_BYTES = 64
"""Start of each tensor in the data area: a cache line, and enough for any dtype's vector loads."""


NUM_KNOWN = 16
"""Layouts that a process remembers: a writer meets those of all ranks of its node."""


class ItemKind(StrEnum):
    """How the local bytes relate to the global tensor."""

    SHARD = "shard"
    TENSOR = "tensor"


class ItemRole(StrEnum):
    """What the tensor is to the training state."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    STATE = "state"


@dataclass(frozen=True, kw_only=True)
class LayoutItem:
    """One local tensor. Shapes are in elements; an empty shard has a 0 in `local_shape` and 0 bytes."""

    fqn: str
    kind: ItemKind
    role: ItemRole
    dtype: str
    local_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    """Further names of the same tensor (tied weights): stored once, found under each."""


@dataclass(frozen=True)
class Layout:
    """All tensors of one rank, in the order of the data area."""

    items: tuple[LayoutItem, ...]

    @cached_property
    def data_bytes(self) -> int:
        """Bytes of the data area in use, the padding behind the last item included."""
        return max((align(item.offset_bytes + item.size_bytes) for item in self.items), default=0)

    @cached_property
    def json(self) -> str:
        """Canonical JSON: what is hashed and what the blob area holds."""
        return canonical_json([asdict(item) for item in self.items])

    @cached_property
    def hash(self) -> str:
        """sha256 of the canonical JSON, 64 hex digits."""
        return text_hash(self.json)

    @cached_property
    def by_fqn(self) -> dict[str, LayoutItem]:
        return {item.fqn: item for item in self.items}


def text_hash(text: str) -> str:
    """`Layout.hash` of the layout whose canonical JSON is `text`."""
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """The one text of a JSON value, so that equal values have equal checksums."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def align(size_bytes: int) -> int:
    """`size_bytes` rounded up to the alignment of the data area."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def pack(items: Sequence[LayoutItem]) -> Layout:
    """Layout of `items` in their order, each placed at the next aligned offset."""
    placed: list[LayoutItem] = []
    end_bytes = 0
    for item in items:
        values = {field.name: getattr(item, field.name) for field in fields(item)}
        placed.append(LayoutItem(**{**values, "offset_bytes": end_bytes}))
        end_bytes = align(end_bytes + item.size_bytes)
    return Layout(tuple(placed))


@lru_cache(maxsize=NUM_KNOWN)
def from_text(text: str) -> Layout:
    """Layout from its canonical JSON. Remembered, because it is the same one at each restore and save of a process.

    Raises `ValueError` for anything that is not one.
    """
    return from_json(json.loads(text))


_SIZES = ("local_shape", "global_offset", "global_shape")


def from_json(value: Any) -> Layout:
    """Layout from the parsed canonical JSON. Raises `ValueError` for anything that is not one."""
    try:
        items = tuple(_item(entry) for entry in value)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"not a layout: {error}") from error
    end_bytes = 0
    for item in items:
        if item.offset_bytes < end_bytes or item.offset_bytes % ALIGNMENT_BYTES or item.size_bytes < 0:
            raise ValueError(f"not a layout: {item.fqn} overlaps or is not aligned")
        end_bytes = item.offset_bytes + item.size_bytes
    if len({item.fqn for item in items}) != len(items):
        raise ValueError("not a layout: a name occurs twice")
    return Layout(items)


def _item(entry: dict[str, Any]) -> LayoutItem:
    values = {**entry, **{name: tuple(int(size) for size in entry[name]) for name in _SIZES}}
    values["aliases"] = tuple(str(alias) for alias in entry["aliases"])
    values["kind"] = ItemKind(entry["kind"])
    values["role"] = ItemRole(entry["role"])
    return LayoutItem(**values)
