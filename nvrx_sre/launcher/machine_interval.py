"""`--hot-every auto`: how often to capture, from what captures were measured to cost.

Model: while it measures, captures are at least `PROBE_EVERY` steps apart, so that steps without one lie between them. A
capture costs what its own step and the one after it (which the copy overlaps) took longer than the steps far
from any capture: blocked time and inflation together. The interval is the smallest that keeps this cost at or below
`COST_SHARE` of the steps it is spread over.

    few samples     a careful first choice: from nearly the dearest capture so far, never below `PROBE_EVERY`, bounded
    enough of them  the choice: from medians
    later           steps take twice as long as then, or half: measured again. Another interval must be another by
                    `HYSTERESIS`, so that noise does not move it

Each change is told to all ranks for a step ahead of them; later generations begin with what is in force.
Times are those of the slowest rank, without data and evaluation. Bounded. Pure.
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
NUM_EARLY = 4
"""Captures before the careful choice, some 20 steps: what is dear must not go on at every fourth step."""
NUM_PROBES = 16
"""Captures that are measured: the median of so many moves by a few percent of a step between runs of one job."""
NUM_WATCHED = 32
"""Newest steps whose median is compared with the steps that were measured: half of them may be outliers."""
EARLY_EVERY_MAX = 64
"""Bound of the careful choice, so that the rest of the captures is still measured."""
NUM_WARM_UP_STEPS = 5
"""First steps of a generation: compilation, lazy state and new slots belong to no capture."""
COST_SHARE = 0.01
"""What captures may cost of the training time."""
CHANGE = 2.0
"""A step that takes this much longer or less is another step: the share of a capture is as much off."""
HYSTERESIS = 1.5
"""How much another interval has to be, to replace one that was measured."""
AHEAD_S = 1.0
"""How far ahead of the ranks a change is announced: they hear of it within milliseconds."""


class HotInterval:
    """Steps between hot captures: as configured, or measured."""

    def __init__(self, job: Job) -> None:
        self._job = job
        configured = job.config.hot_every
        job.hot_every = PROBE_EVERY if configured is None else configured
        self._is_auto = configured is None
        self._chosen_s: tuple[float, float] | None = None
        """What a capture cost and a step took when the interval was measured; None while it is."""
        self._measured_every: int | None = None
        """The newest interval that was chosen from enough samples."""
        self._is_early_chosen = False
        self._generation = 0
        self._first_step = 0
        self._recent: deque[tuple[int, float, bool]] = deque(maxlen=2)
        """(step, seconds, captured) of the newest steps."""
        self._free_s: deque[float] = deque(maxlen=4 * NUM_PROBES)
        self._pairs_s: deque[float] = deque(maxlen=NUM_PROBES)
        """Seconds of a captured step and the one after it, together."""
        self._watched_s: deque[float] = deque(maxlen=NUM_WATCHED)

    def on_step(self, step: int, step_s: float | None, is_captured: bool, newest_step: int) -> None:
        """A step was committed that took `step_s` (None: not known). `newest_step`: that any rank has reported."""
        if not self._is_auto:
            return
        if self._generation != self._job.generation:
            self._generation, self._first_step = self._job.generation, step
            self._recent.clear()
        if step_s is None or (self._recent and self._recent[-1][0] != step - 1):
            self._recent.clear()
        if step_s is None or step < self._first_step + NUM_WARM_UP_STEPS:
            return
        if self._chosen_s is not None:
            self._watch(*self._chosen_s, step_s, newest_step)
            return
        self._recent.append((step, step_s, is_captured))
        self._take_sample()
        if len(self._pairs_s) >= NUM_PROBES and len(self._free_s) >= NUM_PROBES:
            self._choose(newest_step)
        elif not self._is_early_chosen and len(self._pairs_s) >= NUM_EARLY and len(self._free_s) >= NUM_EARLY:
            self._choose_early(newest_step)

    def _take_sample(self) -> None:
        """What the newest step says, together with the one before it."""
        if len(self._recent) < 2:
            return
        (_, before_s, before_captured), (_, step_s, is_captured) = self._recent
        if before_captured and not is_captured:
            self._pairs_s.append(before_s + step_s)
        elif not before_captured and not is_captured:
            self._free_s.append(step_s)

    def _choose_early(self, newest_step: int) -> None:
        """From the dearest capture but one: a single outlier does not count, anything else errs on the dear side."""
        self._is_early_chosen = True
        step_s = statistics.median(self._free_s)
        cost_s = max(0.0, sorted(self._pairs_s)[-2] - 2 * step_s)
        every = min(max(self._job.hot_every, interval(cost_s, step_s)), EARLY_EVERY_MAX)
        self._put_in_force(every, cost_s, step_s, f"a careful choice after {len(self._pairs_s)} captures", newest_step)

    def _choose(self, newest_step: int) -> None:
        step_s = statistics.median(self._free_s)
        cost_s = max(0.0, statistics.median(self._pairs_s) - 2 * step_s)
        every = interval(cost_s, step_s)
        old = self._measured_every
        if old is not None and max(old, every) < HYSTERESIS * min(old, every):
            every = old
        self._measured_every, self._chosen_s = every, (cost_s, step_s)
        self._watched_s.clear()
        self._put_in_force(every, cost_s, step_s, f"measured over {len(self._pairs_s)} captures", newest_step)

    def _watch(self, cost_s: float, chosen_s: float, step_s: float, newest_step: int) -> None:
        """Begin anew if steps have become other steps than those of `chosen_s`."""
        self._watched_s.append(step_s)
        if len(self._watched_s) < NUM_WATCHED:
            return
        now_s = statistics.median(self._watched_s)
        if max(now_s, chosen_s) < CHANGE * min(now_s, chosen_s):
            return
        self._chosen_s, self._is_early_chosen = None, False
        self._free_s.clear()
        self._pairs_s.clear()
        reason = f"to be measured again, a step took {chosen_s * 1e3:.0f} ms before"
        self._put_in_force(max(PROBE_EVERY, self._job.hot_every), cost_s, now_s, reason, newest_step)

    def _put_in_force(self, every: int, cost_s: float, step_s: float, reason: str, newest_step: int) -> None:
        from_step = newest_step + 2 + math.ceil(AHEAD_S / max(step_s, 1e-3))
        if every != self._job.hot_every:
            self._job.hot_every = every
            self._job.command(SetHotInterval(every=every, from_step=from_step))
            reason += f"; in force from step {from_step}"
        self._job.emit(HotIntervalChosen(every_steps=every, cost_s=cost_s, step_s=step_s, reason=reason))


def interval(cost_s: float, step_s: float) -> int:
    """Smallest number of steps over which a capture of `cost_s` costs at most `COST_SHARE` of them."""
    if cost_s <= 0:
        return 1
    # Rounded first: 10.000000001 is 10.
    return max(1, math.ceil(round(cost_s / (COST_SHARE * max(step_s, 1e-9)), 6)))
