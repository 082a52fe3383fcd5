"""spans.jsonl: finished spans, one JSON object a line, each span once, in bounded space.

Model: spans are appended to `spans.jsonl`. When that is full it becomes `spans-000001.jsonl`, the next time
`spans-000002.jsonl`, and so on; the oldest are deleted beyond a number. The first write of a launcher cuts a torn last
line and learns which spans are there: a replay of the journal finishes spans again, with the same ids, and those are
left out. So are spans from before the oldest file that is kept, once an older one was deleted.

Invariants: whole lines only; no span twice; at most `MAX_FILES` full files beside the current one. Private (0600).
Not thread-safe. Must not: be the truth of anything; `events --replay` computes spans from the journal.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from nvrx_sre.core.atomic import PRIVATE_FILE_MODE
from nvrx_sre.telemetry.spans import FinishedSpan

MAX_FILE_BYTES = 4 * 1024 * 1024
"""A file beyond this is full, as a segment of the journal is."""
MAX_FILES = 16
"""Full files that are kept: 64 MiB, about a quarter of a year of a run that saves every five minutes. A start reads
them all, for their ids."""
_FULL_NAME = re.compile(r"spans-(\d{6})\.jsonl")


class SpanFile:
    """Appends spans to `path`, which must be called spans.jsonl. Raises `OSError` when the disk refuses."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES, max_files: int = MAX_FILES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._known: set[str] | None = None
        """Spans that the files held at the first write; later ones come from the fold, which gives none twice."""
        self._kept_from_ns = 0
        """End of the oldest span that is kept, 0 while none was ever deleted."""

    def write(self, spans: Sequence[FinishedSpan]) -> list[FinishedSpan]:
        """Append the spans that are not there yet; those. Blocks for the write, not for the disk."""
        if self._known is None:
            self._known = self._read_back()
        known, kept_from_ns = self._known, self._kept_from_ns
        new = [span for span in spans if span.span_id not in known and span.end_ns >= kept_from_ns]
        if new:
            self._append("".join(json.dumps(span.to_dict()) + "\n" for span in new).encode())
        return new

    def _append(self, content: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE_MODE)
        try:
            size = os.fstat(descriptor).st_size
            try:
                if os.write(descriptor, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(descriptor, size)  # half a line would spoil the next one
                raise
        finally:
            os.close(descriptor)
        if size + len(content) > self._max_bytes:
            self._begin_file()

    def _begin_file(self) -> None:
        """The current file is full: put it aside, delete what is beyond the number."""
        full = self._full_files()
        number = full[-1][0] + 1 if full else 1
        self._path.rename(self._path.with_name(f"spans-{number:06d}.jsonl"))
        for _, path in full[: max(0, len(full) + 1 - self._max_files)]:
            path.unlink(missing_ok=True)

    def _full_files(self) -> list[tuple[int, Path]]:
        """(number, path) of the full files, oldest first."""
        found = ((_FULL_NAME.fullmatch(path.name), path) for path in self._path.parent.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match)

    def _read_back(self) -> set[str]:
        """Ids of the spans that are there, line by line: the files of a long run are more than a launcher should hold.

        Cuts a torn last line off the current file; learns since when everything is kept.
        """
        known: set[str] = set()
        full = self._full_files()
        for number, path in full:
            for span_id, end_ns in _spans_in(path):
                if number == full[0][0] > 1 and not known:
                    self._kept_from_ns = end_ns
                known.add(span_id)
        if self._path.exists():
            _cut_torn_line(self._path)
            known.update(span_id for span_id, _ in _spans_in(self._path))
        return known


def _spans_in(path: Path) -> Iterator[tuple[str, int]]:
    """(id, end in wall ns) of each span; a line that somebody spoilt is none."""
    with open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                span = json.loads(line)
                yield str(span["span_id"]), int(span["end_ns"])


def _cut_torn_line(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
