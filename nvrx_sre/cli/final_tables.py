"""The end of a run on a terminal: tables of incidents, time and saves, and where everything lies.

Shows the run's summary (`summary.json`); a key that is missing shows as `-`, so that a run that ended early still
gets its tables. One that failed before its first step has nothing to show but its incidents. Must not: compute a number
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nvrx_sre.cli.narrate import WARN, duration_text
from nvrx_sre.cli.report import make_console, print_whole
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.schema import Verdict
from nvrx_sre.faults.plan import RARE_PHASES, STORAGE_KINDS, FaultSpec
from nvrx_sre.goodput.verdict import FINAL_STATES, run_state_after
from nvrx_sre.monitoring import assets

DEGRADED = "degraded: recovered with a smaller world, from an older checkpoint or with a large rollback"
"""Both words do not fit into a table of 80 columns."""
_SHOWN_SHARE = 0.0005
"""Ledger states below this share of wall time are left out of the table."""


def print_summary(
    summary: Mapping[str, Any],
    run_dir: Path,
    *,
    metrics_url: str = "",
    num_steps: int | None = None,
    console: Console | None = None,
) -> None:
    """Print the final tables and places of a run. An empty `summary`: the run was refused, places only.

    `num_steps`: the run's planned steps, None if unknown.
    """
    console = console or make_console()
    if summary:
        console.print()
        _print_incidents(console, summary.get("incidents") or [])
        has_trained = bool(summary.get("high_water")) or summary.get("exit_code") == ExitCode.FINISHED
        if has_trained:
            _print_ledger(console, summary.get("ledger") or {}, summary.get("wall_s"))
            _print_saves(console, summary.get("saves") or {})
            _print_goodput(console, summary.get("goodput") or {})
        _print_result(console, summary, num_steps)
        _print_never_struck(console, summary)
    _print_places(console, run_dir, metrics_url)


def _table(title: str, columns: Sequence[tuple[str, str]]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    return table


def _print_incidents(console: Console, incidents: Sequence[Mapping[str, Any]]) -> None:
    if not incidents:
        console.print("Incidents: none")
        return
    names = ("fault", "layer", "rank", "step", "tries", "detected", "outage", "rollback", "verdict")
    right = {"rank", "step", "tries", "detected", "outage", "rollback"}
    table = _table("Incidents", [(name, "right" if name in right else "left") for name in names])
    for item in incidents:
        table.add_row(
            str(item.get("fault", "-")),
            str(item.get("layer", "-")),
            _number(item.get("rank")),
            _number(item.get("step")),
            _number(item.get("attempts")),
            duration_text(item.get("detection_s")),
            duration_text(item.get("outage_s")),
            _number(item.get("rollback_steps")),
            "degraded" if _is_degraded(item) else str(item.get("verdict", "-")),
        )
    print_whole(console, table)
    if any(map(_is_degraded, incidents)):
        console.print(DEGRADED)


def _is_degraded(incident: Mapping[str, Any]) -> bool:
    return bool(incident.get("degraded")) and incident.get("verdict") == Verdict.RECOVERED


def _print_ledger(console: Console, ledger: Mapping[str, Any], wall_s: Any) -> None:
    if not isinstance(wall_s, (int, float)) or wall_s <= 0:
        return
    console.print()
    table = _table("Where the time went", [("state", "left"), ("seconds", "right"), ("share", "right")])
    states = {name: value for name, value in ledger.items() if isinstance(value, (int, float))}
    for name, value in sorted(states.items(), key=lambda item: -item[1]):
        if value / wall_s >= _SHOWN_SHARE:
            table.add_row(name, f"{value:.2f}", f"{value / wall_s:.1%}")
    table.add_row("wall", f"{wall_s:.2f}", "")
    print_whole(console, table)


def _print_saves(console: Console, saves: Mapping[str, Any]) -> None:
    if not saves:
        return
    outcomes = ("committed", "failed", "skipped", "rejected")
    console.print()
    table = _table("Saves", [("tier", "left"), *((name, "right") for name in outcomes)])
    for tier in ("hot", "durable"):
        counts = saves.get(tier)
        if isinstance(counts, Mapping):
            table.add_row(tier, *(_number(counts.get(name)) for name in outcomes))
    print_whole(console, table)
    blocking_s = saves.get("blocking_s")
    if isinstance(blocking_s, (int, float)):
        console.print(f"Steps waited {duration_text(float(blocking_s))} for saves in all.")


def _print_goodput(console: Console, goodput: Mapping[str, Any]) -> None:
    shares = "  ".join(f"{name} {value:.1%}" for name, value in goodput.items() if isinstance(value, (int, float)))
    if shares:
        console.print(f"Goodput: {shares}")


def _print_result(console: Console, summary: Mapping[str, Any], num_steps: int | None) -> None:
    loss = summary.get("final_loss")
    loss_text = f", final loss {loss:.4f}" if isinstance(loss, (int, float)) else ""
    entropy = (summary.get("result") or {}).get("unigram_entropy")
    if loss_text and isinstance(entropy, (int, float)):
        loss_text += f" (byte unigram entropy {entropy:.4f})"
    code = summary.get("exit_code", "-")
    planned = "" if num_steps is None else f" of {num_steps}"
    console.print(
        Text(
            f"Run {summary.get('run', '-')}: exit {code}, {_number(summary.get('high_water'))}{planned} steps, "
            f"{_number(summary.get('redone_steps'))} redone{loss_text}",
            style="bold green" if code == 0 else "bold red",
        )
    )


def _print_never_struck(console: Console, summary: Mapping[str, Any]) -> None:
    """A trial in which nothing was broken has shown nothing: say so, a line for each fault."""
    is_over = run_state_after(summary.get("exit_code", ExitCode.FINISHED)) in FINAL_STATES
    what = "never struck" if is_over else "not struck yet"
    last_step = summary.get("high_water") or 0
    has_writer = not _ranks_wrote(summary.get("saves") or {})
    for text in summary.get("faults_never_struck") or []:
        reason = _why_it_did_not(FaultSpec.parse(text), last_step, has_writer=has_writer)
        console.print(Text(f"planned, {what}: {text} ({reason})", style=WARN))


def _ranks_wrote(saves: Mapping[str, Any]) -> bool:
    """The durable saves were written by the ranks: a writer takes them from a hot capture, and there was none."""
    hot, durable = saves.get("hot") or {}, saves.get("durable") or {}
    return not hot.get("committed") and bool(durable.get("committed") or durable.get("failed"))


def _why_it_did_not(spec: FaultSpec, last_step: int, *, has_writer: bool) -> str:
    """An earlier launcher may have passed the place, without this plan."""
    if spec.step > last_step:
        return f"the run came to step {last_step}"
    if spec.kind in STORAGE_KINDS and not has_writer:
        return "it strikes the writer of the hot tier: without one the ranks write the saves themselves"
    if spec.kind in STORAGE_KINDS:
        return f"no save from step {spec.step} on came to its stage under this launcher"
    if spec.phase in RARE_PHASES:
        return f"rank {spec.rank} had no {spec.phase} from step {spec.step} on under this launcher"
    return f"rank {spec.rank} passed no such point in step {spec.step} under this launcher"


def _print_places(console: Console, run_dir: Path, metrics_url: str) -> None:
    """Where to look next; what does not exist is left out."""
    places = [
        ("run directory", run_dir),
        ("journal", run_dir / "journal"),
        ("spans", run_dir / "spans.jsonl"),
        ("logs", run_dir / "logs"),
        ("stacks", run_dir / "incidents"),
    ]
    for name, path in places:
        if path.exists():
            console.print(f"{name + ':':15}{path}")
    if metrics_url:
        console.print(f"{'metrics:':15}{metrics_url} (while the run is up)")
    console.print(f"{'dashboards:':15}{assets.assets_root() / 'dashboards'}")


def _number(value: Any) -> str:
    return "-" if value is None else str(value)
