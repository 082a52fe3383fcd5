"""A bound on how fast the writer writes, so that training keeps its cores and its disk.

Model: after each piece the next one may start only when the rate allows it. Time that went by unused is not saved
up, so no burst follows a stall. When there is no training left to protect, the bound is lifted, also within a save:
the last one must be whole before the run's time is up. Pages go to the disk piece by piece (`sync_file_range`), so that
the fsync at the end has next to nothing left and does not flush seconds of dirty pages at once.

Thread safety: one thread a pacer. Blocking: that is its purpose.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable

from nvrx_sre.core.clock import SystemClock, seconds, to_ns

PIECE_BYTES = 1 << 20
"""Size of a piece: at 50 MB/s one each 20 ms; large enough that the calls cost nothing."""
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP})
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEVER = threading.Event()

Wait = Callable[[float], bool]
"""Waits for so many seconds; False, at any time, if there is no need to go slowly any more."""


def wait_idly(wait_s: float) -> bool:
    """A `Wait` that nothing cuts short."""
    # The wait is the purpose here: there is nothing else to wait on.
    return not _NEVER.wait(wait_s)


class Pacer:
    """Keeps the rate of one save under a bound; without one it only counts."""

    def __init__(self, bandwidth_bytes_s: float | None, wait: Wait = wait_idly) -> None:
        self._bandwidth_bytes_s = bandwidth_bytes_s
        self._clock = SystemClock()
        self._next_ns = 0
        self._wait = wait
        self._is_lifted = False

    @property
    def is_bounded(self) -> bool:
        """There is a bound, or was when the save began."""
        return self._bandwidth_bytes_s is not None

    def wrote(self, num_bytes: int) -> None:
        """Account for a piece; blocks until the rate allows the next one."""
        if self._bandwidth_bytes_s is None or self._is_lifted:
            return
        now_ns = self._clock.monotonic_ns()
        self._next_ns = max(self._next_ns, now_ns) + to_ns(num_bytes / self._bandwidth_bytes_s)
        self._is_lifted = not self._wait(seconds(self._next_ns - now_ns))


def start_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Have the kernel begin to write these pages of a file to the disk. Raises `OSError` if the disk refuses."""
    _sync_range(descriptor, offset, num_bytes, _WRITE)


def finish_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Wait until these pages are on their way out of memory. Blocks. Raises `OSError` if the disk refuses."""
    _sync_range(descriptor, offset, num_bytes, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)


def _sync_range(descriptor: int, offset: int, num_bytes: int, flags: int) -> None:
    arguments = (ctypes.c_int64(offset), ctypes.c_int64(num_bytes), ctypes.c_uint(flags))
    if _LIBC.sync_file_range(descriptor, *arguments) == 0:
        return
    number = ctypes.get_errno()
    if number not in _UNSUPPORTED:  # where it is not known the fsync at the end does all of it
        raise OSError(number, os.strerror(number))
