"""`nvrx-sre bench`: measurements, printed as a table and written as JSON rows.

Rows are {bench, contestant, case, ranks, n, median, p95, max, unit, note}, and one row of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import click
from rich import box
from rich.table import Table

from nvrx_sre.bench import recovery_cases, rows
from nvrx_sre.bench.rows import Keep, Row, Say
from nvrx_sre.cli.output_file import check_output_file
from nvrx_sre.cli.report import make_console
from nvrx_sre.core.errors import InternalError

_JSON = click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the rows.")


@click.group("bench")
def command() -> None:
    """Measure what recovery, checkpoints and telemetry cost."""


@command.command("recovery")
@click.option(
    "--faults",
    type=click.IntRange(1),
    metavar="N",
    help="Faults of each case.  [default: 100 exceptions, 30 SIGKILLs, 10 hangs]",
)
@click.option(
    "--peer-faults",
    type=click.IntRange(0),
    metavar="N",
    help="Faults of each case under each peer; 0 leaves the peers out.  [default: 5]",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    multiple=True,
    metavar="N",
    help="Ranks; repeatable for exception and sigkill, the other cases take the first.  [default: 2 and 4]",
)
@click.option(
    "--case", "cases", multiple=True, type=click.Choice(recovery_cases.CASES), help="Only this case; repeatable."
)
@click.option("--quick", is_flag=True, help="Few faults and small worlds: shows that it works, not what it costs.")
@_JSON
def recovery(json_path: Path | None, **values: Any) -> int:
    """Time from a fault to the first new step.

    This launcher beside torchrun and, where it is installed, nvidia-resiliency-ext, on the same model. Takes half
    an hour. Rows are written after every part, so that a failure loses none.
    """
    from nvrx_sre.bench.recovery import Benchmark

    check_output_file(json_path, is_renamed=True)
    config = _recovery_config(**values)
    return _run(json_path, lambda say, keep: Benchmark(config, say, keep))


def _recovery_config(
    faults: int | None, peer_faults: int | None, ranks: tuple[int, ...], cases: tuple[str, ...], quick: bool
) -> recovery_cases.BenchConfig:
    base = recovery_cases.quick() if quick else recovery_cases.BenchConfig()
    counts = base.counts if faults is None else recovery_cases.same_count(faults, base.counts.peers)
    if peer_faults is not None:
        counts = replace(counts, peers=peer_faults, peers_long_wait=min(counts.peers_long_wait, peer_faults))
    return replace(base, counts=counts, ranks=ranks or base.ranks, cases=cases or base.cases)


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

    This launcher and torch's own ways of saving, on the same state of about 500 MB. Takes ten minutes or more. The rows
    are written after each part; one that fails costs no other, and the exit code says so at the end.
    """
    from nvrx_sre.bench import checkpoint as question

    check_output_file(json_path, is_renamed=True)
    chosen = cases or question.CASES
    config = question.quick(chosen) if quick else question.BenchConfig(cases=chosen)
    return _run(json_path, lambda say, keep: question.Benchmark(config, say, keep))


@command.command("telemetry")
@_JSON
def telemetry(json_path: Path | None) -> int:
    """Cost of telemetry to a rank, a step, the launcher, a scrape and the exit.

    Says of each whether its target was met. Takes seven minutes.
    """
    from nvrx_sre.bench import telemetry as question

    check_output_file(json_path, is_renamed=True)
    return _show(question.measure(), json_path)


@command.command("gpu")
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["steady", "faults", "memory"]),
    help="Only this part; repeatable.",
)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Ranks, one a GPU.")
@click.option(
    "--folder", type=click.Path(path_type=Path), metavar="DIR", help="Keep the runs there.  [default: a temporary one]"
)
@click.option("--quick", is_flag=True, help="A small model and few faults: shows that it works, not what it costs.")
@_JSON
def gpu(parts: tuple[str, ...], ranks: int, folder: Path | None, quick: bool, json_path: Path | None) -> int:
    """Recovery, hot captures and durable saves of a model of 1.88 B parameters on GPUs.

    Takes about ten minutes on two H200s (estimated). Rows are written after every part, so that a failure loses none.
    """
    from nvrx_sre.bench import gpu as question

    check_output_file(json_path, is_renamed=True)
    chosen = parts or question.PARTS
    config = question.quick(chosen) if quick else question.BenchConfig(parts=chosen)
    config = replace(config, ranks=ranks, folder=folder)
    question.check_start(config)
    return _run(json_path, lambda say, keep: question.Benchmark(config, say, keep))


class _Benchmark(Protocol):
    """What measures in parts: rows, and one line for each part that failed."""

    rows: list[Row]
    failed: list[str]

    def run(self) -> None:
        """Run all parts."""


def _run(json_path: Path | None, make: Callable[[Say, Keep], _Benchmark]) -> int:
    """Run a benchmark in parts: its rows are written after each, and shown at the end, also of one that was cut short.

    Raises `InternalError` at the end if a part failed.
    """
    bench = make(
        lambda line: click.echo(line, err=True),
        lambda done: rows.write_json(json_path, done) if json_path is not None else None,
    )
    try:
        bench.run()
    finally:
        _show(bench.rows, json_path)
    if bench.failed:
        raise InternalError(f"{len(bench.failed)} parts of the benchmark failed: {'; '.join(bench.failed)}")
    return 0


def _show(measured: Sequence[Row], json_path: Path | None) -> int:
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
