"""`nvrx-sre runs`: which runs there are, where, and how they do. The person on call holds a run's name.

Model: every directory one level below the root that holds a run.json is a run; its journal says how it does, and on
this host the newest epoch's process whether its launcher lives. Read-only, and cheap on long journals (they are read
from their newest snapshot). Must not: import torch.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.table import Table

from nvrx_sre.cli.halt import existing_root
from nvrx_sre.cli.narrate import duration_text, rank_text
from nvrx_sre.cli.report import make_console, print_rows
from nvrx_sre.cli.run_options import DEFAULT_RUNS
from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.core.errors import ExitCode, UserError
from nvrx_sre.goodput.verdict import FINAL_STATES, RunState
from nvrx_sre.launcher.rundir import RunDirectory, read_json
from nvrx_sre.telemetry.archive import FollowedRun, RunShelf

INTERRUPTED = "interrupted"
"""What a person calls a run that one of them ended: its metrics count it among the preempted."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run. `launcher`: alive, gone, ended, or elsewhere (another host, where only its records tell).

    `state` is the metric's; `exit_code` that of the newest launcher, None while it lives or if it did not say.
    """

    run: str
    state: str
    exit_code: int | None
    launcher: str
    host: str
    pid: int | None
    epoch: int
    step: int
    open_incident: str
    last_record_age_s: float
    directory: str
    metrics_url: str


def read_rows(root: Path) -> tuple[list[RunRow], dict[Path, str]]:
    """All runs below `root`, the newest record first, and the directories that cannot be read with the reason."""
    clock = SystemClock()
    shelf = RunShelf(root.absolute(), clock, keep_s=seconds(clock.wall_ns()))
    rows = [_row(item, clock.wall_ns()) for item in shelf.refresh()]
    return sorted(rows, key=lambda row: row.last_record_age_s), shelf.unreadable


def _row(item: FollowedRun, now_ns: int) -> RunRow:
    directory = RunDirectory(item.directory)
    holder = directory.newest_holder()
    metrics = read_json(directory.metrics)
    incident = item.views.tracker.open
    return RunRow(
        run=item.run,
        state=str(item.state),
        exit_code=item.views.summary.to_dict(now_ns)["exit_code"],
        launcher=_launcher(item, directory, str(holder.get("node", ""))),
        host=str(holder.get("node", "")),
        pid=holder.get("pid"),
        epoch=directory.newest_epoch(),
        step=item.views.ledger.high_water,
        open_incident="" if incident is None else f"{incident.fault} on {rank_text(incident.rank)}: {incident.verdict}",
        last_record_age_s=max(0.0, seconds(now_ns - item.last_ns)),
        directory=str(item.directory),
        metrics_url=str(metrics.get("url", "")) if isinstance(metrics, dict) else "",
    )


def _launcher(item: FollowedRun, directory: RunDirectory, node: str) -> str:
    if directory.live_launcher() is not None:
        return "alive"
    if item.state in FINAL_STATES or item.state in (RunState.PREEMPTED, RunState.RETRYING):
        return "ended"
    return "gone" if node in ("", socket.gethostname()) else "elsewhere"


def table(rows: list[RunRow]) -> Table:
    """The runs for a person."""
    result = Table(box=None, pad_edge=False)
    for title in ("run", "state", "launcher", "host", "step", "last record", "directory"):
        result.add_column(title, overflow="fold")
    for row in rows:
        word = INTERRUPTED if row.exit_code == ExitCode.INTERRUPTED else row.state
        state = f"{word} ({row.open_incident})" if row.open_incident else word
        age = f"{duration_text(row.last_record_age_s)} ago"
        result.add_row(row.run, state, row.launcher, row.host, str(row.step), age, row.directory)
    return result


@click.command("runs")
@click.argument("name", required=False, metavar="[RUN]")
@click.option("--root", type=click.Path(path_type=Path), default=DEFAULT_RUNS, show_default=True,
              metavar="DIR", help="Directory of the run directories.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
def command(name: str | None, root: Path, as_json: bool) -> int:
    """List runs below a root: state, launcher, host, directory. With RUN only that one; exit 78 if there is none."""
    existing_root(root)
    rows, unreadable = read_rows(root)
    rows = [row for row in rows if name in (None, row.run)]
    for path, why in unreadable.items():
        click.echo(f"{path} is left out: {why}", err=True)
    if name is not None and not rows:
        raise UserError(f"no run {name!r} below {root}: name another directory with --root")
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_rows(make_console(), table(rows))
    return ExitCode.FINISHED
