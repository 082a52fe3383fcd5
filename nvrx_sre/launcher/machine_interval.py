"""`--hot-every auto`: how often to capture, from what captures were measured to cost.

Model: while it measures, captures are at least `PROBE_EVERY` steps apart, so that steps without one lie between them. A
capture costs what its own step and the one after it (which the copy overlaps) took longer than two steps in a row far
from any capture: blocked time and inflation together. Pairs are compared with pairs, at the same quantile: the median
of two steps together is not twice that of one where times are skewed. The interval is the smallest that keeps this cost
at or below `COST_SHARE` of the steps it is spread over.

    few samples     a careful first choice: from the dearest pairs but one, never below `PROBE_EVERY`, bounded
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
        self._recent: deque[tuple[int, float, bool]] = deque(maxlen=3)
        """(step, seconds, captured) of the newest steps."""
        self._before_s: float | None = None
        """Seconds of the newest two steps together of which neither was captured nor followed a captured one."""
        self._pairs_s: list[float] = []
        """Seconds of a captured step and the one after it, together."""
        self._free_s: list[float] = []
        """What `_before_s` was at each of them."""
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
        if len(self._pairs_s) >= NUM_PROBES:
            self._choose(newest_step)
        elif len(self._pairs_s) >= NUM_EARLY and not self._is_early_chosen:
            self._choose_early(newest_step)

    def _take_sample(self) -> None:
        """What the newest steps say: each capture is seen beside the newest undisturbed steps before it."""
        pair_s = sum(step_s for _, step_s, _ in list(self._recent)[-2:])
        captured = [is_captured for _, _, is_captured in self._recent]
        if captured == [False, False, False]:
            self._before_s = pair_s
        elif captured[-2:] == [True, False] and self._before_s is not None:
            self._pairs_s.append(pair_s)
            self._free_s.append(self._before_s)
            self._before_s = None

    def _choose_early(self, newest_step: int) -> None:
        """From the dearest but one of either kind: a single outlier does not count, what is dear shows at once."""
        self._is_early_chosen = True
        step_s = statistics.median(self._free_s) / 2
        cost_s = max(0.0, sorted(self._pairs_s)[-2] - sorted(self._free_s)[-2])
        every = min(max(self._job.hot_every, interval(cost_s, step_s)), EARLY_EVERY_MAX)
        self._put_in_force(every, cost_s, step_s, f"a careful choice after {len(self._pairs_s)} captures", newest_step)

    def _choose(self, newest_step: int) -> None:
        step_s = statistics.median(self._free_s) / 2
        cost_s = max(0.0, statistics.median(self._pairs_s) - statistics.median(self._free_s))
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
