"""Messages between the launcher and its children; `packets` is their wire form.

Totals in `Step` are cumulative since the generation entered its step loop, so a dropped packet loses resolution, never
time or H. `mono_ns` stamps are CLOCK_MONOTONIC of the host.

Thread safety: constants and frozen values only. Must not: carry secrets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

NO_LOSS = math.nan
"""Value of `Step.loss` where the user gave none; `has_loss` is then False."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages; subclasses register themselves by name."""


# --- child -> launcher ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """First message of every child, before any import of the user's."""

    pid: int
    start_ticks: int
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class Parked(Message):
    """The child stands at the decorated call (a writer: at its loop) and waits for its assignment.

    `fit` False: it cannot be a standby (`note` says why) and is only good for a cold start.
    """

    fit: bool
    note: str
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class Ready(Message):
    """The rank left the generation before `generation` and is ready to enter it.

    `fit` False: the process must be replaced; `reason` is bounded text for the log.
    """

    generation: int
    fit: bool
    reason: str
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class Entered(Message):
    """The rank entered `phase` (a `schema.Phase`), `age_ns` before this was sent. `step`: of committed steps."""

    generation: int
    phase: str
    step: int
    mono_ns: int
    age_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Alive(Message):
    """Liveness: the interpreter turns. `progress` counts points passed in this generation.

    `num_dropped` is how many messages of this process found no room so far. `age_ns`: how long before this was sent
    the newest point was passed (an age, since a receiver on another host has another clock). `probe`: number of the
    `Probe` that this answers, 0 for none.
    """

    generation: int
    step: int
    progress: int
    mono_ns: int
    num_dropped: int = 0
    age_ns: int = 0
    probe: int = 0


@dataclass(frozen=True, kw_only=True)
class Step(Message):
    """The rank committed `step`. Times (s) and tokens are cumulative in this generation's step loop.

    `slot` is the hot slot that is taking this step (`Sealed` says when it holds it), -1 if it is not captured;
    `durable` if a durable save of this step is due. `loss` is NaN where the user gave none. `arrived_ns` is when the
    rank came to the step's first `ctx.mark("collective")`, 0 if it has none. `gpu_ns` is how long its GPU took for the
    measured stretch of this step or one a few before, 0 if none was over since the report before.
    """

    generation: int
    step: int
    mono_ns: int
    step_s: float
    data_s: float
    checkpoint_block_s: float
    evaluate_s: float
    tokens: int
    loss: float
    has_loss: bool
    slot: int
    durable: bool
    captured: int
    skipped: int
    arrived_ns: int = 0
    gpu_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Sealed(Message):
    """The rank's capture of `step` is over: `slot` holds it now, -1 if it was given up.

    Sent from the rank's capture thread; a rank's captures end in their order, so a later one says that all earlier
    ones are over.
    """

    generation: int
    step: int
    slot: int
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class SlotsWanted(Message):
    """The rank's layout is known: slots of `data_bytes` + `blob_bytes` are wanted. Answer: `SlotsGranted`.

    `takes_snapshots`: captures go through a snapshot on the rank's device.
    """

    generation: int
    layout_hash: str
    data_bytes: int
    blob_bytes: int
    takes_snapshots: bool = False


@dataclass(frozen=True, kw_only=True)
class Fault(Message):
    """The training function raised. `fault` is the rank's own classification (`schema.FaultClass`).

    `communication`: the error may be a peer's fault seen from here (suspicion only).
    """

    generation: int
    fault: str
    communication: bool
    exception_type: str
    frame: str
    message: str
    stack: str
    step: int
    phase: str
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class Acked(Message):
    """The interrupt of `generation` arrived in the main thread (or found it already out)."""

    generation: int
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class Restored(Message):
    """The rank holds the agreed state of `step`. `source` is a `schema.RestoredFrom`.

    From a hot slot: `slot`, and the generation that sealed it.
    """

    generation: int
    step: int
    source: str
    seconds: float
    mono_ns: int
    slot: int = -1
    slot_generation: int = 0


@dataclass(frozen=True, kw_only=True)
class Rejected(Message):
    """The ranks agreed that a candidate is unusable. Sent by every rank; the first one counts."""

    generation: int
    step: int
    tier: str
    directory: str
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Injected(Message):
    """A planned fault fires now on this rank. Sent before it does."""

    generation: int
    spec: str
    step: int
    passes: int
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class NodeKill(Message):
    """Injection asks the launcher to lose the node: all workers, the writer and every hot slot."""

    generation: int
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class Finished(Message):
    """The training function returned. `result` holds JSON scalars (rank 0's goes to the summary)."""

    generation: int
    step: int
    result: dict[str, Any]
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class WriterProgress(Message):
    """The writer's report on the save of `step`. `stage`: writing (bounded), written, committed, verified, failed.

    `reason` is a `schema.SaveFailure` when `stage` is failed, else ''. `attempt`: that of the `WriteSave`.
    """

    step: int
    stage: str
    directory: str
    size_bytes: int
    seconds: float
    reason: str
    message: str
    attempt: str = ""


@dataclass(frozen=True, kw_only=True)
class RankSave(Message):
    """Rank 0's report on saves that the ranks write themselves.

    `stage`: begun (of the generation; `message` names what slots cannot hold), then started, written, committed,
    verified or failed, of a save of `step`, `seconds` after the monotonic `mono_ns`. `reason`: a `schema.SaveFailure`.
    """

    generation: int
    step: int
    stage: str
    directory: str
    size_bytes: int
    seconds: float
    reason: str
    message: str
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class Retired(Message):
    """The writer's retention deleted a checkpoint, in `seconds`."""

    step: int
    directory: str
    seconds: float


# --- launcher -> child ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Doorbell(Message):
    """The event descriptor beside this message wakes the launcher, whatever it waits for: see `Channel.doorbell`.

    Who may become a rank gets the memory of its `StepRing` as a second descriptor.
    """


@dataclass(frozen=True, kw_only=True)
class Assign(Message):
    """Become `rank` from `generation` on. Hot slots, if the rank has any, come as a descriptor beside it.

    `local_world_size`: ranks of the world on this node, which is node `node_rank`.
    """

    rank: int
    local_rank: int
    world_size: int
    generation: int
    slot_data_bytes: int
    slot_blob_bytes: int
    local_world_size: int
    node_rank: int


@dataclass(frozen=True, kw_only=True)
class Go(Message):
    """All ranks are ready: form `generation`. `candidates`: what to restore from, best first.

    A candidate is {"tier": "hot", "step": s, "slot": k, "layout_hash": h} or
    {"tier": "durable", "step": s, "directory": name}. `require_restore`: commits are on record, so an
    exhausted list is an error rather than a fresh start. `passes`: planned fault -> passes already fired.
    `hot_every`: steps between hot captures, 0 for none, until a `HotInterval` says otherwise. `epoch`: the launcher's,
    for saves that the ranks commit themselves.
    The store is the generation's own c10d TCPStore, hosted by the launcher. `interface`: the one over which ranks of
    several nodes meet, '' for that of the environment.
    """

    generation: int
    world_size: int
    store_host: str
    store_port: int
    candidates: list[dict[str, Any]]
    require_restore: bool
    passes: dict[str, int]
    hot_every: int
    epoch: int = 0
    interface: str = ""


@dataclass(frozen=True, kw_only=True)
class Interrupt(Message):
    """Leave `generation` now. `is_traced`: the flight recorder's entries are wanted, for about a millisecond."""

    generation: int
    is_traced: bool = False


@dataclass(frozen=True, kw_only=True)
class Probe(Message):
    """Say at once how far you are, with an `Alive` that names this `number`: somebody has run out of time."""

    number: int


@dataclass(frozen=True, kw_only=True)
class HotInterval(Message):
    """Capture steps divisible by `every` from `from_step` on; the same for all ranks, and ahead of them."""

    every: int
    from_step: int


@dataclass(frozen=True, kw_only=True)
class SlotsGranted(Message):
    """Slots for the rank; the memfd comes as a descriptor beside this message."""

    data_bytes: int
    blob_bytes: int


@dataclass(frozen=True, kw_only=True)
class SlotsReleased(Message):
    """The writer holds no slot any more: a rank that found none free may look again."""


@dataclass(frozen=True, kw_only=True)
class MapSlots(Message):
    """To the writer and to standbys: slots of `rank`, the memfd beside this message."""

    rank: int
    data_bytes: int
    blob_bytes: int


@dataclass(frozen=True, kw_only=True)
class SlotsDropped(Message):
    """To a standby: the slots of its node are no more."""


@dataclass(frozen=True, kw_only=True)
class Rehearse(Message):
    """To a standby: its node's slots hold a state of a world of `world_size` ranks, whose shapes it may rehearse."""

    world_size: int


@dataclass(frozen=True, kw_only=True)
class WriteSave(Message):
    """To the writer: write `step` from slot `slots[rank]` of each rank, commit, verify.

    Answers: `WriterProgress` per stage. `captured_ns` is wall time. `passes`: as in `Go`, for faults of storage.

    Over several nodes each writer gets its own share: `slots` are those of the ranks from `first_rank` on, `part` of
    `num_parts` (0 commits), and all work on the same `attempt`. A part that is not in after `deadline_s` ends the save.
    """

    step: int
    epoch: int
    generation: int
    world_size: int
    slots: list[int]
    captured_ns: int
    passes: dict[str, int] = field(default_factory=dict)
    first_rank: int = 0
    part: int = 0
    num_parts: int = 1
    attempt: str = ""
    deadline_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Retain(Message):
    """To the writer: delete what is surplus beside the `keep` newest verified checkpoints."""

    keep: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Hurry(Message):
    """To the writer: the run ends, nobody trains beside it any more: write without a bound, what is begun as well."""


@dataclass(frozen=True, kw_only=True)
class SaveTurn(Message):
    """To a rank that waits at its boundary (`--on-busy wait`): the save of `step` was taken, or will not be."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Leave(Message):
    """End in order, now."""

    reason: str = field(default="")


# --- launcher and fork server -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fork(Message):
    """To the fork server: start a child. Its end of its channel, its log, and where a rank puts its stacks, come as
    descriptors beside this message.

    A writer gets `arguments` as its own, any other child runs them as the user's code. `environment`: what the child
    has beside the server's. `name` is what `ps` shows, at most 15 characters.
    """

    child: int
    role: str
    name: str
    arguments: list[str]
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Forked(Message):
    """From the fork server: `pid` is a child of the launcher now; 0: there is none, and `error` says why."""

    child: int
    pid: int
    error: str = ""
