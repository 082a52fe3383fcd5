"""The situation of a run as one number, which dashboards show as a word: what a person on call asks first.

Model: an `or` chain of conditions, the more certain one first; each is a vector over the aggregation key that holds
the number of its `Situation`. Numbers rise with how bad it is, so that a table sorted by them has the worst run on
top. What a dead launcher said last is remembered for `MEMORY_S`: a run whose pod is gone keeps its word.

- crash loop: as many attempts without progress as the run's own limit allows.
- stuck in rendezvous: in it for half its deadline, beyond which the launcher itself acts.
- stalled: no step, new or redone, for longer than the deadline of the phase in force allows: the watchdog should have
  acted and did not. A run that has done its steps may wait for its last save.
- silent: no live series, though the run has not ended.

How long something lasts is judged by the run's own clock, as of its newest scrape (`Query.age`).

Pure. Must not: spell a metric name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from nvrx_sre.monitoring.panels import BLUE, GREEN, ORANGE, RED, Mapping
from nvrx_sre.monitoring.promql import Query, duration
from nvrx_sre.telemetry import catalog

MEMORY_S = 86_400.0
"""How long the last sample of a run is shown: a night and a morning."""
STUCK_RATIO = 0.5
"""Share of the rendezvous deadline: a formation takes seconds, at the deadline the launcher acts."""
STALLED_RATIO = 1.5
"""Over the phase's deadline: room for the launcher's own reaction and two scrapes."""
WITHIN_STEP = ("step", "data")
"""A wait for data is part of the phase `step` in what a run exports, and has its own deadline."""
CRASH_LOOP_LIMIT = "caps.crash_loop_attempts"
DRAIN_LIMIT = "deadlines.final_drain_s"
FLAPPING_WINDOW = "30m"


class Situation(IntEnum):
    """Worse is higher."""

    FINISHED = 0
    TRAINING = 1
    STARTING = 2
    PREEMPTED = 3
    RECOVERING = 4
    FLAPPING = 5
    SILENT = 6
    STALLED = 7
    RENDEZVOUS_STUCK = 8
    CRASH_LOOP = 9
    FAILED = 10
    HALTED = 11


WORDS: tuple[Mapping, ...] = (
    (Situation.FINISHED, "finished", BLUE),
    (Situation.TRAINING, "training", GREEN),
    (Situation.STARTING, "starting", BLUE),
    (Situation.PREEMPTED, "preempted", BLUE),
    (Situation.RECOVERING, "recovering", ORANGE),
    (Situation.FLAPPING, "flapping", ORANGE),
    (Situation.SILENT, "launcher silent", RED),
    (Situation.STALLED, "stalled", RED),
    (Situation.RENDEZVOUS_STUCK, "stuck in rendezvous", RED),
    (Situation.CRASH_LOOP, "crash loop", RED),
    (Situation.FAILED, "failed", RED),
    (Situation.HALTED, "halted", RED),
)


@dataclass(frozen=True, kw_only=True)
class Signals:
    """Expressions over one run that several panels use."""

    q: Query

    @property
    def entered(self) -> str:
        """Entry times of the run's states, remembered."""
        return self.q.latest(catalog.RUN_STATE_ENTERED, "state", memory_s=MEMORY_S)

    @property
    def current(self) -> str:
        """Entry time of the current state, with its label."""
        newest = self.q.latest(catalog.RUN_STATE_ENTERED, memory_s=MEMORY_S)
        return f"({self.entered} == on {self.q.keys()} group_left () {newest})"

    def within(self, *states: str) -> str:
        """Entry time of the current state where it is one of `states`."""
        one = self.q.latest(catalog.RUN_STATE_ENTERED, memory_s=MEMORY_S, state=states)
        return f"({one} == {self.q.latest(catalog.RUN_STATE_ENTERED, memory_s=MEMORY_S)})"

    @property
    def opened(self) -> str:
        """When the open incident began, nothing without one."""
        return f"(({self.q.live(catalog.INCIDENT_OPENED, memory_s=MEMORY_S)}) > 0)"

    @property
    def attempts(self) -> str:
        """Attempts of the open incident."""
        return f"({self.q.live(catalog.INCIDENT_ATTEMPTS, memory_s=MEMORY_S)})"

    @property
    def last_new_step(self) -> str:
        """When the newest new step was committed."""
        return self.q.latest(catalog.LAST_NEW_STEP, memory_s=MEMORY_S)

    @property
    def deadline(self) -> str:
        """Progress deadline in force: of rendezvous while the run waits in it (a rank that has not come is still in the
        phase before), of a step within one, else of the phase; that of a step where the phase has none."""
        limits = self.q.latest(catalog.PHASE_DEADLINE, "phase", memory_s=MEMORY_S)
        phases = self.q.latest(catalog.PHASE_ENTERED, "phase", memory_s=MEMORY_S)
        newest = self.q.latest(catalog.PHASE_ENTERED, memory_s=MEMORY_S)
        keys = self.q.keys()
        in_force = (
            f"max by {keys} ({limits} and on {self.q.keys('phase')} ({phases} == on {keys} group_left () {newest}))"
        )
        forming = self.q.latest(catalog.PHASE_DEADLINE, memory_s=MEMORY_S, phase="rendezvous")
        stepping = f"({self.q.latest(catalog.PHASE_ENTERED, memory_s=MEMORY_S, phase='step')} == on {keys} {newest})"
        step = self._step_limit
        return f"({forming} and {self.within('rendezvous')} or {step} and {stepping} or {in_force} or {step})"

    @property
    def _step_limit(self) -> str:
        """How long a run that works may be without a step: the longer of `step` and `data`, or as long as its newest
        steps took, where they tell of their progress."""
        deadlines = self.q.latest(catalog.PHASE_DEADLINE, memory_s=MEMORY_S, phase=WITHIN_STEP)
        took = self.q.latest(catalog.STEP_SECONDS, memory_s=MEMORY_S)
        return f"({took} > {deadlines} or {deadlines})"

    @property
    def drains(self) -> str:
        """A save is in flight and the newest step not older than a last save may take."""
        saving = f"(({self.q.live(catalog.SAVE_STARTED, memory_s=MEMORY_S)}) > 0)"
        steps = self.q.latest(catalog.LAST_STEP, memory_s=MEMORY_S)
        limit = self.q.latest(catalog.LIMIT, memory_s=MEMORY_S, limit=DRAIN_LIMIT)
        return f"({saving} and {self.q.age(steps)} <= {limit})"

    @property
    def idle_since(self) -> str:
        """The later of: newest step, new or redone; entry into the phase in force."""
        steps = self.q.latest(catalog.LAST_STEP, memory_s=MEMORY_S)
        phases = self.q.latest(catalog.PHASE_ENTERED, "phase", memory_s=MEMORY_S)
        return f"max by {self.q.keys()} ({steps} or {phases})"

    @property
    def halted(self) -> str:
        """When the run was halted, nothing while it is not."""
        return f"(({self.q.live(catalog.HALTED_TIMESTAMP, memory_s=MEMORY_S)}) > 0)"


def situation(q: Query) -> str:
    """The number of each run's `Situation`."""
    signals = Signals(q=q)
    limit = q.latest(catalog.LIMIT, memory_s=MEMORY_S, limit=CRASH_LOOP_LIMIT)
    stuck = f"{STUCK_RATIO} * {q.latest(catalog.PHASE_DEADLINE, memory_s=MEMORY_S, phase='rendezvous')}"
    live = q.latest(catalog.RUN_STATE_ENTERED)
    flapping = q.gain(catalog.INCIDENTS, window=FLAPPING_WINDOW, verdict="flapping")
    overdue = f"({q.age(signals.idle_since)} > {STALLED_RATIO} * {signals.deadline})"
    conditions = {
        Situation.FINISHED: signals.within("finished"),
        Situation.HALTED: f"({signals.halted} and {signals.within('halted')})",
        Situation.FAILED: signals.within("failed"),
        Situation.PREEMPTED: signals.within("preempted"),
        Situation.CRASH_LOOP: f"({signals.opened} and {signals.attempts} >= ({limit} > 0))",
        Situation.SILENT: f"({q.latest(catalog.RUN_STATE_ENTERED, memory_s=MEMORY_S)} unless {live})",
        Situation.RENDEZVOUS_STUCK: f"({q.age(signals.within('rendezvous'))} > {stuck})",
        Situation.STALLED: f"({overdue} unless {signals.drains})",
        Situation.FLAPPING: f"({flapping} > 0)",
        Situation.RECOVERING: signals.opened,
        Situation.STARTING: signals.within("starting", "rendezvous", "restoring"),
        Situation.TRAINING: q.latest(catalog.RUN_STATE_ENTERED),
    }
    return "\nor\n".join(f"{condition} * 0 + {number:d}" for number, condition in conditions.items())


def memory() -> str:
    """`MEMORY_S` as PromQL writes it."""
    return duration(MEMORY_S)
