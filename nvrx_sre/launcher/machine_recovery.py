"""Gathering ranks for the next generation: interrupt, wait, replace, back off, open.

Model: survivors of the old generation are interrupted and come back ready for the next; a rank that does not
acknowledge within its grace, or not get ready within the teardown's, or is unfit, is killed. Vacant ranks go
to parked standbys, else to fresh processes, once the back-off has passed. When every rank is ready the
generation is opened; that is the only place where the number rises.

Without an excluded device the world is another one (`policy.membership`), and begins when nobody is in the old one
any more: survivors keep process and device and move to their new ranks, hot slots are of no use to it. So the newest
step that they hold is saved first, bounded, and nothing that was sealed is lost.

Invariants: nobody is told to go before all are ready; each wait has a deadline; a fault while gathering
keeps the pending number. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nvrx_sre.core.clock import to_ns
from nvrx_sre.events.schema import (
    FaultClass,
    InterruptRaised,
    Layer,
    Phase,
    RankExcluded,
    RankReplaced,
    Role,
    TeardownFinished,
)
from nvrx_sre.launcher.commands import DropSlots, OpenGeneration, SendInterrupt
from nvrx_sre.launcher.machine_commits import Commits
from nvrx_sre.launcher.machine_faults import RootFault
from nvrx_sre.launcher.machine_job import Job, Stage
from nvrx_sre.launcher.machine_progress import Progress
from nvrx_sre.launcher.machine_roster import Child, ChildState, Roster
from nvrx_sre.launcher.machine_saves import Saves
from nvrx_sre.policy.ladder import Decision

MAX_STANDBY_FAILURES = 3
"""Standbys that may fail in a row before the run goes on without."""
_OF_COLLECTIVES = (FaultClass.HANG, FaultClass.COLLECTIVE_ERROR)
"""Faults that are explained by who was in which collective."""


class Recovery:
    """Takes the ranks from one generation to the next."""

    def __init__(self, job: Job, roster: Roster, commits: Commits, saves: Saves, progress: Progress) -> None:
        self._job = job
        self._roster = roster
        self._commits = commits
        self._saves = saves
        self._progress = progress
        self._backoff_until_ns: int | None = None
        self._leaving: set[int] = set()
        self._kept: set[int] = set()
        self._killed: set[int] = set()
        self._is_tearing_down = False
        self._num_standby_failures = 0
        self._next_devices: tuple[str, ...] | None = None
        """The world that comes next, if it is another one."""
        self._save_until_ns = 0
        self.kept_children: set[int] = set()
        """Children of the open generation that came into it through an in-process restart."""

    def begin(self, decision: Decision, fault: RootFault, now_ns: int) -> None:
        """Leave the generation (or go on gathering) as decided."""
        job = self._job
        was_open = job.stage is Stage.OPEN
        job.stage = Stage.FORMING
        job.checkpoints_back = max(job.checkpoints_back, decision.checkpoints_back)
        if decision.backoff_s > 0:
            self._backoff_until_ns = now_ns + to_ns(decision.backoff_s)
        if decision.is_excluding:
            self._exclude(decision, fault, now_ns)
        elif was_open:
            self.tell_unused(job.leave_unfit_out())
            self.take_back_nodes(now_ns)
        if decision.layer is Layer.WORKER:
            self._kill_for_layer(fault, now_ns)
        if was_open:
            self._interrupt_all(now_ns, is_traced=fault.fault in _OF_COLLECTIVES)
        self.fill(now_ns)
        self.settle(now_ns)

    def fill(self, now_ns: int, ranks: Iterable[int] | None = None) -> None:
        """Give every vacant rank a process, unless the back-off is still running.

        `ranks`: only these can be vacant by now and have no process coming.
        """
        if self._job.stage is not Stage.FORMING or self._backoff_until_ns is not None or self._next_devices is not None:
            return
        for rank in self._roster.vacant_ranks(ranks):
            node = self._job.node(rank)
            if node in self._job.absent:
                continue
            standby = self._roster.parked(Role.STANDBY, node)
            if standby is None:
                self._roster.spawn(Role.WORKER, rank, now_ns)
                continue
            self._roster.assign(standby, rank, now_ns)
            self._emit_replaced(standby, warm=True)

    def refill_standbys(self, now_ns: int) -> None:
        """Start missing standbys."""
        if self._num_standby_failures >= MAX_STANDBY_FAILURES:
            return
        there = Counter(child.node for child in self._roster.spares(Role.STANDBY))
        for node in sorted(set(range(self._job.config.num_nodes)) - self._job.absent):
            for _ in range(self._job.config.num_standbys - there[node]):
                self._roster.spawn(Role.STANDBY, None, now_ns, node)

    def on_standby_parked(self) -> None:
        """A standby is as good as it gets."""
        self._num_standby_failures = 0

    def on_standby_failure(self, *, for_good: bool = False) -> None:
        """A standby died or is unfit; `for_good`: every other one would be too."""
        self._num_standby_failures = MAX_STANDBY_FAILURES if for_good else self._num_standby_failures + 1

    def on_spawned(self, child: Child) -> None:
        """A fresh process has its pid: tell who it replaces."""
        if child.rank is not None and child.old_pid:
            self._emit_replaced(child, warm=False)

    def on_acked(self, child: Child, now_ns: int) -> bool:
        """The interrupt arrived; False if it was none of ours."""
        if child.state is not ChildState.INTERRUPTED:
            return False
        child.state = ChildState.LEAVING
        child.arm(now_ns, self._job.config.limits.deadlines.teardown_s)
        return True

    def on_ready(self, child: Child) -> None:
        """The child can enter the pending generation."""
        if child.state is ChildState.RUNNING:
            child.is_ready_early = True
            return
        if child.is_leaving and child.rank is not None:
            self._left(child.rank, kept=True)
            self.kept_children.add(child.number)
        child.state = ChildState.READY
        child.phase = Phase.RENDEZVOUS
        child.serial = self._job.fault_serial
        child.deadline_ns = None

    def on_unfit(self, child: Child, now_ns: int) -> None:
        """A survivor cannot be kept: its process is replaced, which costs no budget."""
        self._roster.kill(child, "process unfit", now_ns)

    def on_gone(self, rank: int, now_ns: int) -> None:
        """The process of `rank` is dead and its seat vacant."""
        self._left(rank, kept=False)
        self.fill(now_ns, [rank])

    def deadline_ns(self) -> int | None:
        """When the back-off, or the save before another world, ends."""
        if self._job.stage is not Stage.FORMING:
            return None
        return self._backoff_until_ns if self._next_devices is None else self._save_until_ns

    def on_tick(self, now_ns: int) -> None:
        """End the back-off, kill ranks past their grace, give up seats of processes that cannot even die."""
        if self._backoff_until_ns is not None and now_ns >= self._backoff_until_ns:
            self._backoff_until_ns = None
            self.fill(now_ns)
        for child in self._roster.seated():
            if child.deadline_ns is None or now_ns < child.deadline_ns:
                continue
            if child.is_leaving:
                self._roster.look_at(child)
                self._roster.kill(child, "did not leave its generation in time", now_ns)
            elif child.is_killed and child.rank is not None and self._job.stage is Stage.FORMING:
                self._roster.detach(child)
                child.deadline_ns = None
                self.on_gone(child.rank, now_ns)

    def settle(self, now_ns: int) -> None:
        """Close the teardown and open the generation as soon as that is possible."""
        if self._job.stage is not Stage.FORMING:
            return
        if self._is_waiting_for_save(now_ns):
            return
        if self._is_tearing_down and not self._leaving:
            self._is_tearing_down = False
            self._job.emit(TeardownFinished(kept=sorted(self._kept), killed=sorted(self._killed)))
        if self._next_devices is not None and not self._leaving:
            self._begin_world(self._next_devices, now_ns)
        if self._backoff_until_ns is None and self._roster.is_every_rank_ready():
            self._open(self._roster.seated(), now_ns)

    def _open(self, seated: list[Child], now_ns: int) -> None:
        job = self._job
        job.generation += 1
        job.stage = Stage.OPEN
        job.go_ns = now_ns
        for child in seated:
            child.state = ChildState.RUNNING
            child.is_ready_early = False
            self._progress.open(child, now_ns)
        self.kept_children &= {child.number for child in seated}
        self._commits.open()
        job.command(
            OpenGeneration(
                generation=job.generation,
                world_size=len(seated),
                children=tuple(child.number for child in seated),
                checkpoints_back=job.checkpoints_back,
                hot_allowed=job.hot_allowed,
                hot_every=job.hot_every,
            )
        )

    def _exclude(self, decision: Decision, fault: RootFault, now_ns: int) -> None:
        """Plan the world without the root's device."""
        job = self._job
        device = "" if fault.root is None else fault.root.device
        devices = job.devices_without(device)
        self._backoff_until_ns = None
        job.checkpoints_back = decision.checkpoints_back
        job.emit(
            RankExcluded(device=device, reason=decision.reason, world_size=len(devices)),
            None if fault.root is None else fault.root.rank,
        )
        self.plan(devices, now_ns)

    def tell_unused(self, devices: Iterable[str]) -> None:
        """These devices take no further part: a check of the node found them unfit, before or beside any fault."""
        job = self._job
        for device in devices:
            rank = job.devices.index(device) if device in job.devices else None
            world_size = len(job.devices_without(""))
            job.emit(RankExcluded(device=device, reason=job.unfit[device], world_size=world_size), rank)

    @property
    def is_changing_world(self) -> bool:
        """Another world is planned and has not begun."""
        return self._next_devices is not None

    def plan(self, devices: tuple[str, ...], now_ns: int) -> None:
        """Another world comes next: have the newest sealed step saved for it."""
        self._next_devices = devices
        self._save_until_ns = now_ns + to_ns(self._job.config.limits.deadlines.final_drain_s)
        self._saves.flush(self._commits.sealed, now_ns)

    def take_back_nodes(self, now_ns: int) -> None:
        """Nodes that have come back, or came in another's place, take part from the next generation on."""
        job = self._job
        job.left_out &= job.absent
        devices = job.devices_without("")
        planned = job.devices if self._next_devices is None else self._next_devices
        if devices != planned:
            self.plan(devices, now_ns)

    def _is_waiting_for_save(self, now_ns: int) -> bool:
        return self._next_devices is not None and not self._saves.is_idle and now_ns < self._save_until_ns

    def _begin_world(self, devices: tuple[str, ...], now_ns: int) -> None:
        """Nobody is in the old world any more: slots go, survivors move to their ranks of the new one."""
        job = self._job
        self._next_devices = None
        self._saves.lose("the save took too long before the world became smaller")
        self._commits.forget_sealed()
        job.devices = devices
        job.hot_allowed = False
        for node in range(job.config.num_nodes):
            job.command(DropSlots(num_ranks=job.num_ranks_on(node), node=node))
        for child in self._roster.reseat():
            if child.state is not ChildState.ENDING:
                self._roster.leave(child, job.config.limits.deadlines.teardown_s, now_ns)
        self.fill(now_ns)

    def _interrupt_all(self, now_ns: int, *, is_traced: bool) -> None:
        """Push the interrupt to everybody in the old generation; whoever was killed only has to die."""
        grace_s = self._job.config.limits.deadlines.interrupt_grace_s
        self._kept, self._killed, self._leaving = set(), set(), set()
        self.kept_children = set()
        self._is_tearing_down = True
        interrupted = []
        for child in self._roster.seated():
            if child.rank is None:
                continue
            self._leaving.add(child.rank)
            if child.is_in_generation and child.is_ready_early:
                child.state = ChildState.LEAVING
                self.on_ready(child)
            elif child.is_in_generation:
                child.state = ChildState.INTERRUPTED
                child.arm(now_ns, grace_s)
                interrupted.append(child.rank)
                self._job.command(
                    SendInterrupt(child=child.number, generation=self._job.generation, is_traced=is_traced)
                )
        if interrupted:
            self._job.emit(InterruptRaised(ranks=interrupted))

    def _kill_for_layer(self, fault: RootFault, now_ns: int) -> None:
        """Layer worker: the root's process goes; if nobody is known to be guilty, all of them."""
        if fault.root is not None:
            root = self._roster.get(fault.root.number)
            targets = [] if root is None else [root]
        else:
            targets = [child for child in self._roster.seated() if child.is_in_generation]
        for child in targets:
            if child.state is not ChildState.ENDING:
                self._roster.kill(child, "replaced in layer worker", now_ns)

    def _left(self, rank: int, *, kept: bool) -> None:
        if rank in self._leaving:
            self._leaving.discard(rank)
            (self._kept if kept else self._killed).add(rank)

    def _emit_replaced(self, child: Child, *, warm: bool) -> None:
        self._job.emit(RankReplaced(old_pid=child.old_pid, new_pid=child.pid, warm=warm), child.rank, self._job.pending)
