"""What the machine makes of budgets: preemptions, decisions that no disk took, second faults, the launcher's own."""

from __future__ import annotations

import pytest

from nvrx_sre.core.limits import CapLimits, Limits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Cap, FaultClass, Phase
from nvrx_sre.launcher import commands as c
from nvrx_sre.policy.history import History
from nvrx_sre.testing.driven import DrivenMachine

SIGTERM = 15
NO_BACKOFF = Limits(caps=CapLimits(backoff_s=(0.0,)))


def begun(**options: object) -> DrivenMachine:
    """In the step loop of generation 1, with step 1 committed and sealed."""
    driven = DrivenMachine(**({"num_standbys": 0} | options))  # type: ignore[arg-type]  # options of the driver
    driven.begin()
    driven.step(1)
    return driven


def preempted(history: History) -> DrivenMachine:
    """A launcher of the run that is preempted in its second step, and ends."""
    driven = begun(history=history)
    driven.feed(c.SignalReceived(signal=SIGTERM, by_person=False))
    for child in (1, 2):
        driven.kill(child)
    driven.kill(3)
    driven.wait(120.0)
    return driven


def test_c39_each_preemption_tells_what_is_left_of_its_budget() -> None:
    """The event carries attempts and limit; exit 143, which no orchestrator counts."""
    history = History()
    for attempt in (1, 2, 3):
        driven = preempted(history)
        (event,) = driven.events(schema.PreemptionReceived)
        assert (event.attempts, event.limit) == (attempt, 20)
        assert [item.exit_code for item in driven.all(c.Stop)] == [143]
        assert not driven.events(schema.CapReached)


def test_preemptions_at_their_cap_stop_the_run_for_good() -> None:
    """Twenty in a row without a newer checkpoint: 93, and the reason says which cap."""
    history = History()
    for _ in range(19):
        history.apply(_record(schema.PreemptionReceived(signal=SIGTERM, by_person=False)))
    driven = preempted(history)
    assert [(item.cap, item.used, item.limit) for item in driven.events(schema.CapReached)] == [
        (Cap.PREEMPTION, 20, 20)
    ]
    (stop,) = driven.all(c.Stop)
    assert stop.exit_code == 93
    assert stop.reason.startswith("cap preemption reached: 20 of 20")


def test_a_persons_interruption_is_no_preemption() -> None:
    """Ctrl-C uses up nothing."""
    driven = begun()
    driven.feed(c.SignalReceived(signal=2, by_person=True))
    (event,) = driven.events(schema.PreemptionReceived)
    assert (event.by_person, event.attempts) == (True, 0)
    assert driven.history.num_preempted == 0


def test_c37_second_fault_in_the_rendezvous_is_a_second_attempt_of_one_job() -> None:
    """Rank 1 dies; 300 ms later, inside the next rendezvous, rank 0 dies: two counts, and the job goes on."""
    driven = begun(limits=NO_BACKOFF)
    driven.kill(driven.child_of(1))
    driven.leave_generation(0)
    driven.start_child(driven.all(c.Spawn)[-1].child)
    driven.make_ready(driven.child_of(1))
    driven.enter(1, Phase.RENDEZVOUS, 1)
    driven.wait(0.3)
    driven.kill(driven.child_of(0))
    driven.leave_generation(1)
    driven.start_child(driven.all(c.Spawn)[-1].child)
    driven.make_ready(driven.child_of(0))
    assert [item.generation for item in driven.all(c.OpenGeneration)] == [1, 2, 3]
    assert [item.restarts_since_progress for item in driven.events(schema.RestartDecided)] == [1, 2]
    assert [record.rank for record in driven.records_of(schema.FaultDetected)] == [1, 0]
    driven.restore(1, "hot")
    driven.step(2)
    assert driven.machine.high_water == 2


def test_c37_replacement_that_dies_before_it_joins_is_counted_once() -> None:
    """The respawned rank never reached the rendezvous: one further attempt, no closed door."""
    driven = begun(limits=NO_BACKOFF)
    driven.kill(driven.child_of(1))
    driven.leave_generation(0)
    replacement = driven.all(c.Spawn)[-1].child
    driven.start_child(replacement)
    driven.kill(replacement)
    driven.start_child(driven.all(c.Spawn)[-1].child)
    driven.make_ready(driven.child_of(1))
    assert [item.restarts_since_progress for item in driven.events(schema.RestartDecided)] == [1, 2]
    assert [item.generation for item in driven.all(c.OpenGeneration)] == [1, 2]


def test_c41_store_that_cannot_be_opened_is_the_storages_matter() -> None:
    """What fails on the launcher's side of a generation is retried, and then left with 75: no fault of training.

    What is sealed is not saved at that end: it would have to go to the storage that fails.
    """
    driven = begun(limits=Limits(caps=CapLimits(backoff_s=(0.0,), transient_grace_s=0.0)), num_standbys=3)
    for attempt in range(3):
        driven.raise_in(0, 0, fault="storage", exception_type="OSError", phase="load")
        if attempt < 2:
            driven.kill(driven.child_of(0))
            driven.make_ready(driven.child_of(0))
            driven.leave_generation(1)
    assert {item.fault for item in driven.events(schema.FaultDetected)} == {FaultClass.STORAGE}
    assert [item.exit_code for item in driven.events(schema.RestartDecided)] == [None, None, 75]
    assert [item.cap for item in driven.events(schema.CapReached)] == [Cap.STORAGE]
    assert not driven.all(c.StartSave)


@pytest.mark.parametrize("num_unrecorded", [0, 3])
def test_decisions_that_the_disk_did_not_take_are_counted(num_unrecorded: int) -> None:
    """After three of them without progress the next fault ends the launcher with 75."""
    driven = begun(limits=NO_BACKOFF)
    driven.raise_in(1, 2)
    driven.leave_generation(0, 1)
    driven.restore(1, "hot")
    for _ in range(num_unrecorded):
        driven.history.apply(_record(schema.DecisionUnrecorded(waited_s=0.5)))
    driven.raise_in(1, 2, exception_type="KeyError")
    decided = driven.events(schema.RestartDecided)[-1]
    assert decided.budget_used[Cap.STORAGE] == num_unrecorded
    assert decided.exit_code == (75 if num_unrecorded else None)


def _record(event: schema.Event) -> schema.Record:
    return schema.Record(run="driven", epoch=1, generation=1, rank=None, seq=1, time_ns=1, event=event)
