"""The journal: every record, append-only, one JSON line each. What a run is rebuilt from.

`DIRECTORY/<epoch, 8 digits>-<segment, 6 digits>.jsonl`; the first line of a segment is a header
`{"schema", "run", "epoch"}`. A segment that is full is closed by its owner with `rotate`: the next one begins
with a second line `{"snapshot", "last"}`, the state of the folds after the record `last`, so that a replay reads
the newest snapshot that fits and what follows it, however long the run is. Old segments are kept up to a limit.

The writer has a thread of its own and a bounded queue: `append` never blocks and never raises; what does not fit
is dropped and counted. `sync` is a barrier: True means that everything appended before is on the disk (fsync).
After a failed write the writer goes on in a new segment and writes the batch again, so a torn line is always the
last of its segment; readers drop lines that repeat a sequence number. After a failed fsync nobody knows what of the
segment is on the disk, and the kernel does not say it twice: everything since the last good one is written again, so
it is kept in memory until then, bounded by an fsync of the writer's own. A segment in which nothing was written whole
is the one that it goes on in, and one that was written again goes when the next one is whole: a disk that stays full
or broken gets a segment or two more, not one an attempt.

Thread safety: `append`, `sync`, `close` from any thread. One writer an epoch; readers at any time.
Must not: change control flow when the disk is full, slow or gone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvrx_sre.core.atomic import PRIVATE_FILE_MODE, fsync_directory, make_private_directory
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.limits import TelemetryLimits
from nvrx_sre.events.codec import from_dict, to_dict
from nvrx_sre.events.schema import SCHEMA_VERSION, Record

SEGMENT_NAME = re.compile(r"(\d{8})-(\d{6})\.jsonl")
MAX_BATCH_RECORDS = 1024
"""Records written with one system call."""
MAX_UNSYNCED_RECORDS = 4096
"""Records that may be written and not synced: so many are kept in memory."""
RETRY_S = 0.5
"""Wait between attempts while the disk refuses."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of the folds after the record (epoch, seq) `last`. `folds`: as taken by `events.snapshot`."""

    last: tuple[int, int]
    folds: dict[str, Any]


class JournalWriter:
    """Appends the records of one epoch. The files are opened by its thread, so construction cannot fail."""

    def __init__(self, directory: Path, run: str, epoch: int, *, limits: TelemetryLimits | None = None) -> None:
        self._directory = directory
        self._run = run
        self._epoch = epoch
        self._limits = limits or TelemetryLimits()
        self._queue: deque[Record | Snapshot] = deque()
        self._changed = threading.Condition()
        self._num_appended = 0
        self._num_written = 0
        self._num_synced = 0
        self._sync_wanted = 0
        self._closing = False
        self._descriptor = -1
        self._path: Path | None = None
        """The open segment's."""
        self._blank: Path | None = None
        """Segment that was begun, and in which no batch was written whole."""
        self._unsynced: list[Record | Snapshot] = []
        """Written into the open segment, and not known to be on the disk."""
        self._synced_bytes = 0
        """Size of what is, in the open segment."""
        self._is_doubtful = False
        """An fsync of the open segment has failed: what it holds of `_unsynced` is not to be relied on."""
        self._superseded: tuple[Path, int] | None = None
        """Segment that was given up, and its size without what is written again."""
        self._segment_bytes = 0
        self._snapshot_bytes = 0
        self._failed = False
        self._rotating = False
        self.num_segments = 0
        self.num_dropped = 0
        self.num_errors = 0
        self.on_error: Callable[[str], None] = lambda _: None
        """Hears of each failure, on the writer's thread."""
        self._thread = threading.Thread(target=self._main, name="nvrx-journal", daemon=True)
        self._thread.start()

    def append(self, record: Record) -> bool:
        """Queue `record`; False if it was dropped (and counted). Never blocks, never raises."""
        with self._changed:
            if self._closing or len(self._queue) >= self._limits.journal_queue_records:
                self.num_dropped += 1
                return False
            self._queue.append(record)
            self._num_appended += 1
            self._changed.notify_all()
            return True

    @property
    def is_failing(self) -> bool:
        """The newest attempt to write or sync failed; it is tried again every `RETRY_S`."""
        return self._failed

    @property
    def is_full(self) -> bool:
        """The segment has reached its size, or segments their number: the owner should `rotate`.

        A snapshot as large as a segment must not fill it: then each record would begin a new one.
        """
        is_large = self._segment_bytes > max(self._limits.journal_segment_bytes, 2 * self._snapshot_bytes)
        return (is_large or self.num_segments > self._limits.journal_segments) and not self._rotating

    def rotate(self, snapshot: Snapshot) -> None:
        """Begin a new segment with `snapshot`, which holds everything appended so far. Never blocks."""
        with self._changed:
            self._rotating = True
            self._queue.append(snapshot)
            self._num_appended += 1
            self._changed.notify_all()

    def sync(self, timeout_s: float) -> bool:
        """Wait until everything appended so far is on the disk; False if that took longer than `timeout_s`."""
        with self._changed:
            wanted = self._num_appended
            if self._num_synced >= wanted:
                return True
            self._sync_wanted = max(self._sync_wanted, wanted)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._num_synced >= wanted, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Write and sync what is queued, end the thread; False if that took longer than `timeout_s`."""
        done = self.sync(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s if done else 0.0)
        return done and not self._thread.is_alive()

    # --- the thread ---------------------------------------------------------------------------------------

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, RETRY_S if self._failed else None)
                if self._closing and (self._failed or not self._queue):
                    self.num_dropped += len(self._queue)
                    break
                batch = self._next_batch()
                sync_wanted = self._sync_wanted > self._num_synced
            self._turn(batch, sync_wanted)
        with contextlib.suppress(OSError):
            self._close_segment()

    def _next_batch(self) -> list[Record | Snapshot]:
        """Records up to the next snapshot, which is a batch of its own."""
        batch = list(itertools.islice(self._queue, MAX_BATCH_RECORDS))
        at = next((index for index, item in enumerate(batch) if isinstance(item, Snapshot)), len(batch))
        return batch[: max(1, at)]

    def _has_work(self) -> bool:
        """Something to do; after a failure only the retry's timeout or the end counts."""
        if self._closing or self._failed:
            return self._closing
        return bool(self._queue) or self._sync_wanted > self._num_synced

    def _turn(self, batch: list[Record | Snapshot], sync_wanted: bool) -> None:
        """Write `batch`, then sync if it was asked for; on failure the batch stays queued."""
        try:
            if batch:
                self._write_batch(batch)
                self._blank = None
                with self._changed:
                    for _ in batch:
                        self._queue.popleft()
                    self._num_written += len(batch)
            if (sync_wanted or len(self._unsynced) >= MAX_UNSYNCED_RECORDS) and self._descriptor >= 0:
                self._fsync()
        except OSError as error:
            self._note(f"{error.strerror or error}", failed=True)
            self._give_up_segment()
            return
        with self._changed:
            self._failed = False
            if sync_wanted:
                self._num_synced = self._num_written
                self._changed.notify_all()

    def _write_batch(self, batch: list[Record | Snapshot]) -> None:
        first = batch[0]
        if isinstance(first, Snapshot):
            self._close_segment()
            self._open_segment()
            self._write(_json_line({"snapshot": first.folds, "last": list(first.last)}))
            self._snapshot_bytes = self._segment_bytes
            self._fsync()
            self._rotating = False
            self._delete_old_segments()
            return
        if self._descriptor < 0:
            self._open_segment()
        self._write(b"".join(self._line(record) for record in batch if isinstance(record, Record)))
        self._unsynced += batch

    def _line(self, record: Record) -> bytes:
        try:
            return _json_line(to_dict(record))
        except (TypeError, ValueError) as error:
            self._note(f"record {record.seq} cannot be written: {error}", failed=False)
            return b""

    def _note(self, message: str, *, failed: bool) -> None:
        with self._changed:
            self.num_errors += 1
            self._failed = failed or self._failed
        self.on_error(message)

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            written = os.write(self._descriptor, view)
            self._segment_bytes += written
            view = view[written:]

    def _open_segment(self) -> None:
        make_private_directory(self._directory)
        existing = segments(self._directory)
        taken = [segment for epoch, segment, _ in existing if epoch == self._epoch]
        path = self._blank or self._directory / f"{self._epoch:08d}-{max(taken, default=0) + 1:06d}.jsonl"
        is_new = os.O_TRUNC if self._blank else os.O_EXCL
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | is_new | os.O_APPEND, PRIVATE_FILE_MODE)
        self.num_segments = len(existing) + (self._blank is None)
        self._blank = self._path = path
        self._synced_bytes, self._is_doubtful = 0, False
        self._segment_bytes = 0
        header = {"schema": SCHEMA_VERSION, "run": self._run, "epoch": self._epoch}
        os.write(self._descriptor, json.dumps(header).encode() + b"\n")
        fsync_directory(self._directory)

    def _delete_old_segments(self) -> None:
        """Called once a snapshot that makes up for them is on disk."""
        for _, _, path in segments(self._directory)[: -self._limits.journal_segments]:
            path.unlink(missing_ok=True)
            self.num_segments -= 1

    def _fsync(self) -> None:
        """Everything written is on the disk, or `OSError`; then nothing since the last one is known to be."""
        self._is_doubtful = True
        os.fsync(self._descriptor)
        self._is_doubtful, self._synced_bytes = False, os.fstat(self._descriptor).st_size
        self._unsynced.clear()
        self._cut_superseded()

    def _close_segment(self) -> None:
        """Sync and close. Raises `OSError`; the segment is still open then."""
        if self._descriptor >= 0:
            self._fsync()
            self._close_descriptor()

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def _give_up_segment(self) -> None:
        """Go on in another one; what may not be on the disk is queued again, before everything else."""
        with contextlib.suppress(OSError):
            if not self._is_doubtful:
                self._close_segment()
        if self._unsynced:
            if self._path is not None and not self._synced_bytes:
                self._cut_superseded()  # what stood there stands here, as good or bad
            if self._path is not None and self._superseded is None:
                self._superseded = (self._path, self._synced_bytes)
            with self._changed:
                self._num_written -= len(self._unsynced)
                self._queue.extendleft(reversed(self._unsynced))
            self._unsynced.clear()
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._close_descriptor()

    def _cut_superseded(self) -> None:
        """What was written again is taken away where it stood first: half of it there would hide the other half."""
        if self._superseded is None:
            return
        (path, num_bytes), self._superseded = self._superseded, None
        with contextlib.suppress(OSError):
            if num_bytes:
                os.truncate(path, num_bytes)
            else:
                path.unlink()
                self.num_segments -= 1


def _json_line(value: Any) -> bytes:
    return json.dumps(value, default=str).encode() + b"\n"


Fits = Callable[[Mapping[str, Any]], bool]
"""Whether a snapshot's folds are usable."""


def begin_at(directory: Path, fits: Fits | None, *, oldest: bool = False) -> tuple[Snapshot | None, list[Path]]:
    """The newest snapshot whose folds fit and the segments from there on; without one, all segments.

    `oldest`: all segments, with the snapshot that the first one begins with where older ones were deleted. Raises
    `UserError` for a segment of a newer version.
    """
    paths = [path for _, _, path in segments(directory)]
    if fits is None:
        return None, paths
    for index in range(min(1, len(paths))) if oldest else reversed(range(len(paths))):
        found = None
        with contextlib.suppress(FileNotFoundError), open(paths[index], "rb") as file:
            check_header(file.readline(), paths[index])
            found = parse_snapshot(file.readline())
        if found is not None and fits(found.folds):
            return found, paths[index:]
    return None, paths


class JournalReader:
    """Reads all epochs in order. `num_bad_lines` counts lines that are no record, torn last lines included.

    With `fits` it begins at the newest snapshot whose folds that function accepts: `snapshot` is that one, and only
    the records after it are read; None if there is none. `oldest`: see `begin_at`. Raises `UserError` for a journal
    of a newer version, at construction or while reading.
    """

    def __init__(self, directory: Path, *, fits: Fits | None = None, oldest: bool = False) -> None:
        self.num_bad_lines = 0
        self.snapshot, self._paths = begin_at(directory, fits, oldest=oldest)

    def __iter__(self) -> Iterator[Record]:
        last = (0, -1) if self.snapshot is None else self.snapshot.last
        for path in self._paths:
            # A segment that is gone meanwhile was old, or was written again, after a failed fsync, in a later one.
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                check_header(file.readline(), path)
                for line in file:
                    record = parse_record(line)
                    if record is None:
                        self.num_bad_lines += not line.startswith(_SNAPSHOT_BEGIN)
                    elif (record.epoch, record.seq) > last:
                        last = (record.epoch, record.seq)
                        yield record


_SNAPSHOT_BEGIN = b'{"snapshot":'


def check_header(line: bytes, path: Path) -> None:
    """Raise `UserError` if the segment at `path` was written by a newer version. A torn header is no error."""
    try:
        schema = int(json.loads(line)["schema"])
    except (ValueError, TypeError, KeyError):
        return
    if schema > SCHEMA_VERSION:
        raise UserError(
            f"journal {path} has version {schema}, this nvrx-sre reads up to {SCHEMA_VERSION}: use a newer nvrx-sre"
        )


def parse_snapshot(line: bytes) -> Snapshot | None:
    """The snapshot that a segment's second line holds, None if it is none or torn."""
    if not line.startswith(_SNAPSHOT_BEGIN) or not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
        epoch, seq = value["last"]
        return Snapshot(last=(int(epoch), int(seq)), folds=dict(value["snapshot"]))
    except (ValueError, TypeError, KeyError):
        return None


def parse_record(line: bytes) -> Record | None:
    """The record of a line, None if it is none or torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        return from_dict(json.loads(line))
    except (ValueError, AttributeError, TypeError):
        return None


def read_journal(directory: Path) -> Iterator[Record]:
    """All records in order of (epoch, seq), each once. A torn last line of a segment is left out.

    Raises `FileNotFoundError` if there is no such directory. Safe beside a live writer.
    """
    return iter(JournalReader(directory))


def repair(directory: Path) -> int:
    """Cut torn last lines off; returns the number of bytes dropped. For the start of a launcher only."""
    if not directory.is_dir():
        return 0
    return sum(_cut_torn_line(path) for _, _, path in segments(directory))


def _cut_torn_line(path: Path) -> int:
    with open(path, "r+b") as file:
        content = file.read()
        keep = content.rfind(b"\n") + 1
        if keep == len(content):
            return 0
        file.truncate(keep)
        os.fsync(file.fileno())
        return len(content) - keep


def segments(directory: Path) -> list[tuple[int, int, Path]]:
    """(epoch, segment, path) in order."""
    found = ((SEGMENT_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), int(match[2]), path) for match, path in found if match)
