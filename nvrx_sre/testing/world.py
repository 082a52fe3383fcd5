"""A simulated world around a real `Machine` and a real `History`: one thread, manual time, seeded.

Model: a queue of (time, action). Actions are deliveries of messages, deaths, delays of simulated processes;
between them the machine's deadlines are ticked. Commands act on simulated children and storage; emitted
events become records and are folded before the next input, exactly as the real shell does. The same seed
gives the same journal, byte for byte.

`run` drives one launcher to its end; `run_job` plays the orchestrator and the operator too: it starts again
after 75 and 143, and resumes after 93, until the run has finished. What must never happen is noted in
`violations`; `testing.checkers` finds the rest in the records.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nvrx_sre.core.clock import seconds, to_ns
from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.core.rng import seeded
from nvrx_sre.events import channel as wire
from nvrx_sre.events.codec import to_dict
from nvrx_sre.events.schema import BudgetReset, Event, Phase, Record, Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.machine import Machine, MachineConfig, MachineStart
from nvrx_sre.policy.history import History
from nvrx_sre.testing.clock import ManualClock
from nvrx_sre.testing.world_plan import SimFault, SimKind
from nvrx_sre.testing.world_ranks import FRESH, SimChild, SimWorker, SimWriter, next_state
from nvrx_sre.testing.world_storage import Content, Storage

SIGKILL, SIGTERM = 9, 15
_DELIVERY_S = 0.002


SIMULATED_LIMITS = Limits(
    deadlines=Deadlines(
        init_s=20.0, rendezvous_s=8.0, rebuild_s=8.0, load_s=8.0, first_step_s=8.0, step_s=6.0, data_s=6.0, save_s=20.0
    )
)
"""Deadlines that fit the simulated pace; the caps are the real ones."""


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Size and pace of a simulated run."""

    num_ranks: int = 2
    num_steps: int = 40
    num_standbys: int = 1
    save_every: int = 5
    hot_every: int | None = 1
    """None: chosen by measurement."""
    capture_cost_s: float = 0.0
    """What a step that is captured takes longer than its 50 ms."""
    is_seal_told_early: bool = False
    """A planted bug: a rank says that its slot is sealed while the copy runs."""
    drop_rate: float = 0.01
    """Share of step reports that are lost on the way (a full socket)."""
    late_report_rate: float = 0.0
    """Share of steps that a rank reports only once their capture is sealed: it may die, or be interrupted, before."""
    limits: Limits = SIMULATED_LIMITS
    min_world_size: int | None = None
    """None: the world never becomes smaller."""
    world_multiple: int = 1


@dataclass(kw_only=True)
class _Launcher:
    """What lives and dies with one launcher."""

    epoch: int
    history: History
    machine: Machine
    children: dict[int, SimChild]
    groups: dict[int, dict[str, dict[int, Callable[[], None]]]]
    members: dict[int, set[int]]
    stop: c.Stop | None = None
    is_killed: bool = False


class World:
    """Machine, processes, storage and time."""

    def __init__(self, seed: int, config: WorldConfig, faults: Sequence[SimFault] = ()) -> None:
        self.rng = seeded(seed)
        self.clock = ManualClock()
        self.config = config
        self.num_steps = config.num_steps
        self.save_every = config.save_every
        self.drop_rate = config.drop_rate
        self.storage = Storage(num_ranks=config.num_ranks)
        self.records: list[Record] = []
        self.violations: list[str] = []
        self.killed_pids: set[int] = set()
        self._num_bad_starts = 0
        self._left = {fault: fault.times for fault in faults}
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._pids = itertools.count(1000)
        self._launcher: _Launcher | None = None
        self._commands: dict[type[c.Command], Callable[[Any], None]] = {
            c.Spawn: self._on_spawn,
            c.AssignRank: self._on_assign,
            c.OpenGeneration: self._on_open,
            c.SendInterrupt: self._on_interrupt,
            c.RequestStacks: lambda command: None,
            c.Kill: self._on_kill,
            c.SetHotInterval: self._on_interval,
            c.GrantSlots: lambda command: None,
            c.DropSlots: lambda command: self.storage.drop_slots(command.num_ranks),
            c.PublishSealed: self._on_publish,
            c.StrandSlots: self._on_strand,
            c.StartSave: self._on_start_save,
            c.ReleaseSlots: self._on_release,
            c.RetainSaves: lambda command: None,
            c.Fence: self._on_fence,
            c.MoveRejected: lambda command: None,
            c.Emit: lambda command: self._emit(command.event, command.generation, command.rank),
            c.LeaveChild: self._on_leave,
            c.Stop: self._on_stop,
        }

    # --- driving --------------------------------------------------------------------------------------------

    def run_job(self, *, max_launchers: int = 20, max_s: float = 36_000.0) -> int:
        """Run until finished, as orchestrator and operator; the last exit code, -1 if it never ended."""
        exit_code = -1
        for _ in range(max_launchers):
            exit_code = self.run(max_s=max_s)
            if exit_code == 0:
                break
            if exit_code == 93:
                self._begin_launcher()
                self._emit(BudgetReset(reason="simulated operator"), self._current.machine.generation)
                self._launcher = None
            self.clock.advance(1.0)
        return exit_code

    def run(self, *, max_s: float = 36_000.0) -> int:
        """Run one launcher until it stops; its exit code, -1 if it was killed or did not end in `max_s`."""
        launcher = self._begin_launcher()
        end_ns = self.clock.monotonic_ns() + to_ns(max_s)
        self._apply(launcher.machine.start(self.clock.monotonic_ns()))
        while launcher.stop is None and not launcher.is_killed:
            if not self._turn(launcher, end_ns):
                self.violation(f"the run did not end within {max_s:g} s")
                break
        self._end_launcher(launcher)
        return -1 if launcher.stop is None else launcher.stop.exit_code

    def journal(self) -> bytes:
        """The records as the journal would hold them."""
        return b"".join(json.dumps(to_dict(record)).encode() + b"\n" for record in self.records)

    def violation(self, text: str) -> None:
        """Something that must never happen."""
        self.violations.append(f"at {seconds(self.clock.monotonic_ns()):.3f} s: {text}")

    # --- what simulated processes use -----------------------------------------------------------------------

    def schedule(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do `action` after `delay_s`."""
        self._schedule_at(self.clock.monotonic_ns() + to_ns(delay_s), action)

    def deliver(self, child: SimChild, message: wire.Message) -> None:
        """Bring a message to the machine, in order."""
        at_ns = child.delivery_ns(to_ns(self.rng.uniform(0.0, _DELIVERY_S)))
        self._schedule_at(at_ns, lambda: self._feed_from(child, message))

    def die(self, child: SimChild, *, exit_code: int | None, signal: int | None) -> None:
        """The process is gone; its peers notice, its packets still arrive first."""
        if not child.is_alive:
            return
        child.is_alive = False
        died_ns = self.clock.monotonic_ns()
        if isinstance(child, SimWorker):
            self.leave_group(child)
        exited = c.Exited(
            child=child.number, exit_code=exit_code, signal=signal, exited_ns=died_ns, oom=False, last_line=""
        )
        self._schedule_at(child.delivery_ns(to_ns(0.001)), lambda: self._feed_exit(child, exited))

    def meet(self, worker: SimWorker, what: str, then: Callable[[], None]) -> None:
        """Join a collective of the worker's generation; all go on when the last one is in."""
        launcher = self._current
        generation = worker.generation
        if worker.number not in launcher.members.get(generation, set()):
            return
        waiting = launcher.groups.setdefault(generation, {}).setdefault(what, {})
        waiting[worker.number] = then
        members = launcher.members[generation]
        if len(members) < launcher.machine.world_size:
            self._break_off(worker)
        elif len(waiting) == len(members):
            for number in sorted(waiting):
                launcher.children[number].later(0.0005, 0.005, waiting[number])
            del launcher.groups[generation][what]

    def leave_group(self, worker: SimWorker) -> None:
        """The worker's sockets are closed: peers in a collective of its generation get an error."""
        launcher = self._current
        members = launcher.members.get(worker.generation, set())
        if worker.number not in members:
            return
        members.discard(worker.number)
        for waiting in launcher.groups.get(worker.generation, {}).values():
            waiting.pop(worker.number, None)
            for number in sorted(waiting):
                peer = launcher.children.get(number)
                if isinstance(peer, SimWorker):
                    self._break_off(peer)

    def planned(self, rank: int, step: int, phase: Phase) -> SimKind | None:
        """The fault that is due here, used up by one."""
        for fault, left in self._left.items():
            is_due = step == fault.step if fault.phase is Phase.STEP else step >= fault.step
            if fault.rank == rank and fault.phase is phase and is_due and (left > 0 or fault.times == 0):
                if fault.kind is SimKind.STORAGE:
                    continue
                self._left[fault] = left - 1
                return fault.kind
        return None

    def fires(self, kind: SimKind, rank: int, step: int, phase: Phase) -> bool:
        """True once for each planned fault of `kind` whose step has been reached."""
        for fault, left in self._left.items():
            if fault.kind is kind and left > 0 and step >= fault.step:
                self._left[fault] = left - 1
                return True
        return False

    def inject(self, worker: SimWorker, kind: SimKind) -> bool:
        """Let the fault happen; True if the worker does not go on."""
        if kind in _RAISED:
            name, exception_type = _RAISED[kind]
            worker.fail(communication=False, kind=name, exception_type=exception_type)
        elif kind is SimKind.SIGKILL:
            self.die(worker, exit_code=None, signal=SIGKILL)
        elif kind is SimKind.HANG_NATIVE:
            worker.is_stuck = True
        elif kind is SimKind.SIGSTOP:
            worker.is_stopped = worker.is_stuck = True
        elif kind is SimKind.NODE_KILL:
            worker.send(wire.NodeKill(generation=worker.generation, mono_ns=self.clock.monotonic_ns()))
        elif kind is not SimKind.HANG:
            self._inject_outside(worker, kind)
            return False
        return True

    def check_final_state(self, worker: SimWorker) -> None:
        """The state after the last step must be that of an uninterrupted run."""
        state = FRESH
        for step in range(1, self.num_steps + 1):
            state = next_state(state, step)
        if worker.state != state:
            self.violation(f"rank {worker.rank} finished with another state than the uninterrupted run")

    # --- inside ---------------------------------------------------------------------------------------------

    @property
    def _current(self) -> _Launcher:
        assert self._launcher is not None
        return self._launcher

    def _inject_outside(self, worker: SimWorker, kind: SimKind) -> None:
        """Faults that hit something else than the worker that reached them."""
        if kind is SimKind.UNFIT:
            worker.is_unfit = True
        elif kind is SimKind.BAD_START:
            self._num_bad_starts += 1
        elif kind is SimKind.SIGKILL_ALL:
            for number in sorted(self._current.members.get(worker.generation, set())):
                self.die(self._current.children[number], exit_code=None, signal=SIGKILL)
        elif kind is SimKind.LINK_FLAP:
            self.schedule(0.0, lambda: self._flap(worker.generation))
        elif kind is SimKind.WRITER_KILL:
            for child in list(self._current.children.values()):
                if child.role is Role.WRITER:
                    self.die(child, exit_code=None, signal=SIGKILL)
        elif kind is SimKind.SIGTERM:
            self.schedule(0.0, lambda: self._feed(c.SignalReceived(signal=SIGTERM, by_person=False)))
        elif kind is SimKind.HALT:
            self.schedule(0.0, lambda: self._feed(c.HaltSeen(reason="simulated")))
        elif kind is SimKind.LAUNCHER_KILL:
            self._current.is_killed = True

    def _flap(self, generation: int) -> None:
        """Every connection of the generation breaks, and nobody died."""
        for number in sorted(self._current.members.get(generation, set())):
            child = self._current.children.get(number)
            if isinstance(child, SimWorker):
                self._break_off(child)

    def _begin_launcher(self) -> _Launcher:
        history = History()
        for record in self.records:
            history.apply(record)
        generation = max((record.generation for record in self.records), default=0)
        start = MachineStart(
            generation=generation,
            high_water=history.high_water,
            wall_offset_ns=self.clock.wall_offset_ns,
            commits_on_record=bool(self.storage.commits),
        )
        config = MachineConfig(
            world_size=self.config.num_ranks,
            num_standbys=self.config.num_standbys,
            limits=self.config.limits,
            hot_every=self.config.hot_every,
            min_world_size=self.config.min_world_size,
            world_multiple=self.config.world_multiple,
        )
        self._launcher = _Launcher(
            epoch=self.records[-1].epoch + 1 if self.records else 1,
            history=history,
            machine=Machine(config, history, start),
            children={},
            groups={},
            members={},
        )
        self.storage.drop_slots(self._launcher.machine.world_size)
        return self._launcher

    def _end_launcher(self, launcher: _Launcher) -> None:
        """Everything that the launcher owns goes with it."""
        survivors = [child for child in launcher.children.values() if child.is_alive]
        if launcher.stop is not None and survivors:
            self.violation(f"{len(survivors)} children were left behind")
        for child in survivors:
            child.is_alive = False
        self._queue.clear()
        self.storage.drop_slots()
        self._launcher = None

    def _turn(self, launcher: _Launcher, end_ns: int) -> bool:
        """One action or one tick; False if time is up or nothing will ever happen again."""
        deadline_ns = launcher.machine.next_deadline_ns()
        action_ns = self._queue[0][0] if self._queue else None
        waits = [item for item in (deadline_ns, action_ns) if item is not None]
        if not waits or min(waits) > end_ns:
            return False
        self.clock.advance_to(max(min(waits), self.clock.monotonic_ns()))
        if action_ns is not None and (deadline_ns is None or action_ns <= deadline_ns):
            heapq.heappop(self._queue)[2]()
            return True
        self._feed(c.Tick())
        after_ns = launcher.machine.next_deadline_ns()
        if after_ns is not None and after_ns <= self.clock.monotonic_ns():
            self.violation("a deadline stays due after its tick: the loop would spin")
            return False
        return True

    def _schedule_at(self, at_ns: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_ns, next(self._order), action))

    def _feed(self, item: c.Input) -> None:
        launcher = self._launcher
        if launcher is not None and launcher.stop is None:
            self._apply(launcher.machine.handle(item, self.clock.monotonic_ns()))

    def _feed_from(self, child: SimChild, message: wire.Message) -> None:
        self._feed(c.FromChild(child=child.number, message=message))

    def _feed_exit(self, child: SimChild, exited: c.Exited) -> None:
        self._current.children.pop(child.number, None)
        self._feed(exited)

    def _apply(self, commands: Sequence[c.Command]) -> None:
        for command in commands:
            self._commands[type(command)](command)

    def _emit(self, event: Event, generation: int, rank: int | None = None) -> None:
        launcher = self._current
        record = Record(
            run="simulated",
            epoch=launcher.epoch,
            generation=generation,
            rank=rank,
            seq=len(self.records) + 1,
            time_ns=self.clock.wall_ns(),
            event=event,
        )
        self.records.append(record)
        launcher.history.apply(record)

    def _break_off(self, worker: SimWorker) -> None:
        worker.later(
            0.001,
            0.06,
            lambda: worker.fail(communication=True, kind="collective_error", exception_type="RuntimeError"),
        )

    # --- commands -------------------------------------------------------------------------------------------

    def _on_spawn(self, command: c.Spawn) -> None:
        kind = SimWriter if command.role is Role.WRITER else SimWorker
        child = kind(self, command.child, command.role, next(self._pids))
        self._current.children[command.child] = child
        spawned = c.Spawned(child=command.child, pid=child.pid, start_ticks=child.pid)
        self._schedule_at(child.delivery_ns(0), lambda: self._feed(spawned))
        if self._num_bad_starts and command.role is not Role.WRITER:
            self._num_bad_starts -= 1
            self.schedule(0.2, lambda: self.die(child, exit_code=1, signal=None))
            return
        child.begin()

    def _on_assign(self, command: c.AssignRank) -> None:
        child = self._current.children.get(command.child)
        if isinstance(child, SimWorker):
            child.assign(command.rank, command.generation)

    def _on_open(self, command: c.OpenGeneration) -> None:
        launcher = self._current
        launcher.members[command.generation] = set(command.children)
        candidates: list[tuple[str, Content]] = self.storage.candidates(
            checkpoints_back=command.checkpoints_back, hot_allowed=command.hot_allowed
        )
        for number in command.children:
            child = launcher.children.get(number)
            if not isinstance(child, SimWorker) or not child.is_alive:
                launcher.members[command.generation].discard(number)
                continue
            child.generation = command.generation
            child.set_interval(command.hot_every, 0)
            self._start_generation(child, command.generation, candidates)

    def _start_generation(self, child: SimWorker, generation: int, candidates: list[tuple[str, Content]]) -> None:
        child.later(0.0005, 0.003, lambda: child.go(generation, candidates))

    def _on_interval(self, command: c.SetHotInterval) -> None:
        for child in self._current.children.values():
            if isinstance(child, SimWorker) and child.rank >= 0:
                child.set_interval(command.every, command.from_step)

    def _on_interrupt(self, command: c.SendInterrupt) -> None:
        child = self._current.children.get(command.child)
        if isinstance(child, SimWorker) and child.is_alive:
            child.interrupt(command.generation)

    def _on_kill(self, command: c.Kill) -> None:
        child = self._current.children.get(command.child)
        if child is None or not child.is_alive:
            return
        self.killed_pids.add(child.pid)
        self.schedule(self.rng.uniform(0.001, 0.01), lambda: self.die(child, exit_code=None, signal=SIGKILL))

    def _on_publish(self, command: c.PublishSealed) -> None:
        for slots in self.storage.slots:
            slots.sealed_step = command.step

    def _on_strand(self, command: c.StrandSlots) -> None:
        for slots in self.storage.slots:
            slots.stranded = (command.generation, command.step)

    def _on_start_save(self, command: c.StartSave) -> None:
        for slots, slot in zip(self.storage.slots, command.slots, strict=True):
            if slots.held_slot not in (-1, slot):
                self.violation(f"save of step {command.step} started while another one holds its slots")
            slots.held_slot = slot
        for child in self._current.children.values():
            if isinstance(child, SimWriter) and child.is_alive:
                child.write(command.step, command.generation, command.slots)

    def _on_release(self, command: c.ReleaseSlots) -> None:
        for slots in self.storage.slots:
            slots.held_slot = -1

    def _on_fence(self, command: c.Fence) -> None:
        self.storage.fences.append((command.generation, command.step))
        for slots in self.storage.slots:
            slots.sealed_step = command.step

    def _on_leave(self, command: c.LeaveChild) -> None:
        child = self._current.children.get(command.child)
        if child is not None and child.is_alive:
            child.on_leave()

    def _on_stop(self, command: c.Stop) -> None:
        self._current.stop = command


_RAISED = {
    SimKind.EXCEPTION: ("exception", "ValueError"),
    SimKind.NONFINITE: ("nonfinite", "NonFiniteLoss"),
    SimKind.USER_ERROR: ("user_error", "UserError"),
}
