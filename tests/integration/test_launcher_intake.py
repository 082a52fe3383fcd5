"""The launcher's intake over real channels: who wakes it, what it takes in, what it counts."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from nvrx_sre.events import channel as wire
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.intake import Intake

PLAIN = (1000, 0.1, 0.0, 0.0, 0.0, 7, wire.NO_LOSS, False, -1, False, 0, 0, 0)
"""Fields of a step's report behind generation and step."""
LONG_S = 60.0
"""A wait that would fail the test by its length."""


@dataclass(eq=False)
class Rank:
    """A child as the intake knows it, and the child's own end."""

    number: int
    channel: wire.Channel
    own: wire.Channel

    def step(self, step: int, *, is_urgent: bool = False) -> bool:
        """Report a step."""
        return self.own.send_step_nowait(wire.pack_step(1, step, *PLAIN), is_urgent=is_urgent)

    def alive(self) -> bool:
        """Give a sign of life, as the monitor thread does."""
        return self.own.send_nowait(
            wire.Alive(generation=1, step=0, progress=0, mono_ns=1, num_dropped=self.own.num_dropped)
        )


@dataclass
class Node:
    """An intake with two ranks, and what it put."""

    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    inputs: list[c.Input] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.intake = Intake(self.selector, self.inputs.append, lambda number: number, lambda: 2)
        for number in range(2):
            ours, theirs = wire.create_pair()
            ours.socket.setblocking(False)
            rank = Rank(number, ours, theirs)
            self.ranks.append(rank)
            self.intake.add(rank)
            received = theirs.receive()
            assert received is not None and isinstance(received[0], wire.Doorbell)
            theirs.doorbell = received[1][0]

    def is_woken(self) -> bool:
        """Something would end the launcher's wait now."""
        return bool(self.selector.select(0))

    def told(self) -> list[tuple[int, str]]:
        """(child, kind) of what was put since the last time."""
        told = [(item.child, type(item.message).__name__) for item in self.inputs if isinstance(item, c.FromChild)]
        self.inputs.clear()
        return told


@pytest.fixture
def node() -> Iterator[Node]:
    """A node whose descriptors are closed afterwards."""
    made = Node()
    yield made
    for rank in made.ranks:
        rank.channel.close()
        rank.own.close()
    made.intake.close()
    made.selector.close()


def test_while_no_steps_come_every_message_wakes(node: Node) -> None:
    """A sign of life, a first step: both end the wait at once."""
    node.ranks[0].alive()
    assert node.is_woken()
    assert node.intake.select(LONG_S) == []
    assert node.told() == [(0, "Alive")] and not node.is_woken()
    node.ranks[1].step(1)
    assert node.is_woken()
    node.intake.select(LONG_S)
    assert node.told() == [(1, "Step")]


def test_while_steps_come_a_step_wakes_nobody_and_is_taken_in_all_the_same(node: Node) -> None:
    """The launcher looks by itself soon; when no step came in between, it waits for everything again."""
    node.ranks[0].step(1)
    node.intake.select(LONG_S)
    node.ranks[0].step(2)
    node.ranks[1].step(1)
    node.ranks[1].alive()
    assert not node.is_woken()
    node.intake.select(LONG_S)
    assert node.told() == [(0, "Step"), (0, "Step"), (1, "Step"), (1, "Alive")]
    node.intake.select(LONG_S)
    assert node.told() == []
    node.ranks[1].alive()
    assert node.is_woken()


@pytest.mark.parametrize("is_step", [True, False])
def test_what_must_not_wait_rings(node: Node, is_step: bool) -> None:
    """A step that its rank waits for, and any other message, also when steps are gathered; and it rings once."""
    node.ranks[0].step(1)
    node.intake.select(LONG_S)
    if is_step:
        node.ranks[0].step(2, is_urgent=True)
    else:
        node.ranks[0].own.send(wire.Acked(generation=1, mono_ns=1))
    assert node.is_woken()
    node.intake.select(LONG_S)
    assert node.told()[-1] == (0, "Step" if is_step else "Acked")
    assert not node.is_woken()


def test_other_inputs_of_the_loop_are_handed_on(node: Node) -> None:
    """What somebody else registered comes back as it was registered, gathering or not."""
    ours, theirs = wire.create_pair()
    node.selector.register(ours, selectors.EVENT_READ, "signal")
    node.ranks[0].step(1)
    theirs.send(wire.Leave())
    assert node.intake.select(LONG_S) == ["signal"]
    assert node.intake.select(LONG_S) == ["signal"], "it is still to be read, and steps are gathered now"
    ours.close()
    theirs.close()


def test_what_found_no_room_is_known_also_after_its_sender_died(node: Node) -> None:
    """A rank tells what it dropped with its next sign of life; a step is dropped, not waited for."""
    first, second = node.ranks
    num_sent = 0
    while first.step(num_sent + 1):
        num_sent += 1
    assert num_sent >= 500 and not first.step(num_sent + 2)
    node.intake.select(LONG_S)
    assert len(node.told()) == num_sent
    assert node.intake.num_dropped == 0, "nobody has told yet"
    second.own.num_dropped = 5
    for rank in node.ranks:
        rank.alive()
    node.intake.select(LONG_S)
    assert node.intake.num_dropped == 7
    node.intake.remove(first)
    assert node.intake.num_dropped == 7


def test_a_closed_channel_is_no_death_and_keeps_nobody_awake(node: Node) -> None:
    """What was sent before counts; afterwards the channel is not looked at."""
    first, second = node.ranks
    first.alive()
    first.own.close()
    node.intake.select(LONG_S)
    assert node.told() == [(0, "Alive")]
    assert not node.is_woken()
    second.alive()
    node.intake.select(LONG_S)
    assert node.told() == [(1, "Alive")]


def test_what_a_rank_had_sent_counts_also_if_it_died_with_a_message_unread(node: Node) -> None:
    """The kernel tells of the unread message first, as an error; the steps come after it."""
    first = node.ranks[0]
    for step in range(1, 4):
        first.step(step)
    first.channel.send(wire.Interrupt(generation=1))
    first.own.close()
    node.intake.select(LONG_S)
    assert node.told() == [(0, "Step")] * 3


def test_a_packet_that_is_no_message_is_counted(node: Node) -> None:
    """The next one is taken in."""
    node.ranks[0].own.socket.send(b"Sorry")
    node.ranks[0].alive()
    node.intake.select(LONG_S)
    assert node.intake.num_bad_packets == 1 and node.told() == [(0, "Alive")]


def test_lateness_is_noted_on_the_way(node: Node) -> None:
    """Who came later to the first collective of a step."""
    for rank, arrived_ns in zip(node.ranks, (10_000_000, 30_000_000), strict=True):
        rank.own.send_step_nowait(wire.pack_step(1, 1, *PLAIN[:-1], arrived_ns), is_urgent=False)
    node.intake.select(LONG_S)
    assert [node.intake.lateness.of(rank) for rank in (0, 1)] == pytest.approx([0.0, 0.02])
