"""Where this process stood when a generation ended: its own account, in memory that its launcher keeps.

Model: the launcher owns 64 KiB of shared memory for each process and hands it over as a descriptor, whose offset both
share: it says how much was written. Four write there:

    STACKS_SIGNAL -> faulthandler   the main thread, also while native code holds the interpreter's lock; not if stopped
    a fatal signal -> faulthandler  all threads of a process that dies of a segmentation fault, an abort, a bus error
    the interrupt's handler         the frame that it found the main thread in, before anything is unwound
    an exception of the user's code its traceback

and the monitor thread, before it aborts the groups, what torch's flight recorder knows (`flight_recorder`) and, where
ranks wait for each other, all other threads. Whoever writes first in a generation is enough: an interrupt does not
repeat what the launcher has asked for.

Invariant: a process that is to live on reads a thread's frames only in that thread, or with the interpreter's lock.
faulthandler's "all threads" reads those of threads that run meanwhile: with one that works beside it, it crashed after
150 to 550 signals (python/cpython#116008). Ranks that were signalled 500 times a second through 29 recoveries: 6 of
50,000 signals crashed one with all threads, 2 of 148,000 with the main thread alone (Python 3.11, in the middle of a
call), and none of 94,000 sent to the main thread itself. A rank is asked once or twice an incident.

The size is sealed, so that the kernel cuts what is too long. Each entry is one write; writes of several threads do not
mix. Must not: raise, block, take a lock: it runs inside a signal handler, in the path of a recovery.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from types import FrameType

from nvrx_sre.events.settings import STACKS_SIGNAL, TRACE_MARK

MAX_FRAMES = 100
"""As many as faulthandler shows of a thread."""


class OwnStacks:
    """The process's end. `descriptor` None: there is no launcher to read it, only the log."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._noted_end = 0
        """Where what the monitor thread noted ends if it is all that was written, else 0."""

    def listen(self) -> None:
        """Answer `STACKS_SIGNAL` from now on, in whatever state the process is, and say where a fatal signal struck."""
        target = sys.stderr.fileno() if self._descriptor is None else self._descriptor
        faulthandler.enable(file=target)
        faulthandler.register(STACKS_SIGNAL, file=target, all_threads=False)

    def interrupted(self, frame: FrameType | None) -> None:
        """The main thread is about to be interrupted in `frame`."""
        if self._descriptor is not None and self._num_bytes() in (0, self._noted_end):
            self._write(f"Main thread, interrupted (most recent call first):\n{frames_text(frame)}")

    def raised(self, traceback_text: str) -> None:
        """The training function has raised."""
        self._write(f"Main thread, raised:\n{traceback_text}")

    def noted(self, trace: bytes, threads: str) -> None:
        """What the flight recorder knows, one line of JSON, and where other threads stand; b"" and "": nothing."""
        is_first = self._num_bytes() == 0
        if trace:
            self._write(f"{TRACE_MARK}{trace.decode()}\n")
        if threads:
            self._write(threads)
        self._noted_end = self._num_bytes() if is_first else 0

    def _num_bytes(self) -> int:
        return 0 if self._descriptor is None else os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def _write(self, text: str) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the sealed size is reached: what matters most was written first
                os.write(self._descriptor, text.encode(errors="replace"))


def other_threads() -> str:
    """Stacks of all threads but the main and the calling one. Not in a signal's handler."""
    known = (threading.main_thread().ident, threading.get_ident())
    frames = {number: frame for number, frame in sys._current_frames().items() if number not in known}
    shown = (f"Thread {number:#x} (most recent call first):\n{frames_text(frame)}" for number, frame in frames.items())
    return "".join(shown)


def frames_text(frame: FrameType | None) -> str:
    """A stack as faulthandler shows it, innermost frame first. Reads no source file."""
    lines: list[str] = []
    while frame is not None and len(lines) < MAX_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)
