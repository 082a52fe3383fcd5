"""Does a launcher own this run now? What a command must know before it changes a run directory.

On this host the newest epoch's process says so itself (pid and start time). Of a launcher on another host only its
records can be read: unless they end with its orderly stop, it may still be at work.
Must not: import torch, take an epoch.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.core.errors import RunDirectoryBusy
from nvrx_sre.events.journal import read_journal
from nvrx_sre.events.schema import GenerationFormed, LauncherStopped, RunFinished, StepsCommitted
from nvrx_sre.launcher.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True)
class HotState:
    """Newest step that every rank of a live run holds in memory; gone with its launcher."""

    step: int
    generation: int
    launcher_pid: int


def live_launcher(run_dir: Path) -> int | None:
    """Process of the launcher on this host that owns the run, None if there is none."""
    return RunDirectory(run_dir).live_launcher()


def check_unowned(run_dir: Path) -> None:
    """Raise `RunDirectoryBusy` if a launcher owns the run, or may own it from another host."""
    pid = live_launcher(run_dir)
    if pid is not None:
        raise RunDirectoryBusy(
            f"run directory {run_dir} is in use by launcher process {pid} of this host: stop it first"
        )
    directory = RunDirectory(run_dir)
    epoch = directory.newest_epoch()
    node = directory.newest_holder().get("node")
    if node in (None, socket.gethostname()) or _has_stopped(directory, epoch):
        return
    raise RunDirectoryBusy(
        f"run directory {run_dir} was last taken by a launcher on {node}, which has not recorded its end: "
        "run this there, or start and stop the run here first"
    )


def hot_state(run_dir: Path) -> HotState | None:
    """What a live run could restore from memory, by its journal; None without a live launcher or a sealed step.

    Reads the whole journal.
    """
    pid = live_launcher(run_dir)
    if pid is None:
        return None
    directory = RunDirectory(run_dir)
    epoch = directory.newest_epoch()
    step = -1
    generation = 0
    for record in read_journal(directory.journal):
        if record.epoch != epoch:
            continue
        if isinstance(record.event, GenerationFormed):
            step = -1
        elif isinstance(record.event, StepsCommitted):
            step, generation = max(step, record.event.hot_sealed_step), record.generation
    return HotState(step=step, generation=generation, launcher_pid=pid) if step > 0 else None


def _has_stopped(directory: RunDirectory, epoch: int) -> bool:
    ends = (LauncherStopped, RunFinished)
    if not directory.journal.is_dir():
        return False
    return any(record.epoch == epoch and isinstance(record.event, ends) for record in read_journal(directory.journal))
