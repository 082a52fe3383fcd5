"""DCP's file system with our needs: private files, checksums while writing, pacing, errors that keep their errno.

One instance a save; its `sums` become the manifest's file list. DCP syncs by `stream.fileno()`, hence that
call flushes first. An `OSError` raised under torch's C++ writer comes back as a `RuntimeError` without its
cause, so the stream remembers it. Thread safety: one thread.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from nvrx_sre.checkpoint import direct, pacing
from nvrx_sre.checkpoint.manifest import FileEntry
from nvrx_sre.checkpoint.pacing import Pacer, Wait, wait_idly
from nvrx_sre.checkpoint.stages import AtStage, unwatched
from nvrx_sre.core.atomic import PRIVATE_FILE_MODE

BUFFER_BYTES = 256 << 10
"""torch writes each tensor's header in some ten small pieces."""


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How the writer treats the storage."""

    bandwidth_bytes_s: float | None = None
    """Upper bound of the rate at which a save writes; None for no bound."""
    wait: Wait = wait_idly
    """How a bounded save spends the time between two pieces."""
    at_stage: AtStage = unwatched
    """Told of each file's `write`, `fsync` and `file`."""


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE_MODE)


class ChecksumStream(io.IOBase):
    """Write-only stream over a file: counts, hashes and paces what goes through."""

    def __init__(self, file: BinaryIO, pacer: Pacer, at_stage: AtStage) -> None:
        super().__init__()
        self._file = file
        self._pacer = pacer
        self._at_stage = at_stage
        self._state = xxhash.xxh3_128()
        self._num_bytes = 0
        self._paced_bytes = 0
        self._on_its_way = (0, 0)
        self._direct: direct.DirectFile | None = None
        # What nobody waits for goes past the page cache, in pieces that the pace is made of.
        if pacer.is_bounded and direct.make_direct(file.fileno()):
            self._direct = direct.DirectFile(file.fileno())
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        with self._remembering():
            self._at_stage("write")
            for start in range(0, len(view), pacing.PIECE_BYTES):
                piece = view[start : start + pacing.PIECE_BYTES]
                self._state.update(piece)
                self._num_bytes += len(piece)
                if self._direct is None:
                    self._write_cached(piece)
                elif written_bytes := self._direct.write(piece):
                    self._pacer.wrote(written_bytes)
        return len(view)

    def _write_cached(self, piece: memoryview) -> None:
        self._file.write(piece)
        if self._pacer.is_bounded and self._num_bytes - self._paced_bytes >= pacing.PIECE_BYTES:
            self._push_out()

    def _push_out(self) -> None:
        """What was written since the last time starts its way to the disk; what went before has arrived."""
        self._file.flush()
        piece = (self._paced_bytes, self._num_bytes - self._paced_bytes)
        pacing.start_writeback(self._file.fileno(), *piece)
        if self._on_its_way[1]:
            pacing.finish_writeback(self._file.fileno(), *self._on_its_way)
        self._on_its_way = piece
        self._paced_bytes = self._num_bytes
        self._pacer.wrote(piece[1])

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        """The file's descriptor, which whoever asks is about to sync."""
        with self._remembering():
            if self._direct is not None:
                self._pacer.wrote(self._direct.finish())
            elif self._pacer.is_bounded:
                self._push_out()
            self._file.flush()
            self._at_stage("fsync")
        return self._file.fileno()

    @contextmanager
    def _remembering(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            self.error = error
            raise

    def entry(self) -> FileEntry:
        """Length and checksum of everything written so far."""
        return FileEntry(size_bytes=self._num_bytes, xxh3_128=self._state.hexdigest())


class ChecksumFileSystem(FileSystem):
    """File system of one save. `sums`: file name -> entry; `error`: the first `OSError` of a write."""

    def __init__(self, options: WriteOptions) -> None:
        self.sums: dict[str, FileEntry] = {}
        self.error: OSError | None = None
        self._options = options
        self._pacer = Pacer(options.bandwidth_bytes_s, options.wait)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if "w" not in mode:
            with super().create_stream(path, mode) as plain:
                yield plain
            return
        with open(path, mode, buffering=BUFFER_BYTES, opener=_open_private) as file:
            stream = ChecksumStream(cast(BinaryIO, file), self._pacer, self._options.at_stage)
            try:
                yield stream
                self._options.at_stage("file")
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
