"""Where a rank's time in the step loop goes: totals since the generation entered the loop. Seconds."""

from __future__ import annotations

from nvrx_sre.core.clock import NS_PER_S, Clock
from nvrx_sre.events.schema import Phase

_PLACES = {Phase.STEP: 0, Phase.DATA: 1, Phase.SAVE: 2, Phase.EVALUATE: 3}
"""Places of the totals: in the order in which a step's report carries them."""


class StepTimes:
    """Splits the time between commits into step, data, checkpoint_block and evaluate."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._totals_ns = [0, 0, 0, 0]
        self._phase = Phase.STEP
        self.since_ns = clock.monotonic_ns()
        """When the phase at hand began (monotonic)."""

    def switch(self, phase: Phase) -> Phase:
        """Book the time so far to the phase that ends; the phase that ended."""
        now_ns = self._clock.monotonic_ns()
        ended = self._phase
        self._totals_ns[_PLACES[ended]] += now_ns - self.since_ns
        self.since_ns, self._phase = now_ns, phase
        return ended

    def move(self, source: Phase, target: Phase, spent_ns: int) -> None:
        """Book time that was booked to `source` since the last report to `target` instead."""
        if spent_ns:
            self._totals_ns[_PLACES[source]] -= spent_ns
            self._totals_ns[_PLACES[target]] += spent_ns

    def total_s(self, phase: Phase) -> float:
        """Seconds booked to `phase` so far."""
        return self._totals_ns[_PLACES[phase]] / NS_PER_S

    def totals_s(self) -> tuple[float, float, float, float]:
        """Seconds booked so far to step, data, save and evaluate: what a step's report carries, in its order."""
        step_ns, data_ns, save_ns, evaluate_ns = self._totals_ns
        return step_ns / NS_PER_S, data_ns / NS_PER_S, save_ns / NS_PER_S, evaluate_ns / NS_PER_S
