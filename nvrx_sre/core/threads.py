"""Threads of this process that Python did not start, as the kernel shows them.

gloo's threads let go of the tensors of a collective a moment after those who waited for it are woken, and need the GIL
for that. In a process that exits in this moment, CPython ends such a thread where C++ allows no ending, and the process
aborts: 'terminate called without an active exception' (pytorch/pytorch#190489, seen with torch 2.13). It takes
a busy machine to meet it, and then it makes a failure of a training that has succeeded.

Thread safety: no state. Must not: import torch.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

GLOO_WORKERS = "pt_gloo_runloop"
"""Name that torch gives to the threads which run gloo's collectives (2.11 to 2.13)."""

POLL_S = 0.001
LIMIT_S = 5.0
"""For threads that always have work: nothing here is worth a process that does not end."""


def wait_until_asleep(name: str, limit_s: float = LIMIT_S) -> bool:
    """Block, without the GIL, until all threads of that name have stopped working; False if some did not in `limit_s`.

    They have when each sleeps and none has run since the look before: one that waits for the GIL sleeps as well, but
    gets it between two looks. Threads that are none of this process are not looked at; none of that name is asleep.
    """
    until = time.monotonic() + limit_s
    before = None
    while time.monotonic() < until:
        now = [_look(task) for task in _tasks(name)]
        if now == before and all(state == "S" for state, _ in now):
            return True
        before = now
        time.sleep(POLL_S)
    return False


def _tasks(name: str) -> list[Path]:
    tasks = Path("/proc/self/task")
    return [tasks / tid for tid in sorted(os.listdir(tasks)) if _read(tasks / tid / "comm").strip() == name]


def _look(task: Path) -> tuple[str, str]:
    """State letter, and how often the thread has left the processor."""
    fields = dict(line.split(":", 1) for line in _read(task / "status").splitlines() if ":" in line)
    switches = fields.get("voluntary_ctxt_switches", "") + fields.get("nonvoluntary_ctxt_switches", "")
    return fields.get("State", "").strip()[:1], switches


def _read(path: Path) -> str:
    """'' for a thread that has ended meanwhile."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
