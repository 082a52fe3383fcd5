"""`--hot-every auto`: how often to capture, from what captures were measured to cost.

Model: the first captures of a launcher are `PROBE_EVERY` steps apart, so that steps without one lie between them.
A capture costs what its own step and the one after it (which the copy overlaps) took longer than the steps far
from any capture: blocked time and inflation together. When enough of both are known, the interval is the
smallest that keeps this cost at or below `COST_SHARE` of the steps it is spread over. It is chosen once a
launcher and told to all ranks for a step ahead of them; later generations begin with it.

Times are those of the slowest rank, without data and evaluation. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from nvrx_sre.events.schema import HotIntervalChosen
from nvrx_sre.launcher.commands import SetHotInterval
from nvrx_sre.launcher.machine_job import Job

PROBE_EVERY = 4
"""Steps between captures while they are measured: the capture's, the one after it, and two that are undisturbed."""
NUM_PROBES = 16
"""Captures that are measured: the median of so many moves by a few percent of a step between runs of one job."""
NUM_WARM_UP_STEPS = 5
"""First steps of a generation: compilation, lazy state and new slots belong to no capture."""
COST_SHARE = 0.01
"""What captures may cost of the training time."""
AHEAD_S = 1.0
"""How far ahead of the ranks a change is announced: they hear of it within milliseconds."""


class HotInterval:
    """Steps between hot captures: as configured, or measured."""

    def __init__(self, job: Job) -> None:
        self._job = job
        configured = job.config.hot_every
        job.hot_every = PROBE_EVERY if configured is None else configured
        self._is_measuring = configured is None
        self._generation = 0
        self._first_step = 0
        self._recent: deque[tuple[int, float, bool]] = deque(maxlen=3)
        """(step, seconds, captured) of the newest steps."""
        self._free_s: list[float] = []
        self._pairs_s: list[float] = []
        """Seconds of a captured step and the one after it, together."""

    def on_step(self, step: int, step_s: float | None, is_captured: bool, newest_step: int) -> None:
        """A step was committed that took `step_s` (None: not known). `newest_step`: that any rank has reported."""
        if not self._is_measuring:
            return
        if self._generation != self._job.generation:
            self._generation, self._first_step = self._job.generation, step
            self._recent.clear()
        if step_s is None or (self._recent and self._recent[-1][0] != step - 1):
            self._recent.clear()
        if step_s is None or step < self._first_step + NUM_WARM_UP_STEPS:
            return
        self._recent.append((step, step_s, is_captured))
        self._take_sample()
        if len(self._pairs_s) >= NUM_PROBES and len(self._free_s) >= NUM_PROBES:
            self._choose(newest_step)

    def _take_sample(self) -> None:
        """What the newest step says, together with those before it."""
        if len(self._recent) < 2:
            return
        (_, before_s, before_captured), (_, step_s, is_captured) = list(self._recent)[-2:]
        if before_captured and not is_captured:
            self._pairs_s.append(before_s + step_s)
        elif not before_captured and not is_captured:
            self._free_s.append(step_s)

    def _choose(self, newest_step: int) -> None:
        self._is_measuring = False
        step_s = statistics.median(self._free_s)
        cost_s = max(0.0, statistics.median(self._pairs_s) - 2 * step_s)
        every = interval(cost_s, step_s)
        from_step = newest_step + 2 + math.ceil(AHEAD_S / max(step_s, 1e-3))
        self._job.hot_every = every
        self._job.command(SetHotInterval(every=every, from_step=from_step))
        reason = f"measured over {len(self._pairs_s)} captures; in force from step {from_step}"
        self._job.emit(HotIntervalChosen(every_steps=every, cost_s=cost_s, step_s=step_s, reason=reason))


def interval(cost_s: float, step_s: float) -> int:
    """Smallest number of steps over which a capture of `cost_s` costs at most `COST_SHARE` of them."""
    if cost_s <= 0:
        return 1
    # Rounded first: 10.000000001 is 10.
    return max(1, math.ceil(round(cost_s / (COST_SHARE * max(step_s, 1e-9)), 6)))
