"""Rows of a benchmark: one shape for every question, so that results can be put beside each other.

A row is {bench, contestant, case, ranks, n, median, p95, max, unit, note}; `machine_row` says in the same
shape where the figures come from. Pure but for `machine_row`, which asks the system, and `write_json`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import psutil

from nvrx_sre.core.atomic import write_bytes_atomically

MACHINE = "machine"
"""`bench` of the row that describes the machine."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured case. `n` samples; `median`, `p95`, `max` in `unit`; `ranks` 0 where there are none."""

    bench: str
    contestant: str
    case: str
    ranks: int
    n: int
    median: float
    p95: float
    max: float
    unit: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return dataclasses.asdict(self)


Say = Callable[[str], None]
"""Takes a line about how a benchmark goes on."""
Keep = Callable[[Sequence[Row]], None]
"""Takes all rows so far, after every part of a benchmark."""


class RowLabels(TypedDict):
    """What a row says beside its figures."""

    bench: str
    contestant: str
    case: str
    ranks: int
    unit: str
    note: str


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` (0..1) of all samples do not exceed (nearest rank)."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarize(samples: Sequence[float], **labels: Unpack[RowLabels]) -> Row:
    """The row of `samples`. Raises `ValueError` if there are none."""
    return Row(
        n=len(samples),
        median=statistics.median(samples),
        p95=percentile(samples, 0.95),
        max=max(samples),
        **labels,
    )


def target(wanted: str, is_met: bool) -> str:
    """How a note states a target and the verdict on it."""
    return f"target {wanted}: {'met' if is_met else 'MISSED'}"


def empty(reason: str, *, bench: str, contestant: str, case: str, ranks: int) -> Row:
    """The row of what was not measured, and why: no samples, no figures."""
    return Row(
        bench=bench, contestant=contestant, case=case, ranks=ranks, n=0, median=0, p95=0, max=0, unit="", note=reason
    )


def machine_row() -> Row:
    """Where the figures were measured: processor, cores that this process may use, memory, versions."""
    memory_gib = psutil.virtual_memory().total / 2**30
    note = (
        f"{_processor()}, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )
    cores = len(os.sched_getaffinity(0))
    return Row(
        bench=MACHINE,
        contestant="",
        case="cores",
        ranks=0,
        n=1,
        median=cores,
        p95=cores,
        max=cores,
        unit="cores",
        note=note,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write `rows` as a JSON list, the machine's row added if it is missing. Raises `StorageError`."""
    every = list(rows)
    if not any(row.bench == MACHINE for row in every):
        every.append(machine_row())
    text = json.dumps([row.to_dict() for row in every], indent=1) + "\n"
    write_bytes_atomically(path, text.encode(), durable=False)


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Header and one line of texts a row, for any renderer."""
    header = tuple(item.name for item in dataclasses.fields(Row))
    return [header, *(tuple(_text(value) for value in row.to_dict().values()) for row in rows)]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
