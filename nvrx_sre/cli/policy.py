"""`nvrx-sre policy explain`: what the policy would do about faults, or what it did in a run and why.

Model: faults on the command line are told to the policy one after the other (`policy.rehearsal`); a run directory is
read record by record. Both give the same rows: one for each decision. Read-only, safe beside a live launcher.

Must not: import torch, decide anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from nvrx_sre.cli import config_file
from nvrx_sre.cli.halt import existing_journal
from nvrx_sre.cli.narrate import duration_text
from nvrx_sre.cli.report import make_console, print_rows
from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import ExitCode, UsageError, UserError
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events import schema
from nvrx_sre.events.journal import read_journal
from nvrx_sre.events.schema import Action, FaultClass, Layer, Record
from nvrx_sre.faults.plan import FaultKind
from nvrx_sre.policy.ladder import Decision
from nvrx_sre.policy.rehearsal import Rehearsal, World

_TOKEN = re.compile(r"(?P<kind>[a-z_]+)(@(?P<rank>\d+|\?))?(:(?P<step>\d+))?(x(?P<times>\d+))?")
_WAIT = re.compile(r"\+(?P<seconds>\d+(\.\d+)?)s?")
PROGRESS = "progress"
RESUME = "resume"
MAX_FAULTS = 10_000
"""Decisions of one rehearsal."""
OF_PLANNED: dict[FaultKind, FaultClass] = {
    FaultKind.SIGKILL: FaultClass.KILLED,
    FaultKind.SIGSTOP: FaultClass.HANG,
    FaultKind.HANG_NATIVE: FaultClass.HANG,
    FaultKind.HANG_GIL: FaultClass.HANG,
    FaultKind.CUDA_ILLEGAL_ACCESS: FaultClass.CUDA_ERROR,
    FaultKind.CUDA_ASSERT: FaultClass.CUDA_ERROR,
    FaultKind.CORRUPT_CHECKPOINT: FaultClass.CHECKPOINT_CORRUPT,
    FaultKind.SIGTERM: FaultClass.PREEMPTION,
    FaultKind.NODE_KILL: FaultClass.NODE_LOST,
}
"""Planned faults whose class has another name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One decision. `when`: seconds since the beginning, or UTC; `left`: what each budget in use has left."""

    when: str
    fault: str
    attempt: int
    decision: str
    layer: str
    backoff_s: float
    exit_code: int | None
    reason: str
    left: dict[str, int]
    excluded: str = ""


@dataclass(frozen=True, kw_only=True)
class Happening:
    """What a token says: a fault, time that passes, progress, or a resume."""

    text: str
    fault: FaultClass | None = None
    rank: int | None = 0
    step: int | None = None
    wait_s: float = 0.0


def parse(tokens: Iterable[str], world: World) -> list[Happening]:
    """The happenings of a command line. Raises `UsageError` for one that is none or has no such rank."""
    found: list[Happening] = []
    for token in tokens:
        found += _parsed(token)
    wrong = [item for item in found if item.rank is not None and item.rank >= world.num_ranks]
    if wrong:
        raise UsageError(
            f"rank {wrong[0].rank} is none of {world.num_ranks} ranks: say how many there are with --nproc"
        )
    if len(found) > MAX_FAULTS:
        raise UsageError(f"{len(found)} faults: explain at most {MAX_FAULTS}")
    return found


def _parsed(token: str) -> list[Happening]:
    waits = _WAIT.fullmatch(token)
    if waits:
        return [Happening(text=token, wait_s=float(waits["seconds"]))]
    if token in (PROGRESS, RESUME):
        return [Happening(text=token)]
    match = _TOKEN.fullmatch(token)
    kind = None if match is None else _class_of(match["kind"])
    if match is None or kind is None:
        classes = ", ".join(item.value for item in FaultClass)
        raise UsageError(
            f"{token!r} is neither a fault (CLASS[@RANK][:STEP][xN]), nor {PROGRESS}, {RESUME}, +SECONDS, nor a run "
            f"directory; the classes are {classes}"
        )
    rank = None if match["rank"] == "?" else int(match["rank"] or 0)
    step = None if match["step"] is None else int(match["step"])
    times = int(match["times"] or 1)
    if times > MAX_FAULTS:
        raise UsageError(f"{token!r}: explain at most {MAX_FAULTS} faults")
    return [Happening(text=kind.value, fault=kind, rank=rank, step=step)] * times


def _class_of(name: str) -> FaultClass | None:
    if name in list(FaultClass):
        return FaultClass(name)
    return OF_PLANNED.get(FaultKind(name)) if name in list(FaultKind) else None


def rehearsed(happenings: Iterable[Happening], rehearsal: Rehearsal, every_s: float) -> Iterator[Row]:
    """What would be decided, fault by fault, until a stop from which the orchestrator does not start again."""
    for item in happenings:
        rehearsal.wait(item.wait_s)
        if item.text == PROGRESS:
            rehearsal.progress()
        elif item.text == RESUME:
            rehearsal.reset()
        if item.fault is None:
            continue
        rehearsal.wait(every_s)
        when = f"{rehearsal.now_s:.0f} s"
        before = len(rehearsal.history.excluded)
        decision = rehearsal.fault(item.fault, rank=item.rank, step=item.step)
        excluded = "".join(rehearsal.history.excluded[before:])
        row = _row(when, f"{item.text}{_place(item)}", decision, excluded)
        yield row if item.fault is not FaultClass.PREEMPTION else _of_preemption(row, decision)
        if decision.exit_code in (ExitCode.DO_NOT_RESTART, ExitCode.CONFIG):
            return


def _of_preemption(row: Row, decision: Decision) -> Row:
    """A preemption is nobody's fault, and counts against its own budget alone."""
    cap = schema.Cap.PREEMPTION.value
    used, limit = decision.budget_used[cap], decision.budget_limit[cap]
    return replace(row, fault=FaultClass.PREEMPTION.value, attempt=used, left={cap: max(0, limit - used)})


def _place(item: Happening) -> str:
    rank = "?" if item.rank is None else str(item.rank)
    return f"@{rank}" if item.step is None else f"@{rank}:{item.step}"


def _row(when: str, fault: str, decided: Decision | schema.RestartDecided, excluded: str) -> Row:
    return Row(
        when=when,
        fault=fault,
        attempt=decided.restarts_since_progress,
        decision=decided.action.value,
        layer=decided.layer.value,
        backoff_s=decided.backoff_s,
        exit_code=decided.exit_code,
        reason=decided.reason,
        left=_left(decided.budget_used, decided.budget_limit),
        excluded=excluded,
    )


def _left(used: dict[str, int], limit: dict[str, int]) -> dict[str, int]:
    return {cap: max(0, limit[cap] - number) for cap, number in used.items() if number and cap in limit}


def happened(records: Iterable[Record]) -> Iterator[Row]:
    """What was decided in a run, and why: faults, preemptions, halts, resumes and exclusions."""
    fault: Record | None = None
    held: Row | None = None
    for record in records:
        event = record.event
        if isinstance(event, schema.RankExcluded) and held is not None:
            held = replace(held, excluded=event.device)
            continue
        if not isinstance(event, _TOLD):
            continue
        if held is not None:
            yield held
            held = None
        if isinstance(event, schema.FaultDetected):
            fault = record
        elif isinstance(event, schema.RestartDecided):
            held = _row(_utc(record), _fault_of(fault), event, "")
        else:
            held = _other(record)
    if held is not None:
        yield held


_TOLD = (
    schema.FaultDetected,
    schema.RestartDecided,
    schema.PreemptionReceived,
    schema.HaltRequested,
    schema.BudgetReset,
)


def _utc(record: Record) -> str:
    return datetime.fromtimestamp(seconds(record.time_ns), UTC).strftime("%Y-%m-%d %H:%M:%S")


def _fault_of(record: Record | None) -> str:
    if record is None or not isinstance(record.event, schema.FaultDetected):
        return "unknown"
    rank = "?" if record.rank is None else str(record.rank)
    return f"{record.event.fault}@{rank}:{record.event.step}"


def _other(record: Record) -> Row:
    """What was decided without a fault."""
    event = record.event
    layer, attempts, left = Layer.JOB.value, 0, {}
    exit_code: int | None = None
    if isinstance(event, schema.PreemptionReceived):
        is_over = event.limit > 0 and event.attempts >= event.limit
        exit_code = ExitCode.INTERRUPTED if event.by_person else ExitCode.PREEMPTED
        exit_code = ExitCode.DO_NOT_RESTART if is_over else exit_code
        name, action, attempts = FaultClass.PREEMPTION.value, Action.STOP.value, event.attempts
        left = {schema.Cap.PREEMPTION.value: event.limit - event.attempts} if event.limit else {}
        reason = "interrupted by a person" if event.by_person else f"signal {event.signal}"
    elif isinstance(event, schema.HaltRequested):
        name, action, reason = f"halt by {event.by}", Action.STOP.value, event.reason
        exit_code = ExitCode.DO_NOT_RESTART
    else:
        assert isinstance(event, schema.BudgetReset)
        name, action, layer, reason = RESUME, "refill", "", event.reason
    return Row(
        when=_utc(record),
        fault=name,
        attempt=attempts,
        decision=action,
        layer=layer,
        backoff_s=0.0,
        exit_code=None if exit_code is None else int(exit_code),
        reason=reason,
        left=left,
    )


def table(rows: Iterable[Row]) -> Table:
    """The rows for a person."""
    result = Table(box=None, pad_edge=False)
    for title in ("when", "fault", "attempt", "decision", "layer", "back-off", "left", "why"):
        result.add_column(title, overflow="fold", no_wrap=title == "when")
    for row in rows:
        decision = row.decision if row.exit_code is None else f"{row.decision}, exit {row.exit_code}"
        decision = f"{decision} without {row.excluded}" if row.excluded else decision
        wait = duration_text(row.backoff_s) if row.backoff_s else ""
        left = ", ".join(f"{cap} {number}" for cap, number in row.left.items())
        attempt = str(row.attempt) if row.attempt else ""
        result.add_row(row.when, row.fault, attempt, decision, row.layer, wait, left, row.reason)
    return result


def _caps_of(path: Path | None) -> CapLimits:
    if path is None:
        return CapLimits()
    known = [name for keys in config_file.OPTION_KEYS.values() for name in keys.values()]
    return config_file.build_limits(config_file.load(path, known).limits).caps


@click.group("policy")
def command() -> None:
    """What is restarted, what is stopped, and why."""


@command.command("explain")
@click.argument("happenings", nargs=-1, required=True, metavar="FAULT... | RUN_DIR")
@click.option("--config", "config", type=click.Path(path_type=Path), metavar="FILE", help="Caps of a run's config.")
@click.option("--nproc", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Ranks.")
@click.option("--min-world-size", type=click.IntRange(1), metavar="N", help="Ranks at least.  [default: all]")
@click.option("--world-multiple", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Ranks that can only take part together.")  # fmt: skip
@click.option("--every", "every_s", type=click.FloatRange(0), default=10.0, show_default=True, metavar="SECONDS",
              help="From a restart to the next fault.")  # fmt: skip
@click.option("--before-first-step", is_flag=True, help="No step of the run was ever committed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
def explain(happenings: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Show what would be decided about faults, or was decided in a run.

    FAULT is CLASS[@RANK][:STEP][xN] (rank ? is unknown; without a step, the newest), `progress`, `resume`, or
    +SECONDS that pass.
    """
    place = Path(happenings[0])
    if len(happenings) == 1 and (place.exists() or "/" in happenings[0]):
        rows = list(happened(_records(place)))
    else:
        world = _world(options["nproc"], options["min_world_size"], options["world_multiple"])
        planned = parse(happenings, world)
        rehearsal = Rehearsal(_caps_of(options["config"]), world, has_begun=not options["before_first_step"])
        rows = list(rehearsed(planned, rehearsal, options["every_s"]))
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
    elif rows:
        print_rows(make_console(), table(rows))
    else:
        click.echo("nothing was decided: no fault, preemption or halt is on record")
    return ExitCode.FINISHED


def _world(nproc: int, min_world_size: int | None, world_multiple: int) -> World:
    """The rehearsed world. Raises `UserError` if its sizes do not fit together."""
    least = nproc if min_world_size is None else min_world_size
    if least > nproc or nproc % world_multiple or least % world_multiple:
        raise UserError(
            f"--min-world-size {least} of {nproc} ranks in units of {world_multiple}: use a multiple of the unit, "
            "not above the number of ranks, which is one as well"
        )
    return World(num_ranks=nproc, min_world_size=least, multiple=world_multiple)


def _records(place: Path) -> Iterator[Record]:
    journal, _ = existing_journal(place)
    return read_journal(journal)
