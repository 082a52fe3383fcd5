"""The fold of records into the values of all series. No rendering, no I/O, no clock.

Invariants: the same records give the same values; counters only grow; label values are those of the schema's
enums. Not thread-safe: see `telemetry.metrics`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.limits import CapLimits, Limits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Action, Cap, Layer, Record, RestoredFrom, StepKind, Tier, Verdict
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.goodput.verdict import RunState, run_state_after, run_state_of
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.catalog import RestartOutcome, SaveOutcome
from nvrx_sre.telemetry.values import Values

MAX_STEP_SAMPLES = 64
"""Aggregates whose median step time gives the expected checkpoint interval."""
STATE_TICK_S = 1e-6
"""Least distance of two entry times, so that the largest is unique (a float64 epoch resolves 0.24 us)."""


def cap_limit(cap: Cap, caps: CapLimits) -> float:
    """The limit that `cap` compares with."""
    return float(
        {
            Cap.SAME_FINGERPRINT: caps.same_fingerprint_attempts,
            Cap.CONSECUTIVE: caps.consecutive_attempts,
            Cap.WINDOW: caps.window_attempts,
            Cap.DEVICE: caps.device_faults,
            Cap.STARTUP: caps.startup_attempts,
            Cap.NONFINITE: caps.nonfinite_attempts,
            Cap.UNKNOWN_PROGRESS: caps.unknown_progress_attempts,
            Cap.STORAGE: caps.storage_attempts,
        }[cap]
    )


class SeriesFold:
    """Fold of records into `values`. Ledger and tracker have seen a record before `apply` does."""

    def __init__(self, ledger: Ledger, tracker: IncidentTracker, limits: Limits) -> None:
        self.values = Values()
        self._ledger = ledger
        self._tracker = tracker
        self._run_state: RunState | None = None
        self._entered_s = 0.0
        self._draining = False
        self._pending: list[Layer] = []
        self._standbys: set[int] = set()
        self._verified: dict[int, int] = {}
        self._save_started_ns: dict[int, int] = {}
        self._step_s: deque[float] = deque(maxlen=MAX_STEP_SAMPLES)
        self._save_every = 0
        self._caps = limits.caps
        self._export_limits(limits.flattened())
        for cap in Cap:
            self.values.set(catalog.BUDGET_LIMIT, cap_limit(cap, limits.caps), cap)
        self._handlers: dict[type[schema.Event], Callable[[Record, Any], None]] = {
            schema.RunStarted: self._on_run_started,
            schema.LauncherStarted: self._on_launcher_started,
            schema.LeaderLost: lambda _, __: self.values.add(catalog.LEADERS_LOST, 1),
            schema.WorkerStarted: lambda _, event: self.values.add(catalog.WORKER_STARTS, 1, event.role),
            schema.WorkerExited: lambda _, event: self._standbys.discard(event.pid),
            schema.StandbyReady: lambda _, event: self._standbys.add(event.pid),
            schema.GenerationFormed: self._on_generation_formed,
            schema.StepsCommitted: self._on_steps_committed,
            schema.FaultInjected: lambda _, __: self.values.add(catalog.FAULTS_INJECTED, 1),
            schema.FaultDetected: self._on_fault_detected,
            schema.RestartDecided: self._on_restart_decided,
            schema.RankReplaced: self._on_rank_replaced,
            schema.StateRestored: self._on_state_restored,
            schema.ProgressResumed: lambda _, __: self._settle(RestartOutcome.RESUMED),
            schema.IncidentClosed: self._on_incident_closed,
            schema.SaveStarted: self._on_save_started,
            schema.SaveCommitted: self._on_save_committed,
            schema.SaveVerified: self._on_save_verified,
            schema.SaveSkipped: self._on_save_skipped,
            schema.SaveFailed: lambda _, event: self._save(event.tier, SaveOutcome.FAILED),
            schema.CheckpointRejected: self._on_checkpoint_rejected,
            schema.RolledBack: self._on_rolled_back,
            schema.ReplayDiverged: lambda _, __: self.values.add(catalog.REPLAY_DIVERGENCES, 1),
            schema.PreemptionReceived: self._on_preemption,
            schema.HaltRequested: self._on_halt_requested,
            schema.CapReached: lambda _, event: self.values.add(catalog.CAPS_REACHED, 1, event.cap),
            schema.BudgetReset: lambda _, __: self._reset_budgets(),
            schema.RunFinished: self._on_end,
            schema.LauncherStopped: self._on_end,
        }

    def apply(self, record: Record) -> None:
        """Fold one record."""
        if self._run_state is None:
            self._begin(record)
        self.values.add(catalog.TELEMETRY_EVENTS, 1)
        handler = self._handlers.get(type(record.event))
        if handler is not None:
            handler(record, record.event)
        if self._run_state in _LIVE_STATES:
            state = RunState.DRAINING if self._draining else run_state_of(self._ledger.current_state())
            self._enter(state, record.time_ns)

    def compute(self, values: Values, now_ns: int) -> None:
        """Fill in what is computed at scrape: times, goodput, the open incident."""
        values.set(catalog.WALL_SECONDS, self._ledger.wall_s(now_ns))
        values.set(catalog.OPEN_INTERVAL, self._ledger.open_s(now_ns))
        for state, spent_s in self._ledger.booked().items():
            values.set(catalog.TIME_SECONDS, spent_s, state)
        for kind, ratio in self._ledger.goodput(now_ns).items():
            values.set(catalog.GOODPUT_RATIO, ratio, kind)
        incident = self._tracker.open
        values.set(catalog.INCIDENT_OPENED, 0.0 if incident is None else seconds(incident.opened_ns))
        values.set(catalog.INCIDENT_ATTEMPTS, 0 if incident is None else incident.attempts)
        values.set(catalog.STANDBY_READY, len(self._standbys))

    def _begin(self, record: Record) -> None:
        start_s = seconds(record.time_ns)
        self.values.set(catalog.RUN_START_TIMESTAMP, start_s)
        self.values.set(catalog.LAST_NEW_STEP, start_s)
        for tier in Tier:
            self.values.set(catalog.CHECKPOINT_CAPTURED, start_s, tier)
        self._enter(RunState.STARTING, record.time_ns)

    def _enter(self, state: RunState, time_ns: int) -> None:
        if state is not self._run_state:
            self._run_state = state
            self._entered_s = max(seconds(time_ns), self._entered_s + STATE_TICK_S)
            self.values.set(catalog.RUN_STATE_ENTERED, self._entered_s, state)

    def _export_limits(self, limits: dict[str, float]) -> None:
        for name in catalog.LIMIT_NAMES:
            if name in limits:
                self.values.set(catalog.LIMIT, limits[name], name)
        for phase in catalog.DEADLINE_PHASES:
            if f"deadlines.{phase}_s" in limits:
                self.values.set(catalog.PHASE_DEADLINE, limits[f"deadlines.{phase}_s"], phase)

    # --- identity and launchers ---------------------------------------------------------------------------

    def _on_run_started(self, _: Record, event: schema.RunStarted) -> None:
        self._save_every = event.save_every_steps
        self._export_limits(event.limits)
        self.values.set(catalog.WORLD_SIZE_CONFIGURED, event.nproc)
        self.values.set(catalog.WORLD_SIZE_MIN, event.min_world_size)
        self.values.info[catalog.RUN_INFO.name]["config_digest"] = event.config_digest
        build = self.values.info[catalog.BUILD_INFO.name]
        build.update({"version": event.versions.get("nvrx_sre", "")})
        build.update({name: event.versions.get(name, "") for name in ("python", "torch")})

    def _on_launcher_started(self, record: Record, event: schema.LauncherStarted) -> None:
        self.values.add(catalog.LAUNCHER_STARTS, 1)
        self.values.info[catalog.RUN_INFO.name]["node"] = event.node
        self.values.set(catalog.EXIT_CODE, -1)
        self.values.set(catalog.HALTED_TIMESTAMP, 0)
        self._standbys.clear()
        self._draining = False
        self._lose_hot_tier()
        self._enter(RunState.STARTING, record.time_ns)

    def _on_preemption(self, _: Record, __: schema.PreemptionReceived) -> None:
        self.values.add(catalog.PREEMPTIONS, 1)
        self._draining = True

    def _on_halt_requested(self, _: Record, __: schema.HaltRequested) -> None:
        self._draining = True

    def _on_end(self, record: Record, event: schema.RunFinished | schema.LauncherStopped) -> None:
        self.values.set(catalog.EXIT_CODE, event.exit_code)
        if event.exit_code == ExitCode.FINISHED:
            self._settle(RestartOutcome.RESUMED)
        state = run_state_after(event.exit_code)
        if state is RunState.HALTED and self._run_state is not RunState.HALTED:
            self.values.set(catalog.HALTED_TIMESTAMP, seconds(record.time_ns))
        self._enter(state, record.time_ns)

    # --- steps --------------------------------------------------------------------------------------------

    def _on_generation_formed(self, _: Record, event: schema.GenerationFormed) -> None:
        self.values.add(catalog.GENERATIONS, 1)
        self.values.set(catalog.WORLD_SIZE, event.world_size)

    def _on_steps_committed(self, _: Record, event: schema.StepsCommitted) -> None:
        num_steps = event.last_step - event.first_step + 1
        self.values.add(catalog.STEPS, num_steps, event.kind)
        self.values.add(catalog.TOKENS, event.tokens, event.kind)
        self.values.set(catalog.STEP_HIGH_WATER, self._ledger.high_water)
        if event.loss is not None:
            self.values.set(catalog.LOSS, event.loss)
        if event.kind is StepKind.NEW:
            self.values.set(catalog.LAST_NEW_STEP, seconds(event.committed_ns))
            step_s = seconds(max(0, event.committed_ns - event.started_ns)) / num_steps
            self.values.set(catalog.STEP_SECONDS, step_s)
            self._step_s.append(step_s)
            self.values.set(catalog.CHECKPOINT_INTERVAL, self._save_every * statistics.median(self._step_s))
        if event.hot_sealed_step > self.values.get(catalog.CHECKPOINT_STEP, Tier.HOT):
            self.values.set(catalog.CHECKPOINT_STEP, event.hot_sealed_step, Tier.HOT)
            self.values.set(catalog.CHECKPOINT_CAPTURED, seconds(event.committed_ns), Tier.HOT)
        self._save(Tier.HOT, SaveOutcome.COMMITTED, event.hot_captured)
        self._save(Tier.HOT, SaveOutcome.SKIPPED, event.hot_skipped)

    # --- faults -------------------------------------------------------------------------------------------

    def _on_fault_detected(self, record: Record, event: schema.FaultDetected) -> None:
        self._settle(RestartOutcome.NO_PROGRESS)
        self.values.add(catalog.FAULTS, 1, event.fault)
        incident = self._tracker.open
        if incident is None:
            return
        detection_s = seconds(max(0, record.time_ns - event.evidence_ns))
        self.values.observe(
            catalog.DETECTION_SECONDS, detection_s, incident.trace_id, record.time_ns, (event.detector,)
        )
        if incident.attempts == 1:
            self.values.add(catalog.INCIDENTS, 1, Verdict.RECOVERING)
            self.values.set(catalog.INCIDENT_ROOT_RANK, -1 if record.rank is None else record.rank)
        if incident.attempts == self._caps.crash_loop_attempts:
            self.values.add(catalog.INCIDENTS, 1, Verdict.CRASH_LOOP)

    def _on_restart_decided(self, _: Record, event: schema.RestartDecided) -> None:
        self.values.set(catalog.RESTARTS_SINCE_PROGRESS, event.restarts_since_progress)
        for cap in Cap:
            if cap in event.budget_used:
                self.values.set(catalog.BUDGET_USED, event.budget_used[cap], cap)
            if cap in event.budget_limit:
                self.values.set(catalog.BUDGET_LIMIT, event.budget_limit[cap], cap)
        self._settle(RestartOutcome.NO_PROGRESS)
        if event.action is Action.STOP:
            self.values.add(catalog.RESTARTS, 1, event.layer, RestartOutcome.STOPPED)
        else:
            self._pending.append(event.layer)

    def _settle(self, outcome: RestartOutcome) -> None:
        """The outcome of the restarts decided so far is known."""
        for layer in self._pending:
            self.values.add(catalog.RESTARTS, 1, layer, outcome)
        self._pending.clear()

    def _on_rank_replaced(self, _: Record, event: schema.RankReplaced) -> None:
        self.values.add(catalog.RANK_REPLACEMENTS, 1)
        self._standbys.discard(event.new_pid)
        if self._pending and self._pending[-1] is Layer.IN_PROCESS:
            self._pending[-1] = Layer.WORKER  # it could not be interrupted in process

    def _on_incident_closed(self, record: Record, event: schema.IncidentClosed) -> None:
        self.values.add(catalog.INCIDENTS, 1, event.verdict)
        if event.outage_s is not None:
            self.values.observe(catalog.OUTAGE_SECONDS, event.outage_s, event.trace_id, record.time_ns, (event.layer,))
        if event.verdict in (Verdict.RECOVERED, Verdict.FLAPPING):
            self.values.observe(catalog.ROLLBACK_STEPS, event.rollback_steps, event.trace_id, record.time_ns)
            self._reset_budgets(keep=(Cap.WINDOW,))

    def _reset_budgets(self, keep: tuple[Cap, ...] = ()) -> None:
        """Attempts with progress do not count; an operator's reset clears every cap."""
        self.values.set(catalog.RESTARTS_SINCE_PROGRESS, 0)
        for cap in Cap:
            if cap not in keep:
                self.values.set(catalog.BUDGET_USED, 0, cap)

    # --- checkpoints --------------------------------------------------------------------------------------

    def _save(self, tier: Tier, outcome: SaveOutcome, count: int = 1) -> None:
        self.values.add(catalog.SAVES, count, tier, outcome)

    def _on_save_started(self, record: Record, event: schema.SaveStarted) -> None:
        self._save_started_ns = {event.step: record.time_ns}

    def _on_save_committed(self, record: Record, event: schema.SaveCommitted) -> None:
        self._save(Tier.DURABLE, SaveOutcome.COMMITTED)
        self.values.set(catalog.CHECKPOINT_SIZE, event.size_bytes)
        started_ns = self._save_started_ns.pop(event.step, None)
        write_s = event.seconds if started_ns is None else seconds(record.time_ns - started_ns)
        self.values.set(catalog.CHECKPOINT_WRITE_SECONDS, write_s)
        interval_s = self.values.get(catalog.CHECKPOINT_INTERVAL)
        self.values.set(catalog.CHECKPOINT_SATURATION, write_s / interval_s if interval_s > 0 else 0.0)

    def _on_save_verified(self, _: Record, event: schema.SaveVerified) -> None:
        self._verified[event.step] = event.captured_ns
        while len(self._verified) > MAX_STEP_SAMPLES:
            del self._verified[min(self._verified)]
        self._export_durable()

    def _on_save_skipped(self, _: Record, event: schema.SaveSkipped) -> None:
        """Hot skips come with `StepsCommitted`; counting them here too would double them."""
        if event.tier is Tier.DURABLE:
            self._save(event.tier, SaveOutcome.SKIPPED)

    def _on_checkpoint_rejected(self, _: Record, event: schema.CheckpointRejected) -> None:
        self.values.add(catalog.CHECKPOINT_REJECTED, 1, event.reason)
        self._save(event.tier, SaveOutcome.REJECTED)
        if event.tier is Tier.DURABLE:
            self._verified.pop(event.step, None)
            self._export_durable()

    def _on_rolled_back(self, _: Record, event: schema.RolledBack) -> None:
        self._verified = {step: time_ns for step, time_ns in self._verified.items() if step <= event.step}
        self._export_durable()

    def _export_durable(self) -> None:
        newest = max(self._verified, default=-1)
        start_s = self.values.get(catalog.RUN_START_TIMESTAMP)
        captured_s = seconds(self._verified[newest]) if self._verified else start_s
        self.values.set(catalog.CHECKPOINT_STEP, newest, Tier.DURABLE)
        self.values.set(catalog.CHECKPOINT_CAPTURED, captured_s, Tier.DURABLE)

    def _on_state_restored(self, _: Record, event: schema.StateRestored) -> None:
        self.values.add(catalog.RESTORES, 1, event.source)
        self.values.set(catalog.RESTORED_STEP, -1 if event.source is RestoredFrom.FRESH else event.step)
        if event.source is not RestoredFrom.HOT:
            self._lose_hot_tier()

    def _lose_hot_tier(self) -> None:
        self.values.set(catalog.CHECKPOINT_STEP, -1, Tier.HOT)
        self.values.set(catalog.CHECKPOINT_CAPTURED, self.values.get(catalog.RUN_START_TIMESTAMP), Tier.HOT)


_LIVE_STATES = frozenset(
    {
        RunState.STARTING,
        RunState.RENDEZVOUS,
        RunState.RESTORING,
        RunState.TRAINING,
        RunState.RECOVERING,
        RunState.BACKOFF,
        RunState.DRAINING,
    }
)
"""States in which the ledger says what the run does; the others last until the next launcher."""
