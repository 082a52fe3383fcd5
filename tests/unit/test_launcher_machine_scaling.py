"""What keeps an input cheap with thousands of ranks must not change what is decided, nor when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.events.schema import (
    FaultDetected,
    Phase,
    RestartDecided,
    Role,
    SaveFailed,
    SaveStarted,
    StepsCommitted,
)
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.machine_job import Job, MachineConfig, MachineStart
from nvrx_sre.policy.history import History
from nvrx_sre.testing.driven import DrivenMachine

LIMITS = Limits(deadlines=Deadlines(step_s=10.0, first_step_s=10.0, load_s=40.0, rendezvous_s=5.0, rebuild_s=5.0))


def test_no_step_is_committed_before_every_rank_has_restored() -> None:
    """A rank that is heard first passes the step at which the last generation ended: nothing is committed by that."""
    driven = DrivenMachine()
    driven.begin()
    for step in (1, 2, 3):
        driven.step(step)
    driven.raise_in(1, 4)
    driven.leave_generation(0, 1)
    driven.forget()
    for phase in (Phase.RENDEZVOUS, Phase.REBUILD, Phase.LOAD, Phase.FIRST_STEP):
        driven.enter(0, phase)
    for step in (1, 2, 3, 4, 5):
        driven.step(step, ranks=[0])
    driven.wait(2.0)
    assert driven.events(StepsCommitted) == []


def test_a_tick_that_comes_early_does_nothing() -> None:
    """A deadline that was put off leaves a tick behind, at which nothing is due; the next one is told right."""
    driven = DrivenMachine(limits=LIMITS)
    driven.begin()
    driven.wait(8.0)
    driven.step(1)
    due_ns = driven.machine.next_deadline_ns()
    assert due_ns is not None and due_ns <= driven.now_ns + 10 * 10**9
    driven.wait(8.0)
    assert driven.events(FaultDetected) == []
    driven.wait(4.0)
    assert len(driven.events(FaultDetected)) == 1


def test_an_excuse_ends_with_the_peers_phase() -> None:
    """A rank out of time waits for a peer that loads; once the peer is as far, the hang is judged at the peer's end."""
    driven = DrivenMachine(limits=LIMITS)
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    for rank in range(2):
        driven.make_ready(driven.child_of(rank))
    for phase in (Phase.RENDEZVOUS, Phase.REBUILD, Phase.LOAD):
        for rank in range(2):
            driven.enter(rank, phase)
    driven.enter(0, Phase.FIRST_STEP)
    driven.wait(15.0)
    assert driven.events(FaultDetected) == [], "rank 1 may load for 40 s, and rank 0 waits for it"
    driven.enter(1, Phase.FIRST_STEP)
    driven.wait(9.9)
    assert driven.events(FaultDetected) == [], "rank 1 has 10 s for its first step"
    driven.wait(0.2)
    assert len(driven.events(FaultDetected)) == 1


def test_many_ranks_open_only_when_the_last_is_ready() -> None:
    """Whoever is ready in whichever order: the generation opens with the last one, once."""
    driven = DrivenMachine(num_ranks=16, num_standbys=0)
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    for rank in (*range(8, 16), *range(7)):
        driven.make_ready(driven.child_of(rank))
        assert driven.all(c.OpenGeneration) == []
    driven.make_ready(driven.child_of(7))
    assert [item.world_size for item in driven.all(c.OpenGeneration)] == [16]


def test_a_save_that_waits_for_a_writer_ends_with_its_line() -> None:
    """The writer died with the save of step 6 and the run goes back to 3: slots are free, no writer begins it again."""
    driven = DrivenMachine()
    driven.begin()
    for step in (1, 2, 3, 4, 5):
        driven.step(step)
    driven.step(6, durable=True)
    writer = next(spawn.child for spawn in driven.all(c.Spawn) if spawn.role is Role.WRITER)
    driven.kill(writer)
    driven.raise_in(1, 7)
    driven.leave_generation(0, 1)
    driven.restore(3, "hot")
    assert [item.step for item in driven.all(c.ReleaseSlots)] == [6]
    driven.forget()
    fresh = [spawn.child for spawn in driven.all(c.Spawn) if spawn.role is Role.WRITER][-1]
    driven.start_child(fresh)
    assert driven.events(SaveStarted) == []
    assert driven.events(SaveFailed) == [], "its failure was told when the writer died"


def test_a_seal_that_no_record_tells_of_is_progress_for_the_next_fault_as_well() -> None:
    """Step 2 is recorded, then sealed, then the next fault comes: that is a first attempt, and the one after a second.

    What decides on a fault sees the live seal; the history, which a later launcher reads, must not see less.
    """
    driven = DrivenMachine()
    driven.begin()
    driven.step(1)
    driven.raise_in(1, 2)
    driven.leave_generation(0, 1)
    driven.restore(1, "hot")
    for rank in range(2):
        driven.step_report(rank, 2)
    driven.wait(2.0)
    for rank in range(2):
        driven.seal(rank, 2, slot=2)
    driven.raise_in(1, 3, frame="train.py:20 other")
    driven.leave_generation(0, 1)
    driven.restore(2, "hot")
    driven.raise_in(1, 3, frame="train.py:30 third")
    assert [event.restarts_since_progress for event in driven.events(RestartDecided)] == [1, 1, 2]


@given(
    per_node=st.integers(1, 4),
    num_nodes=st.integers(1, 5),
    multiple=st.integers(1, 3),
    places=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=6),
    left_out=st.sets(st.integers(0, 4)),
    data=st.data(),
)
def test_the_size_of_a_world_is_told_without_its_devices(
    per_node: int, num_nodes: int, multiple: int, places: set[tuple[int, int]], left_out: set[int], data: st.DataObject
) -> None:
    """As many as the world has that is made of them, whatever was excluded, unfit, left out and renamed."""
    config = MachineConfig(
        world_size=per_node * num_nodes,
        num_standbys=0,
        limits=Limits(),
        num_nodes=num_nodes,
        world_multiple=multiple,
        min_world_size=1,
    )
    start = MachineStart(generation=0, high_water=0, wall_offset_ns=0, commits_on_record=False)
    job = Job(config=config, start=start, history=History())
    for node in data.draw(st.lists(st.integers(0, num_nodes - 1), max_size=4)):
        job.name_node(node, data.draw(st.sampled_from(["a", "b", "node"])))
    all_devices = job.devices_of(set())
    for node, index in sorted(places):
        rank = node * per_node + index
        if node < num_nodes and index < per_node and rank < len(all_devices):
            job.unused.add(all_devices[rank])
    out = {node for node in left_out if node < num_nodes}
    assert job.num_devices_of(out) == len(job.devices_of(out))


def test_names_that_come_change_no_ranks_place() -> None:
    """A node joins under a name: its devices are called so, rank by rank, and all ranks stay where they were."""
    config = MachineConfig(
        world_size=6, num_standbys=0, limits=Limits(), num_nodes=3, unfit={1: "broken"}, min_world_size=1
    )
    start = MachineStart(generation=0, high_water=0, wall_offset_ns=0, commits_on_record=False)
    job = Job(config=config, start=start, history=History())
    before = [(job.node(rank), job.local_rank(rank)) for rank in range(job.world_size)]
    assert job.name_node(2, "gpu-7") == "gpu-7"
    assert job.name_node(1, "gpu-7") == "gpu-7-1", "two nodes of one name are told apart"
    assert [(job.node(rank), job.local_rank(rank)) for rank in range(job.world_size)] == before
    assert job.devices == ("node/0", "gpu-7-1/0", "gpu-7-1/1", "gpu-7/0", "gpu-7/1")
    assert [list(job.ranks_on(node)) for node in range(3)] == [[0], [1, 2], [3, 4]]
    assert (job.node_name(1), job.node_name(2)) == ("gpu-7-1", "gpu-7")
