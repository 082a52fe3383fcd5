"""Processes by pid *and* start time, so that a recycled pid is never mistaken for ours; who dies with whom. Linux."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""
NAME_BYTES_MAX = 15
"""Longest name of a process."""


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


def is_stopped(pid: int) -> bool:
    """True if a signal has stopped `pid` (SIGSTOP, a debugger)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


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


def die_with(parent: int) -> bool:
    """Have the kernel end this process, by SIGKILL, when `parent` ends; False if it is not the parent any more."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def set_name(name: str) -> None:
    """Name of this process in `ps` and `top`, cut to `NAME_BYTES_MAX`. Main thread only."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:NAME_BYTES_MAX]), 0, 0, 0)


def adopt_orphans(adopt: bool) -> None:
    """Whether processes that this one's children leave behind become its own children, rather than those of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def session(pid: int) -> int:
    """Session of `pid`, also while it is a zombie; 0 if there is no such process."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def children() -> list[int]:
    """Children of this process's main thread: what the kernel gave it to adopt is among them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # kernels without CONFIG_PROC_CHILDREN
        return []


def _prctl(option: int, argument: int) -> None:
    ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
