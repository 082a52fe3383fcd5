"""The commit marker of a durable checkpoint: which files it has, how long they are, what they hash to.

A directory is a checkpoint if and only if its name is `step-<8 digits>-g<5 digits>` and it holds a
`manifest.json` that lists exactly its other files. DCP's own metadata is in the manifest as JSON, so that a
reader unpickles nothing of the directory but tensors. The manifest guards itself with a checksum over its
canonical text; one that reads differently from what it renders to is damaged.

Checksums are xxh3_128: against damage, not against forgery. Blocking: `verify` with `deep` and
`verify_files` read whole files. Must not: import torch, trust a value before the checksum matched.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from nvrx_sre.checkpoint import direct
from nvrx_sre.checkpoint.layout import canonical_json
from nvrx_sre.core.atomic import write_bytes_atomically
from nvrx_sre.core.errors import CheckpointCorrupt
from nvrx_sre.events.schema import RejectReason

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
DCP_MARKER_NAME = ".metadata"
"""DCP writes it last and refuses a directory without it: as good as not committed for every plain reader."""
DIRECTORY_NAME = re.compile(r"step-(\d{8,})-g(\d{5,})")
_OWN_KEY = re.compile(r"@rank-\d{5,}$")
_FILE_NAME = re.compile(r"[A-Za-z0-9._@-]+")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file: length and xxh3_128 (32 hex digits)."""

    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`. `captured_ns` is wall time; `layout_hashes[rank]`; `dcp`: see `dcp_metadata`."""

    run: str
    step: int
    epoch: int
    generation: int
    world_size: int
    captured_ns: int
    layout_hashes: list[str]
    torch_version: str
    files: dict[str, FileEntry]
    dcp: dict[str, Any]

    @property
    def size_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(entry.size_bytes for entry in self.files.values())


def directory_name(step: int, generation: int) -> str:
    """Name of the directory of a committed checkpoint."""
    return f"step-{step:08d}-g{generation:05d}"


def parse_directory_name(name: str) -> tuple[int, int] | None:
    """(step, generation) of a checkpoint directory's name, or None."""
    match = DIRECTORY_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def rank_file_name(rank: int) -> str:
    """Name of the file with a rank's layout and small state."""
    return f"rank-{rank:05d}.json"


def own_key(key: str, rank: int) -> str:
    """DCP key of `rank`'s own copy of a plain tensor whose value differs between ranks."""
    return f"{key}@rank-{rank:05d}"


def is_own_key(key: str) -> bool:
    """True for a key that `own_key` made."""
    return _OWN_KEY.search(key) is not None


def write(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into `directory` atomically and durably. Raises `StorageError`."""
    write_bytes_atomically(directory / MANIFEST_NAME, _render(manifest))


def read(directory: Path) -> Manifest:
    """The manifest of `directory`, itself undamaged and of this name. Files are not looked at.

    Raises `CheckpointCorrupt`: no_commit_marker, manifest, version or unreadable.
    """
    path = directory / MANIFEST_NAME
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would never end
            raise _corrupt(directory, RejectReason.UNREADABLE, f"{MANIFEST_NAME} is not a file")
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _corrupt(directory, RejectReason.NO_COMMIT_MARKER, f"it has no {MANIFEST_NAME}") from None
    except OSError as error:
        raise _corrupt(directory, RejectReason.UNREADABLE, f"{MANIFEST_NAME}: {error.strerror}") from error
    if not content:
        raise _corrupt(directory, RejectReason.NO_COMMIT_MARKER, f"its {MANIFEST_NAME} is empty")
    manifest = _parse(directory, content)
    if directory.name != directory_name(manifest.step, manifest.generation):
        raise _corrupt(
            directory,
            RejectReason.MANIFEST,
            f"its manifest is of step {manifest.step}, generation {manifest.generation}",
        )
    return manifest


def verify(directory: Path, deep: bool, *, run: str | None = None) -> Manifest:
    """Manifest of a directory whose files are all there with the right sizes, with `deep` the right bytes.

    Raises `CheckpointCorrupt` with the first thing found wrong. `run`: also refuse another run's checkpoint.
    """
    manifest = read(directory)
    if run is not None and manifest.run != run:
        raise _corrupt(directory, RejectReason.OTHER_RUN, f"it belongs to run {manifest.run!r}, not {run!r}")
    check_sizes(directory, manifest)
    if deep:
        verify_files(directory, manifest)
    return manifest


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise `CheckpointCorrupt` unless the directory holds exactly the listed files with the listed sizes."""
    try:
        found = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(directory)}
    except OSError as error:
        raise _corrupt(directory, RejectReason.UNREADABLE, str(error.strerror)) from error
    dcp_marker = found.get(DCP_MARKER_NAME)
    if DCP_MARKER_NAME in manifest.files and (dcp_marker is None or dcp_marker.st_size == 0):
        raise _corrupt(directory, RejectReason.NO_COMMIT_MARKER, f"its {DCP_MARKER_NAME} is missing or empty")
    for name, listed in manifest.files.items():
        status = found.get(name)
        if status is None or not stat.S_ISREG(status.st_mode):
            raise _corrupt(directory, RejectReason.MISSING_FILE, f"{name} is missing")
        if status.st_size != listed.size_bytes:
            raise _corrupt(
                directory, RejectReason.SIZE, f"{name} has {status.st_size} bytes instead of {listed.size_bytes}"
            )
    unknown = sorted(set(found) - set(manifest.files) - {MANIFEST_NAME})
    if unknown:
        raise _corrupt(directory, RejectReason.MANIFEST, f"{unknown[0]} is not listed in its manifest")


def verify_files(
    directory: Path,
    manifest: Manifest,
    part: int = 0,
    num_parts: int = 1,
    *,
    on_file: Callable[[str, int], None] | None = None,
) -> None:
    """Checksum every `num_parts`-th file from `part` on, so that `num_parts` callers check all between them.

    `on_file(name, size_bytes)` is called after each good file. Raises `CheckpointCorrupt`.
    """
    for name in sorted(manifest.files)[part::num_parts]:
        listed = manifest.files[name]
        try:
            size_bytes, actual = checksum_file(directory / name)
        except FileNotFoundError:
            raise _corrupt(directory, RejectReason.MISSING_FILE, f"{name} is missing") from None
        except OSError as error:
            raise _corrupt(directory, RejectReason.UNREADABLE, f"{name}: {error.strerror}") from error
        if size_bytes != listed.size_bytes:
            raise _corrupt(
                directory, RejectReason.SIZE, f"{name} has {size_bytes} bytes instead of {listed.size_bytes}"
            )
        if actual != listed.xxh3_128:
            raise _corrupt(directory, RejectReason.CHECKSUM, f"{name} does not match its checksum")
        if on_file is not None:
            on_file(name, size_bytes)


def checksum_file(path: Path) -> tuple[int, str]:
    """(length, xxh3_128 in hex) of a file as it is on the disk. Raises `OSError`."""
    state = xxhash.xxh3_128()
    size_bytes = 0
    for piece in direct.read_pieces(path):
        state.update(piece)
        size_bytes += len(piece)
    return size_bytes, state.hexdigest()


def drop_cached_pages(directory: Path, names: Sequence[str]) -> None:
    """Ask the kernel to forget the clean pages of the named files, so that the next read is from the disk."""
    for name in names:
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _render(manifest: Manifest) -> bytes:
    # Not `asdict`: it copies all of `dcp`, which costs every recovery 5 ms a checkpoint.
    files = {name: vars(entry) for name, entry in manifest.files.items()}
    body = {"schema": SCHEMA_VERSION, **vars(manifest), "files": files}
    text = canonical_json(body)
    body["checksum"] = xxhash.xxh3_128(text.encode()).hexdigest()
    return canonical_json(body).encode() + b"\n"


def _parse(directory: Path, content: bytes) -> Manifest:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise _corrupt(directory, RejectReason.MANIFEST, f"its {MANIFEST_NAME} is not JSON") from None
    if not isinstance(body, dict):
        raise _corrupt(directory, RejectReason.MANIFEST, f"its {MANIFEST_NAME} is not an object")
    version = body.pop("schema", None)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise _corrupt(
            directory,
            RejectReason.VERSION,
            f"its manifest has schema {version}, this release reads up to {SCHEMA_VERSION}",
        )
    body.pop("checksum", None)
    try:
        files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
        manifest = Manifest(**{**body, "files": files})
        undamaged = _render(manifest) == content
    except (TypeError, KeyError, AttributeError, ValueError):
        raise _corrupt(directory, RejectReason.MANIFEST, f"its {MANIFEST_NAME} lacks or mistypes a field") from None
    if not undamaged:
        raise _corrupt(directory, RejectReason.MANIFEST, f"its {MANIFEST_NAME} does not match its own checksum")
    _check_names(directory, manifest)
    return manifest


def _check_names(directory: Path, manifest: Manifest) -> None:
    """Names in a manifest stay inside its directory, whoever wrote it."""
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name) or name in (".", "..", MANIFEST_NAME):
            raise _corrupt(directory, RejectReason.MANIFEST, f"it lists a file named {name!r}")


def _corrupt(directory: Path, reason: RejectReason, message: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"checkpoint {directory.name} is not usable: {message}", reason=reason.value)
