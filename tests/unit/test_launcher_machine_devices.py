"""Devices that a check of their node found unfit: the next world does without them, if it is large enough then."""

from __future__ import annotations

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events import schema
from nvrx_sre.events.schema import FaultClass, Record
from nvrx_sre.launcher import commands as c
from nvrx_sre.policy.history import History
from nvrx_sre.testing.driven import DrivenMachine

UUIDS = tuple(f"GPU-{index}" for index in range(4))
WHY = "device GPU-1 is unfit: Xid 79, it has fallen off the bus"


def machine(**settings: object) -> DrivenMachine:
    """Four ranks on devices that are known by UUID; the world may shrink to 2 unless told otherwise."""
    wanted = {"num_standbys": 0, "min_world_size": 2, "gpu_uuids": UUIDS} | settings
    return DrivenMachine(num_ranks=4, **wanted)  # type: ignore[arg-type]  # settings of the machine


def in_loop(**settings: object) -> DrivenMachine:
    """In the step loop, step 1 committed and sealed."""
    driven = machine(**settings)
    driven.begin()
    driven.step(1)
    return driven


def fail(driven: DrivenMachine, rank: int = 0) -> None:
    """A rank's training function raises; everybody leaves the generation, what is sealed is saved."""
    driven.raise_in(rank, 2)
    driven.leave_generation(0, 1, 2, 3)
    driven.write(1, "written", "committed", "verified")


def test_devices_are_known_by_uuid_where_each_rank_has_its_own() -> None:
    """Faults are counted against the card, not against its place; ranks that share cards are told apart by index."""
    (formed,) = in_loop().events(schema.GenerationFormed)
    assert formed.devices == [f"node/{uuid}" for uuid in UUIDS]
    driven = machine(gpu_uuids=UUIDS[:2])
    driven.begin()
    (formed,) = driven.events(schema.GenerationFormed)
    assert formed.devices == [f"node/{index}" for index in range(4)]


def test_an_unfit_device_changes_nothing_until_the_generation_ends() -> None:
    """A reading is no fault: the steps go on, and nobody is interrupted."""
    driven = in_loop()
    driven.forget()
    driven.feed(c.DeviceUnfit(node=0, index=1, reason=WHY))
    driven.step(2)
    assert driven.events(schema.RankExcluded) == []
    assert driven.all(c.SendInterrupt) == []


def test_the_next_world_does_without_an_unfit_device() -> None:
    """Whoever had the fault: the event names the device and why, once, and survivors keep their cards."""
    driven = in_loop()
    driven.feed(c.DeviceUnfit(node=0, index=1, reason=WHY))
    driven.feed(c.DeviceUnfit(node=0, index=1, reason="another reading"))
    fail(driven)
    (excluded,) = driven.events(schema.RankExcluded)
    assert (excluded.device, excluded.reason, excluded.world_size) == ("node/GPU-1", WHY, 3)
    assert driven.machine.world_size == 3
    (decided,) = driven.events(schema.RestartDecided)
    assert not decided.is_excluding, "it costs no attempt of its own"
    assert driven.events(schema.FaultDetected)[-1].fault is FaultClass.EXCEPTION
    assert "node/GPU-1" in driven.history.excluded, "a later launcher of the run does without it as well"


def test_a_world_that_is_too_small_keeps_an_unfit_device() -> None:
    """A run that trains is worth more than a suspicion; two unfit devices are left out as far as it goes."""
    driven = in_loop(min_world_size=4)
    driven.feed(c.DeviceUnfit(node=0, index=1, reason=WHY))
    driven.raise_in(0, 2)
    driven.leave_generation(0, 1, 2, 3)
    assert driven.events(schema.RankExcluded) == []
    assert driven.machine.world_size == 4
    driven = in_loop(min_world_size=3)
    for index in (1, 2):
        driven.feed(c.DeviceUnfit(node=0, index=index, reason=f"{index} is unfit"))
    fail(driven)
    assert [event.device for event in driven.events(schema.RankExcluded)] == ["node/GPU-1"]


def test_a_run_starts_without_a_device_that_is_unfit_already() -> None:
    """It never gets a process, and the record says so."""
    driven = machine(unfit={1: WHY})
    assert [event.device for event in driven.events(schema.RankExcluded)] == ["node/GPU-1"]
    assert driven.machine.world_size == 3
    workers = [spawn for spawn in driven.all(c.Spawn) if spawn.rank is not None]
    assert sorted(spawn.local_rank for spawn in workers) == [0, 2, 3]


def test_an_index_without_a_rank_is_nobodys() -> None:
    """A node with more devices than ranks may have a sick one that the run does not use."""
    driven = in_loop()
    driven.feed(c.DeviceUnfit(node=0, index=7, reason="device GPU-7 is unfit"))
    fail(driven)
    assert driven.events(schema.RankExcluded) == []
    assert driven.machine.world_size == 4


def test_a_node_that_joins_brings_its_uuids() -> None:
    """Its devices have their number until then; a check of that node speaks of them by index."""
    driven = machine(num_nodes=2, gpu_uuids=("GPU-a", "GPU-b"))
    driven.feed(c.NodeJoined(node=1, name="host1", gpu_uuids=("GPU-c", "GPU-d")))
    driven.begin()
    (formed,) = driven.events(schema.GenerationFormed)
    assert formed.devices == ["node/GPU-a", "node/GPU-b", "host1/GPU-c", "host1/GPU-d"]
    driven.step(1)
    driven.feed(c.DeviceUnfit(node=1, index=0, reason="device GPU-c is unfit"))
    driven.raise_in(0, 2)
    assert [event.device for event in driven.events(schema.RankExcluded)] == ["host1/GPU-c"]


def with_past(**settings: object) -> DrivenMachine:
    """A later launcher of a run over two nodes, in which the second one's first device was excluded."""
    history = History()
    event = schema.RankExcluded(device="host1/GPU-c", reason="it was the root three times", world_size=3)
    history.apply(Record(run="run", epoch=1, generation=1, rank=2, seq=1, time_ns=1, event=event))
    return machine(num_nodes=2, gpu_uuids=("GPU-a", "GPU-b"), history=history, **settings)


def test_an_excluded_device_of_another_node_stays_excluded() -> None:
    """Its name is known once the node has joined, and the first world of a later launcher does without it."""
    driven = with_past()
    driven.feed(c.NodeJoined(node=1, name="host1", gpu_uuids=("GPU-c", "GPU-d")))
    driven.num_ranks = 3
    driven.begin()
    (formed,) = driven.events(schema.GenerationFormed)
    assert formed.devices == ["node/GPU-a", "node/GPU-b", "host1/GPU-d"]


def test_a_run_that_needs_an_excluded_device_says_so() -> None:
    """It was asked for more ranks than are left: retrying it changes nothing until an operator resumes it."""
    driven = with_past(min_world_size=4)
    driven.feed(c.NodeJoined(node=1, name="host1", gpu_uuids=("GPU-c", "GPU-d")))
    for spawn in driven.all(c.Spawn):
        driven.feed(c.Spawned(child=spawn.child, pid=100 + spawn.child, start_ticks=1))
        driven.feed(c.Exited(child=spawn.child, exit_code=0, signal=None, exited_ns=driven.now_ns, oom=False))
    (stop,) = driven.all(c.Stop)
    assert (stop.exit_code, "host1/GPU-c" in stop.reason) == (ExitCode.DO_NOT_RESTART, True)


def test_a_host_that_comes_instead_of_a_planned_one_is_in_the_next_world() -> None:
    """The world without the unfit device was planned when the host went: its name is in no world that begins later."""
    driven = machine(num_nodes=2, gpu_uuids=("GPU-a", "GPU-b"))
    driven.feed(c.NodeJoined(node=1, name="host1", gpu_uuids=("GPU-c", "GPU-d")))
    driven.begin()
    driven.step(1)
    driven.feed(c.DeviceUnfit(node=0, index=1, reason=WHY))
    driven.raise_in(0, 2)
    driven.lose(1)
    driven.feed(c.NodeJoined(node=1, name="host9", gpu_uuids=("GPU-e", "GPU-f")))
    driven.leave_generation(0, 1)
    driven.num_ranks = 3
    for spawn in [item for item in driven.all(c.Spawn) if item.node == 1 and item.rank is not None][-2:]:
        driven.start_child(spawn.child)
        driven.make_ready(spawn.child)
    driven.restore()
    assert driven.events(schema.GenerationFormed)[-1].devices == ["node/GPU-a", "host9/GPU-e", "host9/GPU-f"]
