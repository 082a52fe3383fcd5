"""The grace of a preemption: one budget, configurable, within which everything is over."""

from __future__ import annotations

import pytest

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.events import messages as wire
from nvrx_sre.events import schema
from nvrx_sre.launcher import commands as c
from nvrx_sre.testing.driven import DrivenMachine

KUBERNETES_GRACE_S = 30.0
"""terminationGracePeriodSeconds where a pod says nothing (Kubernetes, pod lifecycle)."""
SIGTERM = 15
WRITER = 3


def preempted(deadlines: Deadlines) -> DrivenMachine:
    """A run whose save of step 10 is being written for ever, and which has got SIGTERM; its ranks are dead."""
    driven = DrivenMachine(num_standbys=0, limits=Limits(deadlines=deadlines))
    driven.begin()
    driven.step(10, durable=True)
    driven.forget()
    driven.feed(c.SignalReceived(signal=SIGTERM, by_person=False))
    for rank in range(2):
        driven.kill(driven.child_of(rank))
    return driven


@pytest.mark.parametrize("drain_s", [4.0, Deadlines().preemption_drain_s, 300.0])
def test_c45_a_save_has_the_configured_grace_and_no_more(drain_s: float) -> None:
    """Until it is over nobody is hurried; then the writer is asked to leave, killed, and the run ends: no fault."""
    deadlines = Deadlines(preemption_drain_s=drain_s)
    driven = preempted(deadlines)
    driven.wait(drain_s - 0.1)
    assert not driven.all(c.Stop)
    assert WRITER not in {item.child for item in (*driven.all(c.LeaveChild), *driven.all(c.Kill))}
    driven.wait(0.2)
    assert [item.child for item in driven.all(c.LeaveChild) if item.child == WRITER] == [WRITER]
    driven.wait(deadlines.interrupt_grace_s)
    assert WRITER in {item.child for item in driven.all(c.Kill)}
    driven.wait(deadlines.interrupt_grace_s)
    assert [item.exit_code for item in driven.all(c.Stop)] == [143]
    assert not driven.events(schema.FaultDetected)


def test_c45_a_save_that_ends_within_the_grace_commits() -> None:
    """It is committed, and the reason of the end says so."""
    driven = preempted(Deadlines())
    driven.wait(Deadlines().preemption_drain_s - 1.0)
    driven.write(10, "written", "committed", "verified")
    driven.kill(WRITER, exit_code=0, signal=None)
    [stop] = driven.all(c.Stop)
    assert (stop.exit_code, "durable up to step 10" in stop.reason) == (143, True)


def test_c45_a_second_signal_cannot_make_the_end_longer() -> None:
    """SIGTERM at the end of training: the last save has the grace of a preemption from then on, not the final one."""
    driven = DrivenMachine(num_standbys=0)
    driven.begin()
    driven.step(10, durable=True)
    for rank in range(2):
        finished = wire.Finished(generation=1, step=10, result={}, mono_ns=driven.now_ns)
        driven.say(driven.child_of(rank), finished)
    driven.feed(c.SignalReceived(signal=SIGTERM, by_person=False))
    driven.wait(KUBERNETES_GRACE_S)
    assert len(driven.all(c.Stop)) == 1


def test_c45_the_default_fits_into_the_default_of_kubernetes() -> None:
    """Drain, the writer's grace and its death are over before a pod's default grace is."""
    driven = preempted(Deadlines())
    driven.wait(KUBERNETES_GRACE_S - 1.0)
    assert [item.exit_code for item in driven.all(c.Stop)] == [143]


def test_c45_the_first_signal_says_when_the_launcher_is_to_be_gone() -> None:
    """Whatever comes after; nobody waits for a run that was not told to end."""
    driven = DrivenMachine(num_standbys=0)
    driven.begin()
    assert driven.machine.leave_by_ns is None
    told_ns = driven.now_ns
    driven.feed(c.SignalReceived(signal=SIGTERM, by_person=False))
    driven.wait(1.0)
    driven.feed(c.SignalReceived(signal=SIGTERM, by_person=False))
    assert driven.machine.leave_by_ns == told_ns + to_ns(Deadlines().preemption_drain_s)
