"""`nvrx-sre halt` and `nvrx-sre resume`: stop a run so that it stays stopped, and let it go on.

Model: a halt is a file in the run directory; a live launcher reads it within a second, drains and exits 93, and
none starts while it lies there. Resuming refills the budgets in a record and removes the file.
"""

from __future__ import annotations

from pathlib import Path

import click

from nvrx_sre.core.errors import UserError
from nvrx_sre.core.identity import RUN_FILE, recorded_run
from nvrx_sre.events.schema import HaltReason
from nvrx_sre.launcher.reset import reset_budgets
from nvrx_sre.launcher.rundir import RunDirectory

_RUN_DIR = click.argument("run_dir", type=click.Path(path_type=Path), metavar="RUN_DIR")
_REASON = click.option("--reason", required=True, metavar="TEXT", help="Why; it is recorded.")


@click.command("halt")
@_RUN_DIR
@_REASON
def halt(run_dir: Path, reason: str) -> int:
    """Ask a run to save its state, stop, and stay stopped (exit 93)."""
    directory, name = existing_run(run_dir)
    directory.request_halt(reason, HaltReason.OPERATOR)
    click.echo(f"halt of run {name} requested")
    return 0


@click.command("resume")
@_RUN_DIR
@_REASON
def resume(run_dir: Path, reason: str) -> int:
    """Lift a halt and refill retry budgets: a run may start again."""
    directory, name = existing_run(run_dir)
    reset_budgets(directory, name, reason)
    click.echo(f"run {name} may be started again")
    return 0


def existing_run(run_dir: Path) -> tuple[RunDirectory, str]:
    """Run directory and run name. Raises `UserError` if `run_dir` is no run directory."""
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
