"""The launcher machine, driven by hand: detection, blame, recovery, escalation."""

from __future__ import annotations

from typing import Any

import pytest

from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.events import messages as wire
from nvrx_sre.events import schema
from nvrx_sre.events.schema import FaultClass, Layer, Phase, Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.machine_probe import GRACE_S
from nvrx_sre.testing.driven import DrivenMachine

LIMITS = Deadlines()


def begun(**options: int) -> DrivenMachine:
    """A machine with one committed step in generation 1; only what follows is kept."""
    driven = DrivenMachine(**options)  # type: ignore[arg-type]  # keyword arguments of the driver
    driven.begin()
    driven.step(1)
    driven.forget()
    return driven


def alive(driven: DrivenMachine, rank: int, *, progress: int, step: int = 1) -> None:
    message = wire.Alive(generation=driven.machine.generation, step=step, progress=progress, mono_ns=driven.now_ns)
    driven.say(driven.child_of(rank), message)


def faults(driven: DrivenMachine) -> list[tuple[int | None, FaultClass]]:
    """(root, class) of every fault."""
    return [
        (record.rank, record.event.fault) for record in driven.records if isinstance(record.event, schema.FaultDetected)
    ]


def test_exception_is_a_fault_at_once() -> None:
    """Steps, fault, decision, interrupts: in this order, all in one answer."""
    driven = begun()
    driven.raise_in(1, 2)
    order = driven.order(
        schema.StepsCommitted, schema.FaultDetected, schema.RestartDecided, c.SendInterrupt, schema.InterruptRaised
    )
    assert order == [
        "StepsCommitted",
        "FaultDetected",
        "RestartDecided",
        "SendInterrupt",
        "SendInterrupt",
        "InterruptRaised",
    ]
    assert faults(driven) == [(1, FaultClass.EXCEPTION)]


def test_in_process_restart_keeps_every_process() -> None:
    """Nobody is killed or spawned, the next generation has the same children."""
    driven = begun()
    driven.raise_in(1, 2)
    driven.leave_generation(0, 1)
    assert not driven.all(c.Kill)
    assert [item.children for item in driven.all(c.OpenGeneration)] == [(1, 2)]
    (finished,) = driven.events(schema.TeardownFinished)
    assert (finished.kept, finished.killed) == ([0, 1], [])


def test_c47_communication_errors_wait_for_the_death() -> None:
    """The victim reports first; the killed rank is the root, and there is one fault."""
    driven = begun(num_ranks=3)
    driven.raise_in(0, 2, communication=True)
    driven.raise_in(2, 2, communication=True)
    assert not faults(driven)
    driven.kill(driven.child_of(1))
    assert faults(driven) == [(1, FaultClass.KILLED)]
    driven.wait(0.2)
    assert len(faults(driven)) == 1


def test_communication_error_that_nothing_explains() -> None:
    """After the suspicion has lapsed: a collective error with unknown root."""
    driven = begun()
    driven.raise_in(0, 2, communication=True)
    driven.wait(LIMITS.suspicion_s)
    assert faults(driven) == [(None, FaultClass.COLLECTIVE_ERROR)]


def test_real_exception_beats_a_suspicion() -> None:
    """The rank that raised something of its own is the root."""
    driven = begun()
    driven.raise_in(0, 2, communication=True)
    driven.raise_in(1, 2)
    assert faults(driven) == [(1, FaultClass.EXCEPTION)]


def test_victim_that_exits_after_its_report_is_not_the_root() -> None:
    """A rank that leaves on its communication error explains nothing."""
    driven = begun()
    driven.raise_in(0, 2, communication=True)
    driven.kill(driven.child_of(0), exit_code=1, signal=None)
    assert not faults(driven)
    driven.wait(LIMITS.suspicion_s)
    assert faults(driven) == [(None, FaultClass.COLLECTIVE_ERROR)]
    assert [record.rank for record in driven.records_of(schema.RankReplaced)] == [0]


def test_everything_after_the_root_fault_is_collateral() -> None:
    """Deaths and errors of the same generation add no fault."""
    driven = begun(num_ranks=3)
    driven.kill(driven.child_of(1))
    driven.raise_in(0, 2)
    driven.kill(driven.child_of(2))
    assert faults(driven) == [(1, FaultClass.KILLED)]


def test_dead_rank_goes_to_the_standby() -> None:
    """Exactly one new process, warm; survivors go in process; the standby is refilled after progress only."""
    driven = begun()
    driven.kill(driven.child_of(1))
    (replaced,) = driven.events(schema.RankReplaced)
    assert (replaced.old_pid, replaced.new_pid, replaced.warm) == (102, 104, True)
    spawned = len(driven.all(c.Spawn))
    driven.make_ready(driven.child_of(1))
    driven.leave_generation(0)
    driven.restore(1, "hot")
    assert len(driven.all(c.Spawn)) == spawned
    driven.step(2)
    assert driven.all(c.Spawn)[-1].role is Role.STANDBY
    assert len(driven.all(c.Spawn)) == spawned + 1


def test_without_a_standby_the_rank_starts_cold() -> None:
    """Only the missing rank is spawned; its replacement is told with the new pid."""
    driven = begun(num_standbys=0)
    driven.kill(driven.child_of(1))
    spawn = driven.all(c.Spawn)[-1]
    assert (spawn.role, spawn.rank, spawn.attempt) == (Role.WORKER, 1, 1)
    driven.start_child(spawn.child)
    assert [item.warm for item in driven.events(schema.RankReplaced)] == [False]
    driven.make_ready(spawn.child)
    driven.leave_generation(0)
    assert driven.machine.generation == 2


def test_c27_heartbeat_without_progress_is_a_hang() -> None:
    """Fresh liveness does not clear the deadline; stacks are asked for before the interrupt."""
    driven = begun()
    for _ in range(70):
        driven.wait(1.0)
        if faults(driven):
            break
        alive(driven, 0, progress=2)
        alive(driven, 1, progress=1)
    assert faults(driven) == [(1, FaultClass.HANG)]
    order = driven.order(c.RequestStacks, c.SendInterrupt)
    assert order == ["RequestStacks", "RequestStacks", "SendInterrupt", "SendInterrupt"]


def test_points_passed_arm_the_deadline_anew() -> None:
    """Micro-batches and marks are progress."""
    driven = begun()
    for progress in range(1, 5):
        driven.wait(LIMITS.step_s - 1.0)
        for rank in range(2):
            alive(driven, rank, progress=progress)
    assert not faults(driven)


def test_hang_with_ranks_abreast_has_no_root() -> None:
    """Nobody is provably behind: the root is unknown, and nobody is replaced for it."""
    driven = begun()
    for _ in range(70):
        driven.wait(1.0)
        if faults(driven):
            break
        for rank in range(2):
            alive(driven, rank, progress=1)
    assert faults(driven) == [(None, FaultClass.HANG)]
    assert not driven.all(c.Kill)


def test_c30_silent_rank_is_the_root_and_is_replaced() -> None:
    """The only rank that is not heard any more cannot be interrupted: layer worker."""
    driven = begun()
    for _ in range(70):
        driven.wait(1.0)
        if faults(driven):
            break
        alive(driven, 0, progress=1)
    assert faults(driven) == [(1, FaultClass.HANG)]
    assert [item.layer for item in driven.events(schema.RestartDecided)] == [Layer.WORKER]
    assert [item.child for item in driven.all(c.Kill)] == [2]


def test_c28_long_phases_of_a_peer_excuse_those_who_wait() -> None:
    """Rank 0 waits in its step while rank 1 evaluates beyond the step limit: no fault; past its own, one."""
    driven = begun()
    driven.enter(1, Phase.EVALUATE, 1)
    for _ in range(int(LIMITS.evaluate_s) - 10):
        driven.wait(1.0)
        for rank in range(2):
            alive(driven, rank, progress=1)
    assert not faults(driven)
    driven.wait(20.0)
    assert len(faults(driven)) == 1


def test_c28_deadline_is_armed_anew_on_leaving_a_phase() -> None:
    """Back in the step loop the rank has the whole limit again, and so do those who waited for it."""
    driven = begun()
    driven.enter(1, Phase.EVALUATE, 1)
    driven.wait(LIMITS.step_s + 30.0)
    driven.step(2)
    driven.wait(LIMITS.step_s - 1.0)
    assert not faults(driven)


def test_unacknowledged_interrupt_ends_in_a_kill() -> None:
    """Past its grace the one rank is killed and replaced, without a second fault."""
    driven = begun()
    driven.raise_in(0, 2)
    driven.leave_generation(0)
    driven.wait(LIMITS.interrupt_grace_s)
    assert [item.child for item in driven.all(c.Kill)] == [2]
    driven.kill(2)
    assert [record.rank for record in driven.records_of(schema.RankReplaced)] == [1]
    assert len(faults(driven)) == 1
    assert [item.killed for item in driven.events(schema.TeardownFinished)] == [[1]]


def test_slow_teardown_ends_in_a_kill() -> None:
    """Acknowledged but never ready: killed at the teardown's deadline."""
    driven = begun()
    driven.raise_in(0, 2)
    driven.leave_generation(0)
    driven.say(driven.child_of(1), wire.Acked(generation=1, mono_ns=driven.now_ns))
    driven.wait(LIMITS.teardown_s - 0.1)
    assert not driven.all(c.Kill)
    driven.wait(0.2)
    assert [item.child for item in driven.all(c.Kill)] == [2]


def test_unfit_survivor_is_replaced_without_a_fault() -> None:
    """A process that cannot go on costs no budget."""
    driven = begun()
    driven.raise_in(0, 2)
    driven.leave_generation(0)
    driven.make_ready(driven.child_of(1), fit=False)
    assert [item.child for item in driven.all(c.Kill)] == [2]
    driven.kill(2)
    assert len(faults(driven)) == 1
    assert driven.child_of(1) == 4


def test_c37_death_of_a_replacement_is_a_further_attempt() -> None:
    """Two faults, two decisions, one continuing job; the pending generation keeps its number."""
    driven = begun(num_standbys=2)
    driven.kill(driven.child_of(1))
    driven.kill(driven.child_of(1))
    assert [rank for rank, _ in faults(driven)] == [1, 1]
    assert [record.generation for record in driven.records_of(schema.FaultDetected)] == [1, 2]
    driven.leave_generation(0)
    driven.wait(5.0)
    driven.make_ready(driven.child_of(1))
    assert driven.machine.generation == 2


def test_second_transient_fault_waits_for_its_back_off() -> None:
    """The vacant rank is filled and the generation opened only after the wait."""
    driven = begun(num_standbys=2)
    driven.kill(driven.child_of(1))
    driven.make_ready(driven.child_of(1))
    driven.leave_generation(0)
    driven.kill(driven.child_of(0))
    assert [item.backoff_s for item in driven.events(schema.RestartDecided)] == [0.0, 5.0]
    driven.leave_generation(1)
    driven.wait(4.9)
    assert driven.machine.generation == 2
    driven.wait(0.2)
    driven.make_ready(driven.child_of(0))
    assert driven.machine.generation == 3


def test_ranks_failing_together_at_start_are_one_attempt() -> None:
    """Every rank dies while importing: one fault a round, 75 after three."""
    driven = DrivenMachine(num_ranks=3, num_standbys=0)
    for _ in range(10):
        workers = [item for item in driven.all(c.Spawn) if item.role is Role.WORKER][-3:]
        for spawn in workers:
            driven.kill(spawn.child, exit_code=1, signal=None)
        driven.wait(130.0)
        if driven.events(schema.RunFinished):
            break
    assert [kind for _, kind in faults(driven)] == [FaultClass.STARTUP] * 3
    assert [item.cap for item in driven.events(schema.CapReached)] == ["startup"]
    assert [item.exit_code for item in driven.all(c.Stop)] == [75]


def test_process_that_never_parks_is_a_fault() -> None:
    """Init has a deadline too; the process is killed and started again."""
    driven = DrivenMachine(num_ranks=1, num_standbys=0)
    driven.feed(c.Spawned(child=1, pid=101, start_ticks=1))
    driven.wait(LIMITS.init_s)
    assert faults(driven) == [(0, FaultClass.HANG)]
    assert 1 in {item.child for item in driven.all(c.Kill)}


def test_hang_before_the_first_commit_after_an_in_process_restart_escalates() -> None:
    """The in-process restart did not cure that rank: its process is replaced."""
    driven = begun()
    driven.raise_in(1, 2)
    driven.leave_generation(0, 1)
    driven.restore(1, "hot")
    driven.forget()
    for _ in range(int(LIMITS.first_step_s) + 10):
        driven.wait(1.0)
        if faults(driven):
            break
        alive(driven, 0, progress=9)
        alive(driven, 1, progress=8)
    assert faults(driven) == [(1, FaultClass.HANG)]
    assert [item.layer for item in driven.events(schema.RestartDecided)] == [Layer.WORKER]
    assert [item.child for item in driven.all(c.Kill)] == [2]


def test_second_hang_without_a_root_replaces_every_rank() -> None:
    """A lock that a dead frame holds: nobody is provably behind, and the in-process restart did not help."""
    driven = begun()
    driven.raise_in(1, 2)
    driven.leave_generation(0, 1)
    driven.restore(1, "hot")
    driven.forget()
    for _ in range(int(LIMITS.first_step_s) + 10):
        driven.wait(1.0)
        if faults(driven):
            break
        for rank in range(2):
            alive(driven, rank, progress=9)
    assert faults(driven) == [(None, FaultClass.HANG)]
    assert [item.layer for item in driven.events(schema.RestartDecided)] == [Layer.WORKER]
    assert {item.child for item in driven.all(c.Kill)} == {1, 2}


def test_node_kill_loses_everything_but_the_disk() -> None:
    """Every process and slot goes; the next generation may not use the hot tier, the one after may."""
    driven = begun()
    driven.step(10, durable=True)
    driven.say(driven.child_of(1), wire.NodeKill(generation=1, mono_ns=driven.now_ns))
    assert faults(driven) == [(1, FaultClass.NODE_LOST)]
    assert {item.child for item in driven.all(c.Kill)} == {1, 2, 3, 4}
    assert driven.order(c.Kill, c.DropSlots)[-1] == "DropSlots"
    assert [item.reason for item in driven.events(schema.SaveFailed)] == ["interrupted"]
    for child in (1, 2, 3, 4):
        driven.kill(child)
    for spawn in driven.all(c.Spawn)[-3:]:
        driven.start_child(spawn.child)
    for rank in range(2):
        driven.make_ready(driven.child_of(rank))
    assert [item.hot_allowed for item in driven.all(c.OpenGeneration)] == [False]
    driven.restore(0)
    driven.raise_in(0, 1)
    driven.leave_generation(0, 1)
    assert [item.hot_allowed for item in driven.all(c.OpenGeneration)] == [False, True]


def test_third_attempt_goes_one_checkpoint_further_back() -> None:
    """The command tells the shell; the number goes back to zero once a state is restored."""
    driven = begun(num_standbys=2)
    driven.raise_in(1, 2)
    driven.leave_generation(0, 1)
    driven.restore(1, "hot")
    driven.raise_in(1, 2)
    driven.kill(driven.child_of(1))
    driven.make_ready(driven.child_of(1))
    driven.leave_generation(0)
    assert [item.checkpoints_back for item in driven.all(c.OpenGeneration)] == [0, 1]


def looped(driven: DrivenMachine, step: int) -> None:
    """Three attempts of one fault behind `step`, from which two go on; the ranks are dead then."""
    for attempt in range(3):
        driven.raise_in(1, step + 1)
        if attempt == 1:
            driven.kill(driven.child_of(1))
            spawn = driven.all(c.Spawn)[-1]
            driven.start_child(spawn.child)
            driven.make_ready(spawn.child)
            driven.leave_generation(0)
        elif attempt == 0:
            driven.leave_generation(0, 1)
        if attempt < 2:
            driven.restore(step, "hot")
    assert [item.cap for item in driven.events(schema.CapReached)] == ["same_fingerprint"]
    for rank in range(2):
        driven.kill(driven.child_of(rank))


def test_cap_stops_the_run_and_drains_the_writer() -> None:
    """The cap is told, ranks are ended, the save in flight may finish, exit 93."""
    driven = begun(num_standbys=0)
    driven.step(10, durable=True)
    looped(driven, 10)
    assert not driven.all(c.Stop)
    driven.write(10, "written", "committed", "verified")
    driven.kill(3, exit_code=0, signal=None)
    [stop] = driven.all(c.Stop)
    assert (stop.exit_code, stop.reason.endswith("; durable up to step 10")) == (93, True)


def test_cap_stops_the_run_and_loses_no_sealed_step() -> None:
    """What no save was due for is saved before the end: who cures the cause goes on from there."""
    driven = begun(num_standbys=0)
    driven.step(10, durable=True)
    driven.write(10, "written", "committed", "verified")
    driven.step(11)
    driven.step(12)
    looped(driven, 12)
    assert [item.step for item in driven.all(c.StartSave)] == [10, 12]
    assert not driven.all(c.Stop)
    driven.write(12, "written", "committed", "verified")
    driven.kill(3, exit_code=0, signal=None)
    [stop] = driven.all(c.Stop)
    assert (stop.exit_code, stop.reason.endswith("; durable up to step 12")) == (93, True)
    assert len(driven.all(c.RetainSaves)) == 1, "step 10's: the last save costs no checkpoint that one may go back to"


def unrestorable(*, is_told: bool, **first_fault: Any) -> DrivenMachine:
    """Step 11 is sealed, step 10 durable; after a fault no rank can restore anything, and the ranks end."""
    driven = begun(num_standbys=0)
    driven.step(10, durable=True)
    driven.write(10, "written", "committed", "verified")
    driven.step(11)
    driven.raise_in(1, 12, **first_fault)
    driven.leave_generation(0, 1)
    if is_told:
        hot = wire.Rejected(generation=2, step=11, tier="hot", directory="", reason="digest", message="m")
        driven.say(driven.child_of(1), hot)
    nothing = {"fault": "checkpoint_corrupt", "exception_type": "NothingRestorable", "phase": "load"}
    driven.raise_in(0, 0, **nothing)
    for rank in range(2):
        driven.kill(driven.child_of(rank))
    return driven


@pytest.mark.parametrize("is_told", [False, True])
def test_a_slot_that_no_rank_may_restore_is_not_saved_at_the_end(is_told: bool) -> None:
    """Its bytes would be a good checkpoint to whoever reads it; what cannot be loaded is not called durable either.

    The rank that found the damage may tell of it after its peer has raised.
    """
    driven = unrestorable(is_told=is_told)
    driven.kill(3, exit_code=0, signal=None)
    assert [item.step for item in driven.all(c.StartSave)] == [10]
    [stop] = driven.all(c.Stop)
    assert (stop.exit_code, stop.reason.endswith("; nothing is durable")) == (93, True)


def test_a_slot_that_was_not_offered_is_saved_where_nothing_else_can_be_loaded() -> None:
    """A fault that goes further back leaves the hot tier out: it may be all that is left of the run."""
    driven = unrestorable(is_told=False, fault="nonfinite", exception_type="NonFiniteLoss")
    assert [item.step for item in driven.all(c.StartSave)] == [10, 11]


def test_a_slot_that_was_rejected_is_not_saved_by_a_preemption() -> None:
    """The ranks are about to restore an older state when the run has to end."""
    driven = begun(num_standbys=0)
    driven.step(11)
    driven.raise_in(1, 12)
    driven.leave_generation(0, 1)
    rejected = wire.Rejected(generation=2, step=11, tier="hot", directory="", reason="digest", message="m")
    driven.say(driven.child_of(1), rejected)
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    assert not driven.all(c.StartSave)


def test_user_error_stops_with_78() -> None:
    """No restart for what the user has to change."""
    driven = begun(num_standbys=0)
    driven.raise_in(0, 2, fault="user_error", exception_type="UserError")
    for child in (1, 2, 3):
        driven.kill(child)
    assert [item.exit_code for item in driven.all(c.Stop)] == [78]
    assert not driven.events(schema.CapReached)


def test_launcher_that_stood_still_blames_nobody() -> None:
    """After a stall every deadline starts anew."""
    driven = begun()
    driven.clock.advance(LIMITS.step_s * 3)
    driven.feed(c.Stalled(seconds=LIMITS.step_s * 3))
    driven.feed(c.Tick())
    assert not faults(driven)
    deadline_ns = driven.machine.next_deadline_ns()
    assert deadline_ns is not None
    assert deadline_ns > driven.now_ns


def test_unfit_standby_is_dropped_for_good() -> None:
    """A script that reads rank variables cannot be warm: said once, ranks start cold from then on."""
    driven = DrivenMachine()
    standby = driven.all(c.Spawn)[-1].child
    driven.start_child(standby, fit=False)
    driven.kill(standby)
    for spawn in driven.all(c.Spawn)[:3]:
        driven.start_child(spawn.child)
    for rank in range(2):
        driven.make_ready(driven.child_of(rank))
    driven.restore()
    driven.step(1)
    assert len(driven.all(c.Spawn)) == 4
    assert not driven.events(schema.StandbyReady)


def test_dead_standby_is_no_fault() -> None:
    """It is replaced after progress, a few times at most."""
    driven = begun()
    for step in range(2, 10):
        standby = [item.child for item in driven.all(c.Spawn) if item.role is Role.STANDBY][-1]
        driven.kill(standby)
        driven.step(step)
    assert not faults(driven)
    assert len([item for item in driven.all(c.Spawn) if item.role is Role.STANDBY]) == 3


@pytest.mark.parametrize("exit_code", [0, 3])
def test_orderly_exit_in_mid_training_is_a_fault(exit_code: int) -> None:
    """A rank that leaves without having finished takes the run down with it otherwise."""
    driven = begun()
    driven.step(2)
    driven.wait(2.0)
    driven.kill(driven.child_of(0), exit_code=exit_code, signal=None)
    assert [rank for rank, _ in faults(driven)] == [0]


def test_configured_deadlines_are_used() -> None:
    """A shorter step limit is honoured."""
    driven = DrivenMachine(limits=Limits(deadlines=Deadlines(step_s=2.0)))
    driven.begin()
    driven.step(1)
    driven.wait(2.0)
    assert not faults(driven)
    driven.wait(GRACE_S)
    assert len(faults(driven)) == 1
