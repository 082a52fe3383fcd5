"""Standard output and error of a child whose log lies on the run's storage, which may be full.

A line that the disk does not take is lost; it must not become an exception in the code that wanted to say
something, of which most is the user's. Installed once, before anything is printed; forked children inherit it.
Must not: buffer (a SIGKILL would take the last lines along).
"""

from __future__ import annotations

import io
import sys
from typing import Any


class LossyFile(io.FileIO):
    """A descriptor that says of everything that it was written."""

    def write(self, content: Any, /) -> int:
        """Number of bytes in `content`, whatever became of them."""
        size_bytes = memoryview(content).nbytes
        try:
            super().write(content)
        except OSError:
            return size_bytes
        return size_bytes


def survive_a_full_disk() -> None:
    """From now on `print` and tracebacks of this process lose what the disk refuses, and raise nothing for it."""
    sys.stdout = _lossy(sys.stdout)
    sys.stderr = _lossy(sys.stderr)


def _lossy(stream: Any) -> io.TextIOWrapper:
    stream.flush()
    file = LossyFile(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(file, encoding=stream.encoding, errors=stream.errors, write_through=True)
