"""One launcher of the simulated world: a real `Machine` with its folds, simulated children, and the shell between.

Model: what the shell does for a machine, in simulated time: it feeds inputs in order, stamps and folds every event
before the next input, carries out commands, and looks for a higher epoch before whatever must not happen twice. A
launcher that is stopped takes nothing in until it wakes; then it looks at the epoch first.

Everything a launcher owns (children, hot slots, connections) goes with it; the disk and the journal stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nvrx_sre.checkpoint.slots import NONE
from nvrx_sre.core.clock import seconds, to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events import messages as wire
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Event, Record, Role
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.machine import Machine, MachineStart
from nvrx_sre.launcher.started_saves import StartedSaves
from nvrx_sre.policy.history import History
from nvrx_sre.testing.world_disk import Slots
from nvrx_sre.testing.world_faults import SIGKILL
from nvrx_sre.testing.world_network import Action
from nvrx_sre.testing.world_nodes import Links
from nvrx_sre.testing.world_plan import machine_config, name_of, run_started
from nvrx_sre.testing.world_ranks import Offer, SimChild, SimWorker
from nvrx_sre.testing.world_traffic import Traffic
from nvrx_sre.testing.world_writers import SimWriter

if TYPE_CHECKING:
    from nvrx_sre.testing.world import World

RUN = "simulated"
_DELIVERY_S = 0.002
_FORK_S = 0.02
_SLOW_FORK_S = 3.0
"""A fork, and one from a server that must import everything first."""
_LEADER_HOST = 0


class SimLauncher:
    """A launcher of one epoch. `exit_code` is None while it lives and -1 if it was killed."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.epoch = epoch
        self.children: dict[int, SimChild] = {}
        self.slots = [Slots() for _ in range(world.config.num_ranks)]
        self.num_losses = 0
        """How often a node was lost with its hot slots."""
        self.exit_code: int | None = None
        self.is_stalled = False
        self.num_inputs = 0
        """Facts that the machine took in."""
        self.due_ns: int | None = None  # when the machine wants a tick: asked after each fact, not at each turn
        self._stalled_ns: int | None = None
        """When it was stopped last."""
        self._backlog: list[c.Input] = []
        self._members: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}
        self._losses_at: dict[int, int] = {}
        """Losses before a generation was opened."""
        self._host_of: dict[int, int] = {}
        """Host of a rank's device."""
        self._waiting: dict[tuple[int, str], dict[int, Callable[[], None]]] = {}
        self._executed: dict[int, dict[int, int]] = {}
        """Steps that each rank of a generation has really done."""
        self._paused_until_ns = 0
        self._trained: list[SimWorker] = []
        """Ranks of the newest generation."""
        self._verdicts: dict[tuple[int, str], bool] = {}
        self._seq = 0
        self._history = History()
        self._saves = StartedSaves()
        self._incidents = IncidentTracker(RUN, world.config.limits.caps)
        for record in world.records:
            self._fold(record)
        self.links = Links(self)
        """To the launchers of the other hosts."""
        self.traffic = Traffic(self)
        self.machine = Machine(machine_config(world.config), self._history, self._machine_start())
        self._commands: dict[type[c.Command], Callable[[Any], None]] = {
            c.Spawn: self._on_spawn,
            c.AssignRank: self._on_assign,
            c.OpenGeneration: self._on_open,
            c.SendInterrupt: self._on_interrupt,
            c.SendProbe: self._on_probe,
            c.RequestStacks: lambda command: None,
            c.Kill: self._on_kill,
            c.SetHotInterval: self._on_interval,
            c.GrantSlots: lambda command: None,
            c.DropSlots: self._on_drop,
            c.PublishSealed: self._on_publish,
            c.StrandSlots: self._on_strand,
            c.StartSave: self._on_start_save,
            c.EndAttempt: self._on_end_attempt,
            c.HurrySaves: lambda command: None,
            c.RetainSaves: lambda command: self._on_retain(),
            c.ReleaseSlots: self._on_release,
            c.Fence: self._on_fence,
            c.MoveRejected: self._on_rejected,
            c.Emit: lambda command: self.emit(command.event, command.generation, command.rank),
            c.LeaveChild: self._on_leave,
            c.Stop: self._on_stop,
        }

    # --- its life -------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """It is gone."""
        return self.exit_code is not None

    def begin(self) -> None:
        """Announce itself and start all children."""
        world, generation = self.world, self.machine.generation
        newest = world.records[-1] if world.records else None
        if newest is not None and not isinstance(newest.event, schema.LauncherStopped | schema.BudgetReset):
            self.emit(schema.LeaderLost(lost_epoch=newest.epoch, last_seen_ns=newest.time_ns), generation)
        for failed, of_generation in self._saves.interrupted():
            self.emit(failed, of_generation)
        self.emit(
            schema.LauncherStarted(node=name_of(_LEADER_HOST), pid=1, start_ticks=self.epoch, metrics_port=0),
            generation,
        )
        self.emit(run_started(world.config, is_resumed=newest is not None), generation)
        self._apply(self.machine.start(world.now_ns))
        self.due_ns = self.machine.next_deadline_ns()

    def feed(self, item: c.Input) -> None:
        """A fact reaches the machine, or waits until the launcher wakes."""
        if self.is_stalled:
            self._backlog.append(item)
        elif not self.is_over:
            self.num_inputs += 1
            self._apply(self.machine.handle(item, self.world.now_ns))
            self.due_ns = self.machine.next_deadline_ns()

    def leads(self) -> bool:
        """Look for a higher epoch; superseded, the launcher ends without another record."""
        if self.world.disk.epoch <= self.epoch:
            return True
        self.world.reach("a superseded launcher ended")
        self._end(int(ExitCode.RETRYABLE))
        return False

    def crash(self) -> None:
        """SIGKILL: the records that the journal had not synced are lost, and everything it owns."""
        if not self.is_over:
            if any(slots.held_slot >= 0 for slots in self.slots):
                self.world.reach("a launcher died while a save was in flight")
            self.world.lose_records(self.epoch)
            self._end(-1)

    def stall(self, duration_s: float, *, is_host: bool = False) -> None:
        """The launcher is stopped; its children are not, unless its whole host stands still."""
        if self.is_stalled or self.is_over:
            return
        if is_host:
            self.world.reach("a whole host stood still")
            self._paused_until_ns = self.world.now_ns + to_ns(duration_s)
        self.is_stalled, self._stalled_ns = True, self.world.now_ns
        self.world.schedule(duration_s, self._wake)

    def awake_ns(self, child: SimChild) -> int:
        """Until when the child's host stands still."""
        return self._paused_until_ns if child.host == _LEADER_HOST else 0

    def _wake(self) -> None:
        self.is_stalled = False
        if self.is_over or not self.leads():
            return
        self.links.speak()
        backlog, self._backlog = self._backlog, []
        for item in backlog:
            self.feed(item)
        assert self._stalled_ns is not None
        stalled_s = seconds(self.world.now_ns - self._stalled_ns)
        if stalled_s > self.world.config.limits.deadlines.loop_stall_s:
            self.world.reach("a launcher that was stopped gave all ranks their time again")
            self.feed(c.Stalled(seconds=stalled_s))

    def _end(self, exit_code: int) -> None:
        """Children die with their launcher; the memory of the hot tier is gone."""
        self.exit_code = exit_code
        for child in self.children.values():
            child.is_alive = False
        self.children.clear()
        self.links.close()

    # --- its children ---------------------------------------------------------------------------------------

    def deliver(self, child: SimChild, message: wire.Message) -> None:
        """Bring a message to the machine, in order."""
        self.traffic.said(child, message)
        delay_ns = to_ns(self.world.rng.uniform(0.0, _DELIVERY_S))
        is_news = not isinstance(message, wire.Alive) or bool(message.probe)
        self._arrive(child, lambda: self._take(child, message), delay_ns, is_news=is_news)

    def die(self, child: SimChild, *, exit_code: int | None, signal: int | None) -> None:
        """The process is gone; its peers notice, its packets still arrive first."""
        if not child.is_alive:
            return
        child.is_alive = False
        if isinstance(child, SimWorker):
            self.leave_group(child)
        exited = c.Exited(
            child=child.number,
            exit_code=exit_code,
            signal=signal,
            exited_ns=self.world.now_ns,
            oom=False,
            last_line="",
        )
        # A process is told dead when its memory is given back; its peers may see its sockets closed before.
        self._arrive(child, lambda: self._forget(child, exited), to_ns(self.world.rng.uniform(0.0005, 0.05)))

    def take_children(self, host: int) -> list[SimChild]:
        """The host is given up: its slots are lost, and its processes, which are still to be told dead."""
        self.num_losses += 1
        for rank, of_rank in self._host_of.items():
            if of_rank == host:
                self.slots[rank] = Slots()
        found = [child for child in self.children.values() if child.host == host]
        for child in found:
            child.is_alive = False
            if isinstance(child, SimWorker):
                self.leave_group(child)
        return found

    def forget(self, child: SimChild) -> None:
        """It is known to be dead."""
        self.children.pop(child.number, None)

    def members_of(self, generation: int) -> list[SimWorker]:
        """Ranks that are inside the generation."""
        found = [self.children.get(number) for number in sorted(self._members.get(generation, ()))]
        return [child for child in found if isinstance(child, SimWorker)]

    def meet(self, worker: SimWorker, what: str, then: Callable[[], None]) -> None:
        """Join a collective of the worker's generation; all go on when the last one is in."""
        members = self._members.get(worker.generation, set())
        if worker.number not in members:
            return
        waiting = self._waiting.setdefault((worker.generation, what), {})
        waiting[worker.number] = then
        if len(members) < self._sizes[worker.generation]:
            self.break_off(worker)
        elif len(waiting) == len(members):
            del self._waiting[worker.generation, what]
            for number in sorted(waiting):
                peer = self.children.get(number)
                if peer is not None:
                    peer.later(0.0005, 0.005, waiting[number])

    def leave_group(self, worker: SimWorker) -> None:
        """The worker's sockets are closed: peers in a collective of its generation get an error."""
        members = self._members.get(worker.generation, set())
        if worker.number not in members:
            return
        members.discard(worker.number)
        for key in [key for key in self._waiting if key[0] == worker.generation]:
            waiting = self._waiting.pop(key)
            for number in sorted(waiting.keys() & members):
                peer = self.children.get(number)
                if isinstance(peer, SimWorker):
                    self.break_off(peer)

    def break_off(self, worker: SimWorker) -> None:
        """The worker's collective fails under it."""
        worker.later(
            0.001,
            0.06,
            lambda: worker.fail(communication=True, kind="collective_error", exception_type="RuntimeError"),
        )

    def holds_its_slots(self, generation: int) -> bool:
        """No slot was lost since the generation was opened."""
        return self._losses_at[generation] == self.num_losses

    def executed(self, worker: SimWorker) -> None:
        """The rank has done another step."""
        self._executed.setdefault(worker.generation, {})[worker.rank] = worker.step

    def _check_commit(self, generation: int, event: schema.StepsCommitted) -> None:
        done = self._executed.get(generation, {})
        slowest = min(done.values(), default=0) if len(done) == self._sizes[generation] else 0
        if not event.proven_by_restore and slowest < event.last_step:
            self.world.violation(f"step {event.last_step} was committed, and a rank had done {slowest} only")

    def is_good(self, generation: int, directory: str) -> bool:
        """What the ranks of a generation find, together, when they read a durable checkpoint."""
        key = (generation, directory)
        if key not in self._verdicts:
            commit = self.world.disk.get(directory)
            self._verdicts[key] = commit is not None and not commit.is_damaged
        return self._verdicts[key]

    def _arrive(self, child: SimChild, action: Action, delay_ns: int, *, is_news: bool = True) -> None:
        if child.host == _LEADER_HOST:
            self.world.schedule_at(child.delivery_ns(delay_ns), action)
        else:
            self.links.up(child, action, is_news=is_news)

    def _take(self, child: SimChild, message: wire.Message) -> None:
        generation = getattr(message, "generation", self.machine.generation)
        if generation < self.machine.generation:
            self.world.reach("a message of an older generation arrived")
        self.feed(c.FromChild(child=child.number, message=message))

    def _forget(self, child: SimChild, exited: c.Exited) -> None:
        self.forget(child)
        self.feed(exited)

    # --- its journal ----------------------------------------------------------------------------------------

    def emit(self, event: Event, generation: int, rank: int | None = None) -> None:
        """Record an event, and what follows from it for incidents."""
        if isinstance(event, schema.StepsCommitted):
            self._check_commit(generation, event)
        pending: deque[tuple[Event, int | None]] = deque([(event, rank)])
        while pending:
            item, of_rank = pending.popleft()
            self._seq += 1
            record = Record(
                run=RUN,
                epoch=self.epoch,
                generation=generation,
                rank=of_rank,
                seq=self._seq,
                time_ns=self.world.clock.wall_ns(),
                event=item,
            )
            self.world.append(record)
            pending.extend(self._fold(record))

    def _fold(self, record: Record) -> Sequence[tuple[Event, int | None]]:
        self._history.apply(record)
        self._saves.apply(record)
        return self._incidents.apply(record)

    def _machine_start(self) -> MachineStart:
        world = self.world
        return MachineStart(
            generation=max((record.generation for record in world.records), default=0),
            high_water=self._history.high_water,
            wall_offset_ns=world.clock.wall_offset_ns,
            commits_on_record=world.disk.num_commits_ever > 0,
        )

    # --- commands -------------------------------------------------------------------------------------------

    def _apply(self, commands: Sequence[c.Command]) -> None:
        for command in commands:
            if self.is_over:
                return
            self.traffic.commanded(command)
            self._commands[type(command)](command)
        self.links.flush()

    def _tell(self, number: int, action: Callable[[SimChild], None]) -> None:
        """Something is sent to a child, if it lives when it arrives."""
        child = self.children.get(number)
        if child is None:
            return

        def arrive() -> None:
            if child.is_alive and not child.is_stopped:
                action(child)

        if child.host == _LEADER_HOST:
            arrive()
        else:
            self.links.down(child.host, arrive)

    def _tell_worker(self, number: int, action: Callable[[SimWorker], None]) -> None:
        self._tell(number, lambda child: action(child) if isinstance(child, SimWorker) else None)

    def _on_spawn(self, command: c.Spawn) -> None:
        kind = SimWriter if command.role is Role.WRITER else SimWorker
        child = kind(self, command.child, command.role, command.node)
        if command.rank is not None:
            self._host_of[command.rank] = child.host
        self.children[command.child] = child
        if child.host == _LEADER_HOST:
            self._fork(child)
        elif not self.links.down(child.host, lambda: self._fork(child)):
            self.links.fail_spawn(child)

    def _fork(self, child: SimChild) -> None:
        """The fork server of the child's host starts it, some time."""
        rng = self.world.rng
        self.world.schedule(
            rng.uniform(0.0, _SLOW_FORK_S if rng.random() < 0.1 else _FORK_S), lambda: self._start(child)
        )

    def _start(self, child: SimChild) -> None:
        boots_ns = self.world.hosts[child.host].boots_until_ns
        if not child.is_alive or self.is_over:
            return
        if self.world.now_ns < boots_ns:
            self.world.schedule_at(boots_ns, lambda: self._start(child))
            return
        spawned = c.Spawned(child=child.number, pid=child.pid, start_ticks=child.pid)
        self._arrive(child, lambda: self.feed(spawned), 0)
        child.is_started = True
        if child.is_doomed:
            self.world.reach("a child was ended before it was started")
            self.die(child, exit_code=None, signal=SIGKILL)
            return
        if self.world.num_bad_starts and child.role is not Role.WRITER:
            self.world.num_bad_starts -= 1
            self.world.schedule(0.2, lambda: self.die(child, exit_code=1, signal=None))
            return
        child.begin()

    def _on_assign(self, command: c.AssignRank) -> None:
        self._host_of[command.rank] = command.node
        self._tell_worker(command.child, lambda child: child.assign(command.rank, command.generation))

    def _on_open(self, command: c.OpenGeneration) -> None:
        if not self.leads():
            return
        self.world.sync(self.epoch)
        self._sizes[command.generation] = command.world_size
        self._losses_at[command.generation] = self.num_losses
        self._members[command.generation] = members = set(command.children)
        children = [self.children.get(number) for number in command.children]
        self._trained = [child for child in children if isinstance(child, SimWorker)]
        offer = Offer(
            candidates=self.world.disk.candidates(
                self.slots[: command.world_size],
                checkpoints_back=command.checkpoints_back,
                hot_allowed=command.hot_allowed,
            ),
            requires_restore=self.world.disk.num_commits_ever > 0,
        )
        self.traffic.offered(command, offer)
        best_step = int(offer.candidates[0][0]["step"]) if offer.candidates else NONE
        self._on_publish(c.PublishSealed(step=best_step))
        entries = [entry for entry, _ in offer.candidates if entry["tier"] == schema.Tier.DURABLE]
        self.world.check_offer([item for item in self.world.disk.commits if item.candidate() in entries])
        for number in command.children:
            child = self.children.get(number)
            if child is None or not child.is_alive:
                members.discard(number)
                continue
            if isinstance(child, SimWorker) and child.ready_generation != command.generation:
                self.world.violation(f"rank {child.rank} was told to go before it was ready")
            self._tell_worker(number, lambda worker: self._go(worker, command, offer))

    def _go(self, worker: SimWorker, command: c.OpenGeneration, offer: Offer) -> None:
        worker.generation = command.generation
        worker.set_interval(command.hot_every, 0)
        worker.later(0.0005, 0.003, lambda: worker.go(command.generation, offer))

    def _on_interval(self, command: c.SetHotInterval) -> None:
        for child in list(self.children.values()):
            if isinstance(child, SimWorker) and child.rank >= 0:
                self._tell_worker(child.number, lambda worker: worker.set_interval(command.every, command.from_step))

    def _on_interrupt(self, command: c.SendInterrupt) -> None:
        self._tell_worker(command.child, lambda child: child.interrupt(command.generation))

    def _on_probe(self, command: c.SendProbe) -> None:
        self._tell_worker(command.child, lambda child: child.answer(command.number))

    def _on_kill(self, command: c.Kill) -> None:
        child = self.children.get(command.child)
        if child is None or not child.is_alive:
            return
        self.world.kills_ns.setdefault(child.pid, self.world.clock.wall_ns())
        delay_s = self.world.rng.uniform(0.001, 0.01)

        def kill() -> None:
            if child.is_started:
                at_ns = max(self.world.now_ns + to_ns(delay_s), child.dies_from_ns)
                if at_ns > self.world.now_ns + to_ns(self.world.config.limits.deadlines.teardown_s):
                    self.world.reach("a killed process kept its launcher waiting")
                self.world.schedule_at(at_ns, lambda: self.die(child, exit_code=None, signal=SIGKILL))
            else:
                child.is_doomed = True

        if child.host == _LEADER_HOST:
            kill()
        else:
            self.links.down(child.host, kill)

    def _on_drop(self, command: c.DropSlots) -> None:
        for rank in range(len(self.slots)):
            if self._host_of.get(rank, command.node) == command.node:
                self.slots[rank] = Slots()

    def _on_publish(self, command: c.PublishSealed) -> None:
        for slots in self.slots:
            slots.sealed_step = command.step

    def _on_strand(self, command: c.StrandSlots) -> None:
        for slots in self.slots:
            slots.stranded = (command.generation, command.step)

    def _on_start_save(self, command: c.StartSave) -> None:
        if not self.leads():
            return
        self.world.check_save(self.epoch, command.generation, command.step)
        for slots, slot in zip(self.slots, command.slots, strict=False):
            if slots.held_slot not in (-1, slot):
                self.world.violation(f"save of step {command.step} started while another one holds its slots")
            slots.held_slot = slot
        hosts = command.nodes or (_LEADER_HOST,) * len(command.slots)
        parts = list(dict.fromkeys(hosts))
        writers = [child for child in self.children.values() if isinstance(child, SimWriter)]
        for part, host in enumerate(parts):
            first_rank = hosts.index(host)
            message = wire.WriteSave(
                step=command.step,
                epoch=self.epoch,
                generation=command.generation,
                world_size=command.world_size,
                slots=list(command.slots[first_rank : first_rank + hosts.count(host)]),
                captured_ns=0,
                first_rank=first_rank,
                part=part,
                num_parts=len(parts),
                attempt=command.attempt,
                deadline_s=self.world.config.limits.deadlines.save_s,
            )
            for writer in (item for item in writers if item.host == host):
                self._tell(writer.number, _begins(message))

    def _on_end_attempt(self, command: c.EndAttempt) -> None:
        self.world.disk.attempt(command.attempt).is_ended = True

    def _on_retain(self) -> None:
        for child in list(self.children.values()):
            if isinstance(child, SimWriter) and child.is_alive and child.host == _LEADER_HOST:
                child.retain()

    def _on_release(self, command: c.ReleaseSlots) -> None:
        for slots in self.slots:
            slots.held_slot = -1

    def _on_fence(self, command: c.Fence) -> None:
        if not self.leads():
            return
        self._on_publish(c.PublishSealed(step=command.step))
        self.world.add_fence(command.generation, command.step)

    def _on_rejected(self, command: c.MoveRejected) -> None:
        disk = self.world.disk
        disk.commits = [item for item in disk.commits if item.directory != command.directory]
        self.emit(
            schema.CheckpointRejected(
                step=command.step,
                tier=schema.Tier.DURABLE,
                directory=command.directory,
                reason=command.reason,
                message="",
                moved_to="rejected",
            ),
            self.machine.generation,
        )

    def _on_leave(self, command: c.LeaveChild) -> None:
        def leave(child: SimChild) -> None:
            if child.is_started:
                child.on_leave()
            else:
                child.is_doomed = True

        self._tell(command.child, leave)

    def _on_stop(self, command: c.Stop) -> None:
        survivors = [child for child in self.children.values() if child.is_alive]
        now_ns, hosts = self.world.now_ns, self.world.hosts
        unreachable = [item for item in survivors if now_ns < max(hosts[item.host].cut_until_ns, item.dies_from_ns)]
        if any(now_ns < item.dies_from_ns for item in survivors):
            self.world.reach("a process outlived its launcher in the kernel")
        # One that stood still while its children should have left ends them itself, as it ends.
        if len(survivors) > len(unreachable) and self._stalled_ns is None:
            self.world.violation(f"{len(survivors)} children were left behind")
        workers = [child for child in self._trained if child.rank >= 0]
        if command.exit_code == ExitCode.FINISHED and not all(child.has_finished for child in workers):
            self.world.violation("the run finished before every rank had")
        stopped = schema.LauncherStopped(exit_code=command.exit_code, reason=command.reason)
        self.emit(stopped, self.machine.generation)
        self.world.sync(self.epoch)
        self._end(command.exit_code)


def _begins(message: wire.WriteSave) -> Callable[[SimChild], None]:
    """What a writer that hears of a save does."""
    return lambda child: child.write(message) if isinstance(child, SimWriter) else None
