"""A durable checkpoint as one file for other programs: a torch file, or safetensors.

    .pt, .pth        torch.save of {name: ...} under the names of `ctx.track`, loadable with weights_only; held in
                     memory while it is made
    .safetensors     every tensor under its checkpoint key, written chunk by chunk at its offset: memory is that of
                     the largest chunk, whatever the size of the file

Shards are joined into whole tensors. Small state is that of rank 0; random streams and ranks' own copies of plain
tensors stay behind. Every file is checksummed before the first byte of it is interpreted; tensors are then read
with torch's weights-only reader. The file appears under its name complete and synced, or not at all.

Blocking throughout. Must not: overwrite a file unless told to, execute anything of the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint.utils import _create_file_view

from nvrx_sre.checkpoint import encoding, manifest, safetensors_file
from nvrx_sre.checkpoint.dcp_metadata import StoredTensor, stored_tensors
from nvrx_sre.checkpoint.discover import Found
from nvrx_sre.core.atomic import PRIVATE_FILE_MODE, fsync_directory
from nvrx_sre.core.errors import CheckpointCorrupt, StorageError, UserError
from nvrx_sre.core.ids import random_hex
from nvrx_sre.events.schema import RejectReason


class Format(StrEnum):
    """What is written, told by the file's ending."""

    TORCH = "torch"
    SAFETENSORS = "safetensors"


SUFFIXES = {".pt": Format.TORCH, ".pth": Format.TORCH, ".safetensors": Format.SAFETENSORS}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export wrote. `num_own`: ranks' own copies of plain tensors that were left out."""

    path: Path
    step: int
    size_bytes: int
    num_tensors: int
    num_own: int


def export(found: Found, out: Path, *, force: bool = False, on_file: Callable[[str, int], None]) -> Exported:
    """Write `found` to `out`; `on_file(name, size_bytes)` after each file that was checked.

    Raises `CheckpointCorrupt` before anything is written if the checkpoint is damaged, `UserError` if `out` is
    there already (without `force`) or cannot take this state, `StorageError` if the disk refuses.
    """
    kind = format_of(out)
    if out.exists() and not force:
        raise UserError(f"{out} exists: choose another name, or replace it with --force")
    manifest.verify_files(found.path, found.manifest, on_file=on_file)
    checkpoint = _Stored(found)
    with _new_file(out, force=force) as file:
        if kind is Format.SAFETENSORS:
            details = {"format": "pt", "run": found.manifest.run, "step": str(found.step)}
            safetensors_file.write(file, checkpoint.tensors, checkpoint.chunks(), details)
        else:
            torch.save(_state_dict(checkpoint), file)
    return Exported(
        path=out,
        step=found.step,
        size_bytes=out.stat().st_size,
        num_tensors=len(checkpoint.tensors),
        num_own=checkpoint.num_own,
    )


def format_of(out: Path) -> Format:
    """Format that the name of `out` asks for. Raises `UserError` for any other ending."""
    kind = SUFFIXES.get(out.suffix)
    if kind is None:
        raise UserError(f"cannot tell a format from {out.name!r}: end it in {', '.join(SUFFIXES)}")
    return kind


class _Stored:
    """The tensors of a checkpoint whose files matched their checksums."""

    def __init__(self, found: Found) -> None:
        self.found = found
        stored = stored_tensors(found.manifest.dcp)
        self.tensors: dict[str, StoredTensor] = {
            key: tensor for key, tensor in stored.items() if not manifest.is_own_key(key)
        }
        self.num_own = len(stored) - len(self.tensors)

    def chunks(self) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """(key, offset in the whole tensor, chunk), in the order of the files. Raises `CheckpointCorrupt`."""
        missing = {key: _num_elements(tensor.shape) for key, tensor in self.tensors.items()}
        items = sorted(self.found.manifest.dcp["items"], key=lambda item: (item[2], item[3]))
        with contextlib.ExitStack() as opened:
            files: dict[str, Any] = {}
            for key, offset, name, position, length, *_ in items:
                if key not in self.tensors:
                    continue
                if name not in files:
                    files[name] = opened.enter_context(open(self.found.path / name, "rb"))
                view: Any = _create_file_view(files[name], position, length)
                chunk = torch.load(view, map_location="cpu", weights_only=True)
                missing[key] -= chunk.numel()
                yield key, tuple(offset) if offset is not None else (0,) * chunk.dim(), chunk
        incomplete = sorted(key for key, count in missing.items() if count)
        if incomplete:
            raise CheckpointCorrupt(
                f"checkpoint {self.found.directory} is not usable: parts of {incomplete[0]} are missing",
                reason=RejectReason.LAYOUT.value,
            )

    def small_state(self) -> dict[str, Any]:
        """Small state of rank 0, encoded."""
        content = json.loads((self.found.path / manifest.rank_file_name(0)).read_bytes())
        state: dict[str, Any] = content["state"]
        return state


def _state_dict(checkpoint: _Stored) -> dict[str, Any]:
    """{name: {fqn: tensor}} for modules, {"state", "param_groups"} for optimizers, the rest as it was tracked."""
    whole = {
        key: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)) for key, tensor in checkpoint.tensors.items()
    }
    for key, offset, chunk in checkpoint.chunks():
        place = tuple(slice(start, start + size) for start, size in zip(offset, chunk.shape, strict=True))
        whole[key][place] = chunk
    result: dict[str, Any] = {}
    for key, tensor in whole.items():
        _put(result, checkpoint.found.manifest.dcp["paths"].get(key, [key]), tensor)
    small = checkpoint.small_state()
    for name, optimizer in small["optimizers"].items():
        entry = result.setdefault(name, {}).setdefault("state", {})
        for parameter, values in _plain(encoding.decode(optimizer["scalars"], whole.__getitem__)).items():
            entry.setdefault(parameter, {}).update(values)
        entry.update(_plain(encoding.decode(optimizer.get("shared", {}), whole.__getitem__)))
        result[name]["param_groups"] = [
            {**_plain(encoding.decode(group["options"], whole.__getitem__)), "params": group["names"]}
            for group in optimizer["groups"]
        ]
    for name, value in {**small["objects"], **small["values"]}.items():
        result[name] = _plain(encoding.decode(value, whole.__getitem__))
    return result


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _plain(value: Any) -> Any:
    """The weights-only reader knows no NumPy: arrays become tensors, or lists where torch has no such type."""
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value)
        except TypeError:
            return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {key: _plain(item) for key, item in value.items()}
    return bytes(value) if isinstance(value, bytearray) else value


def _num_elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


@contextlib.contextmanager
def _new_file(out: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A file that becomes `out` when the block ends well: complete, synced, and never over another one unasked."""
    temporary = out.with_name(f".{out.name}.{random_hex(4)}.tmp")
    try:
        with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, PRIVATE_FILE_MODE)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if force:
            os.replace(temporary, out)
        else:
            os.link(temporary, out)
        fsync_directory(out.absolute().parent)
    except FileExistsError:
        raise UserError(f"{out} exists: choose another name, or replace it with --force") from None
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
