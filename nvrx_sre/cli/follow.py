"""Shows what rank 0 prints while the run goes on: follows the link that the launcher keeps to its log.

A thread of its own, so that a terminal that does not read stalls nobody but this thread. When rank 0 moves to
another process the link moves, and the new log is shown from its beginning.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

POLL_S = 0.25
"""How often the log is looked at: quick enough to read along."""
CHUNK_BYTES = 64 * 1024


class RankOutput:
    """Context manager: while inside, new output of a rank goes to `write`."""

    def __init__(self, link: Path, write: Callable[[str], object]) -> None:
        self._link = link
        self._write = write
        self._offsets: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="nvrx-rank-output", daemon=True)

    def __enter__(self) -> RankOutput:
        # Output of an earlier start of the run was shown then; the link still leads to it.
        for log in self._link.parent.glob("*.log"):
            if log.exists():
                self._offsets[os.path.realpath(log)] = log.stat().st_size
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._done.wait(POLL_S):
            self._show_new()
        self._show_new()

    def _show_new(self) -> None:
        target = os.path.realpath(self._link)
        offset = self._offsets.get(target, 0)
        try:
            with open(target, "rb") as file:
                file.seek(offset)
                while chunk := file.read(CHUNK_BYTES):
                    offset += len(chunk)
                    self._write(chunk.decode(errors="replace"))
        except OSError:
            return
        self._offsets[target] = offset
