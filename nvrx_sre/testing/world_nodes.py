"""The launchers of the hosts beside the leader's, and the leader's ends of the links to them.

Model: a host's launcher looks for the leader, joins with nothing, carries out what it is told, and ends its children
when the link does; then it looks again, for whoever leads by then. Both sides speak every second. The leader gives a
host up that was silent for a lease, or whose connection broke; a host gives its leader up after a longer silence. What
was on its way is lost with the link. A node that is back has no child, no slot and no memory of what it was.

    SimNode (outlives leaders) ── search ─> Links.join ─> NodeJoined
                               <─ lose ──── Links.tend (lease), a broken connection ─> NodeLost, Exited of its children

Children of a host that was given up end at once, although the real ones live until their launcher notices: nobody can
hear of them any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvrx_sre.core.clock import seconds, to_ns
from nvrx_sre.launcher import commands as c
from nvrx_sre.policy.classify import SPAWN_FAILED_EXIT
from nvrx_sre.testing.world_network import Action, Host, Relay
from nvrx_sre.testing.world_plan import name_of

if TYPE_CHECKING:
    from nvrx_sre.testing.world import World
    from nvrx_sre.testing.world_launcher import SimLauncher
    from nvrx_sre.testing.world_ranks import SimChild

TEND_S = 0.5
"""Time between two looks of the leader at its links."""
LATE_SHARE = 0.1
"""Hosts that come late, where others are there within two seconds of their launcher's start."""
LATE_S = 15.0


class SimNode:
    """The launcher of a host that does not lead."""

    def __init__(self, world: World, host: Host) -> None:
        self.host = host
        self.links: Links | None = None
        """The leader's end, None while it is not a member."""
        self.heard_ns = 0
        """When the leader was heard of last."""
        self.has_been_lost = False
        self._world = world
        rng = world.rng
        self._search_after(rng.uniform(0.0, LATE_S if rng.random() < LATE_SHARE else 2.0))

    @property
    def is_reachable(self) -> bool:
        """Its host runs, and its link carries something."""
        now_ns = self._world.now_ns
        return now_ns >= self.host.boots_until_ns and now_ns >= self.host.cut_until_ns

    def part(self) -> None:
        """The link has ended: it has no children any more, and looks for a leader."""
        self.links = None
        self.has_been_lost = True
        self._search_after(self._world.rng.uniform(0.05, 0.5))

    def _search_after(self, delay_s: float) -> None:
        self._world.schedule(delay_s, self._search)

    def _search(self) -> None:
        if self.links is not None:
            return
        leader = self._world.newest if self._world.launchers else None
        if leader is None or leader.is_over or leader.is_stalled or not self.is_reachable:
            self._search_after(self._world.rng.uniform(0.2, 1.0))
            return
        self.links, self.heard_ns = leader.links, self._world.now_ns
        leader.links.join(self)
        self._watch(leader.links)

    def _watch(self, links: Links) -> None:
        """Once a second: a leader that is silent for too long is given up."""
        if self.links is not links:
            return
        world = self._world
        if self.is_reachable and not links.launcher.is_stalled:
            self.heard_ns = world.now_ns
        elif seconds(world.now_ns - self.heard_ns) > world.config.limits.nodes.leader_lost_s:
            world.reach("a host gave its silent leader up")
            links.lose(self.host.number, "it has ended its link")
            return
        world.schedule(1.0, lambda: self._watch(links))


@dataclass(kw_only=True)
class _Member:
    """A host that is there."""

    node: SimNode
    relay: Relay
    heard_ns: int
    is_dead: bool = False
    """Its host has gone without a word: what runs there once it is back is another launcher."""
    down: list[Action] = field(default_factory=list)
    """What it is told of the input at hand."""


class Links:
    """One leader's links to the other hosts."""

    def __init__(self, launcher: SimLauncher) -> None:
        self.launcher = launcher
        self._world = launcher.world
        self._members: dict[int, _Member] = {}
        self._told: dict[int, _Member] = {}
        """Hosts that are told something of the input at hand."""
        self._num_past_packets = 0
        if self._world.nodes:
            self._world.schedule(TEND_S, self._tend)

    @property
    def num_packets(self) -> int:
        """Packets both ways so far, beats left out."""
        live = sum(member.relay.num_up + member.relay.num_down for member in self._members.values())
        return self._num_past_packets + live

    def up(self, child: SimChild, action: Action, *, is_news: bool) -> None:
        """A child on another host has said something."""
        member = self._members.get(child.host)
        if member is not None:
            member.relay.up(action, is_news=is_news)

    def down(self, host: int, action: Action) -> bool:
        """Have something done on another host; False if it is not there."""
        member = self._members.get(host)
        if member is None:
            return False
        member.down.append(action)
        self._told[host] = member
        return True

    def reach_all(self) -> None:
        """The input at hand is answered with something that every host is told, and that takes effect here at once."""
        self._told |= self._members

    @property
    def hosts(self) -> list[int]:
        """Who is there."""
        return list(self._members)

    def flush(self) -> None:
        """What was commanded in answer to one input leaves, one packet a host."""
        told, self._told = self._told, {}
        for member in told.values():
            actions, member.down = member.down, []
            member.relay.down(actions)

    def fail_spawn(self, child: SimChild) -> None:
        """A child was asked for on a host that is not there."""
        self._world.schedule(0.0, lambda: self._feed_exit(child, SPAWN_FAILED_EXIT))

    def join(self, node: SimNode) -> None:
        """The host's launcher has found us."""
        number = node.host.number
        assert number not in self._members, "it parts before it joins again"
        world = self._world
        self._members[number] = _Member(node=node, relay=Relay(world, node.host), heard_ns=world.now_ns)
        if node.has_been_lost:
            world.reach("a host came back")
        self.launcher.feed(c.NodeJoined(node=number, name=name_of(number)))

    def silence(self, host: int) -> None:
        """The host is gone, and nobody says so: a lease tells, or its new launcher, whichever is first."""
        member = self._members.get(host)
        if member is None:
            return
        member.is_dead = True
        for child in self.launcher.children.values():
            if child.host == host:
                child.is_alive = False

        def connect_anew() -> None:
            if self._members.get(host) is member:
                self._world.reach("a host came back before it was missed")
                self.lose(host, "its launcher connected anew")

        self._world.schedule_at(member.node.host.boots_until_ns, connect_anew)

    def lose(self, host: int, reason: str) -> None:
        """The host is gone for us, with all that ran there."""
        member = self._members.pop(host, None)
        if member is None:
            return
        world, launcher = self._world, self.launcher
        world.reach("a host was lost with its hot slots")
        self._close(member)
        lost = launcher.take_children(host)
        launcher.feed(c.NodeLost(node=host, reason=reason, mono_ns=member.heard_ns))
        for child in lost:
            self._feed_exit(child, None)
        member.node.part()

    def speak(self) -> None:
        """The leader goes on after a while: whoever can be reached hears it at once, and has spoken all the time."""
        for member in self._members.values():
            if member.node.is_reachable and not member.is_dead:
                member.heard_ns = member.node.heard_ns = self._world.now_ns

    def close(self) -> None:
        """The leader is over: connections break, and hosts look for another one."""
        members, self._members = self._members, {}
        for member in members.values():
            self._close(member)
            member.node.part()

    def _close(self, member: _Member) -> None:
        member.relay.is_closed = True
        self._num_past_packets += member.relay.num_up + member.relay.num_down

    def _feed_exit(self, child: SimChild, exit_code: int | None) -> None:
        self.launcher.forget(child)
        exited_ns = self._world.now_ns
        self.launcher.feed(
            c.Exited(child=child.number, exit_code=exit_code, signal=None, exited_ns=exited_ns, oom=False, last_line="")
        )

    def _tend(self) -> None:
        """Hear from those that can be heard; give up who was silent for a lease."""
        launcher, world = self.launcher, self._world
        if launcher.is_over:
            return
        lease_ns = to_ns(world.config.limits.nodes.lease_s)
        for host, member in list(self._members.items()):
            # What arrived while the leader was stopped is taken in before it judges: it was sent until just now.
            if member.node.is_reachable and not member.is_dead:
                member.heard_ns = world.now_ns
            elif not launcher.is_stalled and world.now_ns - member.heard_ns > lease_ns:
                world.reach("a host was silent for a lease")
                self.lose(host, "silent")
        world.schedule(TEND_S, self._tend)
