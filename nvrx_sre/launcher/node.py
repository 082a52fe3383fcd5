"""Effects of commands on one node: its children, their slots, its writer. The same on the leader's node and on others.

One method a command, found by the command's class. Every effect is bounded; a failed effect becomes an input, never an
exception in the loop. What is the leader's alone (store, run directory's line, journal) is in `launcher.effects`.
Main thread only.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.core import errors
from nvrx_sre.core.clock import Clock
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import FaultClass, HotSlotsAllocated, Phase, Role
from nvrx_sre.events.settings import ChildSettings
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher import process
from nvrx_sre.launcher.config import RunConfig
from nvrx_sre.launcher.forkserver import ForkServer, Request, ServerConfig
from nvrx_sre.launcher.hot import HotSlots
from nvrx_sre.launcher.nccl_variables import unset_variables
from nvrx_sre.launcher.orphans import Orphans
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.launcher.stacks import StackKeeper
from nvrx_sre.policy.classify import SPAWN_FAILED_EXIT
from nvrx_sre.telemetry.boundary import Boundary
from nvrx_sre.telemetry.context import TRACEPARENT_VARIABLE
from nvrx_sre.telemetry.redact import Redactor

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
FOREIGN_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("TRACEPARENT", "TRACESTATE"),
    }
)
"""What another launcher, or a tracer around this one, meant for this process and not for its children."""
GROUP_TIMEOUT_S = 600.0
"""The group's own timeout; recovery does not wait for it, it only bounds a run without a launcher."""

PutInput = Callable[[c.Input], None]


class Node:
    """Children, slots and writer of this node."""

    def __init__(self, config: RunConfig, directory: RunDirectory, clock: Clock, put: PutInput, epoch: int) -> None:
        self.children: dict[int, process.Child] = {}
        self.slots = HotSlots(config.run, config.hot_slots, config.nproc)
        self.stacks = StackKeeper(directory.incidents, Redactor.from_environment(parent_environment()), Boundary(clock))
        self.num_unsent = 0
        self.traceparent: Callable[[], str] = lambda: ""
        """Span that spans of the children belong under, in W3C form; '' if there is none."""
        self.leader_address = ""
        """Where this node reaches the store."""
        self.interface = ""
        """Interface over which ranks of several nodes meet, '' to leave that as it is."""
        self.on_allocated: Callable[[HotSlotsAllocated, int], object] = lambda _, __: None
        """Hears, with the generation, of the memory that all of the node's slots take."""
        self._config = config
        self._directory = directory
        self._clock = clock
        self._put = put
        self._epoch = epoch
        self._generation = 0
        self._recorded: dict[int, int] = {}
        """What was written of the children last."""
        self._rank_of: dict[int, int] = {}
        self._world_size = 0
        self._rehearsing: set[int] = set()
        """Standbys that were told to rehearse since the slots are those of this world."""
        self._local_rank_of: dict[int, int] = {}
        self._orphans = Orphans()
        self.forks = ForkServer(
            ServerConfig(
                environment=child_environment(config.nproc),
                command=config.command,
                log=directory.forkserver_log,
                answer_s=config.limits.deadlines.init_s,
            ),
            clock,
        )
        self._table: dict[type[c.Command], Callable[[Any], None]] = {
            c.Spawn: self._spawn,
            c.AssignRank: self._assign,
            c.Tell: self._tell,
            c.TellWriter: lambda command: self._tell_writer(command.message),
            c.RequestStacks: self._request_stacks,
            c.KeepStacks: lambda command: self.stacks.keep(command.incident),
            c.Kill: self._kill,
            c.SetHotInterval: self._set_hot_interval,
            c.GrantSlots: self._grant,
            c.DropSlots: self._drop,
            c.PublishSealed: self._publish,
            c.StrandSlots: lambda command: self.slots.strand(command.generation, command.step),
            c.HoldSlots: lambda command: self.slots.hold(command.slots, command.first_rank),
            c.ReleaseSlots: self._release_slots,
            c.ReleaseBoundary: self._release_boundary,
        }

    def apply(self, command: c.Command) -> None:
        """Carry out one command."""
        self._table[type(command)](command)

    def close(self) -> None:
        """End whatever still runs, release everything."""
        for forked in self.forks.close():
            if forked.pid:
                self.children[forked.child].started(forked.pid)
        for child in self.children.values():
            if child.pid:
                child.kill()
                child.reap()
            else:
                child.close()
        self.children.clear()
        self.stacks.close()
        self._orphans.close()
        self.slots.drop()

    def rank_of(self, number: int) -> int | None:
        """Rank that a child holds, None if it has none."""
        return self._rank_of.get(number)

    def take_forks(self) -> list[process.Child]:
        """Children that were started since the last call; the machine hears of others. Never blocks."""
        started = []
        for forked in self.forks.take():
            child = self.children[forked.child]
            if not forked.pid:
                child.close()
                self.stacks.end(forked.child)
                del self.children[forked.child]
                self._put_spawn_failure(forked.child, forked.error)
                continue
            child.started(forked.pid)
            self._put(c.Spawned(child=child.number, pid=child.pid, start_ticks=child.start_ticks))
            started.append(child)
        self._record_children()
        return started

    def forget(self, number: int) -> None:
        """A child is dead and reaped."""
        child = self.children.pop(number, None)
        self._rehearsing.discard(number)
        self.stacks.end(number)
        self._rank_of.pop(number, None)
        self._local_rank_of.pop(number, None)
        if child is not None:
            self._orphans.left_by(child.pid)
        self._record_children()

    def pids(self) -> dict[int, int]:
        """Process of each child that was started and lives."""
        return {child.number: child.pid for child in self.children.values() if child.pid}

    def places(self) -> dict[int, int]:
        """Index of the device on which each of the node's ranks runs."""
        return {self._rank_of[number]: index for number, index in self._local_rank_of.items()}

    def retry(self) -> None:
        """Write again what the disk refused before; see to orphans. Called twice a second."""
        self._record_children()
        if not self.forks.is_starting:
            self._orphans.tend(self._processes())

    # --- children -------------------------------------------------------------------------------------------

    def _spawn(self, command: c.Spawn) -> None:
        name = command.role if command.rank is None else f"rank-{command.rank:05d}"
        # Attempts and children are counted anew by each leader: its epoch keeps their logs apart.
        log = self._directory.logs / f"{name}-epoch-{self._epoch:04d}-attempt-{command.attempt:04d}-{command.child}.log"
        try:
            stacks = None if command.role is Role.WRITER else self.stacks.open(command.child, command.rank)
            child, theirs, output = process.prepare(command.child, command.role, log)
        except OSError as error:
            self.stacks.end(command.child)
            self._put_spawn_failure(command.child, error.strerror or str(error))
            return
        self.children[command.child] = child
        child.stacks = stacks
        if command.rank is not None:  # what it says before it gets its rank, if it gets that far, is to be found
            self._directory.point_rank_log(command.rank, log)
        fork = wire.Fork(
            child=command.child,
            role=command.role,
            name=f"nvrx-{name}",
            arguments=self._arguments(command),
            environment=self._environment(command),
        )
        memory = () if stacks is None else (stacks.fd,)
        self.forks.put(Request(message=fork, channel=theirs, output=output, stacks=memory))
        for rank, slots in self.slots.files().items():
            self._map(child, rank, slots)

    def _put_spawn_failure(self, number: int, why: str) -> None:
        self._put(
            c.Exited(
                child=number,
                exit_code=SPAWN_FAILED_EXIT,
                signal=None,
                exited_ns=self._clock.monotonic_ns(),
                oom=False,
                last_line=f"cannot start a process: {why}",
            )
        )

    def _arguments(self, command: c.Spawn) -> list[str]:
        if command.role is not Role.WRITER:
            return list(self._config.command)
        rate = self._config.write_bandwidth_bytes_s
        options = [f"--bandwidth-bytes-s={rate}"] if rate else []
        if command.node > 0:
            options.append("--keep-attempts")
        return [str(self._directory.path), self._config.run, *options]

    def _environment(self, command: c.Spawn) -> dict[str, str]:
        """What a child has beside the fork server's environment. Faults of storage strike the leader's writer alone."""
        is_spared = command.role is Role.WRITER and command.node > 0
        settings = ChildSettings(
            run=self._config.run,
            run_dir=str(self._directory.path),
            launcher_pid=os.getpid(),
            role=command.role,
            attempt=command.attempt,
            save_every=self._config.save_every,
            waits_for_writer=self._config.on_busy == "wait",
            interrupt_signal=self._config.interrupt_signal,
            fault_specs=() if is_spared else self._config.fault_specs,
            group_timeout_s=GROUP_TIMEOUT_S,
        )
        traceparent = self.traceparent()
        trace = {TRACEPARENT_VARIABLE: traceparent} if traceparent else {}
        return rank_environment(command) | settings.to_environment() | trace

    def _processes(self) -> dict[int, int]:
        """pid -> start ticks of everything that was started here and lives."""
        started = {child.pid: child.start_ticks for child in self.children.values() if child.pid}
        return started | self.forks.processes()

    def _record_children(self) -> None:
        # The record serves the cleaning up after a killed launcher; a full disk must not end a healthy run.
        found = self._processes()
        if found == self._recorded:
            return
        try:
            self._directory.record_children(found)
        except errors.StorageError:
            self._recorded = {}
        else:
            self._recorded = found

    def _assign(self, command: c.AssignRank) -> None:
        self._rank_of[command.child] = command.rank
        self._local_rank_of[command.child] = command.local_rank
        self.stacks.assign(command.child, command.rank)
        child = self.children.get(command.child)
        if child is not None:
            self._directory.point_rank_log(command.rank, child.log)
        slots = self.slots.get(command.rank)
        message = wire.Assign(
            rank=command.rank,
            local_rank=command.local_rank,
            world_size=command.world_size,
            generation=command.generation,
            slot_data_bytes=slots.data_bytes if slots else 0,
            slot_blob_bytes=slots.blob_bytes if slots else 0,
            local_world_size=command.local_world_size,
            node_rank=command.node,
        )
        self._send(command.child, message, (slots.fd,) if slots else ())

    def _request_stacks(self, command: c.RequestStacks) -> None:
        child = self.children.get(command.child)
        if child is not None:
            child.request_stacks()

    def _kill(self, command: c.Kill) -> None:
        child = self.children.get(command.child)
        if child is not None:
            child.await_stacks()
            child.kill()

    # --- what children are told -----------------------------------------------------------------------------

    def _send(self, number: int, message: wire.Message, descriptors: tuple[int, ...] = ()) -> None:
        child = self.children.get(number)
        if child is not None:
            # A full socket belongs to a child that does not read: its death or deadline follows anyway.
            self.num_unsent += not child.channel.send_nowait(message, descriptors)

    def _tell(self, command: c.Tell) -> None:
        message = command.message
        if isinstance(message, wire.Go):
            self._generation, self._world_size = message.generation, message.world_size
            rank = self._rank_of.get(command.child)
            if rank is not None:  # else it has died since its generation was decided on
                self.stacks.enter(command.child, rank, message.generation)
            message = dataclasses.replace(
                message, store_host=message.store_host or self.leader_address, interface=self.interface
            )
        self._send(command.child, message)

    def _tell_writer(self, message: wire.Message) -> None:
        """A dead writer hears nothing: its successor is told again of what is held."""
        writer = next((child for child in self.children.values() if child.role is Role.WRITER), None)
        if writer is not None:
            self._send(writer.number, message)

    def _set_hot_interval(self, command: c.SetHotInterval) -> None:
        for child in self._rank_of:
            self._send(child, wire.HotInterval(every=command.every, from_step=command.from_step))

    def _release_boundary(self, command: c.ReleaseBoundary) -> None:
        for child in self._rank_of:
            self._send(child, wire.SaveTurn(generation=command.generation, step=command.step))

    # --- slots ----------------------------------------------------------------------------------------------

    def _grant(self, command: c.GrantSlots) -> None:
        before = self.slots.allocated()
        self.slots.note_snapshots(command.rank, taken=command.takes_snapshots)
        try:
            slots = self.slots.grant(command.rank, command.data_bytes, command.blob_bytes)
        except (errors.UserError, errors.StorageError) as error:
            self._put(own_fault(command.child, self._generation, FaultClass.SHM_EXHAUSTED, error, self._clock))
            return
        allocated = self.slots.allocated()
        if allocated is not None and allocated != before:
            self.on_allocated(allocated, self._generation)
        granted = wire.SlotsGranted(data_bytes=slots.data_bytes, blob_bytes=slots.blob_bytes)
        self._send(command.child, granted, (slots.fd,))
        for child in self.children.values():
            self._map(child, command.rank, slots)

    def _publish(self, command: c.PublishSealed) -> None:
        """With a sealed step there is something that standbys can rehearse."""
        self.slots.publish(command.step)
        if command.step < 0 or not self.slots.files():
            return
        for child in self.children.values():
            if child.number not in self._rehearsing and self._is_standby(child):
                self._rehearsing.add(child.number)
                self._send(child.number, wire.Rehearse(world_size=self._world_size))

    def _drop(self, command: c.DropSlots) -> None:
        self.slots.drop(command.num_ranks)
        self._rehearsing.clear()
        for child in self.children.values():
            if self._is_standby(child):
                self._send(child.number, wire.SlotsDropped())

    def _release_slots(self, command: c.ReleaseSlots) -> None:
        self.slots.release()
        for child in self._rank_of:
            self._send(child, wire.SlotsReleased())

    def _map(self, child: process.Child, rank: int, slots: SlotFile) -> None:
        """The writer reads every rank's slots, and a standby may become any rank."""
        if child.role is Role.WRITER or self._is_standby(child):
            message = wire.MapSlots(rank=rank, data_bytes=slots.data_bytes, blob_bytes=slots.blob_bytes)
            self._send(child.number, message, (slots.fd,))

    def _is_standby(self, child: process.Child) -> bool:
        """It has not become a rank yet."""
        return child.role is Role.STANDBY and child.number not in self._rank_of


def own_fault(child: int, generation: int, fault: FaultClass, error: Exception, clock: Clock) -> c.FromChild:
    """What went wrong on a launcher's side of a generation is a fault of that generation, for the policy."""
    return c.FromChild(
        child=child,
        message=wire.Fault(
            generation=generation,
            fault=fault,
            communication=False,
            exception_type=type(error).__name__,
            frame="",
            message=str(error)[:500],
            stack="",
            step=0,
            phase=Phase.LOAD,
            mono_ns=clock.monotonic_ns(),
        ),
    )


def parent_environment() -> dict[str, str]:
    """The launcher's own environment: what children inherit, and whose secrets are masked in telemetry."""
    return dict(os.environ)


def rank_environment(command: c.Spawn) -> dict[str, str]:
    """What a script under torchrun reads of its rank; a worker keeps its rank, a standby has none yet."""
    if command.rank is None:
        return {}
    return {
        "RANK": str(command.rank),
        "LOCAL_RANK": str(command.local_rank),
        "WORLD_SIZE": str(command.world_size),
        "LOCAL_WORLD_SIZE": str(command.local_world_size),
        "GROUP_RANK": str(command.node),
    }


def child_environment(nproc: int) -> dict[str, str]:
    """Environment of every child: ours, without what is not meant for it, threads shared out.

    What is built before ranks of several nodes meet, such as the group of a standby that warms up, is on loopback.
    """
    environment = {key: value for key, value in parent_environment().items() if key not in FOREIGN_VARIABLES}
    if nproc > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # torchrun does the same: ranks share the cores
    environment.setdefault(INTERFACE_VARIABLE, "lo")
    return environment | unset_variables(environment)


def chosen_interface(found: str) -> str:
    """`found`, unless the user has chosen one: then '' leaves it as it is."""
    return "" if INTERFACE_VARIABLE in parent_environment() else found
