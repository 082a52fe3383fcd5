"""What children leave behind when they die: processes that the kernel gives the launcher to adopt.

Model: the launcher adopts the orphans of its children (PR_SET_CHILD_SUBREAPER; the fork server's go-betweens make every
child of the launcher one). Known children are reaped by their pidfds. Here the others are: ended if they belong to the
session of a child that is dead, and reaped once they are dead themselves. What left its session on purpose (a daemon)
is left alone, and so are processes of the launcher's own session: whoever started them waits for them.

Must not: block; look while a child is being started, whose pid is not known yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection

from nvrx_sre.core import processes

LOOKS = 20
"""How often a dead child's session is looked for: a process of it comes here when its own parent has ended as well."""


class Orphans:
    """Ends and reaps orphans, from the beginning of its life until `close`. One a process."""

    def __init__(self) -> None:
        processes.adopt_orphans(True)
        self._looks_left: dict[int, int] = {}

    def left_by(self, pid: int) -> None:
        """The child `pid` is dead: what there is of its session is to end."""
        self._looks_left[pid] = LOOKS

    def tend(self, ours: Collection[int]) -> None:
        """End and reap what there is by now; `ours` are the live children, which are none. Call now and then."""
        dead = {pid: left for pid, left in self._looks_left.items() if pid not in ours}  # a pid may be used again
        self._looks_left = {pid: left - 1 for pid, left in dead.items() if left > 1}
        for pid in processes.children() if dead else ():
            if pid not in ours and processes.session(pid) in dead:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._reap(ours)

    def _reap(self, ours: Collection[int]) -> None:
        """Reap dead strangers up to the first dead process that somebody else waits for."""
        own = os.getsid(0)
        with contextlib.suppress(ChildProcessError):  # no children at all
            while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if dead.si_pid in ours or processes.session(dead.si_pid) == own:
                    return
                os.waitid(os.P_PID, dead.si_pid, os.WEXITED)

    def close(self) -> None:
        """Adopt no more."""
        processes.adopt_orphans(False)
