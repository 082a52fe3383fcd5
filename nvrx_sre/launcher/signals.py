"""Signals of the launcher as readable bytes: nothing runs in a handler.

SIGTERM means preemption, SIGINT a person. SIGCHLD is not used (pidfds are), SIGPIPE is ignored by Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SignalPipe:
    """Wakes a selector when a watched signal arrives. Main thread only."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, _no_op) for number in WATCHED}

    def fileno(self) -> int:
        return self._read

    def received(self) -> list[int]:
        """Signals since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._read, 4096) if number in WATCHED]
        return []

    def close(self) -> None:
        """Give the signals back as they were."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._read)
        os.close(self._write)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Whatever is waited for within ends with the next watched signal, quietly. Main thread only.

    Also where the launcher was started with SIGINT ignored, as shells do with what a script runs in the background.
    """
    old = {number: signal.signal(number, signal.default_int_handler) for number in WATCHED}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _no_op(signum: int, frame: FrameType | None) -> None:
    """A Python handler must exist, else the wakeup descriptor is not written."""
