"""Every metric, once: the single source for exposition, dashboards, rules, docs and tests.

Nothing else spells a metric name: use `catalog.TIME_SECONDS.name`. Labels come from the closed sets of
`events.schema` and `goodput.verdict`; all combinations are exported from the first scrape on, so that the
first event of a kind is an increase (failure case C63) and the number of series never changes (C57).

`run` is on every series and is not listed. Immutable after import.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.events.schema import (
    Cap,
    Detector,
    FaultClass,
    Layer,
    LedgerState,
    Phase,
    RejectReason,
    RestoredFrom,
    Role,
    StepKind,
    Tier,
    Verdict,
)
from nvrx_sre.goodput.ratios import GoodputKind as GoodputKind
from nvrx_sre.goodput.verdict import RunState as RunState
from nvrx_sre.telemetry.metric import Label as Label
from nvrx_sre.telemetry.metric import Metric as Metric
from nvrx_sre.telemetry.metric import MetricType as MetricType
from nvrx_sre.telemetry.metric import Scope as Scope
from nvrx_sre.telemetry.metric import Unit as Unit

DURATION_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""From an in-process recovery on CPU (0.05 s, ANCHORS) to an hour."""
ROLLBACK_BUCKETS_STEPS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)


class RestartOutcome(StrEnum):
    """How a decision ended. Counted when it is known."""

    RESUMED = "resumed"
    NO_PROGRESS = "no_progress"
    STOPPED = "stopped"


class SaveOutcome(StrEnum):
    """How a due save ended. `committed` counts hot captures sealed by a rank set, durable saves renamed."""

    COMMITTED = "committed"
    FAILED = "failed"
    SKIPPED = "skipped"
    REJECTED = "rejected"


class Component(StrEnum):
    """Parts of telemetry that may drop or fail without touching training."""

    JOURNAL = "journal"
    FOLD = "fold"
    METRICS = "metrics"
    SPANS = "spans"
    OTLP = "otlp"
    LOG = "log"
    REPORTER = "reporter"
    CHANNEL = "channel"
    OTHER = "other"


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


# --- identity ---------------------------------------------------------------------------------------------
BUILD_INFO = _info("nvrx_build_info", "Versions in force: always 1.", "version", "python", "torch")
RUN_INFO = _info("nvrx_run_info", "Configuration in force: always 1.", "config_digest", "node")

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
HALTED_TIMESTAMP = _gauge(
    "nvrx_halted_timestamp_seconds", Unit.TIMESTAMP, "When the run was halted (exit 93); 0 while it is not."
)
EXIT_CODE = _gauge("nvrx_exit_code", Unit.NONE, "Exit code of the newest launcher; -1 while it lives.", initial=-1.0)

# --- steps ------------------------------------------------------------------------------------------------
STEPS = _counter("nvrx_steps_total", Unit.STEPS, "Committed steps: new above the high water mark, else redone.", _KIND)
TOKENS = _counter("nvrx_tokens_total", Unit.TOKENS, "Tokens of committed steps.", _KIND)
STEP_HIGH_WATER = _gauge("nvrx_step_high_water", Unit.STEPS, "Highest step ever committed.")
LAST_NEW_STEP = _gauge(
    "nvrx_last_new_step_timestamp_seconds", Unit.TIMESTAMP, "Commit of the newest new step; before it the run's start."
)
STEP_SECONDS = _gauge("nvrx_step_seconds", Unit.SECONDS, "Mean time of a new step in the newest aggregate.")
LOSS = _gauge(
    "nvrx_loss", Unit.NATS, "Loss of the newest committed step that reported one; NaN before it.", initial=math.nan
)
REPLAY_DIVERGENCES = _counter(
    "nvrx_replay_divergences_total", Unit.COUNT, "Re-executed steps whose loss differs from the first execution."
)

# --- faults and recovery ----------------------------------------------------------------------------------
FAULTS = _counter("nvrx_faults_total", Unit.COUNT, "Root faults detected.", _FAULT)
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
BUDGET_USED = _gauge("nvrx_budget_used", Unit.COUNT, "Attempts counted against a retry cap.", _CAP)
BUDGET_LIMIT = _gauge("nvrx_budget_limit", Unit.COUNT, "Retry cap in force.", _CAP)
CAPS_REACHED = _counter("nvrx_caps_reached_total", Unit.COUNT, "Retry caps that stopped the run.", _CAP)
GENERATIONS = _counter("nvrx_generations_total", Unit.COUNT, "Formations of the process group.")
LAUNCHER_STARTS = _counter("nvrx_launcher_starts_total", Unit.COUNT, "Launchers that took an epoch of the run.")
LEADERS_LOST = _counter("nvrx_leaders_lost_total", Unit.COUNT, "Epochs that ended without an orderly stop.")
PREEMPTIONS = _counter("nvrx_preemptions_total", Unit.COUNT, "Preemption notices.")
WORKER_STARTS = _counter("nvrx_child_starts_total", Unit.COUNT, "Child processes started.", _label("role", Role))
RANK_REPLACEMENTS = _counter("nvrx_rank_replacements_total", Unit.COUNT, "Ranks moved to another process.")
STANDBY_READY = _gauge("nvrx_standby_ready", Unit.COUNT, "Standbys that can become any rank.")

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
TELEMETRY_DROPPED = _counter(
    "nvrx_telemetry_dropped_total", Unit.COUNT, "Items dropped by this launcher.", _COMPONENT, scope=Scope.NODE
)
TELEMETRY_ERRORS = _counter(
    "nvrx_telemetry_errors_total", Unit.COUNT, "Errors swallowed by this launcher.", _COMPONENT, scope=Scope.NODE
)

CATALOG: dict[str, Metric] = {item.name: item for item in list(globals().values()) if isinstance(item, Metric)}
"""All metrics by name, in the order of this file."""


def sample_names() -> frozenset[str]:
    """Every series name that a query may use, histogram suffixes included."""
    return frozenset(name for metric in CATALOG.values() for name in metric.sample_names)


def metric_of(sample_name: str) -> Metric | None:
    """The metric that exports `sample_name`, or None."""
    for metric in CATALOG.values():
        if sample_name in metric.sample_names:
            return metric
    return None


def num_series() -> int:
    """Series of one run: fixed, whatever happens."""
    return sum(metric.num_series for metric in CATALOG.values())
