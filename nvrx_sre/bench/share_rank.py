"""A rank that finds out what its reports cost: runs of the same work with and without them, in turn.

Started by a real launcher (`-m nvrx_sre.bench.share_rank BLOCKS FOLDER`). A block holds two runs of each arm, in an
order and back, so that a machine that gets slower favours none; the order changes from block to block.

    off     the work alone. The launcher is there, and hears that the rank is alive
    told    each step is reported to the launcher
    kept    each step is reported into a ring that nobody reads: the cost inside the rank, without the launcher's

Writes `FOLDER/blocks.json`: for each block {arm: [seconds, processor seconds of the thread]}. Must not: run outside
`bench telemetry`.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from nvrx_sre.bench.reporting_rank import enter_loop, leave_loop, taken_rank
from nvrx_sre.bench.step_reports import Reporter, chunks_for, work
from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.core.errors import RestartAborted
from nvrx_sre.events.channel import Channel
from nvrx_sre.events.step_ring import StepRing
from nvrx_sre.restart.control import RankControl

STEP_S = 0.01
"""Length of a step whose share telemetry takes."""
RUN_STEPS = 25
"""Steps of a run: a launcher that takes in steps behaves otherwise than one that hears of a step now and then."""

Block = dict[str, tuple[float, float]]


def main(num_blocks: int, folder: Path) -> None:
    """Take a rank, measure `num_blocks` blocks, leave with the run."""
    control = taken_rank()
    try:
        _, generation = enter_loop(control)
        ring = StepRing.create()
        ring.watch(True)
        blocks = _measure(control, Reporter(control.channel, generation), ring, num_blocks)
        (folder / "blocks.json").write_text(json.dumps(blocks))
        leave_loop(control, generation)
    except RestartAborted:
        return


def _measure(control: RankControl, told: Reporter, ring: StepRing, num_blocks: int) -> list[Block]:
    own, other = socket.socketpair()
    kept = Channel(own)
    kept.ring = StepRing.map(os.dup(ring.fd))
    reports = {"off": _nothing, "told": told.report, "kept": Reporter(kept).report}
    clock = SystemClock()
    num_chunks = chunks_for(clock, STEP_S)
    orders = itertools.cycle(itertools.permutations(reports))
    blocks = []
    for order in itertools.islice(orders, num_blocks):
        block: Block = dict.fromkeys(reports, (0.0, 0.0))
        for arm in (*order, *reversed(order)):
            wall_s, processor_s = _run(control, clock, num_chunks, reports[arm])
            block[arm] = (block[arm][0] + wall_s, block[arm][1] + processor_s)
            ring.take(ring.num_written)
        blocks.append(block)
    own.close()
    other.close()
    return blocks


def _nothing(step: int) -> None:
    """No report."""


def _run(
    control: RankControl, clock: SystemClock, num_chunks: int, report: Callable[[int], None]
) -> tuple[float, float]:
    """Seconds of a run, and those of this thread on a processor."""
    used, started_ns = resource.getrusage(resource.RUSAGE_THREAD), clock.monotonic_ns()
    for _ in range(RUN_STEPS):
        work(num_chunks)
        control.step += 1
        control.progress += 1
        report(control.step)
    wall_s, now = seconds(clock.monotonic_ns() - started_ns), resource.getrusage(resource.RUSAGE_THREAD)
    return wall_s, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
