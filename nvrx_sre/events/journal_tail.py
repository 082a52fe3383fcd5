"""Following a journal that is being written: what is new since the last look.

Safe beside a live writer: only whole lines are taken, a segment is left behind when a newer one exists. Records come
in order, each once. Not thread-safe. Must not: write, wait.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from nvrx_sre.events.journal import Fits, begin_at, check_header, parse_record, segments
from nvrx_sre.events.schema import Record


class JournalTail:
    """Reads on where it stopped. With `fits` it begins at the newest usable `snapshot` (`JournalReader`).

    Raises `UserError` for a journal of a newer version, `FileNotFoundError` if there is no such directory.
    """

    def __init__(self, directory: Path, *, fits: Fits | None = None) -> None:
        self._directory = directory
        self.snapshot, paths = begin_at(directory, fits)
        self._path = paths[0] if paths else None
        self._offset = 0
        self._last = (0, -1) if self.snapshot is None else self.snapshot.last

    def poll(self) -> list[Record]:
        """New records since the last call. Blocks for the reading alone."""
        found: list[Record] = []
        for path in self._remaining():
            if path != self._path:
                self._path, self._offset = path, 0
            found += self._read(path)
        return found

    def _remaining(self) -> list[Path]:
        paths = [path for _, _, path in segments(self._directory)]
        return [path for path in paths if self._path is None or path.name >= self._path.name]

    def _read(self, path: Path) -> list[Record]:
        content = b""
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # it was written again in a later one
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)
        if lines and self._offset == 0:
            check_header(lines[0], path)
        self._offset += len(whole)
        records = (parse_record(line) for line in lines)
        return [record for record in records if record is not None and self._is_new(record)]

    def _is_new(self, record: Record) -> bool:
        if (record.epoch, record.seq) <= self._last:
            return False
        self._last = (record.epoch, record.seq)
        return True
