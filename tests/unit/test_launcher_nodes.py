"""Small parts of a run over several nodes: what a follower knows of its ranks, its series, slots by rank, addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_sre.checkpoint.slots import NONE
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.limits import Limits
from nvrx_sre.events import messages as wire
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.hot import HotSlots
from nvrx_sre.launcher.network import LOOPBACK, interface_of
from nvrx_sre.launcher.node_readings import NodeReadings
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.launcher.shell import faults_last, is_fault
from nvrx_sre.launcher.token import make_token, read_token
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.endpoint import EndpointSecurity
from nvrx_sre.telemetry.follower import FollowerTelemetry
from nvrx_sre.telemetry.labels import RankMetrics
from nvrx_sre.telemetry.metric import Scope
from nvrx_sre.testing.clock import ManualClock


def _alive(step: int) -> wire.Alive:
    return wire.Alive(generation=1, step=step, progress=step, mono_ns=1)


def test_readings_are_those_of_ranks_that_live() -> None:
    """A standby has no rank, a dead child no reading; how late a rank comes is what the leader said."""
    ranks = {5: 2, 6: 3}
    readings = NodeReadings(ranks.get)
    readings.hear(5, _alive(7), 100)
    readings.hear(6, wire.Ready(generation=1, fit=True, reason="", mono_ns=1), 200)
    readings.hear(7, _alive(1), 300)
    readings.note_lateness((2, 9), (0.25, 1.0))
    found = readings.of_ranks({5: 50, 6: 60, 7: 70}, {2: 0.5}.get)
    assert [found[rank].gpu_s for rank in (2, 3)] == [0.5, None]
    assert {rank: (item.pid, item.heard_ns, item.step, item.lateness_s) for rank, item in found.items()} == {
        2: (50, 100, 7, 0.25),
        3: (60, 200, 0, 0.0),
    }
    readings.forget(6)
    assert set(readings.of_ranks({5: 50, 6: 60})) == {2}


def test_a_follower_exports_its_node_and_nothing_of_the_job() -> None:
    """A second copy of the job's counters would count it twice."""
    clock = ManualClock()
    at = (LOOPBACK, None)
    telemetry = FollowerTelemetry("run", Limits(), clock, at, EndpointSecurity(), RankMetrics.ALL)
    try:
        readings = NodeReadings({5: 2}.get)
        readings.hear(5, _alive(7), clock.wall_ns())
        telemetry.board.set_ranks(readings.of_ranks({5: 50}))
        telemetry.board.set_places("b", {2: "b/0"}, "")
        telemetry.loop_turned()
        families = {family.name: family for family in telemetry._metrics.collect() if family.samples}
    finally:
        telemetry.close()
    scopes = {metric.scope for metric in catalog.CATALOG.values() if metric.name.removesuffix("_total") in families}
    assert scopes == {Scope.NODE}
    steps = families[catalog.RANK_STEP.name].samples
    assert [(sample.labels["rank"], sample.value) for sample in steps] == [("2", 7.0)]
    (place,) = families[catalog.RANK_INFO.name.removesuffix("_info")].samples
    assert (place.labels["rank"], place.labels["node"]) == ("2", "b")


def test_a_follower_counts_what_is_lost_between_it_and_its_children() -> None:
    """As a leader does; another membership of the run begins at 0, the counters of the launcher go on."""
    at = (LOOPBACK, None)
    telemetry = FollowerTelemetry("run", Limits(), ManualClock(), at, EndpointSecurity(), RankMetrics.ALL)

    def lost() -> list[float]:
        samples = [sample for family in telemetry._metrics.collect() for sample in family.samples]
        names = (catalog.TELEMETRY_DROPPED.name, catalog.TELEMETRY_ERRORS.name)
        return [
            next(item.value for item in samples if item.name == name and item.labels["component"] == "channel")
            for name in names
        ]

    try:
        seen = []
        for losses in ((0, 0), (3, 1), (5, 1), (0, 0), (1, 2)):
            telemetry.note_channel(*losses)
            seen.append(lost())
    finally:
        telemetry.close()
    assert seen == [[0, 0], [3, 1], [5, 1], [5, 1], [6, 3]]


def test_slots_are_held_for_the_ranks_of_the_node() -> None:
    """A node's share of a save begins at its first rank, which need not be 0."""
    slots = HotSlots("run", 2, num_ranks=2)
    try:
        for rank in (4, 5):
            slots.grant(rank, 4096, 4096)
        assert slots.allocated() is not None
        slots.hold((1, 0), first_rank=4)
        assert {rank: file.held_slot for rank, file in slots.files().items()} == {4: 1, 5: 0}
        slots.release()
        assert {file.held_slot for file in slots.files().values()} == {NONE}
    finally:
        slots.drop()


def test_ranks_that_take_snapshots_are_counted() -> None:
    """What the slots' record says of a node's devices: how many of its ranks had room; a rank may change its mind."""
    slots = HotSlots("run", 2, num_ranks=2)
    try:
        for rank, taken in ((0, True), (1, False), (1, True), (0, False)):
            slots.note_snapshots(rank, taken=taken)
            slots.grant(rank, 4096, 4096)
        allocated = slots.allocated()
        assert allocated is not None and allocated.num_snapshots == 1
    finally:
        slots.drop()


def test_a_lost_node_is_told_after_what_the_others_have_said() -> None:
    """Its children's deaths follow it; a step that arrived in the same turn still counts."""
    lost = c.NodeLost(node=1, reason="silent", mono_ns=1)
    death = c.Exited(child=3, exit_code=None, signal=None, exited_ns=1, oom=False)
    step = c.FromChild(child=1, message=_alive(2))
    assert is_fault(lost)
    assert faults_last([lost, death, step]) == [step, lost, death]


def test_the_interface_of_an_address() -> None:
    """By name; an address of another host has none here."""
    assert interface_of(LOOPBACK) == "lo"
    assert interface_of("203.0.113.7") == ""


def test_the_token_is_made_once_and_private(tmp_path: Path) -> None:
    """A second start finds the same; a short one, and one that others can read, are refused."""
    path = tmp_path / "link.token"
    assert read_token(path) is None
    token = make_token(path)
    assert (make_token(path), path.stat().st_mode & 0o777) == (token, 0o600)
    path.chmod(0o640)
    with pytest.raises(UserError, match="can be read by others"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(UserError, match="holds 5 bytes: use 16 or more"):
        read_token(path)


def test_each_node_keeps_records_of_its_own_in_the_run_directory(tmp_path: Path) -> None:
    """Children and metrics of one node never overwrite another's."""
    leader, follower = RunDirectory(tmp_path), RunDirectory(tmp_path, 3)
    leader.record_children({1: 10})
    follower.record_children({2: 20})
    assert sorted(path.name for path in tmp_path.glob("children*.json")) == ["children-00003.json", "children.json"]
    assert (leader.metrics.name, follower.metrics.name) == ("metrics.json", "metrics-00003.json")
    assert not follower.has_epoch(1)
