"""Which durable checkpoints are given up, and how: late, one at a time, never the last two good ones.

Only verified commits of the current line count; whatever is older than the `keep` newest of them goes, and so do
commits of an abandoned line. What was abandoned for a fresh start (a fence at step 0) stays: a person asked for the
start, not for the loss. Before each delete the newest kept one is read back again, so that damage found late never
leaves the run without a good checkpoint. The directory first leaves discovery in one rename, then loses its
manifest, then its files: a half-deleted one is never a candidate.

Off the critical path: `Retention` is a thread of the writer, so that a slow delete holds up neither training nor the
next save. Blocks for the read and the deletes. Must not: touch rejected or unfinished directories, raise.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.checkpoint import discover, manifest
from nvrx_sre.checkpoint.agree import Fence, is_abandoned
from nvrx_sre.checkpoint.discover import Discovery, Found
from nvrx_sre.checkpoint.stages import AtStage, unwatched
from nvrx_sre.core.atomic import fsync_directory
from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.core.errors import CheckpointCorrupt, StorageError

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


def abandoned_surplus(found: Discovery, fences: Sequence[Fence]) -> list[Found]:
    """Abandoned commits that may go once two verified ones of the current line exist, oldest first. Pure."""
    if sum(item.verified for item in found.restorable) < KEEP_MIN:
        return []
    rollbacks = [fence for fence in fences if fence.step > 0]
    return [item for item in reversed(found.abandoned) if is_abandoned(rollbacks, item.generation, item.step)]


@dataclass(frozen=True, kw_only=True)
class Deleted:
    """A checkpoint that is gone, and how long that took."""

    step: int
    directory: str
    seconds: float


def retain(
    run_dir: Path,
    run: str,
    keep: int,
    epoch: int,
    on_deleted: Callable[[Deleted], None] = lambda _: None,
    at_stage: AtStage = unwatched,
) -> None:
    """Delete the surplus, for as long as `epoch` leads the run.

    Raises `CheckpointCorrupt` if the newest kept checkpoint no longer verifies (nothing is deleted from then on) and
    `StorageError` if a directory cannot be removed.
    """
    clock = SystemClock()
    fences = discover.read_fences(run_dir)
    found = discover.discover(run_dir, fences, run=run)
    for old in [*abandoned_surplus(found, fences), *surplus(found.restorable, keep)]:
        if discover.highest_epoch(run_dir) > epoch:
            return
        newest = next(item for item in found.restorable if item.verified)
        manifest.verify(newest.path, deep=True, run=run)
        started_ns = clock.monotonic_ns()
        delete(old.path, at_stage)
        elapsed_s = seconds(clock.monotonic_ns() - started_ns)
        on_deleted(Deleted(step=old.step, directory=old.directory, seconds=elapsed_s))


class Retention:
    """A thread that gives up what is surplus after each verified save, one request at a time."""

    def __init__(
        self,
        run_dir: Path,
        run: str,
        on_deleted: Callable[[Deleted], None],
        log: Callable[[str], None],
        at_stage: AtStage = unwatched,
    ) -> None:
        self._run_dir = run_dir
        self._run = run
        self._on_deleted = on_deleted
        self._log = log
        self._at_stage = at_stage
        self._changed = threading.Condition()
        self._wanted: tuple[int, int] | None = None
        self._is_busy = False
        self._thread = threading.Thread(target=self._work, name="nvrx-retention", daemon=True)
        self._thread.start()

    def request(self, keep: int, epoch: int) -> None:
        """A save was verified: give up what is surplus, later. Does not block."""
        with self._changed:
            self._wanted = (keep, epoch)
            self._changed.notify_all()

    def wait_idle(self, limit_s: float) -> bool:
        """Wait until nothing is being deleted or waits for it; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._wanted is None and not self._is_busy, limit_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                while self._wanted is None:
                    self._changed.wait()
                (keep, epoch), self._wanted, self._is_busy = self._wanted, None, True
            try:
                retain(self._run_dir, self._run, keep, epoch, self._on_deleted, self._at_stage)
            except (StorageError, CheckpointCorrupt) as error:
                # It costs disk space, not the save; the next verified save tries again.
                self._log(f"kept all checkpoints: {error}")


def delete(path: Path, at_stage: AtStage = unwatched) -> None:
    """Remove a checkpoint: out of discovery in one rename, then its manifest, then its files.

    Raises `StorageError`; what is left then is no candidate any more.
    """
    retired = path.with_name(f"{discover.RETIRED_PREFIX}{path.name}")
    try:
        os.rename(path, retired)
        fsync_directory(path.parent)
        at_stage("retention")
        (retired / manifest.MANIFEST_NAME).unlink()
        shutil.rmtree(retired)
    except OSError as error:
        raise StorageError(f"cannot delete {path}: {error.strerror}") from error
