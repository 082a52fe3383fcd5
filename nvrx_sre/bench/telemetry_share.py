"""What reports take of a step of 10 ms: on against off, beside a real launcher.

Model: one rank (`bench.share_rank`) alternates short runs of the same work with and without reports, and with reports
that nobody takes in. Every block of runs gives one share for each comparison; the row is the median of the blocks. It
says between what values the true median lies with 95 % confidence (order statistics: no assumption about the noise),
because single blocks differ by far more than what is looked for.

    share of a step             told against off, wall time: all of it, the launcher's disturbance included
    ..., processor time         the same by the processor time of the rank's thread, which leaves out being put aside
    ..., in the rank alone      kept against off, wall time: without a launcher that takes it in

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
from nvrx_sre.bench.share_rank import RUN_STEPS, STEP_S, Block
from nvrx_sre.launcher import main as launcher
from nvrx_sre.launcher.config import RunConfig

SHARE_MAX_PERCENT = 0.1
_WALL, _PROCESSOR = 0, 1
_CONFIDENT = 1.96
"""Standard deviations on each side that hold 95 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class ShareConfig:
    """How much is measured; the default takes four minutes."""

    num_blocks: int = 150
    """Blocks of two runs of each of three arms."""


def measure(folder: Path, config: ShareConfig) -> list[Row]:
    """All comparisons. `folder` must not exist."""
    folder.mkdir(parents=True)
    launcher.run(
        RunConfig(
            run="bench",
            run_dir=folder / "run",
            command=("-m", "nvrx_sre.bench.share_rank", str(config.num_blocks), str(folder)),
            nproc=1,
            min_world_size=1,
            num_standbys=0,
            hot_every=0,
        )
    )
    return share_rows(json.loads((folder / "blocks.json").read_text()))


def share_rows(blocks: Sequence[Block]) -> list[Row]:
    """The rows of the blocks' comparisons."""
    return [
        _row("share of a step", _shares(blocks, "told", _WALL), has_target=True),
        _row("share of a step, processor time", _shares(blocks, "told", _PROCESSOR)),
        _row("share of a step, in the rank alone", _shares(blocks, "kept", _WALL)),
    ]


def _shares(blocks: Sequence[Block], arm: str, column: int) -> list[float]:
    """By how many percent the runs of an arm took longer than those without reports, block for block."""
    return [100 * (block[arm][column] / block["off"][column] - 1) for block in blocks]


def _row(case: str, shares: list[float], *, has_target: bool = False) -> Row:
    low, high = median_interval(shares)
    note = f"95 % sure of {low:.3f} to {high:.3f} %"
    if has_target:
        if low <= SHARE_MAX_PERCENT < high:
            note += ", so that noise decided"
        is_met = statistics.median(shares) <= SHARE_MAX_PERCENT
        note = f"{target(f'median at most {SHARE_MAX_PERCENT} % of a step of 10 ms', is_met)}; {note}"
    note += f"; blocks of 2 x {RUN_STEPS} steps of {1e3 * STEP_S:.0f} ms each way"
    return summarize(shares, bench="telemetry", contestant="nvrx-sre", case=case, ranks=1, unit="%", note=note)


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Between which samples the median of what they are drawn from lies, with 95 % confidence.

    The number of samples below it is binomial, whatever their distribution. Few samples give their extremes.
    """
    ordered, num = sorted(samples), len(samples)
    reach = _CONFIDENT * math.sqrt(num) / 2
    low = max(0, math.floor(num / 2 - reach) - 1)
    return ordered[low], ordered[num - 1 - low]
