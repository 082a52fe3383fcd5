"""What lies in a run directory's `checkpoints/`, and what of it can be restored.

    checkpoints/step-00000100-g00003/   committed; restorable unless damaged, of another run, or fenced off
    checkpoints/.tmp-*                  saves that never committed ('interrupted')
    checkpoints/.retired-*              deletions that were cut short
    checkpoints/rejected/               moved aside, never deleted
    checkpoints/verified.json           which commits were read back from the disk, and when

Discovery looks at directories, not at a pointer, and is shallow: manifests, names and sizes. Whole files are
checked before a load (`manifest.verify_files`). Process safety: `fences.json` and `move_aside` belong to the
launcher, `verified.json` to the writer; readers see old or new, never half.
Must not: import torch, delete a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvrx_sre.checkpoint import manifest as manifests
from nvrx_sre.checkpoint.agree import Fence, is_abandoned
from nvrx_sre.checkpoint.manifest import Manifest
from nvrx_sre.core.atomic import fsync_directory, make_private_directory, write_json_atomically
from nvrx_sre.core.errors import CheckpointCorrupt, StorageError
from nvrx_sre.core.identity import RUN_FILE

CHECKPOINTS = "checkpoints"
REJECTED = "rejected"
TEMPORARY_PREFIX = ".tmp-"
RETIRED_PREFIX = ".retired-"
FENCES_NAME = "fences.json"
VERIFIED_NAME = "verified.json"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A committed checkpoint whose manifest and sizes are right. `directory` is its name in `checkpoints/`."""

    directory: str
    path: Path
    step: int
    generation: int
    epoch: int
    world_size: int
    size_bytes: int
    captured_ns: int
    verified: bool
    manifest: Manifest

    def candidate(self) -> dict[str, Any]:
        """Form for `agree.order` and `channel.Go`."""
        return {"tier": "durable", "step": self.step, "generation": self.generation, "directory": self.directory}


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A directory that looks like a checkpoint and cannot be used. `reason` is a `schema.RejectReason` value."""

    directory: str
    step: int
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """Everything found. `restorable` newest first; `abandoned` are good but behind a fence."""

    restorable: list[Found] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    abandoned: list[Found] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)


def checkpoints_path(run_dir: Path) -> Path:
    """Directory that holds the run's checkpoints."""
    return run_dir / CHECKPOINTS


def discover(run_dir: Path, fences: Sequence[Fence], *, run: str | None = None) -> Discovery:
    """Look through `run_dir`. `run`: the run's name, by default that of `run.json` if there is one.

    Reads every manifest, no other file. Raises `StorageError` if the directory cannot be listed.
    """
    run = run if run is not None else _recorded_run(run_dir)
    verified = read_verified(run_dir)
    found = Discovery()
    for path in _directories(run_dir):
        if path.name.startswith(TEMPORARY_PREFIX):
            found.interrupted.append(path.name)
            continue
        name = manifests.parse_directory_name(path.name)
        if name is None:
            continue
        try:
            manifest = manifests.verify(path, deep=False, run=run)
        except CheckpointCorrupt as error:
            if not path.is_dir():
                continue  # retention took it away while it was looked at
            found.rejected.append(Rejected(directory=path.name, step=name[0], reason=error.reason, message=str(error)))
            continue
        abandoned = is_abandoned(fences, manifest.generation, manifest.step)
        (found.abandoned if abandoned else found.restorable).append(_found(path, manifest, verified))
    found.restorable.sort(key=_age, reverse=True)
    found.abandoned.sort(key=_age, reverse=True)
    return found


def commits_on_record(run_dir: Path) -> bool:
    """True if the run ever committed a checkpoint, good or bad, moved aside or half deleted.

    A directory gets its name only by the rename of a complete save, so any such name is a commit.
    """
    names = [path.name for path in _directories(run_dir)]
    with contextlib.suppress(FileNotFoundError):
        names += os.listdir(checkpoints_path(run_dir) / REJECTED)
    names = [name.removeprefix(RETIRED_PREFIX) for name in names]
    return any(manifests.DIRECTORY_NAME.match(name) for name in names)


def read_fences(run_dir: Path) -> list[Fence]:
    """Fences of the run, oldest first. Raises `StorageError` if the file is there and unreadable."""
    path = run_dir / FENCES_NAME
    try:
        return [Fence(generation=int(item["generation"]), step=int(item["step"])) for item in _read_json(path, [])]
    except (TypeError, KeyError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}: restore it from a backup, do not delete it") from error


def add_fence(run_dir: Path, generation: int, step: int) -> None:
    """Abandon durably everything above `step` of generations before `generation`. Raises `StorageError`."""
    fence = Fence(generation=generation, step=step)
    fences = read_fences(run_dir)
    if fence in fences:
        return
    # A fence that the new one covers says nothing more.
    kept = [old for old in fences if not (old.generation <= generation and old.step >= step)]
    entries = [{"generation": item.generation, "step": item.step} for item in [*kept, fence]]
    write_json_atomically(run_dir / FENCES_NAME, entries)


def read_verified(run_dir: Path) -> dict[str, int]:
    """Directory name -> wall time (ns) at which its commit was read back and found good."""
    try:
        entries = _read_json(checkpoints_path(run_dir) / VERIFIED_NAME, {})
        return {str(name): int(when_ns) for name, when_ns in entries.items()}
    except (AttributeError, TypeError, ValueError):
        return {}  # only a cache of what `verify` can find again: unverified is the safe reading


def write_verified(run_dir: Path, verified: dict[str, int]) -> None:
    """Replace the record of verified commits. Raises `StorageError`."""
    write_json_atomically(checkpoints_path(run_dir) / VERIFIED_NAME, verified)


def record_verified(run_dir: Path, directory: str, when_ns: int) -> None:
    """Add a commit that was read back and found good; forget those that are gone. Raises `StorageError`."""
    root = checkpoints_path(run_dir)
    present = {name: when for name, when in read_verified(run_dir).items() if (root / name).is_dir()}
    write_verified(run_dir, {**present, directory: when_ns})


def move_aside(run_dir: Path, directory: str, reason: str) -> str:
    """Move a rejected checkpoint out of discovery; its new place relative to `run_dir`, '' if it is gone.

    Never deletes and never overwrites. Raises `StorageError`.
    """
    source = checkpoints_path(run_dir) / directory
    rejected = checkpoints_path(run_dir) / REJECTED
    try:
        make_private_directory(rejected)
        target = _unused(rejected, f"{directory}.{reason}")
        os.rename(source, target)
        fsync_directory(rejected)
        fsync_directory(source.parent)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StorageError(f"cannot move {source} aside: {error.strerror}") from error
    return str(target.relative_to(run_dir))


def clear_interrupted(run_dir: Path) -> list[str]:
    """Remove what unfinished saves and deletions left; the names of the unfinished saves.

    Only for the owner of the run directory, while no writer of the run is alive. Never raises: what cannot
    be removed is tried again at the next start.
    """
    removed: list[str] = []
    try:
        directories = _directories(run_dir)
    except StorageError:
        return removed
    for path in directories:
        if path.name.startswith((TEMPORARY_PREFIX, RETIRED_PREFIX)):
            shutil.rmtree(path, ignore_errors=True)
            if path.name.startswith(TEMPORARY_PREFIX):
                removed.append(path.name)
    return removed


def clear_attempts(run_dir: Path, attempt: str, before_generation: int) -> None:
    """Remove what saves under the name `attempt` left that earlier generations began. Never raises."""
    for path in checkpoints_path(run_dir).glob(f"{TEMPORARY_PREFIX}*-{attempt}"):
        if attempt_of(path.name)[1] < before_generation:
            shutil.rmtree(path, ignore_errors=True)


def attempt_of(name: str) -> tuple[int, int]:
    """(step, generation) of the save that a temporary directory belongs to, (0, 0) if its name says none."""
    match = manifests.DIRECTORY_NAME.match(name.removeprefix(TEMPORARY_PREFIX))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def highest_epoch(run_dir: Path) -> int:
    """Highest epoch that any launcher took, 0 if none."""
    try:
        names = os.listdir(run_dir / "epochs")
    except FileNotFoundError:
        return 0
    return max((int(stem) for name in names if (stem := name.removesuffix(".json")).isdigit()), default=0)


def _directories(run_dir: Path) -> list[Path]:
    root = checkpoints_path(run_dir)
    try:
        return sorted(Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot list {root}: {error.strerror}") from error


def _found(path: Path, manifest: Manifest, verified: dict[str, int]) -> Found:
    return Found(
        directory=path.name,
        path=path,
        step=manifest.step,
        generation=manifest.generation,
        epoch=manifest.epoch,
        world_size=manifest.world_size,
        size_bytes=manifest.size_bytes,
        captured_ns=manifest.captured_ns,
        verified=path.name in verified,
        manifest=manifest,
    )


def _age(found: Found) -> tuple[int, int]:
    return found.step, found.generation


def _recorded_run(run_dir: Path) -> str | None:
    try:
        value = _read_json(run_dir / RUN_FILE, {})
    except ValueError:
        return None
    name = value.get("run") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None


def _read_json(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return default
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _unused(parent: Path, name: str) -> Path:
    target = parent / name
    number = 1
    while target.exists():
        number += 1
        target = parent / f"{name}.{number}"
    return target
