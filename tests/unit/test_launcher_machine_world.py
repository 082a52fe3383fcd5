"""The world becomes smaller around an excluded device; survivors keep process and device, nothing sealed is lost."""

from __future__ import annotations

import pytest

from nvrx_sre.core.limits import CapLimits, Limits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Action, FaultClass, Layer, Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.policy.history import History
from nvrx_sre.testing.driven import DrivenMachine

NO_BACKOFF = Limits(caps=CapLimits(backoff_s=(0.0,)))


def begun(num_ranks: int = 4, **settings: object) -> DrivenMachine:
    """In the step loop, step 1 committed and sealed; the world may shrink to 2 unless told otherwise."""
    wanted = {"num_standbys": 0, "min_world_size": 2, "limits": NO_BACKOFF} | settings
    driven = DrivenMachine(num_ranks=num_ranks, **wanted)  # type: ignore[arg-type]  # settings of the machine
    driven.begin()
    driven.step(1)
    return driven


def die(driven: DrivenMachine, rank: int) -> None:
    """The rank's process is killed, its peers leave the generation."""
    peers = [other for other in range(driven.num_ranks) if other != rank]
    driven.kill(driven.child_of(rank))
    driven.leave_generation(*peers)


def replace(driven: DrivenMachine, rank: int) -> None:
    """A fresh process takes the rank, the next generation restores step 1."""
    driven.start_child(driven.all(c.Spawn)[-1].child)
    driven.make_ready(driven.child_of(rank))
    driven.restore(1, "hot")


def blame(driven: DrivenMachine, rank: int = 1) -> None:
    """The device of `rank` is the root three times without progress; the third exclusion is under way."""
    for _ in range(2):
        die(driven, rank)
        replace(driven, rank)
    driven.forget()
    die(driven, rank)


def save(driven: DrivenMachine, step: int = 1) -> None:
    driven.write(step, "written", "committed", "verified")


def test_device_that_is_root_three_times_is_excluded() -> None:
    """The decision says so, the event names the device, the next world has no more than the others."""
    driven = begun()
    blame(driven)
    decided = driven.events(schema.RestartDecided)[-1]
    assert (decided.action, decided.layer, decided.backoff_s) == (Action.RESTART, Layer.WORKER, 0.0)
    (record,) = driven.records_of(schema.RankExcluded)
    assert isinstance(record.event, schema.RankExcluded)
    assert (record.rank, record.event.device, record.event.world_size) == (1, "node/1", 3)
    save(driven)
    assert [(item.world_size, item.hot_allowed) for item in driven.all(c.OpenGeneration)] == [(3, False)]


def test_survivors_move_to_contiguous_ranks_and_keep_process_and_device() -> None:
    """Nobody is started or killed for it; who was rank 2 and 3 is 1 and 2, on the devices of before."""
    driven = begun()
    children = [driven.child_of(rank) for rank in range(4)]
    blame(driven)
    num_assigned, num_spawned = len(driven.all(c.AssignRank)), len(driven.all(c.Spawn))
    driven.forget()
    save(driven)
    moved = driven.all(c.AssignRank)[num_assigned:]
    assert [(item.child, item.rank, item.local_rank) for item in moved] == [
        (children[0], 0, 0),
        (children[2], 1, 2),
        (children[3], 2, 3),
    ]
    assert {item.world_size for item in moved} == {3}
    assert len(driven.all(c.Spawn)) == num_spawned
    assert not driven.all(c.Kill)
    assert driven.all(c.OpenGeneration)[0].children == (children[0], children[2], children[3])


def test_newest_sealed_step_is_saved_before_its_slots_go() -> None:
    """The smaller world cannot use the slots: the save comes first, then the slots, then the ranks, then 'go'."""
    driven = begun()
    blame(driven)
    assert [(item.step, item.world_size) for item in driven.all(c.StartSave)] == [(1, 4)]
    assert not driven.all(c.OpenGeneration)
    assert not driven.events(schema.TeardownFinished)
    save(driven)
    order = driven.order(c.StartSave, schema.SaveVerified, schema.TeardownFinished, c.DropSlots, c.OpenGeneration)
    assert order == ["StartSave", "SaveVerified", "TeardownFinished", "DropSlots", "OpenGeneration"]
    assert [item.num_ranks for item in driven.all(c.DropSlots)] == [3]


def test_save_before_a_smaller_world_is_bounded() -> None:
    """A writer that hangs costs the save, never the run."""
    driven = begun()
    blame(driven)
    driven.wait(NO_BACKOFF.deadlines.final_drain_s)
    assert [item.world_size for item in driven.all(c.OpenGeneration)] == [3]
    assert driven.events(schema.SaveFailed)[-1].reason == schema.SaveFailure.INTERRUPTED


def test_a_process_that_does_not_even_die_keeps_no_deadline_due() -> None:
    """It is in the kernel, on a device that the world has lost: killed again and again, and the loop sleeps between."""
    driven = begun()
    die(driven, 1)
    replace(driven, 1)
    die(driven, 1)
    driven.start_child(driven.all(c.Spawn)[-1].child)
    driven.wait(NO_BACKOFF.deadlines.init_s)
    save(driven)
    assert [item.world_size for item in driven.all(c.OpenGeneration)][-1] == 3
    driven.forget()
    driven.wait(3 * NO_BACKOFF.deadlines.teardown_s)
    due_ns = driven.machine.next_deadline_ns()
    assert due_ns is not None and due_ns > driven.now_ns
    assert {item.reason for item in driven.all(c.Kill)} == {"did not end in time"}


def test_smaller_world_trains_saves_and_finishes() -> None:
    """Three reports commit a step; devices of the new generation are those that are left."""
    driven = begun()
    blame(driven)
    save(driven)
    driven.num_ranks = 3
    driven.forget()
    driven.restore(1, "durable")
    assert driven.events(schema.GenerationFormed)[0].devices == ["node/0", "node/2", "node/3"]
    driven.step(2, durable=True)
    assert driven.machine.high_water == 2
    assert [(item.step, item.world_size) for item in driven.all(c.StartSave)] == [(2, 3)]


def test_fault_in_the_smaller_world_is_counted_against_the_right_device() -> None:
    """Rank 1 runs on the device with local index 2 now; its process is replaced there."""
    driven = begun()
    blame(driven)
    save(driven)
    driven.num_ranks = 3
    driven.restore(1, "durable")
    driven.step(2)
    driven.forget()
    die(driven, 1)
    assert [item.device for item in driven.events(schema.FaultDetected)] == ["node/2"]
    spawn = driven.all(c.Spawn)[-1]
    assert (spawn.rank, spawn.local_rank, spawn.world_size) == (1, 2, 3)


def test_whole_units_leave_a_spare_that_the_next_exclusion_uses() -> None:
    """Pairs: without device 1 two of three take part; without device 0 as well the idle one does."""
    driven = begun(world_multiple=2)
    children = [driven.child_of(rank) for rank in range(4)]
    blame(driven)
    save(driven)
    assert driven.all(c.OpenGeneration)[0].children == (children[0], children[2])
    assert [item.child for item in driven.all(c.LeaveChild)] == [children[3]]
    driven.kill(children[3], exit_code=0, signal=None)
    driven.num_ranks = 2
    driven.restore(1, "durable")
    driven.step(2)
    blame_again(driven)
    assert [item.device for item in driven.events(schema.RankExcluded)] == ["node/0"]
    save(driven, 2)
    spawn = driven.all(c.Spawn)[-1]
    assert (spawn.rank, spawn.local_rank) == (1, 3)


def blame_again(driven: DrivenMachine) -> None:
    """Rank 0 of the world of two is the root three times; its slots hold step 2."""
    for _ in range(2):
        die(driven, 0)
        driven.start_child(driven.all(c.Spawn)[-1].child)
        driven.make_ready(driven.child_of(0))
        driven.restore(2, "hot")
    driven.forget()
    die(driven, 0)


@pytest.mark.parametrize("settings", [{"min_world_size": 4}, {"min_world_size": None}, {"world_multiple": 4}])
def test_without_room_the_device_is_kept(settings: dict[str, object]) -> None:
    """A world that may not shrink is restarted as it is, until a cap stops it."""
    driven = begun(**settings)
    blame(driven)
    assert not driven.events(schema.RankExcluded)
    reason = driven.events(schema.RestartDecided)[-1].reason
    waits = "caps count from 300 s without progress on (0 s so far)"
    assert reason == f"killed: attempt 3 without progress; {waits}; from step 0, no checkpoint is durable yet"


def test_c35_exception_that_repeats_on_one_rank_never_costs_its_device() -> None:
    """Other hardware is no cure for a deterministic fault: the cap stops the run instead."""
    driven = begun()
    driven.raise_in(1, 2)
    driven.leave_generation(0, 1, 2, 3)
    driven.restore(1, "hot")
    driven.raise_in(1, 2)
    driven.kill(driven.child_of(1))
    driven.leave_generation(0, 2, 3)
    replace(driven, 1)
    driven.raise_in(1, 2)
    assert not driven.events(schema.RankExcluded)
    assert [item.cap for item in driven.events(schema.CapReached)] == ["same_fingerprint"]


def test_device_that_cannot_start_is_excluded_before_the_first_step() -> None:
    """No process can be had on it: the others go on without it rather than exit with 75."""
    driven = DrivenMachine(num_ranks=3, num_standbys=0, min_world_size=2, limits=NO_BACKOFF)
    first, *_ = driven.all(c.Spawn)
    others = [spawn.child for spawn in driven.all(c.Spawn) if spawn.child != first.child]
    for child in others:
        driven.start_child(child)
    for rank in (1, 2):
        driven.make_ready(driven.child_of(rank))
    failing = first.child
    for _ in range(3):
        driven.kill(failing, exit_code=127, signal=None)
        failing = driven.all(c.Spawn)[-1].child
    assert [item.fault for item in driven.events(schema.FaultDetected)] == [FaultClass.STARTUP] * 3
    assert [item.device for item in driven.events(schema.RankExcluded)] == ["node/0"]
    (opened,) = driven.all(c.OpenGeneration)
    assert (opened.world_size, opened.children) == (2, (others[0], others[1]))
    assert {spawn.role for spawn in driven.all(c.Spawn)[-3:]} == {Role.WRITER, Role.WORKER}


def test_process_that_still_starts_hears_its_new_rank_when_it_parks() -> None:
    """The seat moves at once, the assignment follows."""
    driven = DrivenMachine(num_ranks=3, num_standbys=0, min_world_size=2, limits=NO_BACKOFF)
    first, second, late, *_ = driven.all(c.Spawn)
    driven.start_child(second.child)
    driven.make_ready(second.child)
    failing = first.child
    for _ in range(3):
        driven.kill(failing, exit_code=127, signal=None)
        failing = driven.all(c.Spawn)[-1].child
    assert [(item.child, item.rank) for item in driven.all(c.AssignRank)][-1] == (second.child, 0)
    driven.start_child(late.child)
    assigned = driven.all(c.AssignRank)[-1]
    assert (assigned.child, assigned.rank, assigned.local_rank, assigned.world_size) == (late.child, 1, 2, 2)
    driven.make_ready(late.child)
    assert [item.world_size for item in driven.all(c.OpenGeneration)] == [2]


def test_next_launcher_starts_without_excluded_devices() -> None:
    """The journal remembers; a reset of the budgets brings the device back."""
    driven = begun()
    blame(driven)
    history = History()
    for record in driven.records:
        history.apply(record)
    assert history.excluded == ["node/1"]
    again = DrivenMachine(num_ranks=4, num_standbys=0, min_world_size=2, history=history)
    workers = [item for item in again.all(c.Spawn) if item.role is Role.WORKER]
    assert [(item.rank, item.local_rank, item.world_size) for item in workers] == [(0, 0, 3), (1, 2, 3), (2, 3, 3)]
