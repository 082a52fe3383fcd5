"""The journal: every record, append-only, one JSON line each. What a run is rebuilt from.

`DIRECTORY/<epoch, 8 digits>-<segment, 6 digits>.jsonl`; the first line of a segment is a header
`{"schema", "run", "epoch"}`. The writer has a thread of its own and a bounded queue: `append` never blocks
and never raises; what does not fit is dropped and counted. `sync` is a barrier: True means that everything
appended before is on the disk (fsync). After a failed write the writer goes on in a new segment and writes
the batch again, so a torn line is always the last of its segment; readers drop lines that repeat a
sequence number.

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
from collections.abc import Iterator
from pathlib import Path

from nvrx_sre.core.atomic import PRIVATE_FILE_MODE, fsync_directory, make_private_directory
from nvrx_sre.core.limits import TelemetryLimits
from nvrx_sre.events.codec import from_dict, to_dict
from nvrx_sre.events.schema import SCHEMA_VERSION, Record

SEGMENT_NAME = re.compile(r"(\d{8})-(\d{6})\.jsonl")
MAX_SEGMENT_BYTES = 64 * 1024 * 1024
"""A segment beyond this is closed and the next one begun."""
MAX_BATCH_RECORDS = 1024
"""Records written with one system call."""
RETRY_S = 0.5
"""Wait between attempts while the disk refuses."""


class JournalWriter:
    """Appends the records of one epoch. The files are opened by its thread, so construction cannot fail."""

    def __init__(self, directory: Path, run: str, epoch: int, *, limits: TelemetryLimits | None = None) -> None:
        self._directory = directory
        self._run = run
        self._epoch = epoch
        self._capacity = (limits or TelemetryLimits()).journal_queue_records
        self._queue: deque[Record] = deque()
        self._changed = threading.Condition()
        self._num_appended = 0
        self._num_written = 0
        self._num_synced = 0
        self._sync_wanted = 0
        self._closing = False
        self._descriptor = -1
        self._segment_bytes = 0
        self._failed = False
        self.num_dropped = 0
        self.num_errors = 0
        self.last_error = ""
        self._thread = threading.Thread(target=self._main, name="nvrx-journal", daemon=True)
        self._thread.start()

    def append(self, record: Record) -> bool:
        """Queue `record`; False if it was dropped (and counted). Never blocks, never raises."""
        with self._changed:
            if self._closing or len(self._queue) >= self._capacity:
                self.num_dropped += 1
                return False
            self._queue.append(record)
            self._num_appended += 1
            self._changed.notify_all()
            return True

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
                batch = list(itertools.islice(self._queue, MAX_BATCH_RECORDS))
                sync_wanted = self._sync_wanted > self._num_synced
            self._turn(batch, sync_wanted)
        with contextlib.suppress(OSError):
            self._close_segment()

    def _has_work(self) -> bool:
        """Something to do; after a failure only the retry's timeout or the end counts."""
        if self._closing or self._failed:
            return self._closing
        return bool(self._queue) or self._sync_wanted > self._num_synced

    def _turn(self, batch: list[Record], sync_wanted: bool) -> None:
        """Write `batch`, then sync if it was asked for; on failure the batch stays queued."""
        try:
            if batch:
                self._write(b"".join(self._line(record) for record in batch))
                with self._changed:
                    for _ in batch:
                        self._queue.popleft()
                    self._num_written += len(batch)
            if sync_wanted and self._descriptor >= 0:
                os.fsync(self._descriptor)
        except OSError as error:
            self._note(f"{error.strerror or error}", failed=True)
            with contextlib.suppress(OSError):
                self._close_segment(sync=False)
            return
        with self._changed:
            self._failed = False
            if sync_wanted:
                self._num_synced = self._num_written
                self._changed.notify_all()

    def _line(self, record: Record) -> bytes:
        try:
            return json.dumps(to_dict(record), default=str).encode() + b"\n"
        except (TypeError, ValueError) as error:
            self._note(f"record {record.seq} cannot be written: {error}", failed=False)
            return b""

    def _note(self, message: str, *, failed: bool) -> None:
        with self._changed:
            self.num_errors += 1
            self.last_error = message
            self._failed = failed or self._failed

    def _write(self, content: bytes) -> None:
        if self._descriptor >= 0 and self._segment_bytes > MAX_SEGMENT_BYTES:
            self._close_segment()
        if self._descriptor < 0:
            self._open_segment()
        view = memoryview(content)
        while view:
            written = os.write(self._descriptor, view)
            self._segment_bytes += written
            view = view[written:]

    def _open_segment(self) -> None:
        make_private_directory(self._directory)
        taken = [segment for epoch, segment, _ in _segments(self._directory) if epoch == self._epoch]
        path = self._directory / f"{self._epoch:08d}-{max(taken, default=0) + 1:06d}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, PRIVATE_FILE_MODE)
        self._segment_bytes = 0
        header = {"schema": SCHEMA_VERSION, "run": self._run, "epoch": self._epoch}
        os.write(self._descriptor, json.dumps(header).encode() + b"\n")
        fsync_directory(self._directory)

    def _close_segment(self, *, sync: bool = True) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)


class JournalReader:
    """Reads all epochs in order. `num_bad_lines` counts lines that are no record, torn last lines included."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.num_bad_lines = 0

    def __iter__(self) -> Iterator[Record]:
        last = (0, -1)
        for _, _, path in _segments(self._directory):
            with open(path, "rb") as file:
                file.readline()  # the header
                for line in file:
                    record = self._parse(line)
                    if record is None:
                        self.num_bad_lines += 1
                    elif (record.epoch, record.seq) > last:
                        last = (record.epoch, record.seq)
                        yield record

    @staticmethod
    def _parse(line: bytes) -> Record | None:
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
    return sum(_cut_torn_line(path) for _, _, path in _segments(directory))


def _cut_torn_line(path: Path) -> int:
    with open(path, "r+b") as file:
        content = file.read()
        keep = content.rfind(b"\n") + 1
        if keep == len(content):
            return 0
        file.truncate(keep)
        os.fsync(file.fileno())
        return len(content) - keep


def _segments(directory: Path) -> list[tuple[int, int, Path]]:
    """(epoch, segment, path) in order."""
    found = ((SEGMENT_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), int(match[2]), path) for match, path in found if match)
