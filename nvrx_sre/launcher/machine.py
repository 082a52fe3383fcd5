"""The pure launcher machine: facts in, commands out. The launcher's whole behaviour, without the world.

    Input, now ─> Machine.handle ─> [Command, ...]        Tick is due at Machine.next_deadline_ns()

Parts, each with one job: `Roster` (children and seats), `Generation` (formed, restored, finished), `Commits`
(which steps count), `Saves` (the writer), `Progress` (deadlines, blame), `Faults` (root cause, decision),
`Recovery` (to the next generation), `Nodes` (who is there), `Shutdown` (the end). This facade routes inputs to them
and holds what concerns several.

Invariants: a message counts only if its sender runs in the open generation (fencing); one root fault a
generation; generations rise strictly; deadlines are judged on `Tick` alone, after the shell drained every
socket. The shell feeds every emitted record to `history` before the next input.
Thread safety: none; one owner. Must not: do I/O, read a clock, import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.errors import ExitCode, NothingRestorable
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import (
    Action,
    Cap,
    CapReached,
    CheckpointDeleted,
    FaultClass,
    FaultInjected,
    HaltRequested,
    Phase,
    PhaseEntered,
    PreemptionReceived,
    Role,
    StandbyReady,
    WorkerExited,
    WorkerStarted,
)
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.machine_commits import Commits
from nvrx_sre.launcher.machine_faults import Faults, RootFault
from nvrx_sre.launcher.machine_generation import Generation
from nvrx_sre.launcher.machine_job import Job, MachineConfig, MachineStart, Stage
from nvrx_sre.launcher.machine_nodes import Nodes
from nvrx_sre.launcher.machine_progress import Progress
from nvrx_sre.launcher.machine_rank_saves import RankSaves
from nvrx_sre.launcher.machine_recovery import Recovery
from nvrx_sre.launcher.machine_roster import Child, ChildState, Roster
from nvrx_sre.launcher.machine_saves import Saves
from nvrx_sre.launcher.machine_shutdown import Shutdown
from nvrx_sre.policy.history import History
from nvrx_sre.policy.ladder import Decision

__all__ = ["Machine", "MachineConfig", "MachineStart"]

_GATHERED = frozenset({ChildState.STARTING, ChildState.PARKED, ChildState.ASSIGNED, ChildState.READY})
"""States of a child that is on its way into the pending generation."""
_OF_WRITERS = (wire.WriterProgress, wire.Retired, wire.Injected)
_AFTER_ENTRY = (wire.Acked, wire.Rejected)
"""What counts of the open generation in whatever state the rank is. (Named here: a union would be built each time.)"""


class Machine:
    """The launcher's decisions. All times are the launcher's monotonic nanoseconds."""

    def __init__(self, config: MachineConfig, history: History, start: MachineStart) -> None:
        self._job = Job(config=config, start=start, history=history, generation=start.generation)
        self._roster = Roster(self._job)
        self._commits = Commits(self._job)
        self._saves = Saves(self._job, self._roster, self._commits)
        self._rank_saves = RankSaves(self._job, self._saves)
        self._progress = Progress(self._job, self._roster)
        self._generation = Generation(self._job, self._roster, self._commits, self._saves, self._progress)
        self._faults = Faults(self._job, self._commits)
        self._recovery = Recovery(self._job, self._roster, self._commits, self._saves, self._progress)
        self._nodes = Nodes(self._job, self._roster, self._saves, self._recovery)
        self._shutdown = Shutdown(self._job, self._roster, self._commits, self._saves)
        self._is_interrupted = False
        self.leave_by_ns: int | None = None
        """When who sent the first termination signal expects the launcher to be gone, None before any."""
        self._looks_again = False
        """The alarm is set anew after this input: a tick, or any while a peer's phase excuses a rank out of time."""
        self._inputs: dict[type[c.Input], Callable[[Any, int], None]] = {
            c.Spawned: self._on_spawned,
            c.FromChild: self._on_message,
            c.Exited: self._on_exited,
            c.SignalReceived: self._on_signal,
            c.HaltSeen: self._on_halt,
            c.Stalled: self._on_stalled,
            c.NodeJoined: self._on_node_joined,
            c.NodeLost: self._on_node_lost,
            c.NodeRefused: lambda item, now_ns: self._nodes.refuse(item.node, item.reason),
            c.DeviceUnfit: self._on_device_unfit,
            c.Tick: self._on_tick,
        }
        self._messages: dict[type[wire.Message], Callable[[Child, Any, int], None]] = {
            wire.Parked: self._on_parked,
            wire.Ready: self._on_ready,
            wire.Acked: self._on_acked,
            wire.Entered: self._generation.on_entered,
            wire.Alive: self._progress.on_alive,
            wire.Step: self._on_step,
            wire.Sealed: self._generation.on_sealed,
            wire.Restored: self._on_restored,
            wire.Finished: self._on_finished,
            wire.Fault: self._on_fault_report,
            wire.NodeKill: self._on_node_kill,
            wire.Rejected: lambda child, message, now_ns: self._generation.on_rejected(message),
            wire.Injected: self._on_injected,
            wire.SlotsWanted: self._on_slots_wanted,
            wire.Retired: self._on_retired,
            wire.WriterProgress: self._saves.on_progress,
            wire.RankSave: lambda child, message, now_ns: self._rank_saves.on_report(message),
        }

    # --- public ---------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Number of the generation that was opened last, 0 if none ever."""
        return self._job.generation

    @property
    def world_size(self) -> int:
        """Ranks of the generation that is open, or being formed."""
        return self._job.world_size

    def ranks_on(self, node: int) -> int:
        """Ranks of that world on a node."""
        return self._job.num_ranks_on(node)

    def seated(self) -> list[Child]:
        """The ranks' processes: what was last heard of each, for the metrics."""
        return self._roster.seated()

    @property
    def high_water(self) -> int:
        """H: highest step ever committed."""
        return self._commits.high_water

    def losses(self) -> Mapping[int, float]:
        """Loss of the last execution of each step of this launcher, the last 65,536 steps."""
        return self._commits.losses()

    def start(self, now_ns: int) -> list[c.Command]:
        """Start all children of this node. Call once, first."""
        self._nodes.start(now_ns)
        self._recovery.tell_unused(sorted(self._job.unused))
        for rank in range(self._job.world_size):
            if self._job.node(rank) not in self._job.absent:
                self._roster.spawn(Role.WORKER, rank, now_ns)
        self._saves.start_writer(now_ns)
        self._recovery.refill_standbys(now_ns)
        return self._job.take()

    def handle(self, item: c.Input, now_ns: int) -> list[c.Command]:
        """Take in one fact; the commands that follow from it, in order."""
        if self._job.stage is not Stage.STOPPED:
            self._inputs[type(item)](item, now_ns)
            if self._job.stage is not Stage.OPEN:
                self._rank_saves.leave()
            self._recovery.settle(now_ns)
            self._shutdown.poll(now_ns)
            if self._looks_again:
                self._set_alarm(now_ns)
        return self._job.take()

    def next_deadline_ns(self) -> int | None:
        """When `Tick` is due, None if nothing waits. It may come early: a tick at which nothing is due does nothing."""
        if self._job.stage is Stage.STOPPED:
            return None
        waits = [
            self._commits.deadline_ns(),
            self._saves.deadline_ns(),
            self._recovery.deadline_ns(),
            self._nodes.deadline_ns(),
            self._shutdown.deadline_ns(),
            self._faults.deadline_ns() if self._job.stage is Stage.OPEN else None,
            self._roster.alarm.due_ns,
        ]
        return min((item for item in waits if item is not None), default=None)

    def _set_alarm(self, now_ns: int) -> None:
        """Look at every child for the next deadline. A suspicion is judged before any rank's progress."""
        waits = [child.deadline_ns for child in self._roster if child.state is not ChildState.RUNNING]
        self._looks_again = False
        if self._job.stage is Stage.OPEN:
            running_ns, self._looks_again = self._progress.next_deadline_ns(now_ns)
            if not (self._looks_again and self._faults.is_suspecting):
                waits.append(running_ns)
        self._roster.alarm.due_ns = min((item for item in waits if item is not None), default=None)

    # --- processes ------------------------------------------------------------------------------------------

    def _on_spawned(self, item: c.Spawned, now_ns: int) -> None:
        child = self._roster.get(item.child)
        if child is None:
            return
        child.pid = item.pid
        self._job.emit(
            WorkerStarted(role=child.role, pid=item.pid, start_ticks=item.start_ticks, attempt=child.attempt),
            child.rank,
            self._job.pending,
        )
        if child.state is not ChildState.STARTING:
            return  # killed, or told to leave, before it was there
        self._recovery.on_spawned(child)
        if child.rank is not None:
            entered = PhaseEntered(phase=Phase.INIT, entered_ns=self._job.wall_ns(now_ns))
            self._job.emit(entered, child.rank, self._job.pending)

    def _on_exited(self, item: c.Exited, now_ns: int) -> None:
        child = self._roster.get(item.child)
        if child is None:
            return
        expected = child.state is ChildState.ENDING
        self._job.emit(
            WorkerExited(
                role=child.role, pid=child.pid, exit_code=item.exit_code, signal=item.signal, expected=expected
            ),
            child.rank,
        )
        rank = child.rank if self._roster.has_seat(child) else None
        self._roster.remove(child)
        if child.role is Role.WRITER:
            self._saves.on_writer_death(child, now_ns)
        elif self._job.stage is Stage.STOPPING:
            return
        elif child.role is Role.STANDBY:
            if not expected:
                self._recovery.on_standby_failure()
        elif rank is not None:
            self._on_rank_gone(child, item, expected, now_ns)

    def _on_rank_gone(self, child: Child, item: c.Exited, expected: bool, now_ns: int) -> None:
        """The process of a rank is dead: the root fault of its attempt, or collateral of one."""
        is_open = self._job.stage is Stage.OPEN
        is_gathered = child.state in _GATHERED and child.serial == self._job.fault_serial
        fault = None
        if not expected and (is_open or is_gathered):
            fault = self._faults.on_death(child, item)
        if fault is not None:
            self._fault(fault, now_ns)
        elif not is_open and child.rank is not None:
            self._recovery.on_gone(child.rank, now_ns)

    # --- messages -------------------------------------------------------------------------------------------

    def _on_message(self, item: c.FromChild, now_ns: int) -> None:
        child = self._roster.get(item.child)
        if child is None or not self._counts(child, item.message):
            return
        handler = self._messages.get(type(item.message))
        if handler is not None:
            handler(child, item.message, now_ns)

    def _counts(self, child: Child, message: wire.Message) -> bool:
        """Fencing: what a rank says counts while it runs in the open generation, and only about that one."""
        if isinstance(message, wire.Parked):
            return child.state is ChildState.STARTING
        if child.role is Role.WRITER:
            return isinstance(message, _OF_WRITERS)
        if isinstance(message, wire.Injected):
            return True  # a strike is a fact, whatever has become of its generation: it never comes again
        if self._job.stage is Stage.STOPPING:
            return False
        if isinstance(message, wire.Ready):
            return message.generation == self._job.pending
        if isinstance(message, _AFTER_ENTRY):
            return message.generation == self._job.generation
        if self._job.stage is not Stage.OPEN or child.state is not ChildState.RUNNING:
            return False
        return getattr(message, "generation", self._job.generation) == self._job.generation

    def _on_parked(self, child: Child, message: wire.Parked, now_ns: int) -> None:
        child.state = ChildState.PARKED
        child.deadline_ns = None
        if child.role is Role.WRITER:
            self._saves.poll(now_ns)
        elif self._job.stage is Stage.STOPPING:
            return
        elif child.rank is not None:
            self._roster.assign(child, child.rank, now_ns)
        elif message.fit:
            self._recovery.on_standby_parked()
            self._job.emit(StandbyReady(pid=child.pid))
        else:
            self._recovery.on_standby_failure(for_good=True)
            self._roster.kill(child, "unfit as a standby", now_ns)

    def _on_ready(self, child: Child, message: wire.Ready, now_ns: int) -> None:
        if child.is_leaving and not message.fit:
            self._recovery.on_unfit(child, now_ns)
        elif child.state is ChildState.ASSIGNED and not message.fit:
            self._roster.kill(child, "process unfit", now_ns)
            self._fault(self._faults.on_unfit(child, message.reason, now_ns), now_ns)
        elif message.fit and (child.is_leaving or child.state in (ChildState.ASSIGNED, ChildState.RUNNING)):
            self._recovery.on_ready(child)

    def _on_acked(self, child: Child, message: wire.Acked, now_ns: int) -> None:
        if self._recovery.on_acked(child, now_ns):
            entered = PhaseEntered(phase=Phase.TEARDOWN, entered_ns=self._job.wall_ns(message.mono_ns))
            self._job.emit(entered, child.rank)

    def _on_step(self, child: Child, message: wire.Step, now_ns: int) -> None:
        num_before = self._commits.num_committed
        self._generation.on_step(child, message, now_ns)
        diverged = self._commits.divergence
        if diverged is not None and self._job.config.exact_replay:
            why = f"step {diverged.step} gave another loss when it was executed again"
            bits = f"bits {diverged.actual}, at first {diverged.expected}"
            self._shutdown.stop(ExitCode.INTERNAL, f"{why} ({bits}): a restored state is not the one saved", now_ns)
            return
        if self._commits.incident_high_water is None and self._commits.num_committed > num_before:
            self._recovery.refill_standbys(now_ns)

    def _on_restored(self, child: Child, message: wire.Restored, now_ns: int) -> None:
        if not self._generation.on_restored(child, message, now_ns):
            self._fault(self._faults.on_disagreement(now_ns), now_ns)

    def _on_finished(self, child: Child, message: wire.Finished, now_ns: int) -> None:
        self._generation.on_finished(child, message)
        if self._generation.is_finished:
            self._shutdown.finish(self._generation.result, now_ns)

    def _on_fault_report(self, child: Child, message: wire.Fault, now_ns: int) -> None:
        child.heard_ns = now_ns
        fault = self._faults.on_report(child, message, now_ns)
        if fault is not None:
            self._fault(fault, now_ns)

    def _on_injected(self, child: Child, message: wire.Injected, now_ns: int) -> None:
        child.heard_ns = now_ns
        injected_ns = self._job.wall_ns(message.mono_ns)
        self._job.emit(
            FaultInjected(spec=message.spec, step=message.step, passes=message.passes, injected_ns=injected_ns),
            child.rank,
        )

    def _on_retired(self, child: Child, message: wire.Retired, now_ns: int) -> None:
        self._job.emit(CheckpointDeleted(step=message.step, directory=message.directory, seconds=message.seconds))

    def _on_slots_wanted(self, child: Child, message: wire.SlotsWanted, now_ns: int) -> None:
        if child.rank is not None:
            self._job.command(
                c.GrantSlots(
                    child=child.number,
                    rank=child.rank,
                    data_bytes=message.data_bytes,
                    blob_bytes=message.blob_bytes,
                    takes_snapshots=message.takes_snapshots,
                )
            )

    def _on_node_kill(self, child: Child, message: wire.NodeKill, now_ns: int) -> None:
        """The child's node loses every process of ours, and every hot slot."""
        fault = self._faults.on_node_kill(child, message.mono_ns)
        decision = self._faults.detect(fault, now_ns)
        for item in self._roster:
            if item.node == child.node:
                self._roster.kill(item, "the node is lost", now_ns)
        self._lose_slots(child.node)
        self._carry_out(fault, decision, now_ns)

    def _on_node_lost(self, item: c.NodeLost, now_ns: int) -> None:
        """A node is gone: a fault, unless it had no part in the attempt at hand."""
        had_ranks = item.node in self._job.nodes
        lost = self._nodes.lose(item.node, item.reason, now_ns)
        if had_ranks:
            self._lose_slots(item.node)
        root = lost[0] if lost else None
        if root is None or root.rank is None or self._job.stage is Stage.STOPPING:
            return
        if self._job.stage is Stage.OPEN or root.serial == self._job.fault_serial:
            self._fault(self._faults.on_node_lost(root, item.reason, item.mono_ns), now_ns)

    def _on_device_unfit(self, item: c.DeviceUnfit, now_ns: int) -> None:
        """The generation goes on: whether the device really fails, its rank will tell. The next one does without it."""
        self._job.note_unfit(item.node, item.index, item.reason)

    def _lose_slots(self, node: int) -> None:
        """What ranks of `node` held in memory is gone: nothing is sealed on all ranks any more."""
        self._saves.lose("the node was lost")
        self._commits.forget_sealed()
        self._job.command(c.DropSlots(num_ranks=self._job.num_ranks_on(node), node=node))
        self._job.hot_allowed = False

    # --- faults ---------------------------------------------------------------------------------------------

    def _fault(self, fault: RootFault, now_ns: int) -> None:
        self._carry_out(fault, self._faults.detect(fault, now_ns), now_ns)

    def _carry_out(self, fault: RootFault, decision: Decision, now_ns: int) -> None:
        if fault.fault is FaultClass.HANG or decision.action is not Action.RESTART:
            self._request_stacks()
        if fault.fault is FaultClass.CHECKPOINT_CORRUPT:
            self._doubt_states(fault)
        if decision.action is Action.RESTART:
            self._recovery.begin(decision, fault, now_ns)
            return
        if decision.cap is not None:
            used, limit = decision.budget_used[decision.cap.value], decision.budget_limit[decision.cap.value]
            self._job.emit(CapReached(cap=decision.cap, used=used, limit=limit))
        exit_code = ExitCode.DO_NOT_RESTART if decision.exit_code is None else decision.exit_code
        end = self._shutdown.give_up if exit_code == ExitCode.DO_NOT_RESTART else self._shutdown.stop
        end(exit_code, decision.reason, now_ns)

    def _doubt_states(self, fault: RootFault) -> None:
        """Ranks could not restore what they were offered: it is not saved, nor said to be durable, at any end."""
        if self._job.hot_allowed and not self._job.checkpoints_back:
            self._commits.forget_sealed()
        if fault.exception_type == NothingRestorable.__name__:
            self._saves.on_nothing_restorable()

    def _request_stacks(self) -> None:
        for child in self._roster.seated():
            if child.is_in_generation:
                self._roster.look_at(child)

    # --- signals, halts, time -------------------------------------------------------------------------------

    def _on_signal(self, item: c.SignalReceived, now_ns: int) -> None:
        exit_code = ExitCode.INTERRUPTED if item.by_person else ExitCode.PREEMPTED
        if self.leave_by_ns is None:
            self.leave_by_ns = now_ns + to_ns(self._job.config.limits.deadlines.preemption_drain_s)
        if self._job.stage is not Stage.STOPPING:
            self._is_interrupted = item.by_person
            if item.by_person:
                self._job.emit(PreemptionReceived(signal=item.signal, by_person=True))
                self._shutdown.drain(exit_code, "interrupted", now_ns)
            else:
                self._on_preemption(item, now_ns)
        elif item.by_person and self._is_interrupted:
            self._shutdown.kill_now(exit_code, "interrupted twice", now_ns)
        else:
            self._is_interrupted = self._is_interrupted or item.by_person
            self._shutdown.hurry(exit_code, now_ns)

    def _on_preemption(self, item: c.SignalReceived, now_ns: int) -> None:
        """Drain; the exit code says whether the orchestrator may start the job again."""
        decision = self._faults.preempted(now_ns)
        attempts, limit = decision.budget_used[Cap.PREEMPTION], decision.budget_limit[Cap.PREEMPTION]
        self._job.emit(PreemptionReceived(signal=item.signal, by_person=False, attempts=attempts, limit=limit))
        if decision.cap is not None:
            self._job.emit(CapReached(cap=decision.cap, used=attempts, limit=limit))
        exit_code = ExitCode.PREEMPTED if decision.exit_code is None else decision.exit_code
        self._shutdown.drain(exit_code, "preempted" if decision.cap is None else decision.reason, now_ns)

    def _on_halt(self, item: c.HaltSeen, now_ns: int) -> None:
        if self._job.stage is Stage.STOPPING:
            return
        self._job.emit(HaltRequested(reason=item.reason, by=item.by))
        self._shutdown.drain(ExitCode.DO_NOT_RESTART, "halted", now_ns)

    def _on_stalled(self, item: c.Stalled, now_ns: int) -> None:
        self._progress.rearm(now_ns)
        self._saves.rearm(now_ns)

    def _on_node_joined(self, item: c.NodeJoined, now_ns: int) -> None:
        refusal = self._nodes.join(item.node, item.name, now_ns, item.gpu_uuids)
        if refusal:
            self._shutdown.give_up(ExitCode.DO_NOT_RESTART, refusal, now_ns)

    def _on_tick(self, item: c.Tick, now_ns: int) -> None:
        aggregate_ns = self._commits.deadline_ns()
        if aggregate_ns is not None and now_ns >= aggregate_ns:
            self._commits.flush()
        self._saves.on_tick(now_ns)
        self._end_overdue(now_ns)
        if self._job.stage is Stage.OPEN:
            self._judge(now_ns)
        if self._job.stage is Stage.FORMING:
            self._recovery.on_tick(now_ns)
            missing = self._nodes.on_tick(now_ns)
            if missing is not None:
                self._shutdown.stop(*missing, now_ns)
        self._looks_again = True

    def _judge(self, now_ns: int) -> None:
        if self._faults.is_suspecting:
            fault = self._faults.on_tick(now_ns)
        else:
            hang = self._progress.judge(now_ns)
            if hang is None:
                return
            suspects = self._roster.seated() if hang.root is None else [hang.root]
            was_kept = any(child.number in self._recovery.kept_children for child in suspects)
            fault = self._faults.on_hang(hang, was_kept)
            self._progress.distrust(hang.child.phase)
        if fault is not None:
            self._fault(fault, now_ns)

    def _end_overdue(self, now_ns: int) -> None:
        """Children past a deadline that is not a rank's progress: kill, and blame a worker on its way in."""
        for child in self._roster:
            if child.deadline_ns is None or now_ns < child.deadline_ns:
                continue
            if child.state is ChildState.ENDING:
                # Recovery gives up the seat of one that cannot even die; who has none is only killed again.
                is_recoverys = child.is_killed and self._roster.has_seat(child)
                if not is_recoverys or self._job.stage is Stage.STOPPING:
                    self._roster.kill(child, "did not end in time", now_ns)
            elif child.state in (ChildState.STARTING, ChildState.ASSIGNED):
                self._end_stuck(child, now_ns)

    def _end_stuck(self, child: Child, now_ns: int) -> None:
        is_blamed = child.rank is not None and self._job.stage is Stage.FORMING
        fault = self._faults.on_stuck(child) if is_blamed and child.serial == self._job.fault_serial else None
        self._roster.look_at(child)
        self._roster.kill(child, "not ready in time", now_ns)
        if child.role is Role.STANDBY:
            self._recovery.on_standby_failure()
        if fault is not None:
            self._fault(fault, now_ns)
