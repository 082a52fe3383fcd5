"""`nvrx-sre simulate`: whole jobs under random fault mixes, with simulated processes, network, disk and time.

Runs the launcher's own machines, thousands of jobs in minutes, and checks each journal. A seed that fails prints the
command that shows it again; the exit code is then 70, because the defect is ours.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from nvrx_sre.cli.output_file import check_output_file
from nvrx_sre.cli.report import make_console
from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.core.errors import ExitCode, UserError
from nvrx_sre.testing import scaling
from nvrx_sre.testing.simulation import (
    RARE_STATES,
    RARE_STATES_OF_HOSTS,
    RAREST_STATES,
    RAREST_STATES_OF_HOSTS,
    Outcome,
    simulate,
)
from nvrx_sre.testing.world_plan import SwarmOptions, draw_scenario

MAX_RANKS = 16_384
PROGRESS_S = 5.0
"""Time between two lines of progress on stderr (seconds)."""
MAX_FAILED_SHOWN = 20
SEEDS_FOR_RARE = 500
SEEDS_FOR_RAREST = 5000
"""From so many seeds on a rare state, and one of the rarest, that none of them reached is worth a line."""


@click.command("simulate")
@click.option(
    "--seeds", type=click.IntRange(1), default=100, show_default=True, metavar="N", help="Seeds to run, from --seed on."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="S", help="First seed.")
@click.option(
    "--ranks",
    type=click.IntRange(1, MAX_RANKS),
    default=8,
    show_default=True,
    metavar="R",
    help=f"Most ranks of a job; seeds draw smaller ones too. At most {MAX_RANKS}.",
)
@click.option("--hosts", type=click.IntRange(1), default=1, show_default=True, metavar="H", help="Most hosts of a job.")
@click.option("--journal", type=click.Path(path_type=Path), metavar="FILE", help="Write the last seed's records.")
@click.option("--scaling", "is_scaling", is_flag=True, help="Cost of one recovery against ranks, instead of seeds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(**chosen: Any) -> int:
    """Run simulated jobs under random fault mixes; check each.

    Every seed draws a job, a subset of the fault kinds and faults of these kinds. The same seed gives the same journal,
    byte for byte.
    """
    request = _Request(**chosen)
    if request.hosts > request.ranks:
        raise UserError(f"{request.hosts} hosts for {request.ranks} ranks: use at most one host a rank")
    if request.is_scaling:
        return _show_scaling(request.ranks if _is_given("ranks") else MAX_RANKS, as_json=request.as_json)
    check_output_file(request.journal)
    options = SwarmOptions(num_ranks=request.ranks, num_hosts=request.hosts)
    outcomes = _run(range(request.seed, request.seed + request.seeds), options, request.journal)
    failed = [outcome for outcome in outcomes if outcome.problems]
    if request.as_json:
        click.echo(json.dumps(_summary(outcomes, options), indent=2))
    else:
        _show(outcomes, failed, options)
    return ExitCode.INTERNAL if failed else ExitCode.FINISHED


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The command's options."""

    seeds: int
    seed: int
    ranks: int
    hosts: int
    journal: Path | None
    is_scaling: bool
    as_json: bool


def _is_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def repro_command(outcome: Outcome, options: SwarmOptions) -> str:
    """The command that runs this seed alone."""
    hosts = f" --hosts {options.num_hosts}" if options.num_hosts > 1 else ""
    return f"nvrx-sre simulate --seed {outcome.scenario.seed} --seeds 1 --ranks {options.num_ranks}{hosts}"


def _run(seeds: range, options: SwarmOptions, journal: Path | None) -> list[Outcome]:
    clock = SystemClock()
    told_ns = clock.monotonic_ns()
    outcomes: list[Outcome] = []
    num_failed = 0
    for number, seed in enumerate(seeds, start=1):
        outcome, world = simulate(draw_scenario(seed, options))
        outcomes.append(outcome)
        if outcome.problems:
            num_failed += 1
            if num_failed <= MAX_FAILED_SHOWN:
                click.echo(f"seed {seed} failed: {outcome.problems[0]}; {repro_command(outcome, options)}", err=True)
        if seconds(clock.monotonic_ns() - told_ns) > PROGRESS_S:
            told_ns = clock.monotonic_ns()
            click.echo(f"{number} of {len(seeds)} seeds, {num_failed} failed", err=True)
        if journal is not None and seed == seeds[-1]:
            _write_journal(journal, world.journal())
    return outcomes


def _write_journal(path: Path, text: bytes) -> None:
    try:
        path.write_bytes(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _summary(outcomes: list[Outcome], options: SwarmOptions) -> dict[str, Any]:
    reached = Counter(state for outcome in outcomes for state in sorted(outcome.reached))
    return {
        "ranks": options.num_ranks,
        "hosts": options.num_hosts,
        "seeds": len(outcomes),
        "failed": [
            {
                "seed": outcome.scenario.seed,
                "repro": repro_command(outcome, options),
                "problems": list(outcome.problems),
                "faults": [asdict(fault) for fault in outcome.scenario.faults],
            }
            for outcome in outcomes
            if outcome.problems
        ],
        "totals": _totals(outcomes),
        "reached": dict(sorted(reached.items())),
        "journals": {str(outcome.scenario.seed): outcome.journal_sha256 for outcome in outcomes},
    }


def _totals(outcomes: list[Outcome]) -> dict[str, float]:
    return {
        "faults": sum(outcome.num_faults for outcome in outcomes),
        "launchers": sum(outcome.num_launchers for outcome in outcomes),
        "records": sum(outcome.num_records for outcome in outcomes),
        "simulated_hours": round(sum(outcome.simulated_s for outcome in outcomes) / 3600, 3),
    }


def _show(outcomes: list[Outcome], failed: list[Outcome], options: SwarmOptions) -> None:
    console = make_console()
    for outcome in failed[:MAX_FAILED_SHOWN]:
        console.print(f"seed {outcome.scenario.seed} FAILED")
        for fault in outcome.scenario.faults:
            times = f" x{fault.times}" if fault.times > 1 else ""
            console.print(f"  {fault.kind.value}@{fault.rank}:{fault.step}/{fault.phase.value}{times}")
        for problem in outcome.problems:
            console.print(f"  {problem}")
        console.print(f"  {repro_command(outcome, options)}")
    totals = _totals(outcomes)
    console.print(
        f"{len(outcomes)} seeds, {len(failed)} failed: {totals['faults']} faults, {totals['launchers']} launchers, "
        f"{totals['records']} records, {totals['simulated_hours']:g} h of simulated time"
    )
    has_hosts = options.num_hosts > 1
    rare = RARE_STATES + (RARE_STATES_OF_HOSTS if has_hosts else ())
    rarest = RAREST_STATES + (RAREST_STATES_OF_HOSTS if has_hosts else ())
    reached = {state for outcome in outcomes for state in outcome.reached}
    console.print(f"rare states reached: {len(reached.intersection(rare + rarest))} of {len(rare + rarest)}")
    due = (*(rare if len(outcomes) >= SEEDS_FOR_RARE else ()), *(rarest if len(outcomes) >= SEEDS_FOR_RAREST else ()))
    for state in due:
        if state not in reached:
            console.print(f"  not reached: {state}")


def _show_scaling(max_ranks: int, *, as_json: bool) -> int:
    rows = []
    for size in scaling.SIZES:
        if size <= max_ranks:
            click.echo(f"{size} ranks", err=True)
            rows.append(scaling.measure_row(size))
    laws = scaling.laws_of(rows)
    if as_json:
        cells = [asdict(row.cost) | {"num_packets_4_hosts": row.num_packets_fixed_hosts} for row in rows]
        exponents = {name: round(law, 3) for name, law in asdict(laws).items()}
        click.echo(json.dumps({"rows": cells, "growth": exponents}, indent=2))
        return ExitCode.FINISHED
    table = Table(
        *("ranks", "hosts", "packets", "packets a host*", "kB a host*", "packets, 4 hosts"),
        *("inputs", "records", "decisions"),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for row in rows:
        cost = row.cost
        num_others = max(1, cost.num_other_hosts)
        of_a_host = (f"{cost.num_packets / num_others:.1f}", f"{cost.num_bytes / num_others / 1000:.1f}")
        counts = (cost.num_ranks, cost.num_hosts, cost.num_packets, *of_a_host)
        rest = (row.num_packets_fixed_hosts, cost.num_inputs, cost.num_records, cost.num_decisions)
        table.add_row(*(str(cell) for cell in (*counts, *rest)))
    console = make_console()
    console.print(table)
    console.print("* of the hosts beside the leader's: on its own no packets are needed")
    console.print(f"growth: packets ~ hosts*^{laws.packets_by_hosts:.2f}, bytes ~ hosts*^{laws.bytes_by_hosts:.2f}")
    console.print(f"        packets at 4 hosts ~ ranks^{laws.packets_by_ranks_at_fixed_hosts:.2f}")
    console.print(f"        inputs of the leader ~ ranks^{laws.inputs_by_ranks:.2f}")
    return ExitCode.FINISHED
