"""Files past the page cache: what is copied through it costs the writer ten times the processor time (docs/adr/0030).

    DirectFile(descriptor)  takes bytes in any portions, writes whole pieces straight to the disk, the rest at `finish`
    read_pieces(path)       a file's bytes as they are on the disk

The kernel takes only whole blocks from memory and to places that are aligned. A file system that does not know the way
(some in memory or on a network) is read through the cache by the same call; `make_direct` says so to whoever writes.
One that takes the flag and then refuses a piece (EINVAL: it wants other blocks) gets that and all after it as usual.

Thread safety: none. Blocking: each piece until the disk has it. Must not: import torch.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

PIECE_BYTES = 1 << 20
"""A write. At 50 MB/s one each 20 ms; larger ones saved no processor time that could be measured."""
READ_BYTES = 4 << 20


def make_direct(descriptor: int) -> bool:
    """Have a file that was opened as usual written past the page cache; False if its file system does not know how."""
    return _switch(descriptor, os.O_DIRECT)


class DirectFile:
    """Writes a new file in whole pieces. `descriptor` is `make_direct`'s and stays the caller's."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._piece = memoryview(mmap.mmap(-1, PIECE_BYTES))
        self._held_bytes = 0
        self._written_bytes = 0

    def write(self, content: memoryview) -> int:
        """Take bytes; the number of those that went to the disk. Raises `OSError`."""
        before = self._written_bytes
        while len(content):
            taken = min(PIECE_BYTES - self._held_bytes, len(content))
            self._piece[self._held_bytes : self._held_bytes + taken] = content[:taken]
            self._held_bytes += taken
            content = content[taken:]
            if self._held_bytes == PIECE_BYTES:
                self._put()
        return self._written_bytes - before

    def finish(self) -> int:
        """Write what is left, through the page cache: it is no whole piece. As `write` else. Sync afterwards."""
        before = self._written_bytes
        if self._held_bytes:
            _switch(self._descriptor, 0)
            self._put()
        return self._written_bytes - before

    def _put(self) -> None:
        done = 0
        while done < self._held_bytes:
            if done:  # the disk took a part: the rest is not aligned
                _switch(self._descriptor, 0)
            done += _or_cached(self._descriptor, partial(self._write_from, done))
        self._written_bytes += done
        self._held_bytes = 0

    def _write_from(self, done: int) -> int:
        return os.pwrite(self._descriptor, self._piece[done : self._held_bytes], self._written_bytes + done)


def read_pieces(path: Path) -> Iterator[memoryview]:
    """Bytes of a file in order; each piece is gone when the next one is asked for. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _switch(descriptor, os.O_DIRECT)
        buffer = memoryview(mmap.mmap(-1, READ_BYTES))
        while num_bytes := _or_cached(descriptor, lambda: os.readv(descriptor, [buffer])):
            yield buffer[:num_bytes]
            if num_bytes % mmap.PAGESIZE:  # the end, or a part: what follows is not aligned
                _switch(descriptor, 0)
    finally:
        os.close(descriptor)


def _or_cached(descriptor: int, move: Callable[[], int]) -> int:
    """`move`, once more through the page cache if the file system takes no such piece directly."""
    try:
        return move()
    except OSError as error:
        if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise
    _switch(descriptor, 0)
    return move()


def _switch(descriptor: int, direct: int) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
