"""Processes by pid *and* start time, so that a recycled pid is never mistaken for ours. Linux /proc."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def start_ticks(pid: int) -> int:
    """Start time of `pid` in clock ticks since boot; 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command name may hold spaces and parentheses: fields count from after the last ')'.
    return int(stat.rpartition(")")[2].split()[19])


def is_alive(pid: int, ticks: int) -> bool:
    """True if the process that had `pid` and `ticks` still runs (a zombie does not)."""
    if start_ticks(pid) != ticks or ticks == 0:
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def kill_session(pid: int, ticks: int) -> bool:
    """SIGKILL the process group that `pid` leads, if it is still the process with `ticks`; False if not."""
    if start_ticks(pid) != ticks or ticks == 0:
        return False
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def boot_id() -> str:
    """Identity of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
