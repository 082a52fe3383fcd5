"""Where a rank's time in the step loop goes: totals since the generation entered the loop. Seconds."""

from __future__ import annotations

from nvrx_sre.core.clock import NS_PER_S, Clock
from nvrx_sre.events.schema import Phase

_STEP, _DATA, _SAVE, _EVALUATE = range(4)
_PLACES = {Phase.STEP: _STEP, Phase.DATA: _DATA, Phase.SAVE: _SAVE, Phase.EVALUATE: _EVALUATE}
"""Places of the totals: in the order in which a step's report carries them."""


Spent = tuple[int, float, float, float, float]
"""When a step was over (monotonic, ns), and the totals at that time (s): what its report begins with."""


class StepTimes:
    """Splits the time between commits into step, data, checkpoint_block and evaluate."""

    def __init__(self, clock: Clock) -> None:
        self._now_ns = clock.monotonic_ns
        self._totals_ns = [0, 0, 0, 0]
        self._phase = Phase.STEP
        self._since_ns = clock.monotonic_ns()

    def switch(self, phase: Phase) -> None:
        """Book the time so far to the phase that ends."""
        now_ns = self._now_ns()
        self._totals_ns[_PLACES[self._phase]] += now_ns - self._since_ns
        self._since_ns, self._phase = now_ns, phase

    def next_step(self, waited_ns: int) -> Spent:
        """The boundary is over: now, and what was booked so far to step, data, save and evaluate.

        `waited_ns` of what was booked to the step since the last boundary were a wait for a capture.
        """
        now_ns = self._now_ns()
        totals_ns = self._totals_ns
        totals_ns[_PLACES[self._phase]] += now_ns - self._since_ns
        self._since_ns, self._phase = now_ns, Phase.STEP
        if waited_ns:
            totals_ns[_STEP] -= waited_ns
            totals_ns[_SAVE] += waited_ns
        step_ns, data_ns, save_ns, evaluate_ns = totals_ns
        return now_ns, step_ns / NS_PER_S, data_ns / NS_PER_S, save_ns / NS_PER_S, evaluate_ns / NS_PER_S
