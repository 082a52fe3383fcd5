"""Where a rank's time in the step loop goes: totals since the generation entered the loop. Seconds."""

from __future__ import annotations

from nvrx_sre.core.clock import NS_PER_S, Clock
from nvrx_sre.events.schema import Phase


class StepTimes:
    """Splits the time between commits into step, data, checkpoint_block and evaluate."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._totals_ns = {Phase.STEP: 0, Phase.DATA: 0, Phase.SAVE: 0, Phase.EVALUATE: 0}
        self._phase = Phase.STEP
        self._since_ns = clock.monotonic_ns()

    def switch(self, phase: Phase) -> Phase:
        """Book the time so far to the phase that ends; the phase that ended."""
        now_ns = self._clock.monotonic_ns()
        self._totals_ns[self._phase] += now_ns - self._since_ns
        self._since_ns = now_ns
        ended, self._phase = self._phase, phase
        return ended

    def move(self, source: Phase, target: Phase, spent_ns: int) -> None:
        """Book time that was booked to `source` since the last report to `target` instead."""
        self._totals_ns[source] -= spent_ns
        self._totals_ns[target] += spent_ns

    def total_s(self, phase: Phase) -> float:
        """Seconds booked to `phase` so far."""
        return self._totals_ns[phase] / NS_PER_S

    def totals_s(self) -> tuple[float, float, float, float]:
        """Seconds booked so far to step, data, save and evaluate: what a step's report carries, in its order."""
        of = self._totals_ns
        return (
            of[Phase.STEP] / NS_PER_S,
            of[Phase.DATA] / NS_PER_S,
            of[Phase.SAVE] / NS_PER_S,
            of[Phase.EVALUATE] / NS_PER_S,
        )
