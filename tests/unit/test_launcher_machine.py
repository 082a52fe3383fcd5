"""The launcher machine, driven by hand: lifecycle, commits, saves, ends."""

from __future__ import annotations

import math

import pytest

from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.events import messages as wire
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Phase, Role, StepKind
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.machine import MachineStart
from nvrx_sre.testing.clock import EPOCH_NS
from nvrx_sre.testing.driven import DrivenMachine


def begun(**options: int) -> DrivenMachine:
    """A machine whose first generation has entered its step loop; only what follows is kept."""
    driven = DrivenMachine(**options)  # type: ignore[arg-type]  # keyword arguments of the driver
    driven.begin()
    driven.forget()
    return driven


def test_start_spawns_ranks_writer_and_standbys() -> None:
    """One worker a rank with its rank, a writer, the standbys."""
    driven = DrivenMachine(num_ranks=3, num_standbys=2)
    spawned = [(item.role, item.rank) for item in driven.all(c.Spawn)]
    assert spawned == [
        (Role.WORKER, 0),
        (Role.WORKER, 1),
        (Role.WORKER, 2),
        (Role.WRITER, None),
        (Role.STANDBY, None),
        (Role.STANDBY, None),
    ]


def test_nobody_goes_before_all_are_ready() -> None:
    """The generation opens with the last `Ready`, once, with children in the order of ranks."""
    driven = DrivenMachine()
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    driven.make_ready(driven.child_of(1))
    assert not driven.all(c.OpenGeneration)
    driven.make_ready(driven.child_of(0))
    opened = driven.all(c.OpenGeneration)
    assert [(item.generation, item.world_size) for item in opened] == [(1, 2)]
    assert opened[0].children == (driven.child_of(0), driven.child_of(1))
    assert opened[0].hot_allowed
    assert opened[0].checkpoints_back == 0


def test_formed_and_restored_need_every_rank() -> None:
    """Events of the generation as a whole come with its last rank."""
    driven = DrivenMachine()
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    for rank in range(2):
        driven.make_ready(driven.child_of(rank))
    driven.enter(0, Phase.REBUILD)
    assert not driven.events(schema.GenerationFormed)
    driven.enter(1, Phase.REBUILD)
    formed = driven.events(schema.GenerationFormed)
    assert [item.pids for item in formed] == [[101, 102]]
    driven.restore()
    assert [(item.step, item.source) for item in driven.events(schema.StateRestored)] == [(0, "fresh")]
    assert not driven.all(c.Fence)


def test_step_is_committed_by_the_slowest_rank() -> None:
    """A later report implies the earlier ones; nothing is committed before every rank reported it."""
    driven = begun()
    driven.step(3, ranks=[0])
    assert driven.machine.high_water == 0
    driven.step(2, ranks=[1])
    assert driven.machine.high_water == 2
    driven.step(3, ranks=[1])
    assert driven.machine.high_water == 3


def test_steps_are_recorded_as_one_aggregate_a_second() -> None:
    """Many steps, one event; its times are the difference of the slowest rank's totals."""
    driven = begun()
    for step in range(1, 6):
        driven.step(step)
    assert not driven.events(schema.StepsCommitted)
    driven.wait(1.0)
    (event,) = driven.events(schema.StepsCommitted)
    assert (event.first_step, event.last_step, event.kind) == (1, 5, StepKind.NEW)
    assert event.step_s == pytest.approx(0.5)
    assert (event.tokens, event.hot_captured, event.hot_sealed_step) == (500, 5, 5)
    assert event.loss == 1.0 / 5


def test_the_first_step_begins_once() -> None:
    """A rank comes back to it from fetching its data: that is part of the step, which began before."""
    driven = begun()
    began_ns = driven.now_ns
    driven.wait(2.0)
    driven.enter(0, Phase.FIRST_STEP)
    driven.wait(1.0)
    driven.step(1)
    driven.wait(1.0)
    (event,) = driven.events(schema.StepsCommitted)
    assert event.started_ns == driven.clock.to_wall_ns(began_ns)


def test_reports_of_an_older_generation_are_ignored() -> None:
    """Fencing: what a generation says after it was left counts for nothing."""
    driven = begun()
    driven.step(1)
    driven.raise_in(1, 2)
    driven.leave_generation(0, 1)
    driven.step(5, generation=1)
    assert (driven.machine.generation, driven.machine.high_water) == (2, 1)


def test_sealed_step_is_published_once_an_input_after_the_hand_over() -> None:
    """The slots are held before they may be overwritten."""
    driven = begun()
    driven.step(10, durable=True)
    assert driven.order(c.StartSave, c.PublishSealed) == ["StartSave", "PublishSealed"]
    assert driven.all(c.StartSave)[0].slots == (1, 1)
    assert driven.all(c.PublishSealed)[0].step == 10


def test_step_without_a_slot_on_one_rank_is_not_sealed() -> None:
    """A due save of it is skipped and counted, with the reason."""
    driven = begun()
    driven.step(10, ranks=[0], durable=True)
    driven.step(10, ranks=[1], durable=True, slot=-1)
    assert not driven.all(c.PublishSealed)
    assert [item.reason for item in driven.events(schema.SaveSkipped)] == ["no_free_slot"]
    assert driven.all(c.StrandSlots) == [c.StrandSlots(generation=1, step=10)]


def test_a_step_that_nobody_captures_strands_nothing() -> None:
    """Steps between two hot captures."""
    driven = begun()
    driven.step(1, slot=-1)
    assert not driven.all(c.StrandSlots)


def test_one_save_is_in_flight() -> None:
    """Slots go back at the commit, the next save starts after the verification."""
    driven = begun()
    driven.step(10, durable=True)
    driven.write(10, "written", "committed")
    assert [item.step for item in driven.all(c.ReleaseSlots)] == [10]
    driven.step(20, durable=True)
    assert [item.step for item in driven.all(c.StartSave)] == [10]
    driven.write(10, "verified")
    assert [item.step for item in driven.all(c.StartSave)] == [10, 20]
    assert [item.step for item in driven.events(schema.SaveVerified)] == [10]


def test_failed_save_releases_its_slots() -> None:
    """The reason is the writer's; training goes on."""
    driven = begun()
    driven.step(10, durable=True)
    driven.write(10, "failed", reason="storage")
    assert [item.step for item in driven.all(c.ReleaseSlots)] == [10]
    assert [item.reason for item in driven.events(schema.SaveFailed)] == ["storage"]


def test_dead_writer_is_replaced_and_redoes_the_save() -> None:
    """The held slots are written again by the next writer, once it is parked."""
    driven = begun()
    driven.step(10, durable=True)
    writer = next(item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER)
    driven.kill(writer)
    assert not driven.all(c.ReleaseSlots)
    driven.start_child(driven.all(c.Spawn)[-1].child)
    assert [item.step for item in driven.all(c.StartSave)] == [10, 10]
    driven.write(10, "written", "committed", "verified")
    assert [item.step for item in driven.events(schema.SaveVerified)] == [10]


def test_save_that_dies_with_every_writer_is_given_up() -> None:
    """Two redos, then the slots are released: nothing is held for ever."""
    driven = begun()
    driven.step(10, durable=True)
    for _ in range(3):
        writer = [item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER][-1]
        driven.kill(writer)
        driven.wait(40.0)
        driven.start_child([item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER][-1])
    assert [item.step for item in driven.all(c.ReleaseSlots)] == [10]
    assert {item.reason for item in driven.events(schema.SaveFailed)} == {"writer_died"}


def test_restore_below_the_high_water_is_fenced_before_it_is_told() -> None:
    """`RolledBack`, the durable fence, then `StateRestored`."""
    start = MachineStart(generation=4, high_water=25, wall_offset_ns=EPOCH_NS, commits_on_record=True)
    driven = DrivenMachine(start=start)
    driven.begin()
    order = driven.order(schema.RolledBack, c.Fence, schema.StateRestored)
    assert order == ["RolledBack", "Fence", "StateRestored"]
    assert [(item.generation, item.step) for item in driven.all(c.Fence)] == [(5, 0)]


def test_a_restored_step_that_no_rank_could_report_is_committed_before_it() -> None:
    """Both ranks sealed step 4 and one reported it: the restore proves it, so H is 4 and nothing is rolled back."""
    driven = begun()
    for step in range(1, 4):
        driven.step(step)
    driven.step(4, ranks=[0])
    driven.raise_in(0, 5)
    driven.leave_generation(0, 1)
    driven.forget()
    driven.restore(4, "hot")
    proven = driven.events(schema.StepsCommitted)
    assert [(item.kind, item.first_step, item.last_step) for item in proven] == [(StepKind.NEW, 4, 4)]
    assert proven[0].proven_by_restore and proven[0].hot_sealed_step == -1
    assert driven.order(schema.StepsCommitted, schema.StateRestored) == ["StepsCommitted", "StateRestored"]
    assert driven.machine.high_water == 4


@pytest.mark.parametrize("ends", ["finished", "preempted"])
def test_a_restored_step_that_no_rank_could_report_is_saved_at_the_end(ends: str) -> None:
    """Nothing is trained above it: the slots it was restored from are all there is, and the launcher knows them."""
    driven = begun()
    for step in range(1, 4):
        driven.step(step)
    driven.step(4, ranks=[0])
    driven.raise_in(0, 5)
    driven.leave_generation(0, 1)
    driven.restore(4, "hot", slot=1)
    driven.forget()
    if ends == "preempted":
        driven.feed(c.SignalReceived(signal=15, by_person=False))
    else:
        for rank in range(2):
            driven.say(driven.child_of(rank), wire.Finished(generation=2, step=4, result={}, mono_ns=driven.now_ns))
    (save,) = driven.all(c.StartSave)
    assert (save.step, save.generation, save.slots) == (4, 1, (1, 1))


def test_steps_that_a_killed_launcher_had_not_recorded_are_committed_before_the_rollback_record() -> None:
    """Its journal ends at 17, its newest durable step is 20: 18 to 20 are counted once, and nothing was lost."""
    start = MachineStart(generation=4, high_water=17, wall_offset_ns=EPOCH_NS, commits_on_record=True)
    driven = DrivenMachine(start=start)
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    for rank in range(2):
        driven.make_ready(driven.child_of(rank))
    driven.restore(20, "durable")
    order = driven.order(schema.StepsCommitted, schema.RolledBack, c.Fence, schema.StateRestored)
    assert order == ["StepsCommitted", "RolledBack", "Fence", "StateRestored"]
    assert [(item.first_step, item.last_step) for item in driven.events(schema.StepsCommitted)] == [(18, 20)]
    assert [(item.step, item.high_water) for item in driven.events(schema.RolledBack)] == [(20, 20)]


def test_redone_steps_are_told_apart() -> None:
    """At or below H a step is redone; the first new one after an incident is recorded alone."""
    driven = begun()
    for step in range(1, 6):
        driven.step(step)
    driven.raise_in(0, 6)
    driven.leave_generation(0, 1)
    driven.restore(3, "durable")
    driven.forget()
    for step in range(4, 8):
        driven.step(step)
    ranges = [(item.kind, item.first_step, item.last_step) for item in driven.events(schema.StepsCommitted)]
    assert ranges == [(StepKind.REDONE, 4, 5), (StepKind.NEW, 6, 6)]


def test_replay_with_another_loss_is_told() -> None:
    """Bit for bit, on the same world size; an equal replay says nothing."""
    driven = begun()
    driven.step(1)
    driven.step(2)
    driven.raise_in(0, 3)
    driven.leave_generation(0, 1)
    driven.restore(0)
    driven.step(1)
    assert not driven.events(schema.ReplayDiverged)
    driven.step(2, loss=math.nextafter(0.5, 1.0))
    assert [item.step for item in driven.events(schema.ReplayDiverged)] == [2]
    assert driven.machine.losses()[1] == 1.0


def test_a_replay_that_differs_ends_an_exact_run() -> None:
    """Exit 70 with a reason that names the step; the state behind it is not saved."""
    driven = begun(exact_replay=True)
    driven.step(9)
    driven.step(10)
    driven.raise_in(0, 11)
    driven.leave_generation(0, 1)
    driven.restore(9, "hot")
    driven.forget()
    driven.step(10, loss=math.nextafter(0.1, 1.0), durable=True)
    for spawn in driven.all(c.Spawn):
        driven.kill(spawn.child)
    (stop,) = driven.all(c.Stop)
    assert stop.exit_code == 70
    assert stop.reason.startswith("step 10 gave another loss when it was executed again")
    assert not driven.events(schema.SaveStarted)
    assert [item.exit_code for item in driven.events(schema.RunFinished)] == [70]


def test_equal_losses_of_ranks_give_exactly_that_loss() -> None:
    """The mean of equal numbers is the number, also over three ranks."""
    driven = begun(num_ranks=3)
    driven.step(1, loss=0.1)
    assert driven.machine.losses() == {1: 0.1}


def test_ranks_that_restored_different_steps_do_not_go_on() -> None:
    """A fault of its own; no state is announced."""
    driven = DrivenMachine()
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    for rank in range(2):
        driven.make_ready(driven.child_of(rank))
    for rank in range(2):
        restored = wire.Restored(generation=1, step=rank, source="hot", seconds=0.1, mono_ns=driven.now_ns)
        driven.say(driven.child_of(rank), restored)
    assert [item.fault for item in driven.events(schema.FaultDetected)] == ["checkpoint_corrupt"]
    assert not driven.events(schema.StateRestored)


def test_c03_rejected_checkpoint_is_moved_once() -> None:
    """Every rank reports it; the first one counts. A hot one is only told."""
    driven = begun()
    for rank in range(2):
        for tier, directory in (("durable", "step-00000010-g00001"), ("hot", "")):
            rejected = wire.Rejected(
                generation=1, step=10, tier=tier, directory=directory, reason="checksum", message="m"
            )
            driven.say(driven.child_of(rank), rejected)
    assert [item.directory for item in driven.all(c.MoveRejected)] == ["step-00000010-g00001"]
    assert [item.tier for item in driven.events(schema.CheckpointRejected)] == ["hot"]


def test_what_is_rejected_counts_although_another_rank_has_raised_over_it() -> None:
    """Only the rank that found the damage tells of it; one that found none may be the first to fail."""
    driven = DrivenMachine()
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    for rank in range(2):
        driven.make_ready(driven.child_of(rank))
    driven.raise_in(1, 1, fault="checkpoint_corrupt", phase="load")
    assert driven.events(schema.FaultDetected)
    rejected = wire.Rejected(generation=1, step=10, tier="hot", directory="", reason="digest", message="m")
    driven.say(driven.child_of(0), rejected)
    assert [item.step for item in driven.events(schema.CheckpointRejected)] == [10]


def test_slots_are_granted_to_the_rank_that_wants_them() -> None:
    """The request becomes a command with the sender's rank."""
    driven = begun()
    wanted = wire.SlotsWanted(generation=1, layout_hash="h", data_bytes=100, blob_bytes=10, takes_snapshots=True)
    driven.say(driven.child_of(1), wanted)
    granted = driven.all(c.GrantSlots)
    assert [(item.rank, item.data_bytes, item.takes_snapshots) for item in granted] == [(1, 100, True)]


def test_run_finishes_after_the_last_save_is_verified() -> None:
    """Ranks stay until the drain is over; then all leave, the run is finished, stop 0 with rank 0's result."""
    driven = begun(num_standbys=0)
    driven.step(10, durable=True)
    for rank in range(2):
        finished = wire.Finished(generation=1, step=10, result={"rank": rank}, mono_ns=driven.now_ns)
        driven.say(driven.child_of(rank), finished)
    assert not driven.all(c.LeaveChild)
    driven.write(10, "written", "committed", "verified")
    assert len(driven.all(c.LeaveChild)) == 3
    for child in (1, 2, 3):
        driven.kill(child, exit_code=0, signal=None)
    (stop,) = driven.all(c.Stop)
    assert (stop.exit_code, stop.result) == (0, {"rank": 0})
    assert driven.order(schema.RunFinished, c.Stop) == ["RunFinished", "Stop"]
    assert driven.machine.next_deadline_ns() is None


def test_final_drain_is_bounded() -> None:
    """A writer that never comes back does not keep the run, which then is not finished."""
    driven = begun(num_standbys=0)
    driven.step(10, durable=True)
    for rank in range(2):
        driven.say(driven.child_of(rank), wire.Finished(generation=1, step=10, result={}, mono_ns=driven.now_ns))
    driven.wait(Deadlines().final_drain_s + 60.0)
    assert [item.exit_code for item in driven.all(c.Stop)] == [75]


@pytest.mark.parametrize(("by_person", "exit_code"), [(False, 143), (True, 130)])
def test_c46_preemption_saves_without_the_ranks(by_person: bool, exit_code: int) -> None:
    """The newest sealed step is handed over, ranks are ended, the exit waits for the verification."""
    driven = begun(num_standbys=0)
    driven.step(7)
    driven.feed(c.SignalReceived(signal=15, by_person=by_person))
    assert [item.step for item in driven.all(c.StartSave)] == [7]
    driven.wait(2 * Deadlines().interrupt_grace_s)
    assert {item.child for item in driven.all(c.Kill)} == {1, 2}
    driven.kill(1)
    driven.kill(2)
    assert not driven.all(c.Stop)
    driven.write(7, "written", "committed", "verified")
    driven.kill(3, exit_code=0, signal=None)
    assert [item.exit_code for item in driven.all(c.Stop)] == [exit_code]
    assert not driven.events(schema.FaultDetected)


def test_preemption_while_the_writer_is_busy_saves_afterwards() -> None:
    """The save in flight ends first, then the newest sealed step is written."""
    driven = begun(num_standbys=0)
    driven.step(10, durable=True)
    driven.step(12)
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    driven.write(10, "written", "committed", "verified")
    assert [item.step for item in driven.all(c.StartSave)] == [10, 12]


def test_preemption_during_recovery_still_saves() -> None:
    """The sealed step of the generation that was left is good until a restore says otherwise."""
    driven = begun()
    driven.step(7)
    driven.raise_in(0, 8)
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    assert [(item.step, item.generation) for item in driven.all(c.StartSave)] == [(7, 1)]


def test_second_ctrl_c_kills_at_once() -> None:
    """A person who insists does not wait for the save."""
    driven = begun(num_standbys=0)
    driven.step(7)
    driven.feed(c.SignalReceived(signal=2, by_person=True))
    driven.feed(c.SignalReceived(signal=2, by_person=True))
    assert {item.child for item in driven.all(c.Kill)} == {1, 2, 3}
    for child in (1, 2, 3):
        driven.kill(child)
    assert [item.exit_code for item in driven.all(c.Stop)] == [130]


def test_halt_request_drains_and_exits_93() -> None:
    """An operator's or the brake's halt is no fault."""
    driven = begun(num_standbys=0)
    driven.step(7)
    driven.feed(c.HaltSeen(reason="bad data"))
    driven.write(7, "written", "committed", "verified")
    for child in (1, 2, 3):
        driven.kill(child)
    assert [item.reason for item in driven.events(schema.HaltRequested)] == ["bad data"]
    assert [item.exit_code for item in driven.all(c.Stop)] == [93]


def test_injected_faults_are_recorded() -> None:
    """What the plan fires is told before it happens, with the rank."""
    driven = begun()
    injected = wire.Injected(generation=1, spec="exception@1:40", step=40, passes=1, mono_ns=driven.now_ns)
    driven.say(driven.child_of(1), injected)
    assert [record.rank for record in driven.records_of(schema.FaultInjected)] == [1]


@pytest.mark.parametrize("phase", ["exit", "teardown"])
def test_what_strikes_while_the_run_ends_is_recorded(phase: str) -> None:
    """Also a preemption that the plan itself brought about: else it would strike the next launcher once more."""
    driven = begun(num_standbys=0)
    driven.step(7)
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    injected = wire.Injected(generation=1, spec=f"sigterm@1:7/{phase}", step=8, passes=1, mono_ns=driven.now_ns)
    driven.say(driven.child_of(1), injected)
    assert [event.spec for event in driven.events(schema.FaultInjected)] == [f"sigterm@1:7/{phase}"]


def test_stamps_are_wall_time() -> None:
    """Monotonic stamps of ranks come out as anchored wall time."""
    driven = DrivenMachine(limits=Limits())
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    entered = driven.events(schema.PhaseEntered)
    assert {item.entered_ns for item in entered} == {EPOCH_NS + 1_000_000_000}


@pytest.mark.parametrize(("by_person", "exit_code"), [(False, 143), (True, 130)])
def test_a_run_that_is_ended_in_its_last_save_was_ended(by_person: bool, exit_code: int) -> None:
    """A signal cuts the final drain short: the last step is not saved, which is nobody's failure."""
    driven = begun(num_standbys=0)
    driven.step(10, durable=True)
    for rank in range(2):
        driven.say(driven.child_of(rank), wire.Finished(generation=1, step=10, result={}, mono_ns=driven.now_ns))
    driven.feed(c.SignalReceived(signal=15, by_person=by_person))
    driven.wait(Deadlines().preemption_drain_s + 60.0)
    (stop,) = driven.all(c.Stop)
    assert stop.exit_code == exit_code
    assert stop.reason.startswith("finished; the last step is not saved"), stop.reason


def test_a_run_whose_last_step_is_not_saved_is_to_be_started_again() -> None:
    """Every save failed: what was trained goes with the launcher, so 0 would say too much. The reason tells why."""
    driven = begun(num_standbys=0)
    driven.step(10, durable=True)
    for rank in range(2):
        driven.say(driven.child_of(rank), wire.Finished(generation=1, step=10, result={}, mono_ns=driven.now_ns))
    failed = wire.WriterProgress(
        step=10, stage="failed", directory="", size_bytes=0, seconds=0.0, reason="storage", message="disk full"
    )
    driven.say(3, failed)
    for child in (1, 2, 3):
        driven.kill(child, exit_code=0, signal=None)
    (stop,) = driven.all(c.Stop)
    assert stop.exit_code == 75
    assert stop.reason == "finished; the last step is not saved (storage: disk full), nothing is durable"


def test_a_last_step_that_was_read_back_damaged_is_not_saved() -> None:
    """Its commit was moved aside: the run goes back behind it, so it neither finished nor is it durable there."""
    driven = begun(num_standbys=0)
    driven.step(5, durable=True)
    driven.write(5, "written", "committed", "verified")
    driven.step(10, durable=True)
    for rank in range(2):
        driven.say(driven.child_of(rank), wire.Finished(generation=1, step=10, result={}, mono_ns=driven.now_ns))
    driven.write(10, "written", "committed")
    driven.write(10, "failed", reason="verify")
    for child in (1, 2, 3):
        driven.kill(child, exit_code=0, signal=None)
    (stop,) = driven.all(c.Stop)
    assert stop.exit_code == 75
    assert stop.reason == "finished; the last step is not saved (verify), durable up to step 5"


def test_a_last_step_that_ranks_did_not_capture_is_said_to_be_lost() -> None:
    """They say why in their logs, and 0 would say too much."""
    driven = begun(num_standbys=0)
    driven.step(9)
    driven.step(10, slot=-1)
    for rank in range(2):
        driven.say(driven.child_of(rank), wire.Finished(generation=1, step=10, result={}, mono_ns=driven.now_ns))
    driven.wait(Deadlines().final_drain_s + 60.0)
    (stop,) = driven.all(c.Stop)
    assert stop.exit_code == 75
    assert "not captured on every rank: their logs say why" in stop.reason


def test_a_run_without_a_step_has_finished() -> None:
    """Nothing was trained, so nothing is lost: to start it again would go on for ever."""
    driven = begun(num_standbys=0)
    for rank in range(2):
        driven.say(driven.child_of(rank), wire.Finished(generation=1, step=0, result={}, mono_ns=driven.now_ns))
    for child in (1, 2, 3):
        driven.kill(child, exit_code=0, signal=None)
    assert [(item.exit_code, item.reason) for item in driven.all(c.Stop)] == [(0, "finished")]
