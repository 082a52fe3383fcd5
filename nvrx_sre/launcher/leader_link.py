"""The leader's end of its links to the other nodes: lets in who belongs, passes on commands, brings back facts.

    listener -> pending (handshake, bounded) -> member -> inputs of the machine: NodeJoined, Spawned, FromChild, ...
                                                       <- commands for that node
                                                       -> NodeLost, then Exited of each of its children

Model: a node is a member from the end of its handshake until its connection ends or nothing was heard of it for a
lease. There is no resumption: TCP itself carries a connection over a cut that is shorter than the lease, and a node
that was given up joins anew with nothing. What its children said arrives in order; stamps are converted to our clock.

Invariants: every child that was asked for on a node gets exactly one `Exited`; what a node says of a child that is not
its own is dropped. Main thread only. Must not: block (names are not resolved here), obey a connection before its mac
was checked.
"""

from __future__ import annotations

import dataclasses
import selectors
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nvrx_sre.checkpoint.slots import SlotHeader
from nvrx_sre.core.clock import Clock, seconds, to_ns
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.limits import NodeLimits
from nvrx_sre.events import messages as wire
from nvrx_sre.events import packets
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher import handshake, link_codec
from nvrx_sre.launcher.handshake import Answer, Claims
from nvrx_sre.launcher.link import Link, LinkLost
from nvrx_sre.launcher.remote_clock import RemoteClock
from nvrx_sre.policy.classify import SPAWN_FAILED_EXIT

BEAT_S = 1.0
"""Launchers speak at least this often."""
HANDSHAKE_S = 5.0
"""Longest handshake; a connection that says nothing is closed after it."""
MAX_PENDING = 64
"""Connections in their handshake; more wait in the kernel's queue."""
FAREWELL_S = 1.0
"""Longest wait until the nodes have been told of the end."""
TAKEN_S = 3.0
"""A node heard of within this is there: a second one of its number is refused for good."""

PutInput = Callable[[c.Input], None]


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """What the leader asks of a node."""

    listener: socket.socket
    """From `listen`; the link closes it."""
    num_nodes: int
    token: bytes
    run: str
    version: str
    settings: dict[str, str]
    """What must be the same on all nodes (`Claims.settings`)."""
    epoch: int
    limits: NodeLimits


@dataclass(eq=False, kw_only=True)
class _Pending:
    link: Link
    nonce: bytes
    since_ns: int


@dataclass(eq=False, kw_only=True)
class _Member:
    """A node that is there."""

    node: int
    link: Link
    claims: Claims
    heard_ns: int
    clock: RemoteClock = field(default_factory=RemoteClock)
    children: set[int] = field(default_factory=set)
    headers: dict[int, Sequence[SlotHeader | None]] = field(default_factory=dict)
    """Slots of its ranks, as they were when the rank got ready."""


class LeaderLink:
    """All links of the leader. `selector` tells when they are ready; its data for them is ("link", this object's)."""

    def __init__(self, config: LinkConfig, selector: selectors.BaseSelector, clock: Clock, put: PutInput) -> None:
        self.traceparent: Callable[[], str] = lambda: ""
        self._config = config
        self._selector = selector
        self._clock = clock
        self._put = put
        self._listener = config.listener
        self._pending: list[_Pending] = []
        self._members: dict[int, _Member] = {}
        self._told: dict[int, _Member] = {}
        """Members for whom something is queued: the others cost a turn nothing."""
        self._next_beat_ns = 0
        selector.register(self._listener, selectors.EVENT_READ, ("link", None))

    def addresses(self) -> set[str]:
        """Addresses of this host by which the nodes have reached it."""
        found = set()
        for member in self._members.values():
            try:
                found.add(member.link.local_address)
            except LinkLost:
                continue  # noticed at its next turn
        return found

    def headers(self) -> dict[int, Sequence[SlotHeader | None]]:
        """Slots of the ranks on other nodes that have some, as each was ready for its next generation."""
        return {rank: headers for member in self._members.values() for rank, headers in member.headers.items()}

    def apply(self, node: int, command: c.Command) -> None:
        """Pass a command on to a node. One that is not there is told nothing, and starts nothing."""
        member = self._members.get(node)
        if member is None:
            if isinstance(command, c.Spawn):
                self._put(self._exited(command.child, "its node is lost", SPAWN_FAILED_EXIT))
            return
        if isinstance(command, c.Spawn):
            member.children.add(command.child)
        elif isinstance(command, c.DropSlots):
            member.headers.clear()
        self._send(member, command)

    def apply_everywhere(self, command: c.Command) -> None:
        """Pass a command on to every node that is there."""
        for node in list(self._members):
            self.apply(node, command)

    def flush(self) -> None:
        """Write what was queued: once a turn of the loop, so that many commands are one packet."""
        told, self._told = self._told, {}
        for member in told.values():
            if self._members.get(member.node) is not member:
                continue
            try:
                member.link.flush()
            except LinkLost as error:
                self._lose(member, str(error))
                continue
            if member.link.wants_write:
                self._told[member.node] = member
            self._watch(member.link, member)

    def handle_ready(self, what: object) -> None:
        """A socket of ours is ready; `what` is the selector's data."""
        if what is None:
            self._accept()
        elif isinstance(what, _Pending):
            self._shake(what)
        elif isinstance(what, _Member):
            self._take(what)

    def drain(self) -> None:
        """Take in everything that has arrived."""
        for member in list(self._members.values()):
            self._take(member)

    def tend(self) -> None:
        """Beats, leases, handshakes that take too long. Call twice a second, after `drain`."""
        now_ns = self._clock.monotonic_ns()
        for pending in [item for item in self._pending if now_ns - item.since_ns > to_ns(HANDSHAKE_S)]:
            self._drop(pending)
        lease_ns = to_ns(self._config.limits.lease_s)
        for member in [item for item in self._members.values() if now_ns - item.heard_ns > lease_ns]:
            self._lose(member, f"silent for {self._config.limits.lease_s:g} s")
        if now_ns >= self._next_beat_ns:
            self._next_beat_ns = now_ns + to_ns(BEAT_S)
            for member in list(self._members.values()):
                self._send(member, link_codec.Beat(sent_ns=now_ns))
            self.flush()

    def close(self, stop: c.Stop | None) -> None:
        """Tell the nodes of the end, bounded, and close everything."""
        if stop is not None:
            until_ns = self._clock.monotonic_ns() + to_ns(FAREWELL_S)
            for member in list(self._members.values()):
                self._send(member, stop)
            for member in list(self._members.values()):
                _write_out(member.link, seconds(until_ns - self._clock.monotonic_ns()))
        links = [item.link for item in self._pending] + [item.link for item in self._members.values()]
        for link in links:
            link.close()
        self._pending.clear()
        self._members.clear()
        self._listener.close()

    # --- who comes in ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._drop(self._pending[0])
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # gone again, or no descriptor left: the next one may have better luck
        pending = _Pending(link=Link(sock), nonce=handshake.new_nonce(), since_ns=self._clock.monotonic_ns())
        self._pending.append(pending)
        pending.link.send(handshake.challenge(pending.nonce))
        try:
            pending.link.flush()
        except LinkLost:
            self._pending.remove(pending)
            pending.link.close()
            return
        self._selector.register(pending.link, selectors.EVENT_READ, ("link", pending))

    def _shake(self, pending: _Pending) -> None:
        if pending not in self._pending:
            return
        payload, ended = pending.link.receive_one()
        if payload is None:
            if ended:
                self._drop(pending)
            return
        now_ns = self._clock.monotonic_ns()
        try:
            nonce, claims = handshake.read_claim(self._config.token, pending.nonce, payload)
        except handshake.HandshakeError as error:
            self._answer(pending, b"", Answer(refused=str(error)))
            self._drop(pending)
            return
        differs = self._differs(claims, here="on the leader", there="here")
        refused, is_final = (differs, True) if differs else self._judge(claims, now_ns)
        answer = Answer(
            refused=refused, is_final=is_final, epoch=self._config.epoch, traceparent=self.traceparent() or ""
        )
        is_told = self._answer(pending, nonce, answer)
        if refused and is_final:
            reason = self._differs(claims, here="here", there="there") or refused
            self._put(c.NodeRefused(node=claims.node_rank, reason=reason))
        if refused or not is_told:
            self._drop(pending)
            return
        self._admit(pending, nonce, claims, now_ns)

    def _differs(self, claims: Claims, *, here: str, there: str) -> str:
        """What the node would run otherwise, '' if nothing."""
        config = self._config
        ours = {"version": config.version, "--name": config.run, **config.settings}
        theirs = {"version": claims.version, "--name": claims.run, **claims.settings}
        return handshake.difference(ours, theirs, here=here, there=there)

    def _judge(self, claims: Claims, now_ns: int) -> tuple[str, bool]:
        """Why a node that would run the same is refused, '' if it is not; and whether that is final."""
        config = self._config
        if not 1 <= claims.node_rank < config.num_nodes:
            return f"--node-rank is {claims.node_rank}: use 1 to {config.num_nodes - 1} beside the leader's 0", True
        other = self._members.get(claims.node_rank)
        if other is None or other.claims.identity == claims.identity:
            return "", True
        taken = f"node rank {claims.node_rank} is taken by process {other.claims.pid} of {other.claims.node}"
        return taken, now_ns - other.heard_ns <= to_ns(TAKEN_S)

    def _answer(self, pending: _Pending, nonce: bytes, answer: Answer) -> bool:
        pending.link.send(handshake.answer(self._config.token, pending.nonce, nonce, answer))
        try:
            pending.link.flush()
        except LinkLost:
            return False
        return True

    def _admit(self, pending: _Pending, nonce: bytes, claims: Claims, now_ns: int) -> None:
        old = self._members.get(claims.node_rank)
        if old is not None:
            self._lose(old, "its launcher connected anew")
        self._pending.remove(pending)
        self._selector.unregister(pending.link)
        pending.link.seal(handshake.session_key(self._config.token, pending.nonce, nonce), is_leader=True)
        pending.link.bound_silence(self._config.limits.lease_s)
        member = _Member(node=claims.node_rank, link=pending.link, claims=claims, heard_ns=now_ns)
        member.clock.observe(pending.since_ns, claims.mono_ns, now_ns)
        self._members[member.node] = member
        self._watch(member.link, member)
        self._put(c.NodeJoined(node=member.node, name=claims.node, gpu_uuids=tuple(claims.gpu_uuids)))

    def _drop(self, pending: _Pending) -> None:
        self._pending.remove(pending)
        self._selector.unregister(pending.link)
        pending.link.close()

    # --- what a member says ---------------------------------------------------------------------------------

    def _take(self, member: _Member) -> None:
        if self._members.get(member.node) is not member:
            return
        if member.link.wants_write:
            self.flush()
        if self._members.get(member.node) is not member:
            return
        payloads, ended = member.link.receive()
        if payloads:
            member.heard_ns = self._clock.monotonic_ns()
        for payload in payloads:
            try:
                self._take_item(member, link_codec.decode(payload))
            except ValueError as error:
                ended = str(error)
                break
        if ended:
            self._lose(member, ended)

    def _take_item(self, member: _Member, item: link_codec.Item) -> None:
        now_ns = member.heard_ns
        if isinstance(item, link_codec.Beat):
            if item.echo_ns:
                member.clock.observe(item.echo_ns, item.sent_ns, now_ns)
        elif isinstance(item, link_codec.Packet):
            if item.child in member.children:
                message = _converted(packets.decode(item.packet), member.clock, now_ns)
                self._put(c.FromChild(child=item.child, message=message))
        elif isinstance(item, link_codec.Headers):
            member.headers[item.rank] = item.headers
        elif isinstance(item, c.Spawned):
            if item.child in member.children:
                self._put(item)
        elif isinstance(item, c.Exited):
            if item.child in member.children:
                member.children.discard(item.child)
                self._put(dataclasses.replace(item, exited_ns=member.clock.here_ns(item.exited_ns, now_ns)))
        elif isinstance(item, c.SignalReceived):
            self._put(item)

    def _lose(self, member: _Member, reason: str) -> None:
        """The node is gone: what it was, and what ran there."""
        del self._members[member.node]
        self._selector.unregister(member.link)
        member.link.close()
        self._put(c.NodeLost(node=member.node, reason=reason, mono_ns=member.heard_ns))
        for child in sorted(member.children):
            self._put(self._exited(child, f"its node is lost: {reason}", None))

    def _exited(self, child: int, why: str, exit_code: int | None) -> c.Exited:
        now_ns = self._clock.monotonic_ns()
        return c.Exited(child=child, exit_code=exit_code, signal=None, exited_ns=now_ns, oom=False, last_line=why)

    def _send(self, member: _Member, item: link_codec.Item) -> None:
        self._told[member.node] = member
        try:
            member.link.send(link_codec.encode(item))
        except LinkLost as error:
            self._lose(member, str(error))

    def _watch(self, link: Link, member: _Member) -> None:
        """Look for room as well while something waits to be written."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)
        known = self._selector.get_map().get(link)
        if known is None:
            self._selector.register(link, events, ("link", member))
        elif known.events != events:
            self._selector.modify(link, events, ("link", member))


_STAMPS = ("mono_ns", "arrived_ns")


def _converted(message: wire.Message, clock: RemoteClock, now_ns: int) -> wire.Message:
    """The message with its stamps on our clock."""
    stamps = {name: stamp for name in _STAMPS if (stamp := getattr(message, name, 0))}
    return dataclasses.replace(message, **{name: clock.here_ns(stamp, now_ns) for name, stamp in stamps.items()})


def listen(host: str, port: int) -> socket.socket:
    """Where the nodes are waited for; `host` '' is every address. Raises `UserError` if the port cannot be had."""
    is_dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=is_dual)
    except OSError as error:
        where = f"{host or '*'}:{port}"
        raise UserError(
            f"cannot listen for other nodes on {where}: {(error.strerror or str(error)).lower()}"
        ) from error
    listener.setblocking(False)
    return listener


def _write_out(link: Link, timeout_s: float) -> None:
    """Write what is queued, bounded; a peer that is gone needs no farewell."""
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_WRITE)
        try:
            link.flush()
            while link.wants_write and selector.select(max(0.0, timeout_s)):
                link.flush()
        except LinkLost:
            return
