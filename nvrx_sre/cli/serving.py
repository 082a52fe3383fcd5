"""What commands share that run until they are told to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that a stop signal sets while inside; the former handlers are back after. Main thread only."""
    stopped = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        stopped.set()

    former = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield stopped
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
