"""Hosts that are lost, cut off, slow, and back, one story each: who is waited for, done without, taken in again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record
from nvrx_sre.testing.checkers_blame import Strike
from nvrx_sre.testing.checkers_nodes import NodeRules, check_nodes
from nvrx_sre.testing.simulation import judge
from nvrx_sre.testing.world import World
from nvrx_sre.testing.world_plan import SIMULATED_LIMITS, SimFault, SimKind, WorldConfig

E = TypeVar("E", bound=schema.Event)
NODES = SIMULATED_LIMITS.nodes
BEGUN_S = 17.0
"""By then every host has come, also a late one, and steps are made."""
RULES = NodeRules(world_multiple=1, grace_s=NODES.grace_s, join_s=NODES.join_s)


def hosts(*, num_steps: int = 500, min_world_size: int | None = None, faults: tuple[SimFault, ...] = ()) -> World:
    """Four hosts with a rank each."""
    config = WorldConfig(
        num_ranks=4, num_hosts=4, num_steps=num_steps, min_world_size=min_world_size, num_standbys=0, drop_rate=0.0
    )
    return World(5, config, faults)


def gone(world: World, host: int, absence_s: float) -> Callable[[], None]:
    """The host's power fails, for so long."""

    def act() -> None:
        generation = world.newest.machine.generation
        world.strikes.append(Strike(kind=SimKind.HOST_KILL, rank=host, generation=generation))
        world.hosts[host].boots_until_ns = world.now_ns + to_ns(absence_s)
        world.newest.links.silence(host)

    return act


def finished(world: World) -> list[int]:
    """The job ends as if nothing had happened; sizes of its generations."""
    assert world.run_job() == ExitCode.FINISHED
    assert world.violations + judge(world) == []
    return [event.world_size for event in events(world, schema.GenerationFormed)]


def events(world: World, kind: type[E]) -> list[E]:
    """Events of a kind."""
    return [record.event for record in world.records if isinstance(record.event, kind)]


def test_a_host_that_is_back_in_time_is_waited_for() -> None:
    """It is missed after a lease, and takes part again before the others go on without it."""
    world = hosts(min_world_size=2)
    world.schedule(BEGUN_S, gone(world, 1, NODES.lease_s + 3.0))
    assert set(finished(world)) == {4}
    assert [event.reason for event in events(world, schema.NodeLost)] == ["silent"]


def test_a_host_that_is_back_before_it_is_missed_is_a_new_one() -> None:
    """Its launcher connects anew: what ran there is lost all the same."""
    world = hosts()
    world.schedule(BEGUN_S, gone(world, 2, 2.0))
    assert set(finished(world)) == {4}
    assert [event.reason for event in events(world, schema.NodeLost)] == ["its launcher connected anew"]


def test_a_host_that_stays_away_is_done_without_and_taken_back() -> None:
    """The others go on with its share; at the next fault it takes part again."""
    late = SimFault(kind=SimKind.EXCEPTION, rank=0, step=480)
    world = hosts(min_world_size=2, faults=(late,))
    world.schedule(BEGUN_S, gone(world, 1, NODES.lease_s + NODES.grace_s + 4.0))
    sizes = finished(world)
    assert sizes[-2:] == [3, 4] and 4 in sizes[:-2], sizes


def test_a_run_that_needs_a_lost_host_ends_retryable_and_goes_on_with_it() -> None:
    """Exit 75 once the host had its time; the next launcher finds it, and nothing is lost but time."""
    world = hosts()
    world.schedule(BEGUN_S, gone(world, 3, NODES.lease_s + NODES.join_s + 10.0))
    assert set(finished(world)) == {4}
    first, *_, last = events(world, schema.RunFinished)
    assert (first.exit_code, first.reason) == (ExitCode.RETRYABLE, f"node 3 did not come within {NODES.join_s:g} s")
    assert last.exit_code == ExitCode.FINISHED


def test_hosts_find_the_successor_of_a_killed_leader() -> None:
    """The leader's connections end with it: every host joins whoever leads next."""
    world = hosts()

    def kill() -> None:
        world.newest.crash()

    world.schedule(BEGUN_S, kill)
    assert set(finished(world)) == {4}
    joined = [record.epoch for record in world.records if isinstance(record.event, schema.NodeJoined)]
    assert joined == [1, 1, 1, 2, 2, 2]


def test_hosts_leave_a_leader_that_stands_still_for_its_successor() -> None:
    """A leader that is stopped says nothing, and its connections stay: its hosts give it up, and it ends superseded."""
    world = hosts(num_steps=1200)

    def stop() -> None:
        leader = world.newest
        world.take_over_after(leader, 5.0)
        leader.stall(2 * NODES.leader_lost_s)

    world.schedule(BEGUN_S, stop)
    assert set(finished(world)) == {4}
    assert {"a host gave its silent leader up", "a superseded launcher ended"} <= world.reached
    assert [record.epoch for record in world.records if isinstance(record.event, schema.NodeJoined)][-3:] == [2, 2, 2]


def test_a_cut_that_is_shorter_than_a_deadline_loses_nobody() -> None:
    """What was said meanwhile arrives after it, in order."""
    world = hosts()

    def cut() -> None:
        world.hosts[2].cut_until_ns = world.now_ns + to_ns(SIMULATED_LIMITS.deadlines.step_s / 2)

    world.schedule(BEGUN_S, cut)
    assert finished(world) == [4]
    assert not events(world, schema.NodeLost) and not events(world, schema.FaultDetected)


def test_a_slow_link_loses_nobody() -> None:
    """Half a second each way is no reason to give a host up."""
    world = hosts()

    def slow() -> None:
        world.hosts[1].delay_s, world.hosts[1].slow_until_ns = 0.5, world.now_ns + to_ns(60.0)

    world.schedule(BEGUN_S, slow)
    assert finished(world) == [4]
    assert not events(world, schema.FaultDetected)


def shrunk() -> list[Record]:
    """A sound journal: a host is lost, done without, and taken back."""
    world = hosts(min_world_size=2, faults=(SimFault(kind=SimKind.EXCEPTION, rank=0, step=480),))
    world.schedule(BEGUN_S, gone(world, 1, NODES.lease_s + NODES.grace_s + 4.0))
    finished(world)
    return world.records


def changed(records: list[Record], kind: type, index: int, **fields: object) -> list[Record]:
    """The records with fields of one event changed."""
    at = [number for number, record in enumerate(records) if isinstance(record.event, kind)][index]
    event = replace(records[at].event, **fields)  # type: ignore[arg-type]  # the fields fit `kind`
    return [*records[:at], replace(records[at], event=event), *records[at + 1 :]]


def without(records: list[Record], kind: type, index: int) -> list[Record]:
    """The records without one event of a kind."""
    at = [number for number, record in enumerate(records) if isinstance(record.event, kind)][index]
    return [*records[:at], *records[at + 1 :]]


TAMPERED: dict[str, tuple[Callable[[list[Record]], list[Record]], str]] = {
    "a host that never came": (lambda records: without(records, schema.NodeJoined, 0), "are not there"),
    "lost twice": (lambda records: without(records, schema.NodeJoined, -1), "are not there"),
    "too few ranks": (lambda records: changed(records, schema.GenerationFormed, -2, world_size=1), "are the least"),
    "not taken back": (lambda records: changed(records, schema.GenerationFormed, -1, world_size=3), "are back"),
    "nobody waited": (
        lambda records: changed(records, schema.GenerationFormed, -2, go_ns=records[0].time_ns),
        "to come back",
    ),
    "gave up early": (
        lambda records: changed(
            records, schema.RunFinished, -1, exit_code=75, reason="node 1 did not come within 60 s"
        ),
        "gave up after",
    ),
    "wrong count": (lambda records: changed(records, schema.NodeJoined, 0, missing=0), "nodes are missing"),
}


def test_a_sound_journal_of_several_hosts_passes() -> None:
    """Nothing to find where nothing is wrong."""
    assert check_nodes(shrunk(), RULES) == []


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_journal_of_several_hosts_does_not(name: str) -> None:
    """Each rule finds its breach, and says so."""
    tamper, found = TAMPERED[name]
    problems = check_nodes(tamper(shrunk()), RULES)
    assert any(found in problem for problem in problems), problems
