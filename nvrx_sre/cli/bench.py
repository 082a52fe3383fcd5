"""`nvrx-sre bench`: measurements, printed as a table and written as JSON rows.

Rows are {bench, contestant, case, ranks, n, median, p95, max, unit, note}, and one row of the machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from nvrx_sre.cli.report import make_console
from nvrx_sre.core.errors import UserError

_JSON = click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the rows.")


@click.group("bench")
def command() -> None:
    """Measure what recovery and telemetry cost."""


@command.command("recovery")
@click.option("--faults", type=click.IntRange(1), default=30, show_default=True, metavar="N", help="Faults of each case.")
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
    """Fault to first new step: this launcher and torchrun on the same model. Takes minutes."""
    from nvrx_sre.bench import recovery as question

    _check_writable(json_path)
    config = question.BenchConfig(
        num_faults=faults, num_peer_faults=peer_faults, ranks=ranks, cases=cases or question.CASES
    )
    return _show(question.measure(config), json_path)


@command.command("telemetry")
@_JSON
def telemetry(json_path: Path | None) -> int:
    """What one step event costs a rank, and what the launcher does with it."""
    from nvrx_sre.bench import telemetry as question

    _check_writable(json_path)
    return _show(question.measure(), json_path)
