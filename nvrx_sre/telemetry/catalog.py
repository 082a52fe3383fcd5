"""Every metric, once: the single source for exposition, dashboards, rules, docs and tests.

Nothing else spells a metric name: use `catalog.TIME_SECONDS.name`. Labels come from the closed sets of
`events.schema`, `goodput.verdict` and `telemetry.labels`; all combinations are exported from the first scrape on,
so that the first event of a kind is an increase (failure case C63) and the number of series never changes (C57).
The labels `rank` and `node` are bounded by the configured world; their series appear with it.

`run` is on every series and is not listed. Immutable after import.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.events.schema import (
    Action,
    Cap,
    Detector,
    FaultClass,
    Layer,
    LedgerState,
    Phase,
    RejectReason,
    RestoredFrom,
    Role,
    SaveFailure,
    SkipReason,
    StepKind,
    Tier,
    Unverified,
    Verdict,
)
from nvrx_sre.events.schema import HaltReason as HaltReason
from nvrx_sre.goodput.ratios import GoodputKind as GoodputKind
from nvrx_sre.goodput.verdict import RunState as RunState
from nvrx_sre.telemetry.labels import DEFAULT_OWNER as DEFAULT_OWNER
from nvrx_sre.telemetry.labels import Component as Component
from nvrx_sre.telemetry.labels import DeviceCount as DeviceCount
from nvrx_sre.telemetry.labels import DeviceErrorKind as DeviceErrorKind
from nvrx_sre.telemetry.labels import FreshProgress as FreshProgress
from nvrx_sre.telemetry.labels import IncidentOutcome as IncidentOutcome
from nvrx_sre.telemetry.labels import MemoryKind as MemoryKind
from nvrx_sre.telemetry.labels import NodeCount as NodeCount
from nvrx_sre.telemetry.labels import RankMetrics as RankMetrics
from nvrx_sre.telemetry.labels import RestartOutcome as RestartOutcome
from nvrx_sre.telemetry.labels import RunEnd as RunEnd
from nvrx_sre.telemetry.labels import SaveOutcome as SaveOutcome
from nvrx_sre.telemetry.labels import SaveStage as SaveStage
from nvrx_sre.telemetry.labels import SpaceKind as SpaceKind
from nvrx_sre.telemetry.labels import StartKind as StartKind
from nvrx_sre.telemetry.labels import Suspect as Suspect
from nvrx_sre.telemetry.labels import TeardownOutcome as TeardownOutcome
from nvrx_sre.telemetry.metric import Bound as Bound
from nvrx_sre.telemetry.metric import Label as Label
from nvrx_sre.telemetry.metric import Metric as Metric
from nvrx_sre.telemetry.metric import MetricType as MetricType
from nvrx_sre.telemetry.metric import Scope as Scope
from nvrx_sre.telemetry.metric import Unit as Unit

DURATION_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""From an in-process recovery on CPU (0.05 s, ANCHORS) to an hour."""
ROLLBACK_BUCKETS_STEPS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)


def _label(name: str, values: Iterable[str]) -> Label:
    return Label(name=name, values=tuple(str(value) for value in values))


LIMIT_NAMES = tuple(Limits().flattened())
DEADLINE_PHASES = tuple(phase for phase in Phase if hasattr(Deadlines(), f"{phase}_s"))
_STATE = _label("state", LedgerState)
_RUN_STATE = _label("state", RunState)
_KIND = _label("kind", StepKind)
_FAULT = _label("fault", FaultClass)
_LAYER = _label("layer", Layer)
_TIER = _label("tier", Tier)
_CAP = _label("cap", Cap)
_COMPONENT = _label("component", Component)
_PHASE = _label("phase", Phase)
_STAGE = _label("stage", SaveStage)
_RANK = Label(name="rank", values=(), bound=Bound.RANKS)
_NODE = Label(name="node", values=(), bound=Bound.NODES)


def _metric(name: str, kind: MetricType, unit: Unit, text: str, labels: tuple[Label, ...], scope: Scope) -> Metric:
    return Metric(name=name, type=kind, unit=unit, scope=scope, help=text, labels=labels)


def _counter(name: str, unit: Unit, text: str, *labels: Label, scope: Scope = Scope.JOB) -> Metric:
    return _metric(name, MetricType.COUNTER, unit, text, labels, scope)


def _gauge(name: str, unit: Unit, text: str, *labels: Label, scope: Scope = Scope.JOB, initial: float = 0.0) -> Metric:
    return Metric(name=name, type=MetricType.GAUGE, unit=unit, scope=scope, help=text, labels=labels, initial=initial)


def _histogram(name: str, unit: Unit, text: str, *labels: Label, buckets: tuple[float, ...]) -> Metric:
    return Metric(
        name=name, type=MetricType.HISTOGRAM, unit=unit, scope=Scope.JOB, help=text, labels=labels, buckets=buckets
    )


def _info(name: str, text: str, *label_names: str) -> Metric:
    labels = tuple(Label(name=label, values=()) for label in label_names)
    return _metric(name, MetricType.INFO, Unit.NONE, text, labels, Scope.JOB)


def _extremes(metric: Metric) -> tuple[Metric, Metric, Metric, Metric]:
    """The summary of a family of ranks: least and greatest value, and the ranks that have them as values."""
    text = metric.help.removesuffix(".")
    least = _gauge(f"{metric.name}_min", metric.unit, f"{text}: the least of the ranks.", scope=Scope.NODE)
    most = _gauge(f"{metric.name}_max", metric.unit, f"{text}: the greatest of the ranks.", scope=Scope.NODE)
    where = [
        _gauge(f"{metric.name}_{end}_rank", Unit.NONE, f"{text}: rank of the {word}.", scope=Scope.NODE, initial=-1.0)
        for end, word in (("min", "least"), ("max", "greatest"))
    ]
    return least, most, where[0], where[1]


# --- identity ---------------------------------------------------------------------------------------------
BUILD_INFO = _info("nvrx_build_info", "Versions in force: always 1.", "version", "python", "torch", "catalog")
RUN_INFO = _info(
    "nvrx_run_info",
    "Owner (`none` if not given), priority (`prod` if not given), digest of the configuration, leader's node: "
    "always 1.",
    "team",
    "priority",
    "config",
    "node",
)
RANK_INFO = Metric(
    name="nvrx_rank_info",
    type=MetricType.INFO,
    unit=Unit.NONE,
    scope=Scope.NODE,
    help="Where a rank of this node runs, `none` where unknown: always 1.",
    labels=(_RANK, *(Label(name=label, values=()) for label in ("node", "gpu_uuid", "pod"))),
)

# --- time -------------------------------------------------------------------------------------------------
WALL_SECONDS = _counter(
    "nvrx_wall_seconds_total", Unit.SECONDS, "Wall time of the run, computed at scrape: denominator of every ratio."
)
TIME_SECONDS = _counter(
    "nvrx_time_seconds_total",
    Unit.SECONDS,
    "Booked wall time by the ledger's state; time once booked never moves.",
    _STATE,
)
GPU_SECONDS = _counter(
    "nvrx_gpu_seconds_total",
    Unit.SECONDS,
    "Booked wall time times the ranks of the newest generation (before the first: those that were asked for).",
    _STATE,
)
OPEN_INTERVAL = _gauge("nvrx_open_interval_seconds", Unit.SECONDS, "Wall time that is not booked yet.")
GOODPUT_RATIO = _gauge(
    "nvrx_goodput_ratio", Unit.RATIO, "Goodput of the run so far (durable may fall).", _label("kind", GoodputKind)
)
RUN_START_TIMESTAMP = _gauge("nvrx_run_start_timestamp_seconds", Unit.TIMESTAMP, "First record of the run.")
RUN_STATE_ENTERED = _gauge(
    "nvrx_run_state_entered_timestamp_seconds",
    Unit.TIMESTAMP,
    "When the run last entered the state (0 never); the largest is the current one.",
    _RUN_STATE,
)
PHASE_ENTERED = _gauge(
    "nvrx_phase_entered_timestamp_seconds",
    Unit.TIMESTAMP,
    "When the job last entered the phase (0 never): the phase of the rank that is furthest behind; the largest is "
    "the current one.",
    _PHASE,
)
RENDEZVOUS_NODES = _gauge(
    "nvrx_rendezvous_nodes",
    Unit.COUNT,
    "Nodes of the newest formation: joined once all their ranks are in the rendezvous, missing until then.",
    _label("state", NodeCount),
)
HALTED_TIMESTAMP = _gauge(
    "nvrx_halted_timestamp_seconds",
    Unit.TIMESTAMP,
    "When it was decided that the run stops for good (exit 93), by why; 0 while it is not.",
    _label("reason", HaltReason),
)
RUN_STARTS = _counter(
    "nvrx_run_starts_total", Unit.COUNT, "Starts of the run by a launcher.", _label("kind", StartKind)
)
RUN_ENDS = _counter("nvrx_run_ends_total", Unit.COUNT, "Ends of the run.", _label("outcome", RunEnd))
EXIT_CODE = _gauge("nvrx_exit_code", Unit.NONE, "Exit code of the newest launcher; -1 while it lives.", initial=-1.0)

# --- steps ------------------------------------------------------------------------------------------------
STEPS = _counter("nvrx_steps_total", Unit.STEPS, "Committed steps: new above the high water mark, else redone.", _KIND)
TOKENS = _counter("nvrx_tokens_total", Unit.TOKENS, "Tokens of committed steps.", _KIND)
STEP_HIGH_WATER = _gauge("nvrx_step_high_water", Unit.STEPS, "Highest step ever committed.")
LAST_NEW_STEP = _gauge(
    "nvrx_last_new_step_timestamp_seconds", Unit.TIMESTAMP, "Commit of the newest new step; before it the run's start."
)
LAST_STEP = _gauge(
    "nvrx_last_step_timestamp_seconds",
    Unit.TIMESTAMP,
    "Commit of the newest step, new or redone; before it the run's start.",
)
STEP_SECONDS = _gauge("nvrx_step_seconds", Unit.SECONDS, "Mean time of a new step in the newest aggregate.")
STEP_REFERENCE = _gauge(
    "nvrx_step_reference_seconds",
    Unit.SECONDS,
    "Median time of the first 200 new steps after warm-up at the configured world; 0 until one is known.",
)
LOSS = _gauge(
    "nvrx_loss", Unit.NATS, "Loss of the newest committed step that reported one; NaN before it.", initial=math.nan
)
REPLAY_DIVERGENCES = _counter(
    "nvrx_replay_divergences_total", Unit.COUNT, "Re-executed steps whose loss differs from the first execution."
)

# --- faults and recovery ----------------------------------------------------------------------------------
FAULTS = _counter("nvrx_faults_total", Unit.COUNT, "Root faults detected.", _FAULT)
FAULT_TIMESTAMP = _gauge(
    "nvrx_fault_timestamp_seconds",
    Unit.TIMESTAMP,
    "When the newest root fault of the class was detected; 0 never.",
    _FAULT,
)
FAULTS_INJECTED = _counter("nvrx_faults_injected_total", Unit.COUNT, "Planned faults that fired.")
RESTARTS = _counter(
    "nvrx_restarts_total",
    Unit.COUNT,
    "Restart decisions whose outcome is known.",
    _LAYER,
    _label("outcome", RestartOutcome),
)
RESTARTS_SINCE_PROGRESS = _gauge(
    "nvrx_restarts_since_progress", Unit.COUNT, "Restarts decided since the run last made progress."
)
INCIDENTS = _counter(
    "nvrx_incidents_total",
    Unit.COUNT,
    "Incidents that reached the verdict: recovering counts openings, crash_loop those that entered it while open.",
    _label("verdict", Verdict),
)
INCIDENTS_DEGRADED = _counter(
    "nvrx_incidents_degraded_total",
    Unit.COUNT,
    "Incidents that recovered with a smaller world, from an older checkpoint or with a large rollback.",
)
INCIDENT_OUTCOMES = _counter(
    "nvrx_incident_outcomes_total",
    Unit.COUNT,
    "Incidents by the fault that opened them, counted at their opening and at their end; the difference is open.",
    _FAULT,
    _label("outcome", IncidentOutcome),
)
INCIDENT_OPENED = _gauge(
    "nvrx_incident_opened_timestamp_seconds", Unit.TIMESTAMP, "First fault of the open incident; 0 when none is open."
)
INCIDENT_ROOT_RANK = _gauge(
    "nvrx_incident_root_rank", Unit.NONE, "Root rank of the newest incident; -1 unknown or none yet.", initial=-1.0
)
INCIDENT_ATTEMPTS = _gauge("nvrx_incident_attempts", Unit.COUNT, "Faults of the open incident; 0 when none is open.")
OUTAGE_SECONDS = _histogram(
    "nvrx_outage_seconds",
    Unit.SECONDS,
    "Last step committed before an incident until the first step above it.",
    _LAYER,
    buckets=DURATION_BUCKETS_S,
)
DETECTION_SECONDS = _histogram(
    "nvrx_detection_seconds",
    Unit.SECONDS,
    "Evidence of a fault until it was detected.",
    _label("detector", Detector),
    buckets=DURATION_BUCKETS_S,
)
ROLLBACK_STEPS = _histogram(
    "nvrx_rollback_steps",
    Unit.STEPS,
    "High water mark at an incident's first fault minus the deepest step restored in it.",
    buckets=ROLLBACK_BUCKETS_STEPS,
)
ROLLBACK_MAX = _gauge("nvrx_rollback_max_steps", Unit.STEPS, "Largest rollback so far.")
OUTAGE_MAX = _gauge("nvrx_outage_max_seconds", Unit.SECONDS, "Longest outage so far.", _LAYER)
OUTAGE_LAST = _gauge(
    "nvrx_outage_last_seconds", Unit.SECONDS, "Outage of the newest incident that recovered; 0 before the first."
)
ROLLBACK_LAST = _gauge(
    "nvrx_rollback_last_steps", Unit.STEPS, "Rollback of the newest incident that recovered; 0 before the first."
)
DETECTION_MAX = _gauge(
    "nvrx_detection_max_seconds", Unit.SECONDS, "Longest detection so far.", _label("detector", Detector)
)
DECISIONS = _counter("nvrx_restart_decisions_total", Unit.COUNT, "Decisions of the policy.", _label("action", Action))
DECISIONS_UNRECORDED = _counter(
    "nvrx_decisions_unrecorded_total", Unit.COUNT, "Restarts whose decision was not on disk in time."
)
INTERRUPTS = _counter("nvrx_interrupts_total", Unit.COUNT, "Interrupts of a generation's survivors.")
TEARDOWNS = _counter(
    "nvrx_teardowns_total", Unit.COUNT, "Ranks that left a generation, by how.", _label("outcome", TeardownOutcome)
)
ROLLBACKS = _counter(
    "nvrx_rollbacks_total", Unit.COUNT, "Lines of steps abandoned, by what was restored.", _label("tier", RestoredFrom)
)
PROGRESS_RESUMED = _counter(
    "nvrx_progress_resumed_total", Unit.COUNT, "Times that the run passed the high water mark of a fault."
)
FRESH_STARTS = _counter(
    "nvrx_fresh_starts_total",
    Unit.COUNT,
    "Generations that began at step 0; lost: steps had been committed before.",
    _label("progress", FreshProgress),
)
NODE_FAULTS = _counter(
    "nvrx_node_faults_total",
    Unit.COUNT,
    "Root faults whose rank ran on the node, by what they speak against: `node` for what a bad device or a lost node "
    "shows as, `other` for the rest, such as an exception of the program.",
    _NODE,
    _label("suspect", Suspect),
)
RANKS_EXCLUDED = _counter("nvrx_ranks_excluded_total", Unit.COUNT, "Devices excluded from the run.")
NODES_JOINED = _counter("nvrx_nodes_joined_total", Unit.COUNT, "Nodes that joined, or came back, beside the leader's.")
NODES_LOST = _counter("nvrx_nodes_lost_total", Unit.COUNT, "Nodes that were lost, with their ranks.")
BUDGET_USED = _gauge("nvrx_budget_used", Unit.COUNT, "Attempts counted against a retry cap.", _CAP)
BUDGET_LIMIT = _gauge("nvrx_budget_limit", Unit.COUNT, "Retry cap in force.", _CAP)
CAPS_REACHED = _counter("nvrx_caps_reached_total", Unit.COUNT, "Retry caps that stopped the run.", _CAP)
BUDGET_RESETS = _counter("nvrx_budget_resets_total", Unit.COUNT, "Times that an operator refilled the budgets.")
HALT_REQUESTS = _counter("nvrx_halt_requests_total", Unit.COUNT, "Requests to stop and stay stopped.")
GENERATIONS = _counter("nvrx_generations_total", Unit.COUNT, "Formations of the process group.")
LAUNCHER_STARTS = _counter("nvrx_launcher_starts_total", Unit.COUNT, "Launchers that took an epoch of the run.")
LAUNCHER_STOPS = _counter("nvrx_launcher_stops_total", Unit.COUNT, "Launchers that stopped in order.")
LEADERS_LOST = _counter("nvrx_leaders_lost_total", Unit.COUNT, "Epochs that ended without an orderly stop.")
PREEMPTIONS = _counter("nvrx_preemptions_total", Unit.COUNT, "Preemption notices.")
WORKER_STARTS = _counter("nvrx_child_starts_total", Unit.COUNT, "Child processes started.", _label("role", Role))
WORKER_EXITS = _counter("nvrx_child_exits_total", Unit.COUNT, "Child processes that ended.", _label("role", Role))
RANK_REPLACEMENTS = _counter("nvrx_rank_replacements_total", Unit.COUNT, "Ranks moved to another process.")
STANDBY_READY = _gauge("nvrx_standby_ready", Unit.COUNT, "Standbys that can become any rank.")
STANDBYS_CONFIGURED = _gauge("nvrx_standbys_configured", Unit.COUNT, "Standbys that were asked for.")

# --- world ------------------------------------------------------------------------------------------------
WORLD_SIZE = _gauge("nvrx_world_size", Unit.COUNT, "Ranks of the newest generation.")
WORLD_SIZE_CONFIGURED = _gauge("nvrx_world_size_configured", Unit.COUNT, "Ranks that were asked for.")
WORLD_SIZE_MIN = _gauge("nvrx_world_size_min", Unit.COUNT, "Smallest world the run may go on with.")

# --- checkpoints ------------------------------------------------------------------------------------------
RESTORES = _counter(
    "nvrx_restores_total", Unit.COUNT, "Restores by where the state came from.", _label("tier", RestoredFrom)
)
RESTORED_STEP = _gauge(
    "nvrx_restored_step", Unit.STEPS, "Step of the newest restore; -1 for a fresh start.", initial=-1.0
)
SAVES = _counter("nvrx_saves_total", Unit.COUNT, "Due saves by their outcome.", _TIER, _label("outcome", SaveOutcome))
SAVES_SKIPPED = _counter(
    "nvrx_saves_skipped_total", Unit.COUNT, "Due saves that did not happen.", _TIER, _label("reason", SkipReason)
)
SAVE_FAILURES = _counter(
    "nvrx_save_failures_total", Unit.COUNT, "Durable saves that failed.", _label("reason", SaveFailure)
)
SAVES_UNVERIFIED = _counter(
    "nvrx_saves_unverified_total",
    Unit.COUNT,
    "Committed saves that were not read back, since who did so was lost; a restore checks them.",
    _label("reason", Unverified),
)
SAVE_STARTED = _gauge(
    "nvrx_save_started_timestamp_seconds", Unit.TIMESTAMP, "Begin of the durable save in flight; 0 while none is."
)
SAVE_SECONDS = _histogram(
    "nvrx_save_seconds", Unit.SECONDS, "Time of a durable save by its part.", _STAGE, buckets=DURATION_BUCKETS_S
)
SAVE_MAX = _gauge("nvrx_save_max_seconds", Unit.SECONDS, "Longest time of a part of a durable save so far.", _STAGE)
CHECKPOINT_DELETIONS = _counter(
    "nvrx_checkpoint_deletions_total", Unit.COUNT, "Durable checkpoints that retention deleted."
)
CHECKPOINT_DELETION_SECONDS = _histogram(
    "nvrx_checkpoint_deletion_seconds", Unit.SECONDS, "Time of a deletion by retention.", buckets=DURATION_BUCKETS_S
)
CHECKPOINT_DELETION_MAX = _gauge(
    "nvrx_checkpoint_deletion_max_seconds", Unit.SECONDS, "Longest deletion by retention so far."
)
CHECKPOINT_REJECTED = _counter(
    "nvrx_checkpoint_rejected_total", Unit.COUNT, "Checkpoints found unusable.", _label("reason", RejectReason)
)
CHECKPOINT_CAPTURED = _gauge(
    "nvrx_checkpoint_captured_timestamp_seconds",
    Unit.TIMESTAMP,
    "Capture of the newest restorable state; before the first save the run's start.",
    _TIER,
)
CHECKPOINT_STEP = _gauge(
    "nvrx_checkpoint_step", Unit.STEPS, "Newest restorable step; -1 for none.", _TIER, initial=-1.0
)
CHECKPOINT_SIZE = _gauge("nvrx_checkpoint_size_bytes", Unit.BYTES, "Size of the newest durable commit.")
CHECKPOINT_WRITE_SECONDS = _gauge(
    "nvrx_checkpoint_write_seconds", Unit.SECONDS, "Time that the newest durable save took, commit included."
)
CHECKPOINT_INTERVAL = _gauge(
    "nvrx_checkpoint_interval_expected_seconds",
    Unit.SECONDS,
    "Configured interval in steps times the median step time.",
)
CHECKPOINT_SATURATION = _gauge(
    "nvrx_checkpoint_saturation_ratio", Unit.RATIO, "Write time over the expected interval: above 1 saves are skipped."
)
HOT_INTERVAL = _gauge("nvrx_hot_interval_steps", Unit.STEPS, "Steps between hot captures in force; 0: tier off.")
HOT_CAPTURE_COST = _gauge(
    "nvrx_hot_capture_cost_ratio", Unit.RATIO, "Cost of the hot captures over the time of the steps between them."
)
HOT_SLOTS = _gauge("nvrx_hot_slots", Unit.COUNT, "Slots of the hot tier a rank.")
HOT_SLOTS_BYTES = _gauge("nvrx_hot_slots_bytes", Unit.BYTES, "Memory of all hot slots of the leader's node.")
HOT_SNAPSHOTS = _gauge(
    "nvrx_hot_snapshot_ranks",
    Unit.COUNT,
    "Ranks of the leader's node whose hot captures go through a snapshot on their device.",
)

# --- nodes and ranks --------------------------------------------------------------------------------------
HOST_MEMORY = _gauge(
    "nvrx_host_memory_bytes",
    Unit.BYTES,
    "Memory of the launcher's cgroup, or of the host where none limits it.",
    _label("kind", MemoryKind),
    scope=Scope.NODE,
)
STORAGE = _gauge(
    "nvrx_storage_bytes",
    Unit.BYTES,
    "File system of the run directory.",
    _label("kind", SpaceKind),
    scope=Scope.NODE,
)
SHM = _gauge("nvrx_shm_bytes", Unit.BYTES, "/dev/shm, for loader workers.", _label("kind", SpaceKind), scope=Scope.NODE)
CLOCK_SKEW = _gauge(
    "nvrx_clock_skew_seconds",
    Unit.SECONDS,
    "System clock minus the clock that stamps this launcher's records: a step of the clock since its start.",
    scope=Scope.NODE,
)
LEFTOVER_PROCESSES = _gauge(
    "nvrx_leftover_processes",
    Unit.COUNT,
    "Processes of a killed predecessor that this launcher had to end at its start.",
    scope=Scope.NODE,
)
DEVICES = _gauge(
    "nvrx_devices",
    Unit.COUNT,
    "NVIDIA devices that the node's ranks may have, as NVML sees them: all, those that should have no rank, those "
    "slowed down by heat or hardware. All 0 without NVML.",
    _label("state", DeviceCount),
    scope=Scope.NODE,
)
DEVICE_ERRORS = _counter(
    "nvrx_device_errors_total",
    Unit.COUNT,
    "Errors of the node's NVIDIA devices since this launcher's start; only where NVML sees a device.",
    _label("kind", DeviceErrorKind),
    scope=Scope.NODE,
)
RANK_GPU_SECONDS = _gauge(
    "nvrx_rank_gpu_seconds",
    Unit.SECONDS,
    "GPU time of the stretch of a step that is the rank's own compute, smoothed; only where it is measured.",
    _RANK,
    scope=Scope.NODE,
)
RANK_HEARTBEAT = _gauge(
    "nvrx_rank_heartbeat_timestamp_seconds", Unit.TIMESTAMP, "Last message of the rank.", _RANK, scope=Scope.NODE
)
RANK_LATENESS = _gauge(
    "nvrx_rank_lateness_seconds",
    Unit.SECONDS,
    "How long after the first rank the rank comes to the first collective of a step, smoothed; 0 without marks.",
    _RANK,
    scope=Scope.NODE,
)
RANK_MEMORY = _gauge("nvrx_rank_memory_bytes", Unit.BYTES, "Resident memory of the rank.", _RANK, scope=Scope.NODE)
RANK_STEP = _gauge("nvrx_rank_step", Unit.STEPS, "Steps that the rank has committed.", _RANK, scope=Scope.NODE)
RANK_FAMILIES = (RANK_GPU_SECONDS, RANK_HEARTBEAT, RANK_LATENESS, RANK_MEMORY, RANK_STEP)
"""One series a rank under `--rank-metrics all`."""
RANK_SUMMARIES = {metric.name: _extremes(metric) for metric in RANK_FAMILIES}
"""Family of ranks -> its least, its greatest value, and the ranks that have them, under `--rank-metrics summary`."""

# --- limits and telemetry itself --------------------------------------------------------------------------
PHASE_DEADLINE = _gauge(
    "nvrx_phase_deadline_seconds", Unit.SECONDS, "Progress deadline in force.", _label("phase", DEADLINE_PHASES)
)
LIMIT = _gauge("nvrx_limit", Unit.NONE, "Every limit in force, in the unit of its name.", _label("limit", LIMIT_NAMES))
LAUNCHER_LOOP = _gauge(
    "nvrx_launcher_loop_timestamp_seconds", Unit.TIMESTAMP, "Last turn of the launcher's main loop.", scope=Scope.NODE
)
TELEMETRY_EVENTS = _counter("nvrx_telemetry_events_total", Unit.COUNT, "Records folded, all epochs.")
TELEMETRY_SPANS = _counter("nvrx_telemetry_spans_total", Unit.COUNT, "Spans finished, all epochs.")
TELEMETRY_DEGRADATIONS = _counter(
    "nvrx_telemetry_degradations_total", Unit.COUNT, "Records of telemetry's own losses and failures.", _COMPONENT
)
JOURNAL_REPAIRS = _counter("nvrx_journal_repairs_total", Unit.COUNT, "Torn last lines cut off the journal.")
JOURNAL_SEGMENTS = _gauge("nvrx_journal_segments", Unit.COUNT, "Files of the journal.", scope=Scope.NODE)
TELEMETRY_SCRAPES = _counter(
    "nvrx_telemetry_scrapes_total", Unit.COUNT, "Scrapes answered by this launcher.", scope=Scope.NODE
)
TELEMETRY_DROPPED = _counter(
    "nvrx_telemetry_dropped_total",
    Unit.COUNT,
    "Items dropped by this launcher, or by its children on their way to it.",
    _COMPONENT,
    scope=Scope.NODE,
)
TELEMETRY_ERRORS = _counter(
    "nvrx_telemetry_errors_total", Unit.COUNT, "Errors swallowed by this launcher.", _COMPONENT, scope=Scope.NODE
)

CATALOG: dict[str, Metric] = {item.name: item for item in list(globals().values()) if isinstance(item, Metric)}
"""All metrics by name, in the order of this file, the summaries of ranks last."""
CATALOG |= {metric.name: metric for summary in RANK_SUMMARIES.values() for metric in summary}


def _version() -> str:
    described = [(item.name, item.type.value, [(each.name, each.values) for each in item.labels]) for item in _ALL]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:8]


_ALL = tuple(CATALOG.values())
VERSION = _version()
"""Digest of names, types and labels: label `catalog` of the build, to be compared with that of the rules in use."""


def sample_names() -> frozenset[str]:
    """Every series name that a query may use, histogram suffixes included."""
    return frozenset(name for metric in CATALOG.values() for name in metric.sample_names)


def metric_of(sample_name: str) -> Metric | None:
    """The metric that exports `sample_name`, or None."""
    for metric in CATALOG.values():
        if sample_name in metric.sample_names:
            return metric
    return None


def num_series(scope: Scope | None = None) -> int:
    """Series of one run (of one scope) that are there whatever its ranks and nodes: fixed, whatever happens."""
    chosen = (item for item in CATALOG.values() if item.bound is None and scope in (None, item.scope))
    return sum(metric.num_series for metric in chosen)
