"""What travels between a simulated launcher and its hosts, in the product's own frames: who is reached, how many bytes.

Model: what children on other hosts say and what the launcher commands becomes the items that the product sends for it,
encoded by its codec. Bytes are counted while `measures_bytes` is set, which costs an encoding each. Two things that a
command leads to outside the machine are added: each `Ready` brings the slots of its rank, and stacks are kept by every
node when a teardown is over and a generation opens. Saves are left out: none is part of a recovery.

Must not: change what happens, or when; `world_network` does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nvrx_sre.checkpoint import agree
from nvrx_sre.events import messages as wire
from nvrx_sre.events import packets
from nvrx_sre.events.schema import TeardownFinished
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher import link_codec
from nvrx_sre.launcher.link import OVERHEAD_BYTES
from nvrx_sre.launcher.link_codec import Item, Packet

if TYPE_CHECKING:
    from nvrx_sre.testing.world_launcher import SimLauncher
    from nvrx_sre.testing.world_ranks import Offer, SimChild

_FOR_ALL = (c.PublishSealed, c.StrandSlots, c.SetHotInterval, c.ReleaseSlots, c.Fence)
"""Commands that every node hears of."""


class Traffic:
    """Of one launcher."""

    def __init__(self, launcher: SimLauncher) -> None:
        self.measures_bytes = False
        self.num_bytes = 0
        """Both ways so far, while they were measured."""
        self._launcher = launcher

    def said(self, child: SimChild, message: wire.Message) -> None:
        """A child has said something."""
        if not self.measures_bytes or not child.host:
            return
        self._count([Packet(child=child.number, packet=packets.encode(message))])
        if isinstance(message, wire.Ready):
            rank = getattr(child, "rank", -1)
            if rank >= 0:
                self._count([link_codec.Headers(rank=rank, headers=tuple(self._launcher.slots[rank].contents))])

    def commanded(self, command: c.Command) -> None:
        """The machine has answered an input."""
        is_for_all = isinstance(command, _FOR_ALL) or _keeps_stacks(command)
        if is_for_all:
            self._launcher.links.reach_all()
        if self.measures_bytes:
            num_reached = len(self._launcher.links.hosts) if is_for_all else 1
            self._count(self._items_of(command), num_reached)

    def offered(self, command: c.OpenGeneration, offer: Offer) -> None:
        """The generation opens with these candidates."""
        if not self.measures_bytes:
            return
        entries = [entry for entry, _ in offer.candidates]
        for number in command.children:
            child = self._launcher.children.get(number)
            if child is not None and child.host:
                go = wire.Go(
                    generation=command.generation,
                    world_size=command.world_size,
                    store_host="",
                    store_port=0,
                    candidates=agree.for_rank(entries, getattr(child, "rank", 0)),
                    require_restore=offer.requires_restore,
                    passes={},
                    hot_every=command.hot_every,
                    epoch=self._launcher.epoch,
                )
                self._count([c.Tell(child=number, message=go)])

    def _items_of(self, command: c.Command) -> Iterator[Item]:
        """What leaves for other hosts; for all of them, what leaves for each."""
        if isinstance(command, c.Fence):
            yield c.PublishSealed(step=command.step)
        elif isinstance(command, _FOR_ALL):
            yield command
        elif _keeps_stacks(command):
            yield c.KeepStacks(incident=1)
        elif isinstance(command, c.Spawn | c.AssignRank | c.DropSlots):
            if command.node:
                yield command
        elif isinstance(command, c.SendInterrupt):
            interrupt = wire.Interrupt(generation=command.generation, is_traced=command.is_traced)
            yield from self._told(command.child, c.Tell(child=command.child, message=interrupt))
        elif isinstance(command, c.SendProbe):
            yield from self._told(command.child, c.Tell(child=command.child, message=wire.Probe(number=command.number)))
        elif isinstance(command, c.LeaveChild):
            yield from self._told(command.child, c.Tell(child=command.child, message=wire.Leave()))
        elif isinstance(command, c.Kill | c.RequestStacks):
            yield from self._told(command.child, command)

    def _told(self, number: int, item: Item) -> Iterator[Item]:
        child = self._launcher.children.get(number)
        if child is not None and child.host:
            yield item

    def _count(self, items: Iterable[Item], num_times: int = 1) -> None:
        for item in items:
            self.num_bytes += num_times * (len(link_codec.encode(item)) + OVERHEAD_BYTES)


def _keeps_stacks(command: c.Command) -> bool:
    is_over = isinstance(command, c.Emit) and isinstance(command.event, TeardownFinished)
    return is_over or isinstance(command, c.OpenGeneration)
