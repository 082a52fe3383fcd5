"""Progress of the ranks of the open generation: deadlines per phase, and who is to blame for a hang.

Model: every rank has a deadline for the phase it is in, armed anew when it enters a phase, commits a step or
passes another point inside a step: from when it did, as far as that is known. A rank says how long ago it
was (an age: whose clock is off by minutes is judged as any other), and of what is late on its way the best
word counts; so a deadline is never earlier than the rank's own, and seldom much later. Liveness (messages
alone) clears nothing. A rank that waits for a peer which is still within a longer phase of its own (load,
evaluate, ...) is not judged before that peer's deadline; so an expiry is a hang of the job, unless a rank
that is asked then says otherwise (`machine_probe`).

Blame needs proof: the only rank that fell silent, else the only rank that is furthest behind, unless it fell
silent with others; otherwise the root is unknown. That it did not answer is no proof of silence. Pure: times
are the launcher's monotonic ones.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from nvrx_sre.core.clock import to_ns
from nvrx_sre.events.messages import Alive, Entered, Step
from nvrx_sre.events.schema import Phase, PhaseEntered
from nvrx_sre.launcher.machine_deadlines import PhaseDeadlines
from nvrx_sre.launcher.machine_job import Job, Stage
from nvrx_sre.launcher.machine_probe import Probe
from nvrx_sre.launcher.machine_roster import Child, ChildState, Roster

_ORDER = {
    Phase.INIT: 0,
    Phase.RENDEZVOUS: 1,
    Phase.REBUILD: 2,
    Phase.LOAD: 3,
    Phase.FIRST_STEP: 4,
    Phase.STEP: 4,
    Phase.DATA: 4,
    Phase.EVALUATE: 4,
    Phase.SAVE: 4,
    Phase.FINALIZE: 5,
    Phase.TEARDOWN: 6,
}
"""Position of a phase in a generation; inside the loop the step and the points passed tell."""
_IN_LOOP = 4
_REARMED_BY_POINTS = frozenset({Phase.FIRST_STEP, Phase.STEP, Phase.SAVE})
"""A save with points: at the end a rank waits for a slot that the writer reads, for as long as that takes."""
_SILENT_SHARE = 0.5
"""A rank is silent if nothing was heard for this share of the expired limit; ranks speak every 0.25 s."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """No progress past a deadline. `root` is None where nobody is provably behind; `child` ran out of time."""

    child: Child
    root: Child | None
    is_root_silent: bool


class Progress:
    """Watches the running ranks."""

    def __init__(self, job: Job, roster: Roster) -> None:
        self._job = job
        self._roster = roster
        self._deadlines = PhaseDeadlines(job)
        self._limits_s = self._deadlines.limits_s
        self._probe = Probe(job, roster.alarm)

    def open(self, child: Child, now_ns: int) -> None:
        """The rank was told to enter the generation."""
        child.phase = Phase.RENDEZVOUS
        child.told_phases = set()
        child.step = child.progress = 0
        child.progressed_ns = child.heard_ns = child.earliest_ns = now_ns
        child.arm(now_ns, self._limits_s[Phase.RENDEZVOUS])
        self._probe.close()

    def on_entered(self, child: Child, message: Entered, now_ns: int) -> Phase | None:
        """The rank entered a phase; the phase, or None if it is not one of ours."""
        try:
            phase = Phase(message.phase)
        except ValueError:
            return None
        child.heard_ns = now_ns
        child.step = max(child.step, message.step)
        child.earliest_ns = at_ns = max(now_ns - message.age_ns, child.earliest_ns)
        self._move(child, phase, at_ns)
        if phase is not Phase.DATA:
            self.tell(child, phase, message.mono_ns)
        return phase

    def on_step(self, child: Child, message: Step, now_ns: int) -> None:
        """The rank committed a step. It may have waited to be looked at: the next sign of life says for how long."""
        child.heard_ns = now_ns
        child.step = max(child.step, message.step)
        self._move(child, Phase.STEP, now_ns)
        self.tell(child, Phase.STEP, message.mono_ns)

    def on_alive(self, child: Child, message: Alive, now_ns: int) -> None:
        """The rank is alive; only points passed count as progress. Without any it may still tell when the last was."""
        child.heard_ns = now_ns
        at_ns = max(now_ns - message.age_ns, child.earliest_ns)
        is_news = message.progress > child.progress or message.step > child.step
        if message.step < child.step:
            pass  # written before the commit that is known by now
        elif is_news:
            child.progress = max(child.progress, message.progress)
            child.step = message.step
            if child.phase in _REARMED_BY_POINTS:
                self._move(child, child.phase, at_ns)
            else:
                child.progressed_ns = at_ns
        elif at_ns < child.progressed_ns:
            child.progressed_ns = at_ns
            if child.phase in _REARMED_BY_POINTS:
                child.arm(at_ns, child.limit_s)
        self._probe.on_answer(child, message.probe, now_ns)

    def distrust(self, phase: Phase) -> None:
        """A deadline of `phase` ran out: if it had been tightened, that may be why."""
        self._deadlines.distrust(phase)

    def tell(self, child: Child, phase: Phase, mono_ns: int) -> None:
        """Record that the rank entered `phase`, once a generation for the step loop."""
        if child.told_phases is None or (phase is Phase.STEP and phase in child.told_phases):
            return
        child.told_phases.add(phase)
        self._job.emit(PhaseEntered(phase=phase, entered_ns=self._job.wall_ns(mono_ns)), rank=child.rank)

    def rearm(self, now_ns: int) -> None:
        """The launcher stood still: every child gets its time again."""
        self._probe.close()
        for child in self._roster:
            child.heard_ns = child.earliest_ns = now_ns
            if child.deadline_ns is not None:
                child.arm(now_ns, child.limit_s)

    def next_deadline_ns(self, now_ns: int) -> tuple[int | None, bool]:
        """When the next rank runs out of time, or what ranks were asked is judged, None if neither will be.

        And whether that may change with any input: a rank is out of time, and its peer's phase excuses it; or it could
        be judged, and is not.
        """
        if self._probe.asked_ns is not None:
            return self._probe.due_ns, self._probe.due_ns <= now_ns
        armed = [child.deadline_ns for child in self._running() if child.deadline_ns is not None]
        if all(when > now_ns for when in armed):
            return min(armed, default=None), False
        return min(when for when, _ in self._verdicts()), True

    def judge(self, now_ns: int) -> Hang | None:
        """The hang, if a deadline has passed that no peer's phase excuses, and no answer does. May ask."""
        asked_ns = self._probe.asked_ns
        if asked_ns is not None:
            if now_ns < self._probe.due_ns:
                return None
            self._probe.close()
            hang = self._hang(asked_ns, now_ns)
            if hang is not None:
                return hang
        if any(when <= now_ns for when, _ in self._verdicts()):
            self._probe.ask(self._running(), now_ns)
        return None

    def _hang(self, asked_ns: int, now_ns: int) -> Hang | None:
        """Who was out of time when ranks were asked, and is by what they have answered."""
        expired = [item for item in self._verdicts() if item[0] <= asked_ns]
        if not expired:
            return None
        _, child = min(expired, key=lambda item: (item[0], item[1].number))
        silent = self._silent(child, now_ns)
        if len(silent) == 1:
            return Hang(child=child, root=silent[0], is_root_silent=True)
        behind = self._only_behind()
        # Of several that fell silent together, as with their host, none is known to be behind the others.
        return Hang(child=child, root=None if behind in silent else behind, is_root_silent=False)

    def _verdicts(self) -> list[tuple[int, Child]]:
        """(when it is judged, rank) of every rank under a deadline."""
        if self._job.stage is not Stage.OPEN:
            return []
        armed = [(child.deadline_ns, child) for child in self._running() if child.deadline_ns is not None]
        excuses = sorted((_place(child), when) for when, child in armed if child.phase is not Phase.STEP)
        if not excuses:
            return armed
        # No rank waits for one that is further on: of the others the latest deadline counts.
        places = [place for place, _ in excuses]
        until = list(accumulate((when for _, when in excuses), max))
        verdicts = []
        for when, child in armed:
            num_excuses = bisect_right(places, _place(child))
            verdicts.append((max(when, until[num_excuses - 1]) if num_excuses else when, child))
        return verdicts

    def _running(self) -> list[Child]:
        return [child for child in self._roster.seated() if child.state is ChildState.RUNNING]

    def _silent(self, expired: Child, now_ns: int) -> list[Child]:
        horizon_ns = now_ns - to_ns(expired.limit_s * _SILENT_SHARE)
        return [child for child in self._running() if child.heard_ns <= horizon_ns]

    def _only_behind(self) -> Child | None:
        by_position = sorted(self._running(), key=_position)
        if len(by_position) == 1 or _position(by_position[0]) < _position(by_position[1]):
            return by_position[0]
        return None

    def _move(self, child: Child, phase: Phase, at_ns: int) -> None:
        """It had progress at `at_ns`, and is in `phase` since then, or still."""
        self._deadlines.observe(child.phase, max(0, at_ns - child.armed_ns))
        child.phase = phase
        child.progressed_ns = at_ns
        child.arm(at_ns, self._limits_s[phase])


def is_in_loop(child: Child) -> bool:
    """The child executes steps."""
    return _ORDER[child.phase] == _IN_LOOP


def _position(child: Child) -> tuple[int, int, int]:
    return (_ORDER[child.phase], child.step, child.progress)


def _place(child: Child) -> tuple[int, int]:
    """How far on it is: nobody waits for a peer at a later place."""
    return _ORDER[child.phase], child.step
