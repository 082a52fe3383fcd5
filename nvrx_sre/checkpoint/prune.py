"""What an operator may delete from a run directory, said before it is done.

    surplus       older than the newest `keep` verified commits of the current line (the writer's own rule)
    abandoned     sound, but behind a fence, so that no restore will ever use it; only beside two verified commits
    interrupted   a save that never committed
    retired       a deletion that was cut short

Invariants: two verified commits of the current line stay, read back in full before the first commit goes; nothing
that was moved aside as damaged is touched. Blocking: reads two checkpoints, deletes. Process safety: only while no
launcher owns the run; `execute` asks its caller before each removal.
Must not: import torch, decide that a run is not owned.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nvrx_sre.checkpoint import discover, manifest, retention
from nvrx_sre.checkpoint.discover import Discovery
from nvrx_sre.core.errors import StorageError


class PruneReason(StrEnum):
    """Why a directory may go."""

    SURPLUS = "surplus"
    ABANDONED = "abandoned"
    INTERRUPTED = "interrupted"
    RETIRED = "retired"


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A directory of `checkpoints/` that may go, and what that frees."""

    directory: str
    reason: PruneReason
    size_bytes: int


def plan(run_dir: Path, found: Discovery, keep: int) -> list[Removal]:
    """What may go, commits oldest first. Reads directory entries only. Raises `StorageError`."""
    root = discover.checkpoints_path(run_dir)
    commits = [(item, PruneReason.SURPLUS) for item in retention.surplus(found.restorable, keep)]
    if sum(item.verified for item in found.restorable) >= retention.KEEP_MIN:
        commits += [(item, PruneReason.ABANDONED) for item in reversed(found.abandoned)]
    rest = [(name, PruneReason.INTERRUPTED) for name in found.interrupted]
    rest += [(name, PruneReason.RETIRED) for name in _retired(root)]
    return [
        *(Removal(directory=item.directory, reason=why, size_bytes=item.size_bytes) for item, why in commits),
        *(Removal(directory=name, reason=why, size_bytes=_size_bytes(root / name)) for name, why in rest),
    ]


def execute(
    run_dir: Path, found: Discovery, removals: Sequence[Removal], check_unowned: Callable[[], None]
) -> Iterator[Removal]:
    """Remove one after another, yielding each that is gone.

    `check_unowned` raises if a launcher has taken the run. Raises `CheckpointCorrupt` before anything is removed
    if one of the two newest verified commits is damaged, `StorageError` if a directory cannot be removed.
    """
    root = discover.checkpoints_path(run_dir)
    if any(removal.reason in (PruneReason.SURPLUS, PruneReason.ABANDONED) for removal in removals):
        for item in [item for item in found.restorable if item.verified][: retention.KEEP_MIN]:
            manifest.verify_files(item.path, item.manifest)
    for removal in removals:
        check_unowned()
        if manifest.parse_directory_name(removal.directory) is not None:
            retention.delete(root / removal.directory)
            _forget(run_dir, removal.directory)
        else:
            _remove_tree(root / removal.directory)
        yield removal


def _forget(run_dir: Path, directory: str) -> None:
    verified = discover.read_verified(run_dir)
    if verified.pop(directory, None) is not None:
        discover.write_verified(run_dir, verified)


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise StorageError(f"cannot delete {path}: {error.strerror}") from error


def _retired(root: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(root) if name.startswith(discover.RETIRED_PREFIX))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot list {root}: {error.strerror}") from error


def _size_bytes(path: Path) -> int:
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
