"""`--deadlines auto`: progress deadlines that start as configured and tighten to what phases were observed to take.

Model: what is observed is what a deadline bounds, the time from its arming until the rank's next evidence of progress.
Of each round of as many observations as there are ranks the slowest counts; of the newest rounds the 99th percentile,
times a multiple and never below a floor, is the phase's deadline. The configured deadline is the ceiling. A phase
with too few rounds keeps its own, so what happens once a generation stays conservative for long.

Invariants: without tuning nothing ever changes; a tightened deadline that runs out goes back to the configured one,
and is tightened again only by fresh observations, so that one mistaken verdict is never followed by the same. Each
change is an event. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from nvrx_sre.core.clock import seconds
from nvrx_sre.events.schema import DeadlineChosen, Phase
from nvrx_sre.launcher.machine_job import Job

MIN_CHANGE = 0.2
"""Share by which a deadline has to change to be told: fewer events than a step's jitter would give."""
_QUANTILE = 0.99


@dataclass(kw_only=True)
class _Observed:
    """What a phase took: the slowest of each of the newest rounds, and the round at hand."""

    rounds: deque[int]
    num_in_round: int = 0
    slowest_ns: int = 0
    num_unjudged: int = 0
    """Rounds since the deadline was looked at last."""


class PhaseDeadlines:
    """Progress deadline of each phase."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tuning = job.config.limits.tuning
        deadlines = job.config.limits.deadlines
        self._configured_s = {phase: deadlines.for_phase(phase.value) for phase in Phase}
        self.limits_s = dict(self._configured_s)
        """Deadlines in force, in seconds."""
        self._observed: dict[Phase, _Observed] = {}

    def observe(self, phase: Phase, spent_ns: int) -> None:
        """A rank in `phase` took `spent_ns` from the arming of its deadline to its next progress."""
        if not self._job.config.tunes_deadlines:
            return
        seen = self._observed.get(phase)
        if seen is None:
            seen = self._observed[phase] = _Observed(rounds=deque(maxlen=self._tuning.num_samples))
        seen.num_in_round += 1
        seen.slowest_ns = max(seen.slowest_ns, spent_ns)
        if seen.num_in_round < self._job.world_size:
            return
        seen.rounds.append(seen.slowest_ns)
        seen.num_in_round = seen.slowest_ns = 0
        seen.num_unjudged += 1
        # A quarter of the window has to be new, so that looking costs nothing and follows what changes.
        if len(seen.rounds) == self._tuning.num_samples and seen.num_unjudged * 4 >= self._tuning.num_samples:
            seen.num_unjudged = 0
            self._choose(phase, sorted(seen.rounds))

    def distrust(self, phase: Phase) -> None:
        """The deadline of `phase` ran out: back to the configured one, if it was tightened."""
        self._observed.pop(phase, None)
        configured_s = self._configured_s[phase]
        if self.limits_s[phase] < configured_s:
            self._set(phase, configured_s, 0.0, "it ran out: as configured until enough is observed anew")

    def _choose(self, phase: Phase, ascending_ns: list[int]) -> None:
        p99_s = seconds(ascending_ns[math.ceil(_QUANTILE * len(ascending_ns)) - 1])
        tight_s = max(self._tuning.floor_s, self._tuning.multiple * p99_s)
        limit_s = min(self._configured_s[phase], tight_s)
        if abs(limit_s - self.limits_s[phase]) > MIN_CHANGE * self.limits_s[phase]:
            of_rounds = f"{self._tuning.multiple:g} x p99 of {len(ascending_ns)} rounds"
            self._set(phase, limit_s, p99_s, f"{of_rounds}, at least {self._tuning.floor_s:g} s")

    def _set(self, phase: Phase, limit_s: float, p99_s: float, reason: str) -> None:
        self.limits_s[phase] = limit_s
        self._job.emit(DeadlineChosen(phase=phase, limit_s=limit_s, p99_s=p99_s, reason=reason))
