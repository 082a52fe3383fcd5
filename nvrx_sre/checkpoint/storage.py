"""DCP's file system with our needs: private files, checksums while writing, pacing, errors that keep their errno.

One instance a save; its `sums` become the manifest's file list. DCP syncs by `stream.fileno()`, hence that
call flushes first. An `OSError` raised under torch's C++ writer comes back as a `RuntimeError` without its
cause, so the stream remembers it. Thread safety: one thread.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from nvrx_sre.checkpoint.manifest import FileEntry
from nvrx_sre.core.atomic import PRIVATE_FILE_MODE
from nvrx_sre.core.clock import SystemClock, seconds


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How the writer treats the storage."""

    bandwidth_bytes_s: float | None = None
    """Upper bound of the average write rate of a save; None for no bound."""
    delay_per_file_s: float = 0.0
    """Extra wait before each file is closed: injected slow storage."""


class Pacer:
    """Keeps the average rate of one save under a bound by waiting after writes that came too early."""

    def __init__(self, bandwidth_bytes_s: float | None) -> None:
        self._bandwidth_bytes_s = bandwidth_bytes_s
        self._clock = SystemClock()
        self._started_ns = self._clock.monotonic_ns()
        self._num_bytes = 0
        self._never = threading.Event()

    def wrote(self, num_bytes: int) -> None:
        """Account for a write; blocks until the rate allows the next one."""
        self._num_bytes += num_bytes
        if self._bandwidth_bytes_s is not None:
            elapsed_s = seconds(self._clock.monotonic_ns() - self._started_ns)
            self.wait(self._num_bytes / self._bandwidth_bytes_s - elapsed_s)

    def wait(self, duration_s: float) -> None:
        """Let `duration_s` pass. The wait is the purpose here: there is nothing else to wait on."""
        if duration_s > 0:
            self._never.wait(duration_s)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE_MODE)


class ChecksumStream(io.IOBase):
    """Write-only stream over a file: counts, hashes and paces what goes through."""

    def __init__(self, file: BinaryIO, pacer: Pacer) -> None:
        super().__init__()
        self._file = file
        self._pacer = pacer
        self._state = xxhash.xxh3_128()
        self._num_bytes = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        try:
            self._file.write(content)
        except OSError as error:
            self.error = error
            raise
        self._state.update(content)
        size_bytes = memoryview(content).nbytes
        self._num_bytes += size_bytes
        self._pacer.wrote(size_bytes)
        return size_bytes

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        self.flush()
        return self._file.fileno()

    def entry(self) -> FileEntry:
        """Length and checksum of everything written so far."""
        return FileEntry(size_bytes=self._num_bytes, xxh3_128=self._state.hexdigest())


class ChecksumFileSystem(FileSystem):
    """File system of one save. `sums`: file name -> entry; `error`: the first `OSError` of a write."""

    def __init__(self, options: WriteOptions) -> None:
        self.sums: dict[str, FileEntry] = {}
        self.error: OSError | None = None
        self._options = options
        self._pacer = Pacer(options.bandwidth_bytes_s)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if "w" not in mode:
            with super().create_stream(path, mode) as plain:
                yield plain
            return
        with open(path, mode, opener=_open_private) as file:
            stream = ChecksumStream(cast(BinaryIO, file), self._pacer)
            try:
                yield stream
                self._pacer.wait(self._options.delay_per_file_s)
            finally:
                self.error = self.error or stream.error
        self.sums[Path(path).name] = stream.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)

    def write_file(self, path: Path, content: bytes) -> None:
        """Write and sync a whole file."""
        with self.create_stream(path, "wb") as stream:
            stream.write(content)
            os.fsync(stream.fileno())
