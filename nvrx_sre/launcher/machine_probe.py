"""The question that comes before a verdict: how far are you?

Model: ranks say how far they are four times a second, so when a deadline runs out the newest word may be that old.
All running ranks are asked then, once, and answer at once, unless something holds their process or their interpreter.
Judged is when all have answered, or after a grace that is enough to hear so many; and only what had run out when they
were asked, since an answer is about that moment. What has run out meanwhile is a question of its own: so each question
ends in a hang, or some rank had progress, and the loop never spins.

Invariants: at most one question is open; an answer counts for the question it names alone. Pure: times are the
launcher's monotonic receive times.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_sre.core.clock import to_ns
from nvrx_sre.launcher.commands import SendProbe
from nvrx_sre.launcher.machine_alarm import Alarm
from nvrx_sre.launcher.machine_job import Job
from nvrx_sre.launcher.machine_roster import Child

GRACE_S = 0.1
"""Longest wait for answers: half of the 0.2 s within which a hang is to be found after its deadline, since from another
node the word on a rank's progress may wait for company for the other half (`pace.LIVENESS_S`). A thread that wants a
busy interpreter gets it after 5 ms, and an answer from another node leaves within 5 ms (`pace.BUNDLE_S`)."""
ANSWER_S = 100e-6
"""Longest time to ask one rank and to hear it: twice the launcher's 31 to 50 us of processor time on busy cores with
2,048 ranks of other nodes (8,192: 34), of which a good third writes the question and the rest takes in the answer. With
`GRACE_S` alone the last of some 2,000 would be heard too late, and ranks that were in time be judged by old words."""


def grace_s(num_asked: int) -> float:
    """Longest wait for the answers of so many ranks (seconds)."""
    return max(GRACE_S, num_asked * ANSWER_S)


class Probe:
    """Who was asked, and who has yet to answer."""

    def __init__(self, job: Job, alarm: Alarm) -> None:
        self.asked_ns: int | None = None
        """When ranks were asked; None while no question is open."""
        self.due_ns = 0
        """When it is judged what they said."""
        self._job = job
        self._alarm = alarm
        self._number = 0
        self._unheard: set[int] = set()

    def ask(self, children: Sequence[Child], now_ns: int) -> None:
        """Ask these ranks how far they are."""
        self._number += 1
        self.asked_ns, self.due_ns = now_ns, now_ns + to_ns(grace_s(len(children)))
        self._unheard = {child.number for child in children}
        for child in children:
            self._job.command(SendProbe(child=child.number, number=self._number))
        self._alarm.bring_forward(self.due_ns)

    def on_answer(self, child: Child, number: int, now_ns: int) -> None:
        """A rank has said how far it is; with the last one it can be judged."""
        if self.asked_ns is None or number != self._number or child.number not in self._unheard:
            return
        self._unheard.remove(child.number)
        if not self._unheard:
            self.due_ns = min(self.due_ns, now_ns)
            self._alarm.bring_forward(self.due_ns)

    def close(self) -> None:
        """The question is answered, or has lost its sense."""
        self.asked_ns = None
