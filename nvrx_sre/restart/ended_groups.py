"""Process groups of generations that are over, aborted and let go of beside the main thread.

Freeing a gloo group joins its threads, and each of them looks every 10 ms whether it is to end: 8 to 20 ms of waiting,
once a rank and recovery (docs/benchmarks/recovery.md). Torch frees a group without the interpreter's lock, so that the
main thread builds the next generation meanwhile.

NCCL's abort lets its kernels go at once and ends half a second later: its proxy thread sleeps that long in `poll`, and
an abort does not wake it (docs/benchmarks/gpu.md). So nobody waits for that either.

Invariant: the last reference to a group is dropped here, hence `let_go` comes after the collection that finds the
cycles which hold groups. Groups that will not end are a reason to replace the process, one generation later.
`abort` may come from any thread, all else from the main thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

JOIN_S = 0.2
"""Bounded wait for the groups of the generation before: ten times what gloo takes (seconds)."""
JOIN_ABORTED_S = 3.0
"""The same where they are aborted beside: four times what NCCL takes (seconds)."""


class EndedGroups:
    """Aborted groups on their way out."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []
        self._thread: threading.Thread | None = None
        """Kept when it has ended: whoever compares threads by identity must not meet another one at its address."""
        self._pool: ThreadPoolExecutor | None = None
        self._aborting: Future[None] | None = None
        self._begun: set[int] = set()
        """Identities of the groups in hand, which are alive as long as they are."""
        self._lock = threading.Lock()

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Begin to abort these, but for those in hand; does not wait.

        Called again it finds groups that were formed meanwhile. Its thread is the same in all generations.
        """
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nvrx-abort")
            if self._aborting is None or self._aborting.done():
                self._begun = set()
            new = [group for group in groups if id(group) not in self._begun]
            if new:
                self._begun |= {id(group) for group in new}
                self._aborting = self._pool.submit(abort_all, new)

    def add(self, groups: list[dist.ProcessGroup]) -> None:
        """These are aborted, and nothing of theirs runs any more."""
        self._groups += groups

    def let_go(self) -> str:
        """Free what was added, on a thread; '' or why this process is unfit for another generation.

        Blocks only for groups that an earlier call has not freed yet, `JOIN_S` at most.
        """
        if self._thread is not None:
            self._thread.join(JOIN_S if self._pool is None else JOIN_ABORTED_S)
            if self._thread.is_alive():
                return "the process groups of an earlier generation do not end"
        groups, self._groups = self._groups, []
        self._thread = threading.Thread(target=_free, args=(groups, self._aborting), daemon=True)
        self._thread.name = "nvrx-ended-groups"
        self._thread.start()
        return ""


def abort_all(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort each; one that is half built or already gone has nothing to abort."""
    for group in groups:
        with contextlib.suppress(RuntimeError):
            group.abort()


def _free(groups: list[dist.ProcessGroup], aborting: Future[None] | None) -> None:
    """Drop the last references, after the abort."""
    if aborting is not None:
        aborting.result()
    groups.clear()
