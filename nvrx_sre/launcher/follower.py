"""The launcher of any node but the leader's: hands without a head.

    find the leader -> member of the run: its commands in, what happens here out -> end with it

Model: everything is decided by the leader's machine. Here children are started, told, ended and reaped, slots are kept,
and every fact is passed on in order: packets before the death of their sender, a rank's slots before it says that it is
ready. A link that ends takes the node's children and slots with it, since the leader counts the node as lost from then
on; then the leader is looked for again, and the node joins as if it were new.

What is durable stays. Main thread only. Must not: decide anything about the run, outlive its leader by more than
`nodes.leader_lost_s`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvrx_sre import __version__
from nvrx_sre.core import processes
from nvrx_sre.core.atomic import write_json_atomically
from nvrx_sre.core.clock import Clock, SystemClock, seconds, to_ns
from nvrx_sre.core.errors import ExitCode, StorageError, UserError
from nvrx_sre.core.rng import seeded
from nvrx_sre.core.signals import SignalPipe
from nvrx_sre.events import messages as wire
from nvrx_sre.events import packets
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher import link_codec
from nvrx_sre.launcher.child_watch import ChildWatch
from nvrx_sre.launcher.config import NodesConfig, RunConfig
from nvrx_sre.launcher.device_watch import DeviceWatch
from nvrx_sre.launcher.handshake import Claims
from nvrx_sre.launcher.host import HostSampler, node_name, pod_name
from nvrx_sre.launcher.leader_link import BEAT_S
from nvrx_sre.launcher.leader_search import Found, LeaderSearch, NotFound, Signalled, Where
from nvrx_sre.launcher.link import LinkLost
from nvrx_sre.launcher.machine_job import devices_of_node
from nvrx_sre.launcher.network import interface_of
from nvrx_sre.launcher.node import Node, chosen_interface, parent_environment
from nvrx_sre.launcher.node_readings import NodeReadings
from nvrx_sre.launcher.pace import Pace
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.telemetry.follower import FollowerTelemetry
from nvrx_sre.telemetry.node_board import rank_metrics_in_force

TURN_S = 0.5
"""Longest sleep of the loop."""


@dataclass(frozen=True, kw_only=True)
class FollowerReport:
    """How a follower ended."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Parted:
    """The end of one membership: the leader's `stop`, or `reason` why the link ended, and when it was last heard of."""

    stop: c.Stop | None
    reason: str
    heard_ns: int


def follow(config: RunConfig, nodes: NodesConfig, say: Callable[[str], None]) -> FollowerReport:
    """Serve the leader until the run ends; blocks, main thread only. `say` takes lines for a person.

    Children, sockets and shared memory are gone when it returns. Raises `UserError` where the leader refuses this node.
    """
    clock = SystemClock()
    limits = config.limits.nodes
    directory = RunDirectory(config.run_dir, nodes.node_rank)
    mode = rank_metrics_in_force(config.rank_metrics, config.nproc)
    at = (config.metrics_host, config.metrics_port)
    telemetry = FollowerTelemetry(config.run, config.limits, clock, at, config.metrics_security, mode)
    where = Where(host=nodes.leader_host, port=nodes.leader_port, token_file=nodes.token_file)
    signals = SignalPipe()
    devices = DeviceWatch(parent_environment(), telemetry.boundary)
    try:
        search = LeaderSearch(where, clock, signals, seeded(os.getpid()), say)
        until_ns = clock.monotonic_ns() + to_ns(limits.join_s)
        while True:
            found = search.find(lambda: _claims(config, nodes, clock, devices), until_ns)
            _check_directory(directory, found)
            directory.end_leftovers()
            _write_where(directory, config, telemetry, found.answer.epoch)
            say(f"joined leader {where} as node {nodes.node_rank} of {nodes.num_nodes}")
            with _Membership(config, directory, clock, signals, found) as membership:
                membership.node.stacks.boundary = telemetry.boundary
                parted = membership.serve(telemetry, devices, nodes.node_rank)
            if parted.stop is not None:
                return FollowerReport(exit_code=parted.stop.exit_code, reason=parted.stop.reason)
            if membership.signal is not None:
                raise Signalled(membership.signal)
            say(f"leader {where} lost: {parted.reason}; the ranks of this node have ended")
            until_ns = parted.heard_ns + to_ns(limits.leader_lost_s)
    except NotFound as error:
        return FollowerReport(exit_code=ExitCode.RETRYABLE, reason=str(error))
    except Signalled as error:
        by_person = error.number == signal.SIGINT
        code = ExitCode.INTERRUPTED if by_person else ExitCode.PREEMPTED
        return FollowerReport(exit_code=code, reason="interrupted" if by_person else "preempted, without a leader")
    finally:
        signals.close()
        devices.close()
        telemetry.close()


def _claims(config: RunConfig, nodes: NodesConfig, clock: Clock, devices: DeviceWatch) -> Claims:
    pid = os.getpid()
    return Claims(
        run=config.run,
        node_rank=nodes.node_rank,
        node=node_name(),
        pid=pid,
        start_ticks=processes.start_ticks(pid),
        version=__version__,
        mono_ns=clock.monotonic_ns(),
        settings=config.shared_settings(),
        gpu_uuids=list(devices.first()),
    )


def _check_directory(directory: RunDirectory, found: Found) -> None:
    if directory.has_epoch(found.answer.epoch):
        return
    found.link.close()
    raise UserError(
        f"run directory {directory.path} is not the leader's (it has no epoch {found.answer.epoch}): "
        "it must lie on storage that all nodes share"
    )


def _write_where(directory: RunDirectory, config: RunConfig, telemetry: FollowerTelemetry, epoch: int) -> None:
    """Say where this node's metrics are, and for which epoch; a disk that refuses it costs the run nothing."""
    has_password = config.metrics_security.users is not None
    where = {"url": telemetry.metrics_url, "pid": os.getpid(), "run": config.run, "password": has_password}
    where |= {"node": node_name(), "epoch": epoch}
    with contextlib.suppress(StorageError):
        write_json_atomically(directory.metrics, where, durable=False)


class _Membership:
    """One membership of the run, from handshake to the end of the link; a context manager that ends what it began."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, clock: Clock, signals: SignalPipe, found: Found
    ) -> None:
        self.signal: int | None = None
        """Termination signal that came, if any."""
        self._limits = config.limits
        self._nproc = config.nproc
        self._unfit_told: set[int] = set()
        self._directory = directory
        self._clock = clock
        self._signals = signals
        self._link = found.link
        self._link.bound_silence(config.limits.nodes.leader_lost_s)
        self._heard_ns = self._next_beat_ns = clock.monotonic_ns()
        self._pace = Pace()
        self._is_blocked = False
        """The socket took not all that was due."""
        self._stop: c.Stop | None = None
        self._ended = ""
        self._selector = selectors.DefaultSelector()
        self.node = Node(config, directory, clock, self._pass_on, found.answer.epoch)
        self.node.leader_address = self._link.peer_address
        self.node.interface = chosen_interface(interface_of(self._link.local_address))
        self.node.traceparent = lambda: found.answer.traceparent
        self._readings = NodeReadings(self.node.rank_of)
        self._next_look_ns = 0
        self._watch = ChildWatch(self._selector, self.node, clock, self._pass_on)
        self._selector.register(self._signals, selectors.EVENT_READ, ("signals", None))
        self._selector.register(self._link, selectors.EVENT_READ, ("link", None))

    def __enter__(self) -> _Membership:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        self.node.close()
        self._link.close()

    def serve(self, telemetry: FollowerTelemetry, devices: DeviceWatch, node_rank: int) -> _Parted:
        """Block until the run ends or the link does."""
        self._take()  # what came right behind the handshake has been read from the socket already
        with contextlib.closing(HostSampler(telemetry, self._directory.path, self._clock, devices)) as sampler:
            while self._stop is None and not self._ended:
                self._turn()
                telemetry.loop_turned()
                self._tell_ranks(telemetry, sampler, devices.snapshot().uuids)
                self._tell_unfit(devices.unfit(), node_rank)
        return _Parted(stop=self._stop, reason=self._ended, heard_ns=self._heard_ns)

    def _turn(self) -> None:
        for data in self._watch.select(self._wait_s()):
            self._handle_ready(*data)
        self._watch.tend()
        now_ns = self._clock.monotonic_ns()
        # Whatever arrived while this process stood still was taken in just now: silence is the leader's.
        nodes = self._limits.nodes
        patience_s = nodes.leader_lost_s if self.signal is None else nodes.lease_s
        if seconds(now_ns - self._heard_ns) > patience_s:
            self._ended = self._ended or f"silent for {patience_s:g} s"
        if now_ns >= self._next_beat_ns:
            self._next_beat_ns = now_ns + to_ns(BEAT_S)
            self._send(link_codec.Beat(sent_ns=now_ns))
        if self._watch.is_to_die:
            self._pace.at_once(now_ns)
        self._flush()
        if self._watch.is_to_die:
            os.kill(os.getpid(), signal.SIGKILL)

    def _wait_s(self) -> float:
        """Until something that waits to be sent is due."""
        due_ns = self._pace.due_ns
        return TURN_S if due_ns is None else min(TURN_S, max(0.0, seconds(due_ns - self._clock.monotonic_ns())))

    def _tell_unfit(self, unfit: Mapping[int, str], node_rank: int) -> None:
        """Each device once a membership: another leader has not heard of it."""
        for index in unfit.keys() - self._unfit_told:
            self._unfit_told.add(index)
            self._send(c.DeviceUnfit(node=node_rank, index=index, reason=unfit[index]))

    def _tell_ranks(self, telemetry: FollowerTelemetry, sampler: HostSampler, uuids: Sequence[str]) -> None:
        """Twice a second: where this node's ranks run, and what was last heard of them."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._next_look_ns:
            return
        self._next_look_ns = now_ns + to_ns(TURN_S)
        node = node_name()
        named = devices_of_node(node, self._nproc, uuids)
        devices = {rank: named[index] for rank, index in self.node.places().items()}
        telemetry.board.set_places(node, devices, pod_name(parent_environment()))
        telemetry.note_channel(self.node.num_unsent, self._watch.intake.num_bad_packets)
        slots = self.node.slots.files().values()
        readings = self._readings.of_ranks(self.node.pids(), self._watch.intake.gpu_times.of)
        sampler.tell_ranks(readings, sum(file.size_bytes for file in slots))

    def _handle_ready(self, what: str, child: Any) -> None:
        if what == "link":
            self._take()
        elif what == "signals":
            for number in self._signals.received():
                self.signal = number
                self._send(c.SignalReceived(signal=number, by_person=number == signal.SIGINT))
        else:
            self._watch.handle_ready(what, child)

    def _take(self) -> None:
        """What the leader says."""
        payloads, ended = self._link.receive()
        if payloads:
            self._heard_ns = self._clock.monotonic_ns()
        for payload in payloads:
            try:
                item = link_codec.decode(payload)
            except ValueError as error:
                self._ended = str(error)
                return
            if isinstance(item, link_codec.Beat):
                self._send(link_codec.Beat(sent_ns=self._clock.monotonic_ns(), echo_ns=item.sent_ns))
            elif isinstance(item, c.NoteLateness):
                self._readings.note_lateness(item.ranks, item.seconds)
            elif isinstance(item, c.Stop):
                self._stop = item
                return
            elif isinstance(item, c.Command):
                self.node.apply(item)
        self._ended = self._ended or ended

    def _pass_on(self, item: c.Input) -> None:
        """A fact of this node; before a rank says that it is ready, what it could restore from."""
        if isinstance(item, c.Exited):
            self._readings.forget(item.child)
        if not isinstance(item, c.FromChild):
            self._send(item)
            return
        self._readings.hear(item.child, item.message, self._clock.wall_ns())
        rank = self.node.rank_of(item.child)
        if isinstance(item.message, wire.Ready) and rank is not None:
            slots = self.node.slots.get(rank)
            self._send(link_codec.Headers(rank=rank, headers=() if slots is None else tuple(slots.headers())))
        packet = link_codec.Packet(child=item.child, packet=packets.encode(item.message))
        if isinstance(item.message, wire.Alive) and not item.message.probe:
            self._queue(packet)
            self._pace.sign_of_life(self._clock.monotonic_ns())
        else:
            self._send(packet)

    def _send(self, item: link_codec.Item) -> None:
        self._queue(item)
        now_ns = self._clock.monotonic_ns()
        if isinstance(item, link_codec.Beat):  # it measures how long the way takes
            self._pace.at_once(now_ns)
        else:
            self._pace.news(now_ns)

    def _queue(self, item: link_codec.Item) -> None:
        try:
            self._link.send(link_codec.encode(item))
        except LinkLost as error:
            self._ended = self._ended or str(error)

    def _flush(self) -> None:
        """Write what is due, and what the socket had no room for."""
        now_ns = self._clock.monotonic_ns()
        if not (self._pace.is_due(now_ns) or self._is_blocked):
            return
        self._pace.sent(now_ns)
        try:
            self._link.flush()
        except LinkLost as error:
            self._ended = self._ended or str(error)
            return
        self._is_blocked = self._link.wants_write
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._is_blocked else 0)
        if self._selector.get_key(self._link).events != events:
            self._selector.modify(self._link, events, ("link", None))
