"""`nvrx-sre halt` and `nvrx-sre resume`: stop a run so that it stays stopped, and let it go on.

Model: a halt is a file in the run directory; a live launcher reads it within a second, drains and exits 93, and
none starts while it lies there. Resuming refills the budgets in a record and removes the file.

Both say what came of it in one line. Asking for what is so already changes nothing (exit 0): a halt of a run that is
halted, a resume of one that is not and has used none of its budgets. A halt of one that has stopped for good is
recorded: `--start-fresh`, which takes the stop away, does not start it either. A run that has finished can be neither
halted nor resumed, one that runs cannot be resumed (exit 78).
"""

from __future__ import annotations

import socket
from pathlib import Path

import click

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import ExitCode, RunDirectoryBusy, UserError
from nvrx_sre.core.identity import RUN_FILE, check_run_dir, recorded_run
from nvrx_sre.events.schema import HaltReason
from nvrx_sre.goodput.verdict import RunState
from nvrx_sre.launcher.past import look_back
from nvrx_sre.launcher.reset import reset_budgets
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.telemetry.archive import FollowedRun

_RUN_DIR = click.argument("run_dir", type=click.Path(path_type=Path), metavar="RUN_DIR")
_REASON = click.option("--reason", required=True, metavar="TEXT", help="Why; it is recorded.")


@click.command("halt")
@_RUN_DIR
@_REASON
def halt(run_dir: Path, reason: str) -> int:
    """Ask a run to save its state, stop, and stay stopped (exit 93)."""
    directory, name = existing_run(run_dir)
    click.echo(_halt(directory, name, reason))
    return ExitCode.FINISHED


def _halt(directory: RunDirectory, name: str, reason: str) -> str:
    """Ask for a halt unless there is nothing to ask for; what to say."""
    request, state = directory.halt_request(), _state(directory, name)
    if request is not None:
        return f"run {name} is halted already (by {request[1]}: {request[0]}): nothing was changed"
    if state is RunState.FINISHED:
        raise UserError(f"run {name} has finished: there is nothing to halt")
    directory.request_halt(reason, HaltReason.OPERATOR)
    if directory.live_launcher() is not None:
        return f"halt of run {name} requested: its launcher saves, stops and exits {ExitCode.DO_NOT_RESTART}"
    if look_back(directory).past.stop_reason:
        what = f"was stopped for good already (exit {ExitCode.DO_NOT_RESTART})"
        return f"run {name} {what}: now --start-fresh does not start it either, until it is resumed"
    holder = directory.newest_holder().get("node", socket.gethostname())
    if holder != socket.gethostname() and state not in (RunState.PREEMPTED, RunState.FAILED):
        return f"halt of run {name} requested: its launcher on {holder}, if it lives, reads it within a second"
    return f"halt of run {name} requested: it is not running, and does not start again until it is resumed"


@click.command("resume")
@_RUN_DIR
@_REASON
def resume(run_dir: Path, reason: str) -> int:
    """Lift a halt and refill retry budgets: a run may start again."""
    directory, name = existing_run(run_dir)
    click.echo(_resume(directory, name, reason))
    return ExitCode.FINISHED


def _resume(directory: RunDirectory, name: str, reason: str) -> str:
    """Lift the halt and refill the budgets; what to say."""
    is_halted, state, pid = directory.halt.exists(), _state(directory, name), directory.live_launcher()
    if pid is not None:
        why = (
            "is being halted: resume it when that has ended" if is_halted else "is running: there is nothing to resume"
        )
        raise RunDirectoryBusy(f"run {name} {why} (launcher process {pid})")
    if state is RunState.FINISHED and not is_halted:
        raise UserError(f"run {name} has finished: there is nothing to resume")
    folds = look_back(directory)
    is_stopped = is_halted or bool(folds.past.stop_reason)
    if not is_stopped and folds.history.is_unused:
        return f"run {name} is not halted and its budgets are full: nothing was changed"
    reset_budgets(directory, name, reason)
    if is_stopped:
        return f"run {name} may be started again: its halt is lifted and its budgets are full"
    return f"run {name} was not halted: its budgets are full again"


def _state(directory: RunDirectory, name: str) -> RunState | None:
    """State of the run as of its last record, None before any."""
    if not directory.journal.is_dir():
        return None
    run = FollowedRun(name, directory.path, SystemClock())
    run.refresh()
    return run.state if run.last_ns else None


def existing_root(root: Path) -> Path:
    """`root`, absolute. Raises `UserError` if it is no directory."""
    if not root.is_dir():
        raise UserError(f"{root} is no directory: name the directory of the run directories")
    return root.absolute()


def existing_run(run_dir: Path) -> tuple[RunDirectory, str]:
    """Run directory and run name. Raises `UserError` if `run_dir` is no run directory."""
    check_run_dir(run_dir)
    directory = RunDirectory(run_dir.absolute())
    run = recorded_run(run_dir)
    if run is None:
        raise UserError(f"{run_dir} is not a run directory (it has no {RUN_FILE} that says which run)")
    return directory, run


def existing_journal(run_dir: Path) -> tuple[Path, str]:
    """Journal and run name. Raises `UserError` if `run_dir` is no run directory, or no launcher has started there."""
    directory, run = existing_run(run_dir)
    if not directory.journal.is_dir():
        raise UserError(f"{run_dir} has no journal yet: no launcher has started there")
    return directory.journal, run
