"""Run a contestant to its end, and leave nothing of it behind.

Model: this process becomes the reaper of orphans, so that what a killed rank left running is found among our
descendants, gets a moment to end by itself, and is then killed. Blocking: as long as the contestant runs.
Process safety: for a program of its own, such as `nvrx-sre bench`; descendants that were there before stay.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from nvrx_sre.core.errors import InternalError

PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h"""
RUN_TIMEOUT_S = 3600.0
ORPHAN_S = 5.0
"""What orphans get to finish (seconds): a checkpoint process may still commit."""
LOG_TAIL_LINES = 5


def run_to_end(command: Sequence[str], log: Path, *, may_fail: bool = False) -> int:
    """Run with output to `log`; the exit code. Raises `InternalError` with the log's end if it fails unasked."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = set(psutil.Process().children(recursive=True))
    with log.open("ab") as output:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
    _end_orphans(before)
    if done.returncode != 0 and not may_fail:
        raise failed(done.returncode, log)
    return done.returncode


def failed(exit_code: int, log: Path) -> InternalError:
    """What to raise for a run that ended as it should not, with the log's end."""
    tail = " | ".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
    return InternalError(f"the benchmark's run ended with exit code {exit_code}: {tail}")


def _end_orphans(before: set[psutil.Process]) -> None:
    orphans = [process for process in psutil.Process().children(recursive=True) if process not in before]
    _, alive = psutil.wait_procs(orphans, timeout=ORPHAN_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=ORPHAN_S)
