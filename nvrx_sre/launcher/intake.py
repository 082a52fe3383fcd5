"""What children say: their channels, the rings of their steps, when to look at them, what is noted on the way in.

Model: while no steps come in, every message wakes the launcher, among them each child's sign of life, with which it
finds the first steps. While they come it looks at everything every `GATHER_S` and sleeps in between, unless something
urgent happens: a death, a signal, or a child rings the doorbell, which it does after every message but a sign of life,
and when its ring is half full. So a step costs its rank no wake-up of another process, which on a busy machine takes
the rank longer than all the rest of the report, nor a look at whether one is due, and costs the launcher a share of one
turn. What a step means is the same: stamps are the rank's own.

    selector -+- whatever else wakes the launcher
              +- doorbell
              +- the channels, together, while not gathering

Invariants: what a child told is taken in its order, packets and steps (a packet says how many steps were before it);
nothing is held back here. Not thread-safe: the launcher's loop. Must not: block, judge what was said.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable
from typing import Any, Protocol

from nvrx_sre.events import messages as wire
from nvrx_sre.events.channel import Channel
from nvrx_sre.events.step_record import to_message
from nvrx_sre.events.step_ring import StepRing
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.gpu_times import GpuTimes
from nvrx_sre.launcher.lateness import Lateness

GATHER_S = 0.25
"""Time between two looks while steps come in (seconds): as often as a rank says that it is alive. Its ring holds the
steps of many looks, and nobody waits for a step: what a rank or a slot waits for rings. Each look disturbs whoever
computes on the same processor."""

_OWN = object()
"""Marks what is nobody else's to handle."""

Put = Callable[[c.Input], None]


class Speaker(Protocol):
    """What the intake knows of a child."""

    number: int
    channel: Channel
    ring: StepRing | None


class Intake:
    """Channels of the children that live. `rank_of`: rank that a child holds; `world_size`: ranks of the generation."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        put: Put,
        rank_of: Callable[[int], int | None],
        world_size: Callable[[], int],
    ) -> None:
        self._selector = selector
        self._put = put
        self._rank_of = rank_of
        self._world_size = world_size
        self._channels = selectors.EpollSelector()
        self._rings: dict[int, Speaker] = {}
        """Children that may report steps."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_gathering = False
        self._num_steps = 0
        self._dropped: dict[int, int] = {}
        """What living children said that they had dropped."""
        self._num_dropped_by_dead = 0
        self.lateness = Lateness()
        self.gpu_times = GpuTimes()
        self.num_bad_packets = 0
        """Packets that were no message, and places of rings that held no step."""
        self.on_injected: Callable[[int, wire.Injected], None] = lambda _, __: None
        """Hears of a child's planned fault before the machine does."""
        selector.register(self._bell, selectors.EVENT_READ, _OWN)
        selector.register(self._channels, selectors.EVENT_READ, _OWN)

    @property
    def num_dropped(self) -> int:
        """Messages that found no room on their way here, as far as their senders could tell."""
        return self._num_dropped_by_dead + sum(self._dropped.values())

    def add(self, child: Speaker) -> None:
        """Listen to a child, and give it the doorbell and its ring."""
        self._channels.register(child.channel, selectors.EVENT_READ, child)
        ring = child.ring
        if ring is not None:
            self._rings[child.number] = child
        child.channel.send_nowait(wire.Doorbell(), (self._bell,) if ring is None else (self._bell, ring.fd))

    def remove(self, child: Speaker) -> None:
        """The child is dead, and all it said was taken in."""
        self._num_dropped_by_dead += self._dropped.pop(child.number, 0)
        self._rings.pop(child.number, None)
        self._stop_listening(child)

    def select(self, timeout_s: float) -> list[Any]:
        """Wait for what wakes the launcher, at most `timeout_s`; take in what children said.

        Data of what else is ready, as it was registered.
        """
        ready = self._selector.select(min(timeout_s, GATHER_S) if self._is_gathering else timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._num_steps = 0
        for key, _ in self._channels.select(0):
            self.drain(key.data)
        for child in self._rings.values():
            if child.ring is not None and child.ring.has_more:
                self.drain(child)
        # Woken early it goes on as it was: with captures a bell follows each step, and finds none.
        self._gather(self._num_steps > 0 or (self._is_gathering and bool(ready)))
        return [key.data for key, _ in ready if key.data is not _OWN]

    def drain(self, child: Speaker) -> None:
        """Take in all that was told by now. A closed channel alone is not death: the pidfd tells."""
        # Counted first: every packet that was sent before these steps is in the channel by then.
        num_steps = 0 if child.ring is None else child.ring.num_written
        while True:
            try:
                received = child.channel.receive_plain()
            except BlockingIOError:
                break
            except ValueError:
                self.num_bad_packets += 1  # the child's own doing, its deadlines judge it
                continue
            if received is None:
                self._stop_listening(child)
                break
            message, num_before = received
            self._take_steps(child, num_before)
            self._take(child, message)
        self._take_steps(child, num_steps)

    def _take_steps(self, child: Speaker, until: int) -> None:
        """Take in the steps with a number below `until`."""
        ring = child.ring
        if ring is None:
            return
        num_damaged = ring.num_damaged
        for record in ring.take(until):
            self._take(child, to_message(record))
            self._num_steps += 1
        self.num_bad_packets += ring.num_damaged - num_damaged

    def _take(self, child: Speaker, message: wire.Message) -> None:
        self.note(child.number, message)
        self._put(c.FromChild(child=child.number, message=message))

    def note(self, number: int, message: wire.Message) -> None:
        """What is to be noted of a message, also of one that a child of another node has sent."""
        if isinstance(message, wire.Step):
            self._note_step(number, message)
        elif isinstance(message, wire.Alive):
            self._note_dropped(number, message)
        elif isinstance(message, wire.Injected):
            self.on_injected(number, message)

    def _note_step(self, number: int, message: wire.Step) -> None:
        rank = self._rank_of(number)
        if rank is None:
            return
        if message.arrived_ns:
            self.lateness.report(message.generation, self._world_size(), rank, message.step, message.arrived_ns)
        self.gpu_times.report(message.generation, rank, message.gpu_ns)

    def _note_dropped(self, number: int, message: wire.Alive) -> None:
        if message.num_dropped:
            self._dropped[number] = message.num_dropped

    def _gather(self, is_wanted: bool) -> None:
        if is_wanted is not self._is_gathering:
            self._is_gathering = is_wanted
            if is_wanted:
                self._selector.unregister(self._channels)
            else:
                self._selector.register(self._channels, selectors.EVENT_READ, _OWN)

    def _stop_listening(self, child: Speaker) -> None:
        if child.channel.fileno() in self._channels.get_map():
            self._channels.unregister(child.channel)

    def close(self) -> None:
        """Stop listening."""
        self._channels.close()
        os.close(self._bell)
