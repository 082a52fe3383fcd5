"""`halt` and `resume`: stop a run so that it stays stopped, and let it go on. Both work on the run directory."""

from __future__ import annotations

from pathlib import Path

import click

from nvrx_sre.core.atomic import write_json_atomically
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import RunDirectoryBusy, UserError
from nvrx_sre.launcher.rundir import RunDirectory, read_json


def _open(run_dir: Path) -> tuple[RunDirectory, str]:
    directory = RunDirectory(run_dir)
    identity = read_json(run_dir / "run.json")
    if not isinstance(identity, dict) or "run" not in identity:
        raise UserError(f"{run_dir} is not a run directory (no run.json); pass the directory given to --run-dir")
    return directory, str(identity["run"])


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--reason", required=True, help="Why; shown in the events, the alert and the refusal to start again.")
def halt(run_dir: Path, reason: str) -> None:
    """Stop the run of RUN_DIR: it drains its newest state to disk and exits 93.

    The launcher sees the request within a second. A run that is not live stays stopped when it is started.
    """
    directory, run = _open(run_dir)
    write_json_atomically(directory.halt, {"reason": reason, "requested_ns": SystemClock().wall_ns()})
    click.echo(f"run {run}: halt requested; `nvrx-sre resume {run_dir} --reason TEXT` lets it go on")


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--reason", required=True, help="Why; recorded as BudgetReset.")
def resume(run_dir: Path, reason: str) -> None:
    """Refill the retry budgets of RUN_DIR's run and clear a halt. Start the run again afterwards."""
    from nvrx_sre.launcher.reset import reset_budgets

    directory, run = _open(run_dir)
    if directory.newest_epoch_is_live():
        raise RunDirectoryBusy(f"run {run} is live; `nvrx-sre halt {run_dir} --reason TEXT` stops it first")
    reset_budgets(directory, run, reason)
    click.echo(f"run {run}: budgets refilled; start it again with the same command")
