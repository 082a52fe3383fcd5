"""Slots are mapped in a thread of their own: to map and lock tens of gigabytes takes seconds, which nobody waits for.

    put(work)     done in the order in which it came
    do(work)      the same, waited for
    map(...)      `SlotFile.map`, and its pages locked where there is a device (`checkpoint.page_lock`)

What cannot be locked is said once, and copied the slow way. The thread is there from the start, so that no generation
is taken for its owner. Thread safety: `put` from any thread; `do`, `settle` and `hurried` from the main one; `map` in
the thread alone, since CUDA remembers what it refused, and torch raises that at the thread's next launch. Must not:
touch a device before there are slots.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from nvrx_sre.checkpoint.slots import SlotFile

P = ParamSpec("P")
R = TypeVar("R")


class Mapper:
    """The thread, and the device for which it locks."""

    def __init__(self) -> None:
        self.device_index = 0
        """Of this process: a rank's own; the first one before that is known, since any can lock for all."""
        self._has_said = False
        self._hurries = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nvrx-slots")
        self.settle()

    def put(self, work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have it done. Errors are the work's own matter."""
        self._pool.submit(work, *args, **kwargs)

    def do(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Have it done after everything that was put, and wait. Raises what it raises."""
        with self.hurried():
            return self._pool.submit(work, *args, **kwargs).result()

    def settle(self) -> None:
        """Wait until everything that was put is done."""
        self.do(lambda: None)

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Somebody waits inside: no rests."""
        self._hurries.set()
        try:
            yield
        finally:
            self._hurries.clear()

    def map(self, fd: int, data_bytes: int, blob_bytes: int) -> SlotFile:
        """As `SlotFile.map`; where there is a device the pages are locked as well, with rests for the training."""
        slots = SlotFile.map(fd, data_bytes, blob_bytes)
        why = self._lock(slots)
        if why and not self._has_said:
            self._has_said = True
            print(f"nvrx-sre: {why}: captures and restores take several times as long", file=sys.stderr)
        return slots

    def _lock(self, slots: SlotFile) -> str:
        import torch

        if not torch.cuda.is_available():
            return ""
        from nvrx_sre.checkpoint import page_lock

        try:
            with torch.cuda.device(self.device_index):
                return page_lock.lock(slots, rest=self._hurries.wait)
        except RuntimeError as error:  # taken by another process alone, or lost
            return f"no device to lock slots for: {str(error).splitlines()[0]}"
