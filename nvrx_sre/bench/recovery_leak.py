"""Many restarts in one process: what is held must stay flat, and the last recoveries be as quick as the first.

Model: ranks and launcher are counted in every generation at the same place (`recovery_census`). A resource is flat if
none of the last counts is above the highest of the first; memory that an allocator keeps (`KEPT`) may grow by a tenth,
medians compared. The first generation is left out: what it builds is built once. `held_most` is the one place where
this is judged, for every benchmark that counts restarts.

Pure but for `count_restarts`, which runs the launcher and blocks.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.bench.recovery_cases import BENCH, EXCEPTION, GROUP_TIMEOUT_S, LEAK
from nvrx_sre.bench.recovery_ours import launch, plan
from nvrx_sre.bench.recovery_reading import Measured, Pace, from_records
from nvrx_sre.bench.rows import Row, summarize, target
from nvrx_sre.core.errors import InternalError
from nvrx_sre.events.journal import read_journal

COUNTED = ("threads", "fds", "sockets", "shared_bytes", "rss_bytes")
KEPT = ("rss_bytes", "device_bytes", "reserved_bytes")
"""Of the process, of its device, and by torch on the device: how much is kept for later is the allocator's choice."""
KEPT_MAX_RATIO = 1.1
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
    rows = [_resource_row(contestant, ranks, name, counted) for name in COUNTED]
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


@dataclass(frozen=True, kw_only=True)
class Held:
    """A resource over many restarts, in the process in which it grew most. `note`: both ends, and the verdict."""

    process: str
    samples: Sequence[float]
    unit: str
    note: str


def held_most(name: str, counted: Counted) -> Held:
    """What became of the resource `name`. Raises `InternalError` where less than two restarts were counted."""
    samples = {process: [float(count[name]) for count in counts[1:]] for process, counts in counted.items()}
    grown = {process: _growth(name, values) for process, values in samples.items()}
    process = max(grown, key=lambda key: grown[key][1] / max(1.0, grown[key][0]))
    first, last = grown[process]
    unit = "bytes" if name.endswith("_bytes") else name
    is_met = last <= KEPT_MAX_RATIO * first if name in KEPT else last <= first
    note = _ends_note(first, last, unit, is_met, "within 10 %" if name in KEPT else "flat")
    return Held(process=process, samples=samples[process], unit=unit, note=f"{process}: {note}")


def _resource_row(contestant: str, ranks: int, name: str, counted: Counted) -> Row:
    held = held_most(name, counted)
    case = f"{LEAK} {name.removesuffix('_bytes')}"
    return summarize(
        held.samples, bench=BENCH, contestant=contestant, case=case, ranks=ranks, unit=held.unit, note=held.note
    )


def _growth(name: str, samples: Sequence[float]) -> tuple[float, float]:
    """What stands for each end: medians of what is kept, the highest of anything else."""
    first, last = ends(samples)
    return (statistics.median(first), statistics.median(last)) if name in KEPT else (max(first), max(last))


def _ends_note(first: float, last: float, unit: str, is_met: bool, wanted: str) -> str:
    return f"first {first:.4g}, last {last:.4g} {unit}; {target(wanted, is_met)}"
