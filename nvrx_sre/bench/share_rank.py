"""A rank that finds out what its reports cost: the same training with and without them, in turn.

Started by a real launcher (`-m nvrx_sre.bench.share_rank BLOCKS STEPS FOLDER`), it compares in two ways:

    runs     of steps, all with reports or none: without, with, with, without, and the next block the other way round.
             The launcher has steps to take in or has none. [seconds, processor seconds of the thread] of each
    steps    one by one in the same order, with how long each took, how long its report or nothing in its place, and
             whether the launcher looked meanwhile, which a rank sees by what was taken out of its ring: what a report
             costs inside the rank, and what a look costs it

Writes both to `FOLDER/measured.json`. Must not: run outside `bench telemetry`.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
from pathlib import Path
from typing import TypedDict

from nvrx_sre.bench.reporting_rank import enter_loop, leave_loop, taken_rank
from nvrx_sre.bench.step_reports import Reporter, training
from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.core.errors import RestartAborted
from nvrx_sre.events.schema import Phase
from nvrx_sre.restart.control import RankControl

STEP_S = 0.01
"""Length of a step whose share telemetry takes."""
RUN_STEPS = 25
"""Steps of a run: a launcher that takes in steps behaves otherwise than one that hears of a step now and then."""
ORDER = (False, True, True, False)
"""Which of four neighbours report: a machine that gets slower favours neither."""

Run = tuple[bool, float, float]
"""(with reports, seconds, processor seconds)"""
Timed = tuple[bool, bool, int, int]
"""A step: (with a report, the launcher looked meanwhile, nanoseconds, of which the report or nothing in its place)."""


class Measured(TypedDict):
    """What the rank has found."""

    runs: list[Run]
    steps: list[Timed]


def main(num_blocks: int, num_steps: int, folder: Path) -> None:
    """Take a rank, measure, leave with the run."""
    control = taken_rank()
    try:
        _, generation = enter_loop(control)
        measured = _Work(control, generation).measure(num_blocks, num_steps)
        (folder / "measured.json").write_text(json.dumps(measured))
        leave_loop(control, generation)
    except RestartAborted:
        return


class _Work:
    """Steps of training, reported or not. The launcher sees progress either way."""

    def __init__(self, control: RankControl, generation: int) -> None:
        ring = control.channel.ring
        assert ring is not None
        self._control = control
        self._ring = ring
        self._clock = SystemClock()
        self._reporter = Reporter(control.channel, generation)
        self._train = training(self._clock, STEP_S)

    def measure(self, num_blocks: int, num_steps: int) -> Measured:
        """Runs, then single steps."""
        orders = itertools.cycle((ORDER, tuple(not is_told for is_told in ORDER)))
        told = itertools.chain.from_iterable(itertools.islice(orders, num_blocks))
        runs = [self._run(is_told) for is_told in told]
        steps = [self._timed(is_told) for is_told in itertools.islice(itertools.cycle(ORDER), num_steps)]
        return {"runs": runs, "steps": steps}

    def _run(self, is_told: bool) -> Run:
        used, started_ns = resource.getrusage(resource.RUSAGE_THREAD), self._clock.monotonic_ns()
        for _ in range(RUN_STEPS):
            self._step(is_told)
        wall_s, now = seconds(self._clock.monotonic_ns() - started_ns), resource.getrusage(resource.RUSAGE_THREAD)
        return is_told, wall_s, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime

    def _timed(self, is_told: bool) -> Timed:
        num_taken, started_ns = self._ring.num_taken, self._clock.monotonic_ns()
        report_ns = self._step(is_told)
        spent_ns = self._clock.monotonic_ns() - started_ns
        return is_told, self._ring.num_taken > num_taken, spent_ns, report_ns

    def _step(self, is_told: bool) -> int:
        """A step with its report or nothing in the place of it; how long that took (ns)."""
        self._train()
        control = self._control
        self._reporter.pass_boundary(control.step + 1)
        control.enter(Phase.STEP, tell=False)
        control.step += 1
        call = self._reporter.report if is_told else self._reporter.report_nothing
        started_ns = self._clock.monotonic_ns()
        call(control.step)
        return self._clock.monotonic_ns() - started_ns


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
