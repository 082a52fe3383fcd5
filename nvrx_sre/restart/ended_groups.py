"""Process groups of generations that are over, let go of beside the main thread.

Freeing a gloo group joins its threads, and each of them looks every 10 ms whether it is to end: 8 to 20 ms of waiting,
once a rank and recovery (docs/benchmarks/recovery.md). Torch frees a group without the interpreter's lock, so that the
main thread builds the next generation meanwhile.

Invariant: the last reference to a group is dropped here, hence `let_go` comes after the collection that finds the
cycles which hold groups. Groups that will not end are a reason to replace the process, one generation later.
Main thread only. Must not: abort a group; that comes before.
"""

from __future__ import annotations

import threading

import torch.distributed as dist

JOIN_S = 0.2
"""Bounded wait for the groups of the generation before: ten times what gloo takes (seconds)."""


class EndedGroups:
    """Aborted groups on their way out."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []
        self._thread: threading.Thread | None = None
        """Kept when it has ended: whoever compares threads by identity must not meet another one at its address."""

    def add(self, groups: list[dist.ProcessGroup]) -> None:
        """These are aborted, and nothing of theirs runs any more."""
        self._groups += groups

    def let_go(self) -> str:
        """Free what was added, on a thread; '' or why this process is unfit for another generation.

        Blocks only for groups that an earlier call has not freed yet, `JOIN_S` at most.
        """
        if self._thread is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                return "the process groups of an earlier generation do not end"
        groups, self._groups = self._groups, []
        self._thread = threading.Thread(target=groups.clear, name="nvrx-ended-groups", daemon=True)
        self._thread.start()
        return ""
