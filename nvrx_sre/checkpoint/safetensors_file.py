"""The safetensors format, written in one pass and out of order: header first, then each chunk at its offset.

    8 bytes   length of the header, little-endian
    header    JSON {key: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}, padded with
              spaces to a multiple of 8
    data      the tensors, C order, little-endian, without holes

The `safetensors` library takes whole tensors in memory; this takes chunks of them, so that a file may be larger than
memory. Tensors lie in the order of falling element size, which aligns each of them.
Thread safety: none needed. Must not: hold more than one chunk.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO

import torch

from nvrx_sre.checkpoint.dcp_metadata import StoredTensor
from nvrx_sre.core.errors import UserError

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
"""torch's name -> the format's."""
_ALIGNMENT_BYTES = 8

Chunk = tuple[str, tuple[int, ...], torch.Tensor]
"""Key, offset in the whole tensor, values."""


def write(
    file: BinaryIO, tensors: Mapping[str, StoredTensor], chunks: Iterable[Chunk], metadata: Mapping[str, str]
) -> None:
    """Write `tensors`, whose values come as `chunks` that cover each of them once. `file` is new and seekable.

    Raises `UserError` for a dtype that the format lacks, and whatever reading `chunks` raises.
    """
    begins, header = _header(tensors, metadata)
    file.write(header)
    file.flush()
    for key, offset, values in chunks:
        tensor = tensors[key]
        content = memoryview(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        done_bytes = 0
        itemsize = values.element_size()
        for start, count in runs(offset, values.shape, tensor.shape):
            part = content[done_bytes : done_bytes + count * itemsize]
            _write_at(file.fileno(), part, len(header) + begins[key] + start * itemsize)
            done_bytes += count * itemsize


def runs(offset: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first element in the whole tensor, number of elements) of a chunk's contiguous stretches, in its order."""
    if 0 in sizes:
        return
    whole_from = len(shape)
    while whole_from > 0 and sizes[whole_from - 1] == shape[whole_from - 1]:
        whole_from -= 1
    split = max(0, whole_from - 1)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner_start = offset[split] * strides[split] if shape else 0
    outer = [range(start, start + size) for start, size in zip(offset[:split], sizes[:split], strict=True)]
    for index in itertools.product(*outer):
        start = sum(position * stride for position, stride in zip(index, strides, strict=False))
        yield start + inner_start, math.prod(sizes[split:])


def _header(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> tuple[dict[str, int], bytes]:
    """(offset of each tensor in the data, the file's beginning)."""
    begins: dict[str, int] = {}
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end_bytes = 0
    for key in sorted(tensors, key=lambda name: (-_itemsize(name, tensors[name]), name)):
        tensor = tensors[key]
        begins[key] = end_bytes
        end_bytes += math.prod(tensor.shape) * _itemsize(key, tensor)
        entries[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[key], end_bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return begins, len(text).to_bytes(8, "little") + text


def _itemsize(key: str, tensor: StoredTensor) -> int:
    if tensor.dtype not in DTYPES:
        raise UserError(f"{key} is of type {tensor.dtype}, which safetensors cannot hold: export to a .pt file")
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype.itemsize


def _write_at(descriptor: int, content: memoryview, position: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, position)
        content, position = content[written:], position + written
