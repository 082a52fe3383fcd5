"""The children: who lives, in which state, and which rank each one holds.

Model: every rank has a seat, which is vacant or taken by one child. A child is numbered once and never
again. States of a worker, in order: starting -> parked -> assigned -> ready -> running (-> finished), and
from running over interrupted and leaving back to ready. `ending` is any child that was killed or told to
leave: its death is expected.

Invariants: a child holds at most one seat; a seat has at most one child; each child in a waiting state has
a deadline. Pure state, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from nvrx_sre.core.clock import to_ns
from nvrx_sre.events.schema import Phase, Role
from nvrx_sre.launcher.commands import AssignRank, Kill, LeaveChild, RequestStacks, Spawn
from nvrx_sre.launcher.machine_alarm import Alarm
from nvrx_sre.launcher.machine_job import Job


class ChildState(StrEnum):
    """Where a child is in its life."""

    STARTING = "starting"
    PARKED = "parked"
    ASSIGNED = "assigned"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    LEAVING = "leaving"
    ENDING = "ending"


@dataclass(kw_only=True)
class Child:
    """One child process. Times are monotonic ns of the launcher."""

    number: int
    role: Role
    rank: int | None
    attempt: int
    serial: int
    """`Job.fault_serial` of the attempt that this child belongs to."""
    alarm: Alarm
    state: ChildState = ChildState.STARTING
    pid: int = 0
    old_pid: int = 0
    """Process that this one replaces, 0 if none."""
    deadline_ns: int | None = None
    is_killed: bool = False
    is_ready_early: bool = False
    """It left its generation by itself, before it was interrupted."""
    phase: Phase = Phase.INIT
    told_phases: set[Phase] | None = None
    step: int = 0
    progress: int = 0
    progressed_ns: int = 0
    earliest_ns: int = 0
    """Nothing that it says of its progress counts as older: its phase began then, or its launcher went on."""
    heard_ns: int = 0
    limit_s: float = 0.0
    armed_ns: int = 0
    """When its deadline was set."""
    device: str = ""
    """Where it runs, '' before it has a rank."""
    node: int = 0

    def arm(self, now_ns: int, limit_s: float) -> None:
        """Give it `limit_s` from now."""
        self.armed_ns = now_ns
        self.limit_s = limit_s
        self.deadline_ns = now_ns + to_ns(limit_s)
        self.alarm.bring_forward(self.deadline_ns)

    @property
    def is_in_generation(self) -> bool:
        """It may still be inside the training function of the open generation."""
        return self.state in (ChildState.RUNNING, ChildState.FINISHED)

    @property
    def is_leaving(self) -> bool:
        """It was interrupted and is not ready again yet."""
        return self.state in (ChildState.INTERRUPTED, ChildState.LEAVING)


class Roster:
    """Children by number, seats by rank."""

    def __init__(self, job: Job) -> None:
        self.alarm = Alarm()
        """Bound of the deadlines of all children."""
        self._job = job
        self._children: dict[int, Child] = {}
        self._spares: dict[int, dict[int, Child]] = {}
        """Writer and standbys of each node: few, however many ranks there are."""
        self._seats: list[int | None] = [None] * job.world_size
        self._attempts = [0] * job.config.world_size
        self._last_pids: dict[str, int] = {}
        """Process that ran on a device last."""
        self._unready = 0
        """A rank that was not ready when that was asked last."""
        self._num_spawned = 0
        self._spare_attempts = {Role.STANDBY: 0, Role.WRITER: 0}

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children.values()))

    def __len__(self) -> int:
        return len(self._children)

    def get(self, number: int) -> Child | None:
        """The child with this number while it lives."""
        return self._children.get(number)

    def in_seat(self, rank: int) -> Child | None:
        """The child that holds `rank`, None also for a rank that the world has lost."""
        number = self._seats[rank] if rank < len(self._seats) else None
        return None if number is None else self._children[number]

    def has_seat(self, child: Child) -> bool:
        """The child holds a rank of the world."""
        return child.rank is not None and self.in_seat(child.rank) is child

    def seated(self) -> list[Child]:
        """Children that hold a rank, by rank."""
        return [self._children[number] for number in self._seats if number is not None]

    def vacant_ranks(self, ranks: Iterable[int] | None = None) -> list[int]:
        """Ranks that nobody holds, of all or of these; one that the world has lost is none."""
        seats = self._seats
        if ranks is not None:
            return [rank for rank in ranks if rank < len(seats) and seats[rank] is None]
        return [rank for rank, number in enumerate(seats) if number is None]

    def is_every_rank_ready(self) -> bool:
        """Every seat is taken by a child that can enter the pending generation.

        Whoever was not ready the last time is looked at first: waiting for one rank costs one look at each input.
        """
        if not self._is_ready(self._unready):
            return False
        unready = next((rank for rank in range(len(self._seats)) if not self._is_ready(rank)), None)
        if unready is None:
            return True
        self._unready = unready
        return False

    def _is_ready(self, rank: int) -> bool:
        """Also if the world has lost the rank."""
        if rank >= len(self._seats):
            return True
        number = self._seats[rank]
        return number is not None and self._children[number].state is ChildState.READY

    def spares(self, role: Role) -> list[Child]:
        """Writers or standbys that are not on their way out."""
        return [item for node in list(self._spares) for item in self._spares_on(node, role)]

    def _spares_on(self, node: int, role: Role) -> list[Child]:
        there = self._spares.get(node, {}).values()
        return [item for item in there if item.role is role and item.state is not ChildState.ENDING]

    def spawn(self, role: Role, rank: int | None, now_ns: int, node: int = 0) -> Child:
        """Start a child; a worker takes the seat of `rank` at once, and runs where the rank's device is."""
        self._num_spawned += 1
        child = Child(
            number=self._num_spawned,
            role=role,
            rank=rank,
            attempt=self._next_attempt(role, rank),
            serial=self._job.fault_serial,
            alarm=self.alarm,
            progressed_ns=now_ns,
            heard_ns=now_ns,
            node=node if rank is None else self._job.node(rank),
        )
        child.arm(now_ns, self._job.config.limits.deadlines.init_s)
        self._children[child.number] = child
        if rank is None:
            self._spares.setdefault(node, {})[child.number] = child
        else:
            child.device = self._job.devices[rank]
            child.old_pid = self._last_pids.get(child.device, 0)
            self._seats[rank] = child.number
        self._job.command(
            Spawn(
                child=child.number,
                role=role,
                rank=rank,
                attempt=child.attempt,
                local_rank=0 if rank is None else self._job.local_rank(rank),
                world_size=self._job.world_size,
                local_world_size=self._job.num_ranks_on(child.node),
                node=child.node,
            )
        )
        return child

    def assign(self, child: Child, rank: int, now_ns: int) -> None:
        """Give a parked child its rank for the pending generation."""
        device = self._job.devices[rank]
        if child.role is Role.STANDBY:
            del self._spares[child.node][child.number]
            child.role = Role.WORKER
            child.old_pid = self._last_pids.get(device, 0)
            child.attempt = self._next_attempt(Role.WORKER, rank)
        child.rank, child.device = rank, device
        child.state = ChildState.ASSIGNED
        child.serial = self._job.fault_serial
        child.arm(now_ns, self._job.config.limits.deadlines.init_s)
        self._seats[rank] = child.number
        self._last_pids[device] = child.pid
        self._tell_rank(child, rank)

    def reseat(self) -> list[Child]:
        """Seats of another world: who runs on a device that takes part goes on there, under its new rank; the others.

        A process that still starts hears its rank when it parks.
        """
        on_device = {child.device: child for child in self.seated()}
        taken = [on_device.pop(device, None) for device in self._job.devices]
        self._seats = [None if child is None else child.number for child in taken]
        for rank, child in enumerate(taken):
            if child is None:
                continue
            child.rank = rank
            if child.state in (ChildState.ASSIGNED, ChildState.READY):
                self._tell_rank(child, rank)
        return list(on_device.values())

    def _tell_rank(self, child: Child, rank: int) -> None:
        self._job.command(
            AssignRank(
                child=child.number,
                rank=rank,
                local_rank=self._job.local_rank(rank),
                world_size=self._job.world_size,
                generation=self._job.pending,
                local_world_size=self._job.num_ranks_on(child.node),
                node=child.node,
            )
        )

    def parked(self, role: Role, node: int) -> Child | None:
        """A writer, or a standby that can become any rank of the node."""
        return next((item for item in self._spares_on(node, role) if item.state is ChildState.PARKED), None)

    def look_at(self, child: Child) -> None:
        """Have it say where it stands; a kill that follows waits for that, bounded."""
        self._job.command(RequestStacks(child=child.number, generation=self._job.generation))

    def nodes_with_parked(self, role: Role) -> set[int]:
        """Nodes on which `parked` finds one."""
        return {item.node for item in self.spares(role) if item.state is ChildState.PARKED}

    def kill(self, child: Child, reason: str, now_ns: int) -> None:
        """SIGKILL a child; its death is expected from now on."""
        child.state = ChildState.ENDING
        child.is_killed = True
        child.arm(now_ns, self._job.config.limits.deadlines.teardown_s)
        self._job.command(Kill(child=child.number, reason=reason))

    def leave(self, child: Child, grace_s: float, now_ns: int) -> None:
        """Tell a child to end in order within `grace_s`."""
        child.state = ChildState.ENDING
        child.arm(now_ns, grace_s)
        self._job.command(LeaveChild(child=child.number))

    def remove(self, child: Child) -> None:
        """The child is dead: its seat is vacant."""
        del self._children[child.number]
        self._spares.get(child.node, {}).pop(child.number, None)
        self.detach(child)

    def detach(self, child: Child) -> None:
        """Take the seat from a child, dead or not to be waited for any longer."""
        if child.rank is None or child.rank >= len(self._seats) or self._seats[child.rank] != child.number:
            return
        self._seats[child.rank] = None
        if child.pid:
            self._last_pids[child.device] = child.pid

    def _next_attempt(self, role: Role, rank: int | None) -> int:
        if rank is None:
            attempt = self._spare_attempts[role]
            self._spare_attempts[role] += 1
            return attempt
        attempt = self._attempts[rank]
        self._attempts[rank] += 1
        return attempt
