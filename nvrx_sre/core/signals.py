"""Signals as readable bytes: nothing runs in a handler, and none is lost.

SIGTERM means preemption, SIGINT a person. SIGCHLD is not used (pidfds are), SIGPIPE is ignored by Python. A handler
that sets an event, or raises, will not do: CPython runs it between two instructions, and a wait that the main thread
is just beginning goes on to its end although the signal came before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SignalPipe:
    """Wakes a selector when a watched signal arrives, one that was ignored before too.

    Main thread only: `ValueError` elsewhere.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        except ValueError:
            os.close(self._read)
            os.close(self._write)
            raise
        self._old = {number: signal.signal(number, _no_op) for number in WATCHED}

    def fileno(self) -> int:
        return self._read

    def received(self) -> list[int]:
        """Signals since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._read, 4096) if number in WATCHED]
        return []

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a signal arrives, `timeout_s` at most. True if there is one that `received` has not taken.

        Any that has a handler in Python ends it; in processes of ours these are the watched ones.
        """
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """Give the signals back as they were."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._read)
        os.close(self._write)


def _no_op(signum: int, frame: FrameType | None) -> None:
    """A Python handler must exist, else the wakeup descriptor is not written."""
