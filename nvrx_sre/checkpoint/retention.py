"""Which durable checkpoints are given up, and how: late, one at a time, never the last two good ones.

Only verified commits of the current line count; whatever is older than the `keep` newest of them goes. Before
each delete the newest kept one is read back again, so that damage found late never leaves the run without a
good checkpoint. The directory first leaves discovery in one rename, then loses its manifest, then its files:
a half-deleted one is never a candidate.

Runs in the writer process, off the training path; blocks for the read and the deletes.
Must not: touch abandoned, rejected or unfinished directories.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from nvrx_sre.checkpoint import discover, manifest
from nvrx_sre.checkpoint.discover import Found
from nvrx_sre.core.atomic import fsync_directory
from nvrx_sre.core.errors import StorageError

KEEP_MIN = 2
"""From the second commit on, two good ones exist."""


def surplus(restorable: list[Found], keep: int) -> list[Found]:
    """What is older than the `keep` (at least 2) newest verified commits, oldest first. Pure."""
    ordered = sorted(restorable, key=lambda found: (found.step, found.generation), reverse=True)
    verified = [found for found in ordered if found.verified]
    kept = verified[: max(keep, KEEP_MIN)]
    if len(kept) < max(keep, KEEP_MIN):
        return []
    oldest_kept = ordered.index(kept[-1])
    return ordered[:oldest_kept:-1]


def retain(run_dir: Path, run: str, keep: int) -> list[str]:
    """Delete the surplus; names of the directories deleted.

    Raises `CheckpointCorrupt` if the newest kept checkpoint no longer verifies (nothing is deleted then) and
    `StorageError` if a directory cannot be removed.
    """
    found = discover.discover(run_dir, discover.read_fences(run_dir), run=run)
    deleted = []
    for old in surplus(found.restorable, keep):
        newest = next(item for item in found.restorable if item.verified)
        manifest.verify(newest.path, deep=True, run=run)
        delete(old.path)
        deleted.append(old.directory)
    if deleted:
        present = {item.directory for item in [*found.restorable, *found.abandoned]} - set(deleted)
        verified = discover.read_verified(run_dir)
        discover.write_verified(run_dir, {name: when for name, when in verified.items() if name in present})
    return deleted


def delete(path: Path) -> None:
    """Remove a checkpoint: out of discovery in one rename, then its manifest, then its files.

    Raises `StorageError`; what is left then is no candidate any more.
    """
    retired = path.with_name(f"{discover.RETIRED_PREFIX}{path.name}")
    try:
        os.rename(path, retired)
        fsync_directory(path.parent)
        (retired / manifest.MANIFEST_NAME).unlink()
        shutil.rmtree(retired)
    except OSError as error:
        raise StorageError(f"cannot delete {path}: {error.strerror}") from error
