"""The closed set of events. Metrics, spans, logs, ledger and incidents are folds over it.

A `Record` is an event with its stamp: run, epoch, generation, rank (None for job level), sequence number
and time. `time_ns` is the launcher's anchored wall clock (nanoseconds since the Unix epoch, never
decreasing within a launcher); stamps taken by a rank have been converted by its launcher. Where an event
carries a time of its own (`*_ns`), that is when the thing happened; `Record.time_ns` is when the launcher
recorded it.

Invariants: every event class is frozen, in the past tense, holds only JSON scalars, lists of scalars or
dicts of scalars; a class once released keeps its field names. Thread safety: immutable.
Must not: read clocks, do I/O, hold a message text that a policy would need to parse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nvrx_sre.events.kinds import DEVICE_FAULTS as DEVICE_FAULTS
from nvrx_sre.events.kinds import NODE_FAULTS as NODE_FAULTS
from nvrx_sre.events.kinds import Action as Action
from nvrx_sre.events.kinds import Cap as Cap
from nvrx_sre.events.kinds import Detector as Detector
from nvrx_sre.events.kinds import FaultClass as FaultClass
from nvrx_sre.events.kinds import HaltReason as HaltReason
from nvrx_sre.events.kinds import Layer as Layer
from nvrx_sre.events.kinds import LedgerState as LedgerState
from nvrx_sre.events.kinds import Phase as Phase
from nvrx_sre.events.kinds import RejectReason as RejectReason
from nvrx_sre.events.kinds import RestoredFrom as RestoredFrom
from nvrx_sre.events.kinds import Role as Role
from nvrx_sre.events.kinds import SaveFailure as SaveFailure
from nvrx_sre.events.kinds import SkipReason as SkipReason
from nvrx_sre.events.kinds import StepKind as StepKind
from nvrx_sre.events.kinds import Tier as Tier
from nvrx_sre.events.kinds import Unverified as Unverified
from nvrx_sre.events.kinds import Verdict as Verdict

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; subclasses register themselves by name."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """First record of a run, and again at each launcher start with the configuration then in force."""

    nproc: int
    min_world_size: int
    save_every_steps: int
    hot_every_steps: int
    config_digest: str
    versions: dict[str, str]
    limits: dict[str, float]
    resumed: bool
    fresh: bool
    labels: dict[str, str] = field(default_factory=dict)
    """What the run's owner calls it: `team`, `priority`."""
    num_nodes: int = 1
    num_standbys: int = 0
    """Warm spare processes that were asked for."""
    allow_brake: bool = False
    """The site's brake may halt the run."""
    faults: list[str] = field(default_factory=list)
    """The plan of faults, each in the words of its `FaultInjected.spec`."""


@dataclass(frozen=True, kw_only=True)
class LauncherStarted(Event):
    """A launcher took the epoch of the record."""

    node: str
    pid: int
    start_ticks: int
    metrics_port: int
    pod: str = ""


@dataclass(frozen=True, kw_only=True)
class LauncherStopped(Event):
    """Last record of a launcher that ended in order."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaderLost(Event):
    """The previous epoch ended without `LauncherStopped`; `last_seen_ns` is its last record."""

    lost_epoch: int
    last_seen_ns: int


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """A child process was started. `rank` of the record is None for standby and writer."""

    role: Role
    pid: int
    start_ticks: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class WorkerExited(Event):
    """A child process ended. `expected`: the launcher had ended it or was waiting for it."""

    role: Role
    pid: int
    exit_code: int | None
    signal: int | None
    expected: bool


@dataclass(frozen=True, kw_only=True)
class StandbyReady(Event):
    """A standby can become any rank."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class PhaseEntered(Event):
    """The rank of the record entered `phase` at `entered_ns`.

    Recorded for init, rendezvous, rebuild, load, first_step, evaluate, save, finalize and teardown; `step`
    once when a rank enters its step loop. The split of a step is in `StepsCommitted`.
    """

    phase: Phase
    entered_ns: int


@dataclass(frozen=True, kw_only=True)
class GenerationFormed(Event):
    """All ranks of the record's generation have formed the process group. `devices[rank]`: `node/device`."""

    world_size: int
    go_ns: int
    pids: list[int]
    devices: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StepsCommitted(Event):
    """Steps `first_step..last_step` (inclusive, one kind) were committed by every rank.

    At most one a second, and one at every change of kind, fault and end. `started_ns` is when the first of
    them began (the commit before it, or entry into the step loop), `committed_ns` when the last was
    committed by the slowest rank. The four times sum to about `committed_ns - started_ns` and are those of
    the rank that committed last.

    `proven_by_restore`: an earlier generation executed them, a fault or the launcher's end swallowed what the ranks
    said of it, and the state that the record's generation restores proves it. They are counted; their time is booked
    already, so the record has none, and they are no progress since the fault.
    """

    kind: StepKind
    first_step: int
    last_step: int
    started_ns: int
    committed_ns: int
    step_s: float
    data_s: float
    checkpoint_block_s: float
    evaluate_s: float
    tokens: int
    loss: float | None
    hot_sealed_step: int
    hot_captured: int
    hot_skipped: int
    proven_by_restore: bool = False


@dataclass(frozen=True, kw_only=True)
class FaultInjected(Event):
    """A fault of the plan is about to fire on the record's rank (pass `passes` of that step)."""

    spec: str
    step: int
    passes: int
    injected_ns: int


@dataclass(frozen=True, kw_only=True)
class FaultDetected(Event):
    """One root fault. `rank` of the record is the culprit, or None if unknown.

    `evidence_ns`: exit time of a death, the rank's stamp of an exception, last progress of a hang.
    `high_water` is H at this moment. `frame` is `file:line function` of the user's code, `message` redacted.
    """

    fault: FaultClass
    detector: Detector
    phase: Phase
    step: int
    high_water: int
    evidence_ns: int
    exception_type: str
    frame: str
    message: str
    fingerprint: str
    exit_code: int | None
    signal: int | None
    pid: int | None
    device: str
    hot_sealed_step: int = -1
    """Newest step sealed on every rank: a seal that was told after the newest `StepsCommitted` is progress as well."""


@dataclass(frozen=True, kw_only=True)
class InterruptRaised(Event):
    """Survivors of the record's generation were told to leave it."""

    ranks: list[int]


@dataclass(frozen=True, kw_only=True)
class TeardownFinished(Event):
    """Every rank has left the old generation: `kept` in process, `killed` past their grace."""

    kept: list[int]
    killed: list[int]


@dataclass(frozen=True, kw_only=True)
class RestartDecided(Event):
    """A decision of the policy, with its reason and what is left of each budget.

    `is_excluding`: the restart goes on without the root's device, which a full cap does not stop. `is_capped`: it is
    a full cap that stops the run.
    """

    action: Action
    layer: Layer
    reason: str
    backoff_s: float
    exit_code: int | None
    restarts_since_progress: int
    checkpoints_back: int
    budget_used: dict[str, int]
    budget_limit: dict[str, int]
    is_excluding: bool = False
    is_capped: bool = False


@dataclass(frozen=True, kw_only=True)
class DecisionUnrecorded(Event):
    """A restart went on although its decision was not on disk within `waited_s`."""

    waited_s: float


@dataclass(frozen=True, kw_only=True)
class RankReplaced(Event):
    """The record's rank moved to a new process; `warm` if it was a standby."""

    old_pid: int
    new_pid: int
    warm: bool


@dataclass(frozen=True, kw_only=True)
class RankExcluded(Event):
    """A device takes no further part in the run, which goes on with `world_size` ranks. Root of the record: `rank`."""

    device: str
    reason: str
    world_size: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeJoined(Event):
    """The launcher of another node is there, at the start or back after a loss; `missing` nodes are not."""

    node: str
    node_rank: int
    missing: int


@dataclass(frozen=True, kw_only=True)
class NodeLost(Event):
    """A node is gone, with its processes and hot slots; `ranks` of the world ran there."""

    node: str
    node_rank: int
    reason: str
    ranks: int


@dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """The run goes on from `step`; everything above it of generations before the record's is abandoned."""

    step: int
    high_water: int
    source: RestoredFrom


@dataclass(frozen=True, kw_only=True)
class StateRestored(Event):
    """All ranks hold the state of `step`. `seconds` is the slowest rank's load time."""

    step: int
    source: RestoredFrom
    restored_ns: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ProgressResumed(Event):
    """The first step above the incident's H was committed on the slowest rank."""

    step: int
    committed_ns: int
    first_step_started_ns: int


@dataclass(frozen=True, kw_only=True)
class IncidentClosed(Event):
    """An incident ended. `outage_s` is None when no step followed it. Root of the record: `rank`."""

    incident: int
    verdict: Verdict
    degraded: bool
    fault: FaultClass
    step: int
    layer: Layer
    attempts: int
    opened_ns: int
    detection_s: float
    outage_s: float | None
    resume_s: float | None
    rollback_steps: int
    trace_id: str


@dataclass(frozen=True, kw_only=True)
class SaveStarted(Event):
    """The writer took a step that all ranks had sealed. `captured_ns` is the newest seal."""

    step: int
    tier: Tier
    captured_ns: int


@dataclass(frozen=True, kw_only=True)
class SaveSealed(Event):
    """Every rank sealed `step` for a durable save."""

    step: int
    sealed_ns: int


@dataclass(frozen=True, kw_only=True)
class SaveWritten(Event):
    """All files of the save are on disk, not yet committed."""

    step: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SaveCommitted(Event):
    """The save was renamed into place: discoverable from now on."""

    step: int
    directory: str
    size_bytes: int
    seconds: float
    captured_ns: int


@dataclass(frozen=True, kw_only=True)
class SaveVerified(Event):
    """The committed save was read back from the disk and its checksums matched."""

    step: int
    directory: str
    seconds: float
    captured_ns: int


@dataclass(frozen=True, kw_only=True)
class SaveUnverified(Event):
    """The committed save was not read back to its end: its reader was lost. It stays, and a restore checks it."""

    step: int
    reason: Unverified
    message: str


@dataclass(frozen=True, kw_only=True)
class SaveSkipped(Event):
    """A due save did not happen."""

    step: int
    tier: Tier
    reason: SkipReason


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A save that had started did not commit, or could not be read back as it was written."""

    step: int
    tier: Tier
    reason: SaveFailure
    message: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRejected(Event):
    """A checkpoint was found unusable; `moved_to` is where it lies now ('' if it was left alone)."""

    step: int
    tier: Tier
    directory: str
    reason: RejectReason
    message: str
    moved_to: str


@dataclass(frozen=True, kw_only=True)
class CheckpointDeleted(Event):
    """Retention deleted a durable checkpoint, off the critical path."""

    step: int
    directory: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class HotIntervalChosen(Event):
    """Hot captures happen every `every_steps` steps from now on. A capture costs `cost_s`, a step takes `step_s`.

    0: none, because no slot can hold the state; `reason` names it. `cost_s` and `step_s` are 0 then.
    """

    every_steps: int
    cost_s: float
    step_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class HotSlotsAllocated(Event):
    """Memory of the hot tier: `num_slots` a rank of `slot_bytes` each, `total_bytes` on the node.

    `num_snapshots`: ranks of the node whose captures go through a snapshot on their device.
    """

    num_slots: int
    slot_bytes: int
    total_bytes: int
    num_snapshots: int = 0


@dataclass(frozen=True, kw_only=True)
class DeadlineChosen(Event):
    """The progress deadline of `phase` is `limit_s` from now on; its 99th percentile was `p99_s`."""

    phase: Phase
    limit_s: float
    p99_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class ReplayDiverged(Event):
    """A re-executed step's loss differs from its first execution (hex of the float's bits)."""

    step: int
    expected: str
    actual: str


@dataclass(frozen=True, kw_only=True)
class PreemptionReceived(Event):
    """The node is to be taken away; the job drains and exits 143 (130 for a person's Ctrl-C).

    `attempts` preemptions in a row, this one included, found no newer verified checkpoint; at `limit` the run stops
    for good (93). Both 0 where a person interrupted.
    """

    signal: int
    by_person: bool
    attempts: int = 0
    limit: int = 0


@dataclass(frozen=True, kw_only=True)
class CapReached(Event):
    """A retry cap stopped the run."""

    cap: Cap
    used: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class BudgetReset(Event):
    """An operator refilled the budgets and cleared a halt."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class HaltRequested(Event):
    """An operator or the brake (`by`) asked the run to stop and stay stopped."""

    reason: str
    by: HaltReason = HaltReason.OPERATOR


@dataclass(frozen=True, kw_only=True)
class JournalRepaired(Event):
    """A torn last line of the journal was cut off at start."""

    dropped_bytes: int


@dataclass(frozen=True, kw_only=True)
class TelemetryDegraded(Event):
    """A telemetry part dropped or failed; cumulative counts. Training was not affected.

    `error`: what its newest failure said, masked and cut; "" where none failed, as of a full queue.
    """

    component: str
    dropped: int
    errors: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The run reached a terminal state with `exit_code`."""

    exit_code: int
    reason: str
    step: int
    result: dict[str, Any] = field(default_factory=dict)


EVENT_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in Event.__subclasses__()}


@dataclass(frozen=True, kw_only=True)
class Record:
    """An event with its stamp. Order within a run: (epoch, seq)."""

    run: str
    epoch: int
    generation: int
    rank: int | None
    seq: int
    time_ns: int
    event: Event
