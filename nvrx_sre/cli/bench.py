"""`nvrx-sre bench`: measurements, printed as a table and written as JSON rows.

Rows are {bench, contestant, case, ranks, n, median, p95, max, unit, note}, and one row of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich import box
from rich.table import Table

from nvrx_sre.bench import rows
from nvrx_sre.cli.report import make_console
from nvrx_sre.core.errors import UserError

_JSON = click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the rows.")


@click.group("bench")
def command() -> None:
    """Measure what recovery, checkpoints and telemetry cost."""


@command.command("recovery")
@click.option(
    "--faults", type=click.IntRange(1), default=30, show_default=True, metavar="N", help="Faults of each case."
)
@click.option(
    "--peer-faults",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="Faults of each case under torchrun; 0 leaves it out.",
)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Ranks.")
@click.option(
    "--case", "cases", multiple=True, type=click.Choice(["exception", "sigkill"]), help="Only this case; repeatable."
)
@_JSON
def recovery(faults: int, peer_faults: int, ranks: int, cases: tuple[str, ...], json_path: Path | None) -> int:
    """Time from a fault to the first new step.

    This launcher and torchrun, on the same model. Takes minutes.
    """
    from nvrx_sre.bench import recovery as question

    _check_writable(json_path)
    config = question.BenchConfig(
        num_faults=faults, num_peer_faults=peer_faults, ranks=ranks, cases=cases or question.CASES
    )
    return _show(question.measure(config), json_path)


@command.command("checkpoint")
@click.option(
    "--case",
    "cases",
    multiple=True,
    type=click.Choice(["blocked", "efficiency", "restore", "memory"]),
    help="Only this case; repeatable.",
)
@click.option("--quick", is_flag=True, help="A tiny state and few saves: shows that it works, not what it costs.")
@_JSON
def checkpoint(cases: tuple[str, ...], quick: bool, json_path: Path | None) -> int:
    """What a durable checkpoint costs, and what it gives.

    This launcher and torch's own ways of saving, on the same state of about 500 MB. Takes ten minutes or more.
    """
    from nvrx_sre.bench import checkpoint as question

    _check_writable(json_path)
    chosen = cases or question.CASES
    config = question.quick(chosen) if quick else question.BenchConfig(cases=chosen)
    return _show(question.measure(config, lambda line: click.echo(line, err=True)), json_path)


@command.command("telemetry")
@_JSON
def telemetry(json_path: Path | None) -> int:
    """Cost of telemetry to a rank, a step, the launcher, a scrape and the exit.

    Says of each whether its target was met. Takes two minutes.
    """
    from nvrx_sre.bench import telemetry as question

    _check_writable(json_path)
    return _show(question.measure(), json_path)


def _check_writable(json_path: Path | None) -> None:
    """Raise `UserError` now rather than after minutes of measuring."""
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise UserError(f"cannot write {json_path}: there is no such folder")


def _show(measured: Sequence[rows.Row], json_path: Path | None) -> int:
    """Print the rows, the machine's last, and write them where that was asked for."""
    every = [*(row for row in measured if row.bench != rows.MACHINE), rows.machine_row()]
    header, *lines = rows.table(every)
    table = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False)
    for line in lines:
        table.add_row(*line)
    console = make_console()
    console.print(table)
    if json_path is not None:
        rows.write_json(json_path, every)
        console.print(f"rows: {json_path}")
    return 0
