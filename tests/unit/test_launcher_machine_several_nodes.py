"""The machine over several nodes: who is waited for, what a lost node takes with it, saves that nodes share."""

from __future__ import annotations

from typing import Any

import pytest

from nvrx_sre.core.limits import CapLimits, Limits, NodeLimits
from nvrx_sre.events import messages as wire
from nvrx_sre.events import schema
from nvrx_sre.events.schema import FaultClass, Record, Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.policy.history import History
from nvrx_sre.testing.driven import DrivenMachine

LIMITS = Limits(caps=CapLimits(backoff_s=(0.0,)), nodes=NodeLimits(join_s=60, grace_s=5))


def launched(num_nodes: int = 2, num_ranks: int = 4, **settings: Any) -> DrivenMachine:
    """The leader's launcher has started; no other node is there."""
    wanted = {"num_standbys": 0, "limits": LIMITS} | settings
    return DrivenMachine(num_ranks=num_ranks, num_nodes=num_nodes, **wanted)


def begun(num_nodes: int = 2, num_ranks: int = 4, **settings: Any) -> DrivenMachine:
    """Every node is there, and step 1 is committed and sealed."""
    driven = launched(num_nodes, num_ranks, **settings)
    for node in range(1, num_nodes):
        driven.join(node)
    driven.begin()
    driven.step(1)
    driven.forget()
    return driven


def spawned(driven: DrivenMachine, node: int) -> list[tuple[Role, int | None]]:
    """What was started on a node."""
    return [(item.role, item.rank) for item in driven.all(c.Spawn) if item.node == node]


def writer_of(driven: DrivenMachine, node: int) -> int:
    """The node's newest writer."""
    return [item.child for item in driven.all(c.Spawn) if (item.role, item.node) == (Role.WRITER, node)][-1]


def opened(driven: DrivenMachine) -> list[int]:
    """World sizes of the generations that were opened."""
    return [item.world_size for item in driven.all(c.OpenGeneration)]


def lose_and_leave(driven: DrivenMachine, node: int, *survivors: int) -> None:
    """The node is lost, the ranks elsewhere leave the generation."""
    driven.lose(node)
    driven.leave_generation(*survivors)


def return_of(driven: DrivenMachine, node: int) -> None:
    """The node is back, its new children are parked and its ranks ready."""
    num_before = len(driven.all(c.Spawn))
    driven.join(node)
    fresh = driven.all(c.Spawn)[num_before:]
    for spawn in fresh:
        driven.start_child(spawn.child)
    for spawn in fresh:
        if spawn.rank is not None:
            driven.make_ready(spawn.child)


def test_a_node_gets_its_children_when_it_joins() -> None:
    """Ranks node by node with their local index, a writer and the standbys of each."""
    driven = launched(num_standbys=1)
    assert spawned(driven, 0) == [(Role.WORKER, 0), (Role.WORKER, 1), (Role.WRITER, None), (Role.STANDBY, None)]
    assert spawned(driven, 1) == []
    driven.join(1)
    assert set(spawned(driven, 1)) == {(Role.WORKER, 2), (Role.WORKER, 3), (Role.WRITER, None), (Role.STANDBY, None)}
    assert [(item.rank, item.local_rank) for item in driven.all(c.Spawn) if item.rank is not None] == [
        (0, 0),
        (1, 1),
        (2, 0),
        (3, 1),
    ]


def test_devices_have_the_names_of_their_nodes() -> None:
    """Faults are counted against the host that joined, whatever its number."""
    driven = begun()
    driven.kill(driven.child_of(3))
    assert driven.events(schema.FaultDetected)[0].device == "host1/1"


def test_launchers_on_one_host_are_told_apart() -> None:
    """Two nodes of one name, as in a test, or hosts that are all called localhost: no device is two."""
    driven = launched(num_nodes=3, num_ranks=3, node="host2")
    driven.join(1)
    driven.join(2)
    driven.num_ranks = 3
    driven.begin()
    (formed,) = driven.events(schema.GenerationFormed)
    assert formed.devices == ["host2/0", "host1/0", "host2-2/0"]


def test_nobody_goes_before_every_node_is_there() -> None:
    """The leader's ranks wait, ready, for those of a node that comes late."""
    driven = launched()
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    driven.make_ready(driven.child_of(0))
    driven.make_ready(driven.child_of(1))
    driven.wait(50)
    assert opened(driven) == []
    return_of(driven, 1)
    assert opened(driven) == [4]


def waited_in_vain(driven: DrivenMachine) -> c.Stop:
    """How a run ends that a node did not come to: after `join_s`, and not before."""
    driven.wait(59)
    assert not driven.all(c.Stop)
    driven.wait(2)
    for spawn in driven.all(c.Spawn):
        driven.kill(spawn.child)
    (stop,) = driven.all(c.Stop)
    return stop


def test_a_node_that_never_comes_ends_the_run_retryable() -> None:
    """Exit 75 with the node's number, after the limit and not before."""
    driven = launched()
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    stop = waited_in_vain(driven)
    assert (stop.exit_code, stop.reason.split(";")[0]) == (75, "node 1 did not come within 60 s")


def test_a_node_that_was_refused_and_did_not_come_since_is_not_waited_for_again() -> None:
    """Exit 78 with what its launcher was refused for: started again as it is, it would be refused again."""
    driven = launched()
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    driven.feed(c.NodeRefused(node=1, reason="--keep is 3 here and 5 there"))
    stop = waited_in_vain(driven)
    assert (stop.exit_code, stop.reason.split("; durable")[0]) == (
        78,
        "node 1 did not come within 60 s; node 1 was refused: --keep is 3 here and 5 there",
    )


@pytest.mark.parametrize("is_there", [False, True])
def test_a_refusal_from_before_a_node_was_lost_ends_no_run(is_there: bool) -> None:
    """A node that came was cured, a stranger beside one that is there is none: once lost, it is like any other."""
    driven = launched()
    refused = c.NodeRefused(node=1, reason="--keep is 3 here and 5 there")
    if not is_there:
        driven.feed(refused)
    driven.join(1)
    driven.begin()
    driven.step(1)
    if is_there:
        driven.feed(refused)
        driven.feed(c.NodeRefused(node=9, reason="--node-rank is 9: use 1 to 1 beside the leader's 0"))
    assert not driven.all(c.Stop)
    driven.lose(1)
    driven.wait(61)
    for spawn in driven.all(c.Spawn):
        driven.kill(spawn.child)
    (stop,) = driven.all(c.Stop)
    assert (stop.exit_code, "was refused" in stop.reason) == (75, False)


def test_enough_nodes_go_on_without_the_others_after_a_grace() -> None:
    """At the start: the minimum is there, the rest has had its time."""
    driven = launched(num_nodes=3, num_ranks=6, min_world_size=4)
    driven.join(1)
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    for rank in range(4):
        driven.make_ready(driven.child_of(rank))
    driven.wait(4.9)
    assert opened(driven) == []
    driven.wait(0.2)
    assert opened(driven) == [4]


def test_a_lost_node_is_one_fault_with_the_nodes_lowest_rank() -> None:
    """Not one for each of its children; the record names class, device and evidence."""
    driven = begun()
    driven.lose(1)
    (fault,) = driven.records_of(schema.FaultDetected)
    assert isinstance(fault.event, schema.FaultDetected)
    assert (fault.event.fault, fault.rank, fault.event.device) == (FaultClass.NODE_LOST, 2, "host1/0")
    (lost,) = driven.events(schema.NodeLost)
    assert (lost.node, lost.node_rank, lost.ranks) == ("host1", 1, 2)
    assert {item.child for item in driven.all(c.SendInterrupt)} == {driven.child_of(0), driven.child_of(1)}


def test_the_world_shrinks_around_a_node_that_does_not_come_back() -> None:
    """After the grace, to whole units, from the durable tier: half of what was sealed is gone."""
    driven = begun(min_world_size=2)
    lose_and_leave(driven, 1, 0, 1)
    driven.wait(4.9)
    assert opened(driven) == []
    driven.wait(0.2)
    assert [(item.world_size, item.hot_allowed) for item in driven.all(c.OpenGeneration)] == [(2, False)]
    assert not driven.all(c.StartSave)


def test_units_that_span_nodes_stay_whole() -> None:
    """Three nodes of two ranks in units of four: without one of them four ranks go on."""
    driven = begun(num_nodes=3, num_ranks=6, min_world_size=2, world_multiple=2)
    lose_and_leave(driven, 1, 0, 1, 4, 5)
    driven.wait(5.1)
    assert opened(driven) == [4]
    assert [(item.rank, item.local_rank) for item in driven.all(c.AssignRank)[-4:]] == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_a_world_that_needs_the_node_waits_for_it() -> None:
    """The survivors are ready, nothing is started elsewhere, and the node's return opens the generation."""
    driven = begun()
    lose_and_leave(driven, 1, 0, 1)
    driven.wait(30)
    assert opened(driven) == []
    return_of(driven, 1)
    assert [(item.world_size, item.hot_allowed) for item in driven.all(c.OpenGeneration)] == [(4, False)]


def test_a_node_that_comes_back_within_the_grace_keeps_the_world_whole() -> None:
    """The world does not shrink for a launcher that was only started again."""
    driven = begun(min_world_size=2)
    lose_and_leave(driven, 1, 0, 1)
    driven.wait(3)
    return_of(driven, 1)
    driven.wait(10)
    assert opened(driven) == [4]


def test_a_node_that_comes_back_late_takes_part_from_the_next_formation() -> None:
    """It gets a writer at once and ranks at the next fault; the newest sealed step is saved before."""
    driven = begun(min_world_size=2)
    lose_and_leave(driven, 1, 0, 1)
    driven.wait(5.1)
    driven.num_ranks = 2
    driven.restore()
    driven.forget()
    num_before = len(driven.all(c.Spawn))
    driven.join(1)
    writer = driven.all(c.Spawn)[num_before]
    assert (writer.role, writer.node, len(driven.all(c.Spawn))) == (Role.WRITER, 1, num_before + 1)
    driven.start_child(writer.child)
    driven.step(2)
    driven.raise_in(1, 3)
    driven.leave_generation(0, 1)
    assert [(item.step, item.world_size, set(item.nodes)) for item in driven.all(c.StartSave)] == [(2, 2, {0})]
    driven.write(2, "written", "committed", "verified")
    ranks = driven.all(c.Spawn)[num_before + 1 :]
    assert [(item.rank, item.node) for item in ranks] == [(2, 1), (3, 1)]
    for spawn in ranks:
        driven.start_child(spawn.child)
        driven.make_ready(spawn.child)
    assert opened(driven) == [4]


def with_a_spare() -> DrivenMachine:
    """The world does without node 2; node 1 is replaced by a host of which one device is excluded: 3 of 4 are left."""
    history = History()
    event = schema.RankExcluded(device="spare/0", reason="it was the root three times", world_size=5)
    history.apply(Record(run="run", epoch=1, generation=1, rank=2, seq=1, time_ns=1, event=event))
    driven = begun(num_nodes=3, num_ranks=6, min_world_size=4, history=history)
    lose_and_leave(driven, 2, 0, 1, 2, 3)
    driven.wait(5.1)
    assert opened(driven) == [4]
    driven.num_ranks = 4
    driven.restore(1, "hot")
    driven.forget()
    lose_and_leave(driven, 1, 0, 1)
    driven.feed(c.NodeJoined(node=1, name="spare"))
    return driven


def test_a_host_that_brings_too_little_waits_for_a_node_that_was_left_out() -> None:
    """With node 2 it is enough: the world begins when that is back."""
    driven = with_a_spare()
    for spawn in driven.all(c.Spawn):
        if spawn.node == 1 and spawn.rank is not None:
            driven.start_child(spawn.child)
            driven.make_ready(spawn.child)
    assert opened(driven) == [] and not driven.all(c.Stop)
    return_of(driven, 2)
    assert opened(driven) == [5]


def test_a_host_that_brings_too_little_ends_the_run_retryable_if_nobody_else_comes() -> None:
    """Nothing is wrong that an operator could put right: more nodes may come the next time. Not before the limit."""
    driven = with_a_spare()
    driven.wait(59)
    assert not driven.all(c.Stop) and not driven.all(c.LeaveChild)
    driven.wait(2)
    for spawn in driven.all(c.Spawn):
        driven.kill(spawn.child)
    (stop,) = driven.all(c.Stop)
    assert (stop.exit_code, stop.reason.split(";")[0]) == (75, "node 2 did not come within 60 s")


def test_a_node_without_ranks_of_the_world_may_come_and_go() -> None:
    """It is no fault, and nothing waits for it."""
    driven = begun(min_world_size=2)
    lose_and_leave(driven, 1, 0, 1)
    driven.wait(5.1)
    driven.num_ranks = 2
    driven.restore()
    driven.forget()
    driven.join(1)
    driven.lose(1)
    assert driven.events(schema.FaultDetected) == []
    driven.step(2)
    assert driven.machine.high_water == 2


def test_a_node_lost_while_ranks_gather_is_waited_for_as_well() -> None:
    """Its ranks were on their way in: a second attempt of the same incident."""
    driven = begun()
    driven.raise_in(0, 2)
    driven.leave_generation(0, 1)
    driven.lose(1)
    driven.wait(1)
    assert opened(driven) == []
    return_of(driven, 1)
    assert opened(driven) == [4]


def test_every_writer_of_the_world_shares_a_save() -> None:
    """One hand-over with the node of each rank; written when both shares are, committed by the first writer's word."""
    driven = begun()
    driven.step(2, durable=True)
    (save,) = driven.all(c.StartSave)
    assert (save.nodes, save.world_size) == ((0, 0, 1, 1), 4)
    assert save.attempt
    driven.write(2, "written", node=1)
    assert not driven.events(schema.SaveWritten)
    driven.write(2, "written")
    assert [item.size_bytes for item in driven.events(schema.SaveWritten)] == [2]
    driven.write(2, "committed", "verified")
    assert [item.step for item in driven.events(schema.SaveVerified)] == [2]


def test_a_save_waits_for_every_writer() -> None:
    """The writer of one node still starts up: the save is owed, not begun with a part missing."""
    driven = launched()
    driven.join(1)
    late = next(item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER and item.node == 1)
    for spawn in driven.all(c.Spawn):
        if spawn.child != late:
            driven.start_child(spawn.child)
    for rank in range(4):
        driven.make_ready(driven.child_of(rank))
    driven.restore()
    driven.step(1, durable=True)
    assert not driven.all(c.StartSave)
    driven.start_child(late)
    assert [item.step for item in driven.all(c.StartSave)] == [1]


def test_the_death_of_one_writer_ends_the_attempt_for_all() -> None:
    """The others must not wait for its part; the save is written again, under another name."""
    driven = begun()
    driven.step(2, durable=True)
    first = driven.all(c.StartSave)[0].attempt
    driven.kill(writer_of(driven, 1))
    assert driven.all(c.EndAttempt) == [c.EndAttempt(step=2, generation=1, attempt=first)]
    driven.wait(1)
    driven.start_child(driven.all(c.Spawn)[-1].child)
    second = driven.all(c.StartSave)[1].attempt
    assert second not in ("", first)


def test_a_writer_whose_share_is_committed_may_die_while_another_reads_it_back() -> None:
    """Only the one of rank 0's node is still at it."""
    driven = begun()
    driven.step(2, durable=True)
    driven.write(2, "written", node=1)
    driven.write(2, "written", "committed")
    driven.kill(writer_of(driven, 1))
    driven.write(2, "verified")
    assert [item.step for item in driven.events(schema.SaveVerified)] == [2]
    assert not driven.events(schema.SaveUnverified) and not driven.events(schema.SaveFailed)


def test_a_writer_that_has_done_its_share_is_not_replaced_at_the_end() -> None:
    """A commit is being read back on rank 0's node: the end waits for that, not for a process with nothing to write."""
    driven = begun()
    driven.step(2, durable=True)
    driven.write(2, "written", node=1)
    driven.write(2, "written", "committed")
    num_before = len(driven.all(c.Spawn))
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    driven.kill(writer_of(driven, 1))
    driven.wait(1)
    assert len(driven.all(c.Spawn)) == num_before
    driven.write(2, "verified")
    assert [item.step for item in driven.events(schema.SaveVerified)] == [2]


def test_a_writer_that_was_to_be_replaced_is_not_at_the_end() -> None:
    """It died in time, its back-off passes during the drain."""
    driven = begun(limits=Limits(caps=CapLimits(backoff_s=(2.0,))))
    driven.step(2, durable=True)
    driven.write(2, "written", node=1)
    driven.write(2, "written", "committed")
    driven.kill(writer_of(driven, 1))
    num_before = len(driven.all(c.Spawn))
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    driven.wait(3)
    assert len(driven.all(c.Spawn)) == num_before


@pytest.mark.parametrize("is_committed", [True, False], ids=["step 3 is sealed", "step 2 is not committed"])
def test_a_writer_that_has_to_write_before_the_end_is_replaced(is_committed: bool) -> None:
    """The newest sealed step waits for all writers, and so does a save whose attempt was ended."""
    driven = begun()
    driven.step(2, durable=True)
    if is_committed:
        driven.write(2, "written", node=1)
        driven.write(2, "written", "committed")
        driven.step(3)
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    dead = writer_of(driven, 1)
    driven.kill(dead)
    driven.wait(1)
    assert writer_of(driven, 1) != dead
    driven.start_child(writer_of(driven, 1))
    if is_committed:
        driven.write(2, "verified")
    assert [item.step for item in driven.all(c.StartSave)] == [2, 3 if is_committed else 2]


def test_no_writer_is_started_on_a_node_that_was_lost_meanwhile() -> None:
    """Its writer had died, and the node was gone before the back-off had passed; it gets one when it is back."""
    driven = begun(limits=Limits(caps=CapLimits(backoff_s=(2.0,)), nodes=LIMITS.nodes))
    driven.kill(writer_of(driven, 1))
    driven.lose(1)
    num_before = len(driven.all(c.Spawn))
    driven.wait(3)
    assert len(driven.all(c.Spawn)) == num_before
    driven.join(1)
    assert (Role.WRITER, None) in [(item.role, item.rank) for item in driven.all(c.Spawn)[num_before:]]


def test_a_report_on_an_attempt_that_was_ended_is_stale() -> None:
    """A writer that gives up late does not fail the save that is written again."""
    driven = begun()
    driven.step(2, durable=True)
    stale = driven.all(c.StartSave)[0].attempt
    driven.kill(writer_of(driven, 1))
    driven.wait(1)
    driven.start_child(driven.all(c.Spawn)[-1].child)
    failures = len(driven.events(schema.SaveFailed))
    writer = next(item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER and item.node == 0)
    late = schema.SaveFailure.INTERRUPTED.value
    driven.say(
        writer,
        wire.WriterProgress(
            step=2, stage="failed", directory="", size_bytes=0, seconds=0.1, reason=late, message="", attempt=stale
        ),
    )
    assert len(driven.events(schema.SaveFailed)) == failures


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_nodes_processes_are_those_of_the_node(node: int) -> None:
    """The planned loss of a node ends its processes and slots; the others are interrupted."""
    driven = begun()
    child = driven.child_of(2 * node)
    driven.say(child, wire.NodeKill(generation=1, mono_ns=driven.now_ns))
    killed = {item.child for item in driven.all(c.Kill)}
    assert killed == {item.child for item in driven.all(c.Spawn) if item.node == node}
    assert [(item.node, item.num_ranks) for item in driven.all(c.DropSlots)] == [(node, 2)]
