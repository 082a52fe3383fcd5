"""A child's pid comes some time after it was asked for: what is decided meanwhile holds."""

from __future__ import annotations

from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.testing.driven import DrivenMachine

LATE = Limits(deadlines=Deadlines(init_s=5.0))


def test_a_rank_that_is_never_started_is_a_start_that_failed() -> None:
    """Its deadline counts from the request; the kill that follows ends it whenever it comes."""
    driven = DrivenMachine(num_standbys=0, limits=LATE)
    started, stuck = (item.child for item in driven.all(c.Spawn) if item.role is Role.WORKER)
    driven.start_child(started)
    driven.make_ready(started)
    driven.wait(5.1)
    assert stuck in [item.child for item in driven.all(c.Kill)]
    assert [(item.phase, item.pid) for item in driven.events(schema.FaultDetected)] == [("init", None)]
    driven.forget()
    driven.feed(c.Spawned(child=stuck, pid=77, start_ticks=7))
    assert [item.role for item in driven.events(schema.WorkerStarted) if item.pid == 77] == [Role.WORKER], (
        "a successor must know of the process"
    )
    assert not driven.events(schema.PhaseEntered) and not driven.events(schema.RankReplaced)


def test_the_end_waits_for_a_child_that_was_not_started_yet() -> None:
    """A launcher that is told to end before its children are there does not leave them to themselves."""
    driven = DrivenMachine(num_standbys=0)
    asked = [item.child for item in driven.all(c.Spawn)]
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    assert not driven.all(c.Stop)
    for number, child in enumerate(asked):
        driven.feed(c.Spawned(child=child, pid=50 + number, start_ticks=1))
        driven.feed(c.Exited(child=child, exit_code=None, signal=9, exited_ns=0, oom=False))
    assert [item.exit_code for item in driven.all(c.Stop)] == [143]
    assert [item.expected for item in driven.events(schema.WorkerExited)] == [True] * len(asked)
