"""What goes into the pure launcher machine and what comes out. Frozen contract between machine and shell.

Inputs are facts with the launcher's monotonic receive time passed beside them; commands are effects that the
shell carries out in order. `Emit` commands become records; the shell stamps run, epoch, seq and time, and
feeds each record back to the folds (history, ledger, incidents) before the next input.

A worker is named by `child`, a number that is never reused within a launcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nvrx_sre.events.messages import Message
from nvrx_sre.events.schema import Event, HaltReason, RejectReason, Role


@dataclass(frozen=True, kw_only=True)
class Input:
    """Base of all inputs."""


@dataclass(frozen=True, kw_only=True)
class Spawned(Input):
    """The shell started the child that a `Spawn` asked for."""

    child: int
    pid: int
    start_ticks: int


@dataclass(frozen=True, kw_only=True)
class FromChild(Input):
    """A message arrived. Messages of a child are delivered in order, and before its `Exited`."""

    child: int
    message: Message


@dataclass(frozen=True, kw_only=True)
class Exited(Input):
    """The child is dead and its channel drained. `oom`: the cgroup's oom_kill counter rose with it."""

    child: int
    exit_code: int | None
    signal: int | None
    exited_ns: int
    oom: bool
    last_line: str = ""
    """Last line of the child's own output, for the incident."""


@dataclass(frozen=True, kw_only=True)
class SignalReceived(Input):
    """SIGTERM-like (preemption) or a person's Ctrl-C."""

    signal: int
    by_person: bool


@dataclass(frozen=True, kw_only=True)
class HaltSeen(Input):
    """A halt request lies in the run directory; `by` an operator or the brake."""

    reason: str
    by: HaltReason = HaltReason.OPERATOR


@dataclass(frozen=True, kw_only=True)
class Stalled(Input):
    """The launcher itself did not turn for a while (stopped, starved): arm all deadlines anew."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class NodeJoined(Input):
    """A node is there and can run children. `name`: of its host; the leader's own node never joins.

    `gpu_uuids`: its devices by local index, where they are known.
    """

    node: int
    name: str
    gpu_uuids: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NodeLost(Input):
    """A node is gone, with its children and its hot slots. `Exited` of each of its children follows."""

    node: int
    reason: str
    mono_ns: int
    """When it was last heard of."""


@dataclass(frozen=True, kw_only=True)
class NodeRefused(Input):
    """A launcher that knows the run's secret came as this node and was sent away for good, for a reason."""

    node: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class DeviceUnfit(Input):
    """The device with this index on this node should have no rank, for a reason that names it."""

    node: int
    index: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Tick(Input):
    """Time passed; sent whenever `Machine.next_deadline_ns()` is reached."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Base of all commands."""


@dataclass(frozen=True, kw_only=True)
class Spawn(Command):
    """Start a child on `node`. The shell answers with `Spawned`, or `Exited` with code 127 if it could not.

    `local_rank`, `world_size` and `local_world_size` go with `rank`: what it is told of them before the call of its
    training function.
    """

    child: int
    role: Role
    rank: int | None
    attempt: int
    local_rank: int = 0
    world_size: int = 0
    local_world_size: int = 0
    node: int = 0


@dataclass(frozen=True, kw_only=True)
class AssignRank(Command):
    """Send `Assign` (with the rank's slots, if it has any) to a parked child, or to one whose rank changes.

    `local_rank` is the index of the child's device on its node, which does not change with the rank.
    `local_world_size`: ranks of the world on the child's node.
    """

    child: int
    rank: int
    local_rank: int
    world_size: int
    generation: int
    local_world_size: int = 0
    node: int = 0


@dataclass(frozen=True, kw_only=True)
class OpenGeneration(Command):
    """All ranks are ready. The shell sets up the store prefix, computes restore candidates and sends `Go`.

    `checkpoints_back`: leave out that many of the newest durable candidates (and all hot ones if > 0).
    `hot_allowed`: hot slots may be used. `hot_every`: steps between hot captures, 0 for none.
    """

    generation: int
    world_size: int
    children: tuple[int, ...]
    checkpoints_back: int
    hot_allowed: bool
    hot_every: int


@dataclass(frozen=True, kw_only=True)
class SendInterrupt(Command):
    """Send `Interrupt` for `generation`. `is_traced`: a collective is what the fault is about."""

    child: int
    generation: int
    is_traced: bool = False


@dataclass(frozen=True, kw_only=True)
class SendProbe(Command):
    """Have the child say at once how far it is, naming this `number`."""

    child: int
    number: int


@dataclass(frozen=True, kw_only=True)
class RequestStacks(Command):
    """Have the child write down the stacks of all its threads; a `Kill` that follows waits for them, bounded."""

    child: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Kill(Command):
    """SIGKILL the child's session. Its `Exited` follows."""

    child: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SetHotInterval(Command):
    """Tell every rank to capture steps divisible by `every` from `from_step` on."""

    every: int
    from_step: int


@dataclass(frozen=True, kw_only=True)
class GrantSlots(Command):
    """Create (or reuse) the rank's slots and send `SlotsGranted`; tell the writer."""

    child: int
    rank: int
    data_bytes: int
    blob_bytes: int
    takes_snapshots: bool = False


@dataclass(frozen=True, kw_only=True)
class DropSlots(Command):
    """Every hot slot of `node` is lost (`node_kill`), or is of another world; `num_ranks` of the node come next."""

    num_ranks: int
    node: int = 0


@dataclass(frozen=True, kw_only=True)
class PublishSealed(Command):
    """`step` is sealed on every rank: older slots may be overwritten, except those held for the writer."""

    step: int


@dataclass(frozen=True, kw_only=True)
class StrandSlots(Command):
    """`step` of `generation` was captured by some ranks and will not be by all: its slots may be overwritten."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True)
class StartSave(Command):
    """Hold the slots and tell the writers to write `step`. `captured_mono_ns` is the newest seal.

    `nodes[rank]`: where the slots of a rank lie; the writer of each of these nodes takes part, that of rank 0's
    commits. The shell answers with writer messages as `FromChild`.
    """

    step: int
    generation: int
    world_size: int
    slots: tuple[int, ...]
    captured_mono_ns: int
    nodes: tuple[int, ...] = ()
    """() where there is one node."""
    attempt: str = ""
    """Name on which several writers agree, '' for one."""


@dataclass(frozen=True, kw_only=True)
class EndAttempt(Command):
    """A writer is gone that others share a save with: they must not wait for its part."""

    step: int
    generation: int
    attempt: str


@dataclass(frozen=True, kw_only=True)
class ReleaseBoundary(Command):
    """Tell the ranks of `generation` that the durable save due at `step` was taken, or will not be."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True)
class ReleaseSlots(Command):
    """The writer is done with `step`."""

    step: int


@dataclass(frozen=True, kw_only=True)
class HurrySaves(Command):
    """The run ends: have all writers write as fast as they can."""


@dataclass(frozen=True, kw_only=True)
class RetainSaves(Command):
    """A save is verified, and no rank restores: have the writer delete what is surplus now."""


@dataclass(frozen=True, kw_only=True)
class Fence(Command):
    """Write durably: everything above `step` of generations before `generation` is abandoned."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True)
class MoveRejected(Command):
    """Move a rejected durable checkpoint aside and emit `CheckpointRejected` with its new place."""

    directory: str
    step: int
    reason: RejectReason
    message: str


@dataclass(frozen=True, kw_only=True)
class Emit(Command):
    """Record an event of `generation`; `rank` None: it concerns the job."""

    event: Event
    generation: int
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class LeaveChild(Command):
    """Send `Leave`; the machine follows up with `Kill` at a deadline."""

    child: int


@dataclass(frozen=True, kw_only=True)
class Stop(Command):
    """Terminal: the launcher exits with `exit_code` after its sinks are flushed."""

    exit_code: int
    reason: str
    result: dict[str, Any]


# --- what the leader's shell makes of these for one node ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tell(Command):
    """Send `message` to the child."""

    child: int
    message: Message


@dataclass(frozen=True, kw_only=True)
class TellWriter(Command):
    """Send `message` to the node's writer, if it lives."""

    message: Message


@dataclass(frozen=True, kw_only=True)
class KeepStacks(Command):
    """Keep what the node's ranks have written of their stacks as `incident`'s; 0: drop it."""

    incident: int


@dataclass(frozen=True, kw_only=True)
class NoteLateness(Command):
    """How late the node's `ranks` come to the first collective of a step (seconds), for its metrics."""

    ranks: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class HoldSlots(Command):
    """The writer reads slot `slots[i]` of rank `first_rank + i` from now on."""

    first_rank: int
    slots: tuple[int, ...]
