"""Carries out what the machine commands: the only place where decisions touch the world.

    command -> a child's  -> the node it lives on: `Node` here, `LeaderLink` elsewhere
            -> all nodes' -> each of them
            -> the leader's own: store, candidates, fences, journal

One method a command, found by the command's class. Every effect is bounded; a failed effect becomes an input of
the machine or an event, never an exception in the loop. Main thread only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from nvrx_sre.checkpoint import discover
from nvrx_sre.checkpoint.commit import SaveRequest, attempt_path
from nvrx_sre.checkpoint.parts import Exchange, Share
from nvrx_sre.checkpoint.slots import SlotHeader
from nvrx_sre.core import errors
from nvrx_sre.core.clock import Clock
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import Event, FaultClass, TeardownFinished
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.config import RunConfig
from nvrx_sre.launcher.leader_link import LeaderLink
from nvrx_sre.launcher.network import ANY_ADDRESS, LOOPBACK, interface_of
from nvrx_sre.launcher.node import Node, chosen_interface, own_fault
from nvrx_sre.launcher.restorable import Restorables
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.launcher.store import StoreHost

EmitEvent = Callable[[Event, int, int | None], None]
PutInput = Callable[[c.Input], None]

OWN_NODE = 0


class Effects:
    """Effects of commands on the nodes, the store and the run directory."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, clock: Clock, epoch: int, emit: EmitEvent, put: PutInput
    ) -> None:
        self.node = Node(config, directory, clock, put, epoch)
        self.node.on_allocated = lambda event, generation: emit(event, generation, None)
        self.link: LeaderLink | None = None
        """The other nodes, None where there is only this one."""
        self.stop: c.Stop | None = None
        self.commits_ever = False
        self.passes: dict[str, int] = {}
        self.await_decision: Callable[[int], object] = lambda _: None
        """Waits, bounded, until the decision that led to a generation is on disk; says so if it is not."""
        self.incident: Callable[[], int] = lambda: 0
        """Number of the incident that is open, or that the stop of the run has just closed; 0 if there is none."""
        self._config = config
        self._directory = directory
        self._clock = clock
        self._epoch = epoch
        self._emit = emit
        self._put = put
        self._generation = 0
        self._store = StoreHost()
        self._node_of: dict[int, int] = {}
        self._rank_of: dict[int, int] = {}
        self.restorables = Restorables(config.run, directory.path, lambda event: emit(event, self._generation, None))
        self._table: dict[type[c.Command], Callable[[Any], None]] = {
            c.Spawn: self._spawn,
            c.AssignRank: self._assign,
            c.OpenGeneration: self._open_generation,
            c.SendInterrupt: self._interrupt,
            c.SendProbe: lambda command: self._tell(command.child, wire.Probe(number=command.number)),
            c.RequestStacks: self._to_childs_node,
            c.Kill: self._to_childs_node,
            c.SetHotInterval: self._to_all_nodes,
            c.GrantSlots: self._to_childs_node,
            c.DropSlots: lambda command: self._to_node(command.node, command),
            c.PublishSealed: self._to_all_nodes,
            c.StrandSlots: self._to_all_nodes,
            c.StartSave: self._start_save,
            c.EndAttempt: self._end_attempt,
            c.ReleaseBoundary: self._to_all_nodes,
            c.ReleaseSlots: self._to_all_nodes,
            c.HurrySaves: lambda _: self._to_all_nodes(c.TellWriter(message=wire.Hurry())),
            c.RetainSaves: lambda _: self._to_node(
                OWN_NODE, c.TellWriter(message=wire.Retain(keep=config.keep, epoch=epoch))
            ),
            c.Fence: self._fence,
            c.MoveRejected: lambda command: self.restorables.move(
                command.directory, command.step, command.reason, command.message
            ),
            c.Emit: self._record,
            c.LeaveChild: lambda command: self._tell(command.child, wire.Leave()),
            c.Stop: self._stop,
        }

    def lead(self, link: LeaderLink) -> None:
        """There are other nodes, at the end of `link`."""
        self.link = link
        self._store.load()

    def apply(self, command: c.Command) -> None:
        """Carry out one command."""
        self._table[type(command)](command)

    def close(self) -> None:
        """End whatever still runs, tell the other nodes of the end, release everything."""
        self.node.close()
        if self.link is not None:
            self.link.close(self.stop)
        self._store.close()

    def rank_of(self, number: int) -> int | None:
        """Rank that a child holds, None if it has none."""
        return self._rank_of.get(number)

    def forget(self, number: int) -> None:
        """A child is dead, wherever it was."""
        self._node_of.pop(number, None)
        self._rank_of.pop(number, None)

    def tell_lateness(self, lateness_s: Callable[[int], float]) -> None:
        """Let the other nodes know how late their ranks come: each exports its own."""
        if self.link is None:
            return
        ranks_of: dict[int, list[int]] = {}
        for child, rank in self._rank_of.items():
            ranks_of.setdefault(self._node_of.get(child, OWN_NODE), []).append(rank)
        for node, ranks in ranks_of.items():
            if node != OWN_NODE:
                self._to_node(node, c.NoteLateness(ranks=tuple(ranks), seconds=tuple(map(lateness_s, ranks))))

    # --- nodes ----------------------------------------------------------------------------------------------

    def _to_node(self, node: int, command: c.Command) -> None:
        if node == OWN_NODE:
            self.node.apply(command)
        elif self.link is not None:
            self.link.apply(node, command)

    def _to_all_nodes(self, command: c.Command) -> None:
        self.node.apply(command)
        if self.link is not None:
            self.link.apply_everywhere(command)

    def _to_childs_node(self, command: c.RequestStacks | c.Kill | c.GrantSlots) -> None:
        self._to_node(self._node_of.get(command.child, OWN_NODE), command)

    def _tell(self, child: int, message: wire.Message) -> None:
        self._to_node(self._node_of.get(child, OWN_NODE), c.Tell(child=child, message=message))

    def _spawn(self, command: c.Spawn) -> None:
        self._node_of[command.child] = command.node
        self._to_node(command.node, command)

    def _assign(self, command: c.AssignRank) -> None:
        self._rank_of[command.child] = command.rank
        self._to_node(command.node, command)

    def _interrupt(self, command: c.SendInterrupt) -> None:
        self._tell(command.child, wire.Interrupt(generation=command.generation, is_traced=command.is_traced))

    def _record(self, command: c.Emit) -> None:
        self._emit(command.event, command.generation, command.rank)
        if isinstance(command.event, TeardownFinished):
            self._keep_stacks()  # everybody has left, or is dead: what they wrote is complete

    def _keep_stacks(self) -> None:
        self._to_all_nodes(c.KeepStacks(incident=self.incident()))

    # --- a generation ---------------------------------------------------------------------------------------

    def _open_generation(self, command: c.OpenGeneration) -> None:
        self._directory.check_leads(self._epoch)
        self._keep_stacks()
        self._generation = command.generation
        self.await_decision(command.generation)
        try:
            candidates = self.restorables.find(
                self._headers(command.world_size),
                checkpoints_back=command.checkpoints_back,
                hot_allowed=command.hot_allowed,
                commits_ever=self.commits_ever,
            )
            port = self._open_store()
        except (OSError, errors.StorageError) as error:
            self._report_fault(command.children[0], FaultClass.STORAGE, error)
            return
        # Before a rank may capture anything: a word above what is restored would free a slot before it can be held.
        self._to_all_nodes(c.PublishSealed(step=candidates.best_step))
        for child in command.children:
            self._tell(
                child,
                wire.Go(
                    generation=command.generation,
                    world_size=command.world_size,
                    store_host="",
                    store_port=port,
                    candidates=candidates.for_rank(self._rank_of[child]),
                    require_restore=candidates.require_restore,
                    passes=self.passes,
                    hot_every=command.hot_every,
                    epoch=self._epoch,
                ),
            )
        self._store.make_ready()

    def _headers(self, world_size: int) -> Sequence[Sequence[SlotHeader | None]]:
        """Slots of every rank; a rank without slots has an empty row."""
        own = self.node.slots.headers(world_size)
        if self.link is None:
            return own
        others = self.link.headers()
        return [row or others.get(rank, ()) for rank, row in enumerate(own)]

    def _open_store(self) -> int:
        """An empty store that all nodes reach; its port."""
        addresses = set() if self.link is None else self.link.addresses()
        own = min(addresses, default=LOOPBACK)
        port = self._store.open(own if len(addresses) < 2 else ANY_ADDRESS)
        self.node.leader_address = own
        self.node.interface = chosen_interface(interface_of(own)) if addresses else ""
        return port

    # --- saves ----------------------------------------------------------------------------------------------

    def _start_save(self, command: c.StartSave) -> None:
        self._directory.check_leads(self._epoch)
        nodes = list(dict.fromkeys(command.nodes or (OWN_NODE,)))
        of_rank = command.nodes or (OWN_NODE,) * len(command.slots)
        for part, node in enumerate(nodes):
            first_rank = of_rank.index(node)
            slots = command.slots[first_rank : first_rank + of_rank.count(node)]
            self._to_node(node, c.HoldSlots(first_rank=first_rank, slots=slots))
            message = wire.WriteSave(
                step=command.step,
                epoch=self._epoch,
                generation=command.generation,
                world_size=command.world_size,
                slots=list(slots),
                captured_ns=self._clock.to_wall_ns(command.captured_mono_ns),
                passes=self.passes,
                first_rank=first_rank,
                part=part,
                num_parts=len(nodes),
                attempt=command.attempt,
                deadline_s=self._config.limits.deadlines.save_s,
            )
            self._to_node(node, c.TellWriter(message=message))

    def _end_attempt(self, command: c.EndAttempt) -> None:
        """Leave word in the attempt's directory; without it the others would wait until their deadline."""
        request = SaveRequest(
            run=self._config.run,
            step=command.step,
            epoch=self._epoch,
            generation=command.generation,
            captured_ns=0,
            world_size=0,
        )
        with contextlib.suppress(OSError, errors.StorageError):
            directory = attempt_path(self._directory.path, request, command.attempt)
            share = Share(part=self._config.num_nodes, attempt=command.attempt)  # a part that no writer has
            Exchange(directory, share, lambda: None).give_up()

    def _fence(self, command: c.Fence) -> None:
        self._directory.check_leads(self._epoch)
        self._to_all_nodes(c.PublishSealed(step=command.step))
        try:
            discover.add_fence(self._directory.path, command.generation, command.step)
        except errors.StorageError as error:
            # Without the fence an abandoned line could come back after a restart of the launcher.
            self._report_fault(next(iter(self._rank_of)), FaultClass.STORAGE, error)

    def _report_fault(self, child: int, fault: FaultClass, error: Exception) -> None:
        self._put(own_fault(child, self._generation, fault, error, self._clock))

    def _stop(self, command: c.Stop) -> None:
        self._keep_stacks()
        self.stop = command
