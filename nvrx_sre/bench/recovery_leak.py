"""Many restarts in one process: what is held must stay flat, and the last recoveries be as quick as the first.

Model: ranks and launcher are counted in every generation at the same place (`recovery_census`). A resource is flat if
none of the last counts is above the highest of the first; resident memory may grow by a tenth. The first generation
is left out: what it builds is built once.

Pure but for `count_restarts`, which runs the launcher and blocks.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvrx_sre.bench.recovery_cases import BENCH, EXCEPTION, GROUP_TIMEOUT_S, LEAK
from nvrx_sre.bench.recovery_ours import launch, plan
from nvrx_sre.bench.recovery_reading import Measured, Pace, from_records
from nvrx_sre.bench.rows import Row, summarize, target
from nvrx_sre.core.errors import InternalError
from nvrx_sre.events.journal import read_journal

FLAT = ("threads", "fds", "sockets", "shared_bytes")
RSS = "rss_bytes"
RSS_MAX_RATIO = 1.1
RECOVERIES_MAX_RATIO = 1.2
WINDOW = 20
"""Restarts at each end that are compared."""

Counted = Mapping[str, Sequence[Mapping[str, int]]]
"""Process -> its counts in order of time."""


def count_restarts(run_dir: Path, ranks: int, num_restarts: int, pace: Pace) -> tuple[Measured, Counted]:
    """Recoveries and counts of a run with so many exceptions."""
    folder = run_dir.with_suffix(".census")
    folder.mkdir()
    specs, steps = plan(EXCEPTION, ranks, num_restarts, pace)
    arguments = ("--steps", str(steps), "--group-timeout", str(GROUP_TIMEOUT_S))
    launch(run_dir, ranks, specs, (*arguments, "--census", str(folder), "--bench", str(os.getpid())))
    counted = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}
    return from_records(read_journal(run_dir / "journal")), counted


def leak_rows(contestant: str, ranks: int, measured: Measured, counted: Counted) -> list[Row]:
    """A row for each resource, of the process that grew most, and one of the recoveries."""
    rows = [_resource_row(contestant, ranks, name, counted) for name in (*FLAT, RSS)]
    totals_s = measured.totals_s()
    first, last = (statistics.median(part) for part in ends(totals_s))
    note = _ends_note(first, last, "s", last / first <= RECOVERIES_MAX_RATIO, f"within {RECOVERIES_MAX_RATIO}x")
    recoveries = summarize(
        totals_s, bench=BENCH, contestant=contestant, case=f"{LEAK} total", ranks=ranks, unit="s", note=note
    )
    return [*rows, recoveries]


def ends(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """First and last `WINDOW` values, less where there are not twice as many. Raises `InternalError` below two."""
    size = min(WINDOW, len(values) // 2)
    if size < 1:
        raise InternalError("the benchmark's run counted less than two restarts")
    return values[:size], values[-size:]


def _resource_row(contestant: str, ranks: int, name: str, counted: Counted) -> Row:
    grown = {process: _growth(name, counts) for process, counts in counted.items()}
    process = max(grown, key=lambda key: grown[key][1] / max(1.0, grown[key][0]))
    first, last = grown[process]
    is_met = last / first <= RSS_MAX_RATIO if name == RSS else last <= first
    unit = "bytes" if name.endswith("_bytes") else name
    note = _ends_note(first, last, unit, is_met, "within 10 %" if name == RSS else "flat")
    samples = [float(count[name]) for count in counted[process][1:]]
    return summarize(
        samples,
        bench=BENCH,
        contestant=contestant,
        case=f"{LEAK} {name.removesuffix('_bytes')}",
        ranks=ranks,
        unit=unit,
        note=f"{process}: {note}",
    )


def _growth(name: str, counts: Sequence[Mapping[str, int]]) -> tuple[float, float]:
    """What stands for each end: medians of memory, the highest of anything else."""
    first, last = ends([float(count[name]) for count in counts[1:]])
    return (statistics.median(first), statistics.median(last)) if name == RSS else (max(first), max(last))


def _ends_note(first: float, last: float, unit: str, is_met: bool, wanted: str) -> str:
    return f"first {first:.4g}, last {last:.4g} {unit}; {target(wanted, is_met)}"
