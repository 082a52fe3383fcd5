"""Threads and child processes that a generation leaves behind: they make a process unfit.

A thread of the old generation could still write into the new one's files or groups; it cannot be ended from
outside, so the process is replaced. Child processes (loader workers) are ended and joined. What the user
registered with `ctx.keep` may stay.
"""

from __future__ import annotations

import multiprocessing
import threading

JOIN_S = 0.2
"""Bounded wait for a thread or child that is on its way out."""


class Leftovers:
    """Baseline of threads at a generation's start, compared at its end."""

    def __init__(self) -> None:
        self._kept: set[int] = set()
        self._threads: frozenset[int] = frozenset()

    def keep(self, item: object) -> None:
        """`item` (a thread or process) may outlive its generation."""
        self._kept.add(id(item))

    def begin(self) -> None:
        """Remember what runs now."""
        self._threads = frozenset(id(thread) for thread in threading.enumerate())

    def end(self) -> str:
        """End children, wait briefly for threads; '' if nothing is left, else what is."""
        for child in multiprocessing.active_children():
            if id(child) not in self._kept:
                child.terminate()
                child.join(JOIN_S)
                if child.is_alive():
                    child.kill()
                    child.join(JOIN_S)
        for thread in threading.enumerate():
            # Native threads that once called into Python (autograd's device threads) are torch's, not the user's.
            if isinstance(thread, threading._DummyThread):
                continue
            if id(thread) not in self._threads and id(thread) not in self._kept:
                thread.join(JOIN_S)
                if thread.is_alive():
                    return f"thread {thread.name!r} outlived its generation"
        return ""
