"""The simulated network between the leader's launcher and the hosts of the other ranks.

Model: ranks on the leader's host have a socket of their own to the launcher. Every other host has one connection, with
a relay at its end: what its ranks say goes up in packets, paced as the product's are (`launcher.pace`); what the
launcher commands in answer to one input goes down in one packet a host. So the packets of a recovery grow with the
hosts, not with the ranks, and a host that is cut off holds back both directions, in order, until the connection is back
or given up (`world_nodes`).

Must not: lose or reorder packets of one direction while the connection lasts (TCP does not either).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvrx_sre.core.clock import to_ns
from nvrx_sre.launcher.pace import Pace

if TYPE_CHECKING:
    from nvrx_sre.testing.world import World

LATENCY_S = 0.0005
"""One way within a data centre, with the relay's own turn."""

Action = Callable[[], None]


@dataclass(kw_only=True)
class Host:
    """State of a host's link, whichever launcher is at the other end. Monotonic ns."""

    number: int
    cut_until_ns: int = 0
    slow_until_ns: int = 0
    delay_s: float = 0.0
    boots_until_ns: int = 0
    """The host is down: processes start on it after this."""

    def latency_s(self, now_ns: int) -> float:
        """What a packet takes that is sent now."""
        return LATENCY_S + (self.delay_s if now_ns < self.slow_until_ns else 0.0)


class Relay:
    """One launcher's connection to one other host."""

    def __init__(self, world: World, host: Host) -> None:
        self.num_up = 0
        """Packets to the launcher."""
        self.num_down = 0
        """Packets from the launcher."""
        self.is_closed = False
        """The connection has ended: what is on its way is lost."""
        self._world = world
        self._host = host
        self._waiting: list[Action] = []
        self._pace = Pace()
        self._wakes_ns: int | None = None
        """When it looks next whether something is due."""
        self._last_ns = {"up": 0, "down": 0}

    def up(self, action: Action, *, is_news: bool) -> None:
        """Something that a rank said: `action` takes it in at the launcher. A sign of life is no news."""
        now_ns = self._world.now_ns
        self._waiting.append(action)
        if is_news:
            self._pace.news(now_ns)
        else:
            self._pace.sign_of_life(now_ns)
        due_ns = self._pace.due_ns
        assert due_ns is not None, "there is something to say"
        if self._wakes_ns is None or due_ns < self._wakes_ns:
            self._wakes_ns = due_ns
            self._world.schedule_at(due_ns, self._flush)

    def down(self, actions: list[Action]) -> None:
        """What the launcher commands at one time, also what does nothing to the host's children."""
        self.num_down += 1
        if actions:
            self._deliver("down", actions)

    def _flush(self) -> None:
        now_ns = self._world.now_ns
        if not self._pace.is_due(now_ns):
            return  # it left with news that came later and was due before
        self._pace.sent(now_ns)
        self._wakes_ns = None
        waiting, self._waiting = self._waiting, []
        self.num_up += 1
        self._deliver("up", waiting)

    def _deliver(self, way: str, actions: list[Action]) -> None:
        world, host = self._world, self._host
        at_ns = world.now_ns + to_ns(host.latency_s(world.now_ns))
        at_ns = max(at_ns, self._last_ns[way])

        def arrive() -> None:
            if self.is_closed:
                return
            if world.now_ns < host.cut_until_ns:
                self._last_ns[way] = host.cut_until_ns
                world.schedule_at(host.cut_until_ns, arrive)
                return
            for action in actions:
                action()

        self._last_ns[way] = at_ns
        world.schedule_at(at_ns, arrive)
