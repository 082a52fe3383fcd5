"""What reports take of a step of 10 ms: on against off, beside a real launcher.

Model: one rank (`bench.share_rank`) trains the same with and without reports, in turn. A row is the median of many
comparisons. It says between what values the true median lies with 95 % confidence (order statistics: no assumption
about the noise), because a single comparison differs by far more than what is looked for.

    share of a step             runs with against runs without: all of it, what the launcher does meanwhile included
    ..., processor time         the same by the processor time of the rank's thread, which leaves out being put aside
    ..., in the rank alone      step against step, of those during which the launcher did not look
    ..., the report itself      how long it takes by the clock, against a call of nothing in the others: leaves out
                                what it does to the step after it
    ..., launcher's looks       by how much a step is longer during which it looked, times looks a step

`in the rank alone` and `launcher's looks` are what the first consists of, and are more exact: single steps are compared
with their neighbours. `the report itself` is the most exact, and should be what the rank alone pays.

Must not: run beside anything else; run outside the main thread.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.bench.rows import Row, summarize, target
from nvrx_sre.bench.share_rank import ORDER, RUN_STEPS, STEP_S, Measured, Run, Timed
from nvrx_sre.bench.telemetry_launcher import BENCH, CONTESTANT
from nvrx_sre.core.clock import NS_PER_S
from nvrx_sre.launcher import main as launcher
from nvrx_sre.launcher.config import RunConfig

SHARE_MAX_PERCENT = 0.1
_WALL, _PROCESSOR = 1, 2
_NOTHING = "single steps, in blocks of four, without their reports a call of nothing"
_CONFIDENT = 1.96
"""Standard deviations on each side that hold 95 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class ShareConfig:
    """How much is measured; the defaults take five minutes."""

    num_blocks: int = 200
    """Blocks of two runs with and two without reports."""
    num_steps: int = 10_000
    """Steps one by one."""


def measure(folder: Path, config: ShareConfig) -> list[Row]:
    """All comparisons. `folder` must not exist."""
    folder.mkdir(parents=True)
    amount = (str(config.num_blocks), str(config.num_steps))
    launcher.run(
        RunConfig(
            run="bench",
            run_dir=folder / "run",
            command=("-m", "nvrx_sre.bench.share_rank", *amount, str(folder)),
            nproc=1,
            min_world_size=1,
            num_standbys=0,
            hot_every=0,
        )
    )
    return share_rows(json.loads((folder / "measured.json").read_text()))


def share_rows(measured: Measured) -> list[Row]:
    """The rows of the comparisons."""
    runs, steps = measured["runs"], measured["steps"]
    of_runs = f"{RUN_STEPS} steps of {1e3 * STEP_S:.0f} ms, in blocks of four"
    looks = _looks(steps)
    num_looks = len(looks)
    return [
        _row("share of a step", _of_runs(runs, _WALL), of_runs, has_target=True),
        _row("share of a step, processor time", _of_runs(runs, _PROCESSOR), of_runs),
        _row("share of a step, in the rank alone", _of_steps(steps), "single steps, in blocks of four"),
        _row("share of a step, the report itself", _of_reports(steps), _NOTHING),
        _row("share of a step, launcher's looks", looks, f"{num_looks} looks in {len(steps)} steps"),
    ]


def _of_runs(runs: Sequence[Run], column: int) -> list[float]:
    """By how many percent the runs with reports took longer, block for block."""
    shares = []
    for begin in range(0, len(runs), len(ORDER)):
        block = runs[begin : begin + len(ORDER)]
        with_s = sum(float(run[column]) for run in block if run[0])
        without_s = sum(float(run[column]) for run in block if not run[0])
        shares.append(100 * (with_s / without_s - 1))
    return shares


def _of_steps(steps: Sequence[Timed]) -> list[float]:
    """The same for single steps, of the blocks in which the launcher did not look."""
    shares = []
    for begin in range(0, len(steps), len(ORDER)):
        block = steps[begin : begin + len(ORDER)]
        if not any(is_looked for _, is_looked, _, _ in block):
            with_ns = sum(spent_ns for is_told, _, spent_ns, _ in block if is_told)
            without_ns = sum(spent_ns for is_told, _, spent_ns, _ in block if not is_told)
            shares.append(100 * (with_ns / without_ns - 1))
    return shares


def _of_reports(steps: Sequence[Timed]) -> list[float]:
    """By how much the reports of each block took longer than nothing in their place, in percent of a step."""
    shares = []
    for begin in range(0, len(steps), len(ORDER)):
        block = steps[begin : begin + len(ORDER)]
        longer_ns = sum(report_ns if is_told else -report_ns for is_told, _, _, report_ns in block)
        shares.append(100 * longer_ns / (len(ORDER) / 2 * STEP_S * NS_PER_S))
    return shares


def _looks(steps: Sequence[Timed]) -> list[float]:
    """What each look took of all steps, in percent: against the same place in the blocks before and after."""
    is_looked = [looked for _, looked, _, _ in steps]
    share_of_looks = sum(is_looked) / len(steps)
    shares = []
    for number in range(len(ORDER), len(steps) - len(ORDER)):
        before, after = number - len(ORDER), number + len(ORDER)
        if is_looked[number] and not is_looked[before] and not is_looked[after]:
            longer_ns = steps[number][2] - (steps[before][2] + steps[after][2]) / 2
            shares.append(100 * share_of_looks * longer_ns / (STEP_S * NS_PER_S))
    return shares


def _row(case: str, shares: list[float], what: str, *, has_target: bool = False) -> Row:
    low, high = median_interval(shares)
    note = f"95 % sure of {low:.3f} to {high:.3f} %"
    if has_target:
        if low <= SHARE_MAX_PERCENT < high:
            note += ", so that noise decided"
        is_met = statistics.median(shares) <= SHARE_MAX_PERCENT
        note = f"{target(f'median at most {SHARE_MAX_PERCENT} % of a step of 10 ms', is_met)}; {note}"
    note += f"; {what}"
    return summarize(shares, bench=BENCH, contestant=CONTESTANT, case=case, ranks=1, unit="%", note=note)


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Between which samples the median of what they are drawn from lies, with 95 % confidence.

    The number of samples below it is binomial, whatever their distribution. Few samples give their extremes.
    """
    ordered, num = sorted(samples), len(samples)
    reach = _CONFIDENT * math.sqrt(num) / 2
    low = max(0, math.floor(num / 2 - reach) - 1)
    return ordered[low], ordered[num - 1 - low]
