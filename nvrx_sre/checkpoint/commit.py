"""From a written attempt to a verified commit: manifest, sync, not fenced, not superseded, one rename, read back.

    write -> [.tmp-.../ + Manifest] -> manifest.json -> check -> rename -> step-.../ -> drop cached pages -> compare

Invariants: nothing that a fence or a higher epoch cut off gets its final name; a directory with a final name was
complete and synced before. Process safety: one committer a run, the leader's writer. Blocking throughout.
Must not: import torch, delete anything but its own attempt.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.checkpoint import discover, manifest
from nvrx_sre.checkpoint.agree import is_abandoned
from nvrx_sre.checkpoint.manifest import Manifest
from nvrx_sre.checkpoint.stages import AtStage, unwatched
from nvrx_sre.core.atomic import fsync_directory, make_private_directory
from nvrx_sre.core.errors import CheckpointCorrupt, NvrxError, StorageError
from nvrx_sre.core.ids import random_hex
from nvrx_sre.events.schema import SaveFailure

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk, the quota or the limit of a file's size is reached. A full target reports it with free space elsewhere."""


class SaveRefused(NvrxError):
    """The save must not commit. `reason` is a `schema.SaveFailure`."""

    code = "save_refused"

    def __init__(self, message: str, *, reason: SaveFailure) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """What to write. `captured_ns` is wall time; ranks are those of the whole run."""

    run: str
    step: int
    epoch: int
    generation: int
    captured_ns: int
    world_size: int


def failure_of(error: StorageError) -> SaveFailure:
    """Why the storage refused, from the `OSError` behind it."""
    cause = error.__cause__
    is_full = isinstance(cause, OSError) and cause.errno in NO_SPACE
    return SaveFailure.NO_SPACE if is_full else SaveFailure.STORAGE


def attempt_path(run_dir: Path, request: SaveRequest, attempt: str = "") -> Path:
    """Directory of an attempt: a new name, or the one on which several writers agreed.

    Raises `StorageError` if `checkpoints/` cannot be made.
    """
    root = discover.checkpoints_path(run_dir)
    try:
        make_private_directory(root)
    except OSError as error:
        raise StorageError(f"cannot create {root}: {error.strerror}") from error
    name = manifest.directory_name(request.step, request.generation)
    return root / f"{discover.TEMPORARY_PREFIX}{name}-{attempt or f'{os.getpid()}-{random_hex(4)}'}"


def commit(
    run_dir: Path,
    temporary: Path,
    described: Manifest,
    *,
    is_untouched: Callable[[], None] = lambda: None,
    at_stage: AtStage = unwatched,
) -> Path:
    """Publish `temporary` under its final name; the new path. Durable when it returns.

    A commit of this step and generation that is already there and good is kept. `is_untouched` raises `SaveRefused`
    if what was written from is no longer what it was. Raises `SaveRefused` as well if the line was abandoned or the
    launcher superseded, `StorageError` otherwise.
    """
    final = temporary.with_name(manifest.directory_name(described.step, described.generation))
    try:
        at_stage("manifest")
        manifest.write(temporary, described)
        at_stage("rename")
        check_current(run_dir, described.epoch, described.generation, described.step)
        is_untouched()
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


def check_current(run_dir: Path, epoch: int, generation: int, step: int) -> None:
    """Raise `SaveRefused` unless the save still belongs to the run's line and its launcher still leads."""
    newest = discover.highest_epoch(run_dir)
    if newest > epoch:
        raise SaveRefused(f"epoch {newest} has taken over the run", reason=SaveFailure.ABANDONED_LINE)
    if is_abandoned(discover.read_fences(run_dir), generation, step):
        raise SaveRefused(
            f"step {step} of generation {generation} was abandoned by a rollback", reason=SaveFailure.ABANDONED_LINE
        )


def verify_committed(run_dir: Path, directory: Path, run: str, at_stage: AtStage = unwatched) -> Manifest:
    """Read a commit back from the disk and compare every checksum.

    Damage moves the directory out of discovery at once. Raises `SaveRefused` (verify) or `StorageError`.
    """
    try:
        at_stage("verify")
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
