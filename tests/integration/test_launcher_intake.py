"""The launcher's intake over real channels: who wakes it, what it takes in, what it counts."""

from __future__ import annotations

import mmap
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from nvrx_sre.events import messages as wire
from nvrx_sre.events import step_ring
from nvrx_sre.events.channel import Channel, create_pair
from nvrx_sre.events.step_record import UNKNOWN_LOSS
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.intake import Intake

PLAIN = (1000, 900, 0, 0, 0, 7, -1, False, 0, 0)
"""Fields of a step's record behind generation and step, before when it arrived and its loss."""
LONG_S = 60.0
"""A wait that would fail the test by its length."""


@dataclass(eq=False)
class Rank:
    """A child as the intake knows it, and the child's own end."""

    number: int
    channel: Channel
    ring: step_ring.StepRing
    own: Channel

    def step(self, step: int, *, is_urgent: bool = False, arrived_ns: int = 0, gpu_ns: int = 0) -> None:
        """Report a step."""
        assert self.own.ring is not None
        if self.own.ring.put((1, step, *PLAIN, arrived_ns, gpu_ns, UNKNOWN_LOSS)) or is_urgent:
            self.own.ring_bell()

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
            ours, theirs = create_pair()
            ours.socket.setblocking(False)
            rank = Rank(number, ours, step_ring.StepRing.create(), theirs)
            self.ranks.append(rank)
            self.intake.add(rank)
            received = theirs.receive()
            assert received is not None and isinstance(received[0], wire.Doorbell)
            theirs.take_over(received[1])

    def is_woken(self) -> bool:
        """Something would end the launcher's wait now."""
        return bool(self.selector.select(0))

    def look(self) -> None:
        """Called by the first rank, the launcher takes in what there is."""
        self.ranks[0].own.ring_bell()
        self.intake.select(LONG_S)

    def told(self) -> list[tuple[int, str]]:
        """(child, kind) of what was put since the last time."""
        told = [(item.child, type(item.message).__name__) for item in self.inputs if isinstance(item, c.FromChild)]
        self.inputs.clear()
        return told

    def steps(self) -> list[int]:
        """Steps that were put and are not told yet."""
        messages = [item.message for item in self.inputs if isinstance(item, c.FromChild)]
        return [message.step for message in messages if isinstance(message, wire.Step)]


@pytest.fixture
def node() -> Iterator[Node]:
    """A node whose descriptors are closed afterwards."""
    made = Node()
    yield made
    for rank in made.ranks:
        rank.channel.close()
        rank.own.close()
        rank.ring.close()
    made.intake.close()
    made.selector.close()


def test_a_step_wakes_nobody_and_is_found_with_the_next_sign_of_life(node: Node) -> None:
    """A rank gives one as often as a launcher that gathers steps looks by itself."""
    node.ranks[1].step(1)
    assert not node.is_woken()
    node.ranks[0].alive()
    assert node.is_woken()
    node.intake.select(LONG_S)
    assert sorted(node.told()) == [(0, "Alive"), (1, "Step")] and not node.is_woken()


def test_while_steps_come_a_sign_of_life_wakes_nobody_either(node: Node) -> None:
    """The launcher looks by itself soon; when no step came in between, it waits for every message again."""
    node.ranks[0].step(1)
    node.ranks[0].alive()
    node.intake.select(LONG_S)
    node.told()
    node.ranks[0].step(2)
    node.ranks[1].step(1)
    node.ranks[1].alive()
    assert not node.is_woken()
    node.intake.select(LONG_S)
    told = node.told()
    assert [kind for child, kind in told if child == 0] == ["Step"]
    assert [kind for child, kind in told if child == 1] == ["Step", "Alive"]
    node.intake.select(LONG_S)
    assert node.told() == []
    node.ranks[1].alive()
    assert node.is_woken()


@pytest.mark.parametrize("is_step", [True, False])
def test_what_must_not_wait_rings(node: Node, is_step: bool) -> None:
    """A step that its rank waits for, and any other message, also when steps are gathered; and it rings once."""
    node.ranks[0].step(1)
    node.look()
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
    ours, theirs = create_pair()
    node.selector.register(ours, selectors.EVENT_READ, "signal")
    node.ranks[0].step(1)
    theirs.send(wire.Leave())
    assert node.intake.select(LONG_S) == ["signal"]
    assert node.intake.select(LONG_S) == ["signal"], "it is still to be read, and steps are gathered now"
    ours.close()
    theirs.close()


def test_a_bell_without_a_step_does_not_make_the_next_step_wake(node: Node) -> None:
    """Each rank rings when its capture is over: the second of two finds the steps taken in already."""
    first, second = node.ranks
    first.step(1)
    second.step(1)
    node.look()
    second.own.send(wire.Sealed(generation=1, step=1, slot=0, mono_ns=1))
    node.intake.select(LONG_S)
    assert [kind for _, kind in node.told()] == ["Step", "Step", "Sealed"]
    first.step(2)
    assert not node.is_woken()


def test_packets_and_steps_of_a_child_come_in_the_order_in_which_they_were_told(node: Node) -> None:
    """A step behind what comes before it, a fault behind its last step: they travel on different ways."""
    first = node.ranks[0]
    for step in range(1, 4):
        first.own.send(wire.Acked(generation=step, mono_ns=1))
        first.step(step)
    first.step(4)
    first.own.send(wire.Ready(generation=1, fit=True, reason="", mono_ns=1))
    first.step(5)
    node.look()
    assert [kind for _, kind in node.told()] == ["Acked", "Step"] * 3 + ["Step", "Ready", "Step"]


def test_a_launcher_that_is_away_finds_every_step(node: Node) -> None:
    """As many as a ring holds; beyond that the newest is kept, and what it replaced is counted."""
    first, second = node.ranks
    first.step(1)
    node.look()
    node.inputs.clear()
    for step in range(2, step_ring.NUM_STEPS + 2):
        first.step(step)
    assert first.own.num_dropped == 0
    for step in range(step_ring.NUM_STEPS + 2, step_ring.NUM_STEPS + 9):
        first.step(step)
    first.alive()
    node.intake.select(LONG_S)
    assert node.steps() == [*range(2, step_ring.NUM_STEPS + 1), step_ring.NUM_STEPS + 8]
    assert node.intake.num_dropped == 7
    node.intake.remove(first)
    second.alive()
    node.intake.select(LONG_S)
    assert node.intake.num_dropped == 7, "it is known also after its sender died"


def test_a_ring_that_is_half_full_wakes_the_launcher(node: Node) -> None:
    """Once: a rank that reports faster than anybody looks does not call the kernel for each step."""
    first = node.ranks[0]
    first.step(1)
    node.look()
    for step in range(2, step_ring.NUM_STEPS // 2 + 2):
        first.step(step)
    assert not node.is_woken()
    first.step(step_ring.NUM_STEPS // 2 + 2)
    assert node.is_woken()


def test_c01_what_a_killed_rank_had_told_counts(node: Node) -> None:
    """Steps lie in the launcher's memory, and a packet in the kernel's: neither dies with the rank."""
    first = node.ranks[0]
    code = (
        "import os, socket, sys\n"
        "from nvrx_sre.events import messages as wire\n"
        "from nvrx_sre.events.channel import Channel\n"
        "from nvrx_sre.events.step_ring import StepRing\n"
        "own = Channel(socket.socket(fileno=int(sys.argv[1])))\n"
        "own.ring = StepRing.map(int(sys.argv[2]))\n"
        "for step in range(1, 1001):\n"
        f"    own.ring.put((1, step, *{PLAIN!r}, 0, 0, 0.5))\n"
        "own.send(wire.Acked(generation=1, mono_ns=1))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    descriptors = (first.own.fileno(), first.ring.fd)
    command = [sys.executable, "-c", code, *map(str, descriptors)]
    assert subprocess.run(command, pass_fds=descriptors, check=False).returncode == -signal.SIGKILL
    node.intake.drain(first)
    assert node.told() == [(0, "Step")] * 1000 + [(0, "Acked")]


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


def test_memory_that_holds_no_step_is_counted(node: Node) -> None:
    """A script that writes where it should not loses that step, and no other."""
    first = node.ranks[0]
    for step in range(1, 4):
        first.step(step)
    with mmap.mmap(first.ring.fd, step_ring.RING_BYTES) as memory:
        memory[step_ring.COUNTS_BYTES + step_ring.PLACE_BYTES + 7] ^= 1
    node.look()
    assert node.intake.num_bad_packets == 1 and node.told() == [(0, "Step")] * 2


def test_lateness_is_noted_on_the_way(node: Node) -> None:
    """Who came later to the first collective of a step."""
    for rank, arrived_ns in zip(node.ranks, (10_000_000, 30_000_000), strict=True):
        rank.step(1, arrived_ns=arrived_ns)
    node.look()
    assert [node.intake.lateness.of(rank) for rank in (0, 1)] == pytest.approx([0.0, 0.02])


def test_gpu_time_is_noted_on_the_way(node: Node) -> None:
    """Of whoever measured it, whatever the others did."""
    node.ranks[1].step(1, gpu_ns=30_000_000)
    node.look()
    assert [node.intake.gpu_times.of(rank) for rank in (0, 1)] == [None, pytest.approx(0.03)]
