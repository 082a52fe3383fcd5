"""`nvrx-sre events`: what happened in a run, record by record, live or afterwards.

Model: the journal is the one stream; this command filters and prints it, or folds it (`--replay`) into the same
counters, ledger, incidents and spans that the launcher had. Read-only and safe beside a live launcher.
Must not: import torch, write into the run directory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from nvrx_sre.cli.halt import existing_journal
from nvrx_sre.cli.narrate import counted, narrate, rank_text
from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.core.errors import ExitCode, UsageError
from nvrx_sre.core.signals import SignalPipe
from nvrx_sre.events.codec import to_dict
from nvrx_sre.events.journal import JournalReader, read_journal
from nvrx_sre.events.journal_tail import JournalTail
from nvrx_sre.events.schema import EVENT_TYPES, IncidentClosed, LauncherStopped, Record
from nvrx_sre.events.snapshot import fits
from nvrx_sre.goodput.verdict import FINAL_STATES, run_state_after
from nvrx_sre.launcher.rundir import RunDirectory, incident_name
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.folded import FoldedRun
from nvrx_sre.telemetry.logs import event_line, log_fields
from nvrx_sre.telemetry.metric import MetricType, Scope

POLL_S = 0.25
"""How often a followed journal is looked at."""


class Filter:
    """Which records are wanted. Raises `UsageError` for a kind that is none."""

    def __init__(self, kinds: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        wanted = {name for text in kinds for name in text.split(",") if name}
        unknown = sorted(wanted - set(EVENT_TYPES))
        if unknown:
            raise UsageError(f"--kind {unknown[0]} is no event; the events are {', '.join(sorted(EVENT_TYPES))}")
        self._kinds = wanted
        self._ranks = set(ranks)

    def passes(self, record: Record) -> bool:
        """True if the record is wanted."""
        of_kind = not self._kinds or type(record.event).__name__ in self._kinds
        return of_kind and (not self._ranks or record.rank in self._ranks)


def stacks_of(run_dir: Path, incident: int) -> str:
    """Where the stacks of an incident lie below the run directory, '' if there are none."""
    directory = RunDirectory(run_dir).incidents / incident_name(incident)
    return str(directory.relative_to(run_dir)) if directory.is_dir() else ""


def line_of(record: Record, run_dir: Path) -> str:
    """One record for a person: time (UTC), generation, rank, name, and what it says."""
    when = _moment(record.time_ns)
    rank = "     -" if record.rank is None else f"rank {record.rank}"
    told = narrate(record)
    text = told.text if told is not None else event_line(record)
    if text is None:
        fields = {name: value for name, value in log_fields(record).items() if name not in _STAMP}
        text = " ".join(_field(name, value) for name, value in fields.items())
    stacks = stacks_of(run_dir, record.event.incident) if isinstance(record.event, IncidentClosed) else ""
    text += f", stacks in {stacks}" if stacks else ""
    return f"{when}  g{record.generation:<4} {rank:<8} {type(record.event).__name__:<18} {text}"


def _moment(time_ns: int) -> str:
    return datetime.fromtimestamp(seconds(time_ns), UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def _field(name: str, value: Any) -> str:
    """`name=value`; a moment, of which events have nanoseconds, as a time of the day (UTC)."""
    if name.endswith("_ns") and isinstance(value, int):
        return f"{name.removesuffix('_ns')}={_moment(value).partition(' ')[2] if value else '-'}"
    return f"{name}={value}"


_STAMP = ("epoch", "generation", "rank", "seq")


def replayed(directory: Path, run: str) -> dict[str, Any]:
    """Counters, ledger, incidents and spans of the whole journal, as the launcher had them. Blocks for the reading."""
    views = FoldedRun(run, clock=SystemClock())
    reader = JournalReader(directory, fits=lambda folds: fits(views.parts, folds), oldest=True)
    records = list(reader)
    spans = views.replay(reader.snapshot, records)
    summary = views.summary.to_dict(records[-1].time_ns if records else 0)
    return {
        "run": run,
        "events": summary["telemetry"]["events"],
        "bad_lines": reader.num_bad_lines,
        "counters": _counters(views),
        "ledger": summary["ledger"],
        "wall_s": summary["wall_s"],
        "goodput": summary["goodput"],
        "incidents": summary["incidents"],
        "stacks": {row["incident"]: stacks_of(directory.parent, row["incident"]) for row in summary["incidents"]},
        "spans": [span.to_dict() for span in spans],
    }


def _counters(views: FoldedRun) -> dict[str, float]:
    """Every counter and histogram of the job: exposition name with labels -> value."""
    wanted = {
        metric.name
        for metric in catalog.CATALOG.values()
        if metric.scope is Scope.JOB and metric.type in (MetricType.COUNTER, MetricType.HISTOGRAM)
    }
    found = {}
    for family in views.metrics.collect():
        for sample in family.samples:
            metric = catalog.metric_of(sample.name)
            if metric is not None and metric.name in wanted:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def _print_replay(value: dict[str, Any]) -> None:
    click.echo(f"run {value['run']}: {value['events']} events, {value['bad_lines']} damaged lines")
    shares = "  ".join(f"{state} {spent_s:.1f} s" for state, spent_s in value["ledger"].items() if spent_s > 0)
    click.echo(f"wall {value['wall_s']:.1f} s: {shares}")
    click.echo("goodput  " + "  ".join(f"{kind} {ratio:.1%}" for kind, ratio in value["goodput"].items()))
    for row in value["incidents"]:
        stacks = value["stacks"][row["incident"]]
        click.echo(
            f"incident {row['incident']}: {row['fault']} on {rank_text(row['rank'])} at step {row['step']}, "
            f"{row['verdict']}, {counted(row['attempts'], 'attempt')}, "
            f"rolled back {counted(row['rollback_steps'], 'step')}, trace {row['trace_id']}"
            + (f", stacks in {stacks}" if stacks else "")
        )
    for name, count in value["counters"].items():
        if count and "_bucket{" not in name:
            click.echo(f"{name} {count:g}")
    click.echo(f"{len(value['spans'])} spans (--json shows them)")


def _is_over(record: Record) -> bool:
    event = record.event
    return isinstance(event, LauncherStopped) and run_state_after(event.exit_code) in FINAL_STATES


def _followed(directory: Path) -> Iterator[Record]:
    """Records from the first on, as they come, until the run is over for good or a stop signal arrives."""
    tail = JournalTail(directory)
    with contextlib.closing(SignalPipe()) as stopped:
        is_stopped = False
        while not is_stopped:
            records = tail.poll()
            yield from records
            if records and _is_over(records[-1]):
                return
            is_stopped = stopped.wait(POLL_S)


@click.command("events")
@click.argument("run_dir", type=click.Path(path_type=Path), metavar="RUN_DIR")
@click.option("--follow", is_flag=True, help="Go on with what is recorded from now on, until the run is over.")
@click.option("--kind", "kinds", multiple=True, metavar="EVENT", help="Only these, e.g. FaultDetected; repeatable.")
@click.option("--rank", "ranks", type=click.IntRange(min=0), multiple=True, metavar="N",
              help="Only records of this rank; repeatable.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="A JSON object a line; with --replay one object.")
@click.option("--replay", is_flag=True, help="Fold the journal: counters, ledger, incidents and spans.")
def command(
    run_dir: Path, follow: bool, kinds: tuple[str, ...], ranks: tuple[int, ...], as_json: bool, replay: bool
) -> int:
    """Show what happened in a run, or fold it again."""
    journal, name = existing_journal(run_dir)
    if replay and (follow or kinds or ranks):
        raise UsageError("--replay folds the whole journal: leave --follow, --kind and --rank out")
    if replay:
        value = replayed(journal, name)
        click.echo(json.dumps(value, indent=2)) if as_json else _print_replay(value)
        return ExitCode.FINISHED
    wanted = Filter(kinds, ranks)
    records = _followed(journal) if follow else read_journal(journal)
    for record in filter(wanted.passes, records):
        click.echo(json.dumps(to_dict(record)) if as_json else line_of(record, run_dir))
    return ExitCode.FINISHED
