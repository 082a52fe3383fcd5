"""From a `RunConfig` to an exit code: start the launcher, show the run, print how it ended.

Shared by every command that starts a launcher. Must not: import torch, or outlive the launcher.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from nvrx_sre.cli.devices import num_nvidia_devices
from nvrx_sre.cli.final_tables import print_summary
from nvrx_sre.cli.follow import RankOutput
from nvrx_sre.cli.narrate import rank_text, what_was_seen
from nvrx_sre.cli.report import TerminalReporter, make_console
from nvrx_sre.core.errors import ExitCode, StorageError
from nvrx_sre.events.schema import Action, FaultDetected, Record, RestartDecided
from nvrx_sre.faults.plan import FaultPlan
from nvrx_sre.launcher.config import NodesConfig, RunConfig
from nvrx_sre.launcher.rundir import RunDirectory

FINISHED = "finished"
"""Reason of a run that ended with nothing more to say."""

Sink = Callable[[Record], None]


def check_fault_specs(specs: Sequence[str], world_size: int, num_steps: int | None = None) -> None:
    """Raise `UserError` for a fault that cannot be parsed or can never fire."""
    FaultPlan.parse(specs).check(world_size, num_steps, has_device=num_nvidia_devices() > 0)


def run_and_report(
    config: RunConfig, *, num_steps: int | None, notices: Sequence[str] = (), sinks: Sequence[Sink] = ()
) -> int:
    """Run to the end and return the exit code. Blocks; `num_steps` is for the progress bar alone.

    Must be called from the main thread: the launcher installs signal handlers.
    """
    # Imported here so that `--help` of the commands stays light.
    from nvrx_sre.launcher import main as launcher
    from nvrx_sre.launcher.nccl_variables import contrary_values
    from nvrx_sre.launcher.node import parent_environment

    console = make_console()
    for notice in (*notices, *contrary_values(parent_environment())):
        console.print(notice)
    if config.nodes is not None and config.nodes.node_rank > 0:
        return _follow(config, config.nodes)
    if config.nodes is not None:
        others, port = config.nodes.num_nodes - 1, config.nodes.leader_port
        console.print(f"node 0 leads: waits for {others} other {'node' if others == 1 else 'nodes'} on port {port}")
    output = RankOutput(
        RunDirectory(config.run_dir).rank_log(0),
        lambda text: console.print(text, end="", markup=False, highlight=False, soft_wrap=True),
    )
    cause = StopCause()
    with TerminalReporter(num_steps, console) as reporter, output, _curing_full_disks():
        ended = launcher.run(config, [reporter, cause, *sinks], reporter.say)
    if reporter.num_dropped:
        console.print(f"{reporter.num_dropped} records were not shown here; the journal has them")
    print_summary(ended.summary, config.run_dir, metrics_url=ended.metrics_url, num_steps=num_steps, console=console)
    if ended.exit_code != ExitCode.FINISHED or ended.reason != FINISHED:
        click.echo(f"nvrx-sre: exit {ended.exit_code}: {ended.reason}{cause.text(config.run_dir)}", err=True)
    return ended.exit_code


@contextlib.contextmanager
def _curing_full_disks() -> Iterator[None]:
    """Where a run cannot begin or go on since the file system of its directory is full, say what helps."""
    try:
        yield
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"{error}: free some space, or choose another directory with --run-dir") from error
        raise


class StopCause:
    """The fault for which the run was stopped. A sink: called from one thread, read when the run has ended."""

    def __init__(self) -> None:
        self._newest: tuple[int | None, FaultDetected] | None = None
        self._found: tuple[int | None, FaultDetected] | None = None

    def __call__(self, record: Record) -> None:
        """Remember the fault that a decision to stop follows."""
        event = record.event
        if isinstance(event, FaultDetected):
            self._newest = (record.rank, event)
        elif isinstance(event, RestartDecided):
            self._found, self._newest = (self._newest if event.action is Action.STOP else None), None

    def text(self, run_dir: Path) -> str:
        """What was seen, of which rank, and the log to read; '' if no fault stopped the run."""
        if self._found is None:
            return ""
        rank, fault = self._found
        what = what_was_seen(fault) or fault.message
        said = f"; {rank_text(rank)}: {what}" if what else f"; {fault.fault} on {rank_text(rank)}"
        log = None if rank is None else RunDirectory(run_dir).rank_log(rank)
        return f"{said}; see {log}" if log is not None and log.exists() else said


def _follow(config: RunConfig, nodes: NodesConfig) -> int:
    """Serve the leader of the run; the exit code is its."""
    from nvrx_sre.launcher.follower import follow

    ended = follow(config, nodes, lambda line: click.echo(f"nvrx-sre: {line}", err=True))
    if ended.exit_code != ExitCode.FINISHED:
        click.echo(f"nvrx-sre: exit {ended.exit_code}: {ended.reason}", err=True)
    return ended.exit_code
