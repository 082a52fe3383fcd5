"""The fold of records into the values of all job series. No rendering, no I/O, no clock.

Model: one part a theme (`series_recovery`, `series_checkpoints`, `series_phases`), each with a handler an event;
what belongs to the run as a whole is here. Every event class has a metric of its own: a test holds the table.

Invariants: the same records give the same values; counters only grow; label values are those of closed sets.
Not thread-safe: see `telemetry.metrics`.
"""

from __future__ import annotations

from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.limits import Limits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Action, Cap, HaltReason, Record, StepKind
from nvrx_sre.events.snapshot import Snapshotted
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.goodput.verdict import RunState, run_state_after, run_state_of
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.labels import DEFAULT_OWNER, StartKind, run_end
from nvrx_sre.telemetry.series_checkpoints import CheckpointSeries
from nvrx_sre.telemetry.series_part import SeriesPart
from nvrx_sre.telemetry.series_phases import STATE_TICK_S, PhaseSeries
from nvrx_sre.telemetry.series_recovery import RecoverySeries
from nvrx_sre.telemetry.values import Values


class RunSeries(SeriesPart):
    """The run as a whole: identity, state, steps, and telemetry's own records."""

    STATE = ("_state", "_entered_s", "_draining", "_halt_reason")
    STORED = (RunState,)

    def __init__(self, values: Values, ledger: Ledger, limits: Limits) -> None:
        super().__init__(values)
        self._ledger = ledger
        self._state: RunState | None = None
        self._entered_s = 0.0
        self._draining = False
        self._halt_reason = HaltReason.INCURABLE
        self._export_limits(limits.flattened())
        self.handlers = {
            schema.RunStarted: self._on_run_started,
            schema.LauncherStarted: self._on_launcher_started,
            schema.LauncherStopped: self._on_launcher_stopped,
            schema.LeaderLost: self.counting(catalog.LEADERS_LOST),
            schema.StepsCommitted: self._on_steps_committed,
            schema.ReplayDiverged: self.counting(catalog.REPLAY_DIVERGENCES),
            schema.DeadlineChosen: self._on_deadline_chosen,
            schema.PreemptionReceived: self._on_preemption,
            schema.HaltRequested: self._on_halt_requested,
            schema.RestartDecided: self._on_restart_decided,
            schema.CapReached: self._on_cap_reached,
            schema.BudgetReset: self._on_budget_reset,
            schema.JournalRepaired: self.counting(catalog.JOURNAL_REPAIRS),
            schema.TelemetryDegraded: self._on_telemetry_degraded,
            schema.RunFinished: self._on_run_finished,
        }

    @property
    def has_begun(self) -> bool:
        """A record was folded."""
        return self._state is not None

    def begin(self, record: Record) -> None:
        """The first record of the run."""
        start_s = seconds(record.time_ns)
        self.values.set(catalog.RUN_START_TIMESTAMP, start_s)
        self.values.set(catalog.LAST_NEW_STEP, start_s)
        self.values.set(catalog.LAST_STEP, start_s)
        self._enter(RunState.STARTING, record.time_ns)

    @property
    def state(self) -> RunState | None:
        """State of the run as of the last record, None before any."""
        return self._state

    def settle(self, record: Record) -> None:
        """All parts have seen the record: which state is the run in now?"""
        self.values.add(catalog.TELEMETRY_EVENTS, 1)
        if self._state in _LIVE_STATES:
            state = RunState.DRAINING if self._draining else run_state_of(self._ledger.current_state())
            self._enter(state, record.time_ns)

    def _enter(self, state: RunState, time_ns: int) -> None:
        if state is not self._state:
            self._state = state
            self._entered_s = max(seconds(time_ns), self._entered_s + STATE_TICK_S)
            self.values.set(catalog.RUN_STATE_ENTERED, self._entered_s, state)

    def _export_limits(self, limits: dict[str, float]) -> None:
        for name in catalog.LIMIT_NAMES:
            if name in limits:
                self.values.set(catalog.LIMIT, limits[name], name)
        for phase in catalog.DEADLINE_PHASES:
            if f"deadlines.{phase}_s" in limits:
                self.values.set(catalog.PHASE_DEADLINE, limits[f"deadlines.{phase}_s"], phase)

    # --- launchers and ends -------------------------------------------------------------------------------

    def _on_run_started(self, _: Record, event: schema.RunStarted) -> None:
        kind = StartKind.FRESH if event.fresh else StartKind.RESUMED if event.resumed else StartKind.NEW
        self.values.add(catalog.RUN_STARTS, 1, kind)
        self._export_limits(event.limits)
        self.values.set(catalog.WORLD_SIZE_CONFIGURED, event.nproc)
        self.values.set(catalog.WORLD_SIZE_MIN, event.min_world_size)
        self.values.set(catalog.STANDBYS_CONFIGURED, event.num_standbys)
        run = self.values.info[catalog.RUN_INFO.name]
        run.update({"config": event.config_digest})
        run.update({name: event.labels.get(name, default) for name, default in DEFAULT_OWNER.items()})
        build = self.values.info[catalog.BUILD_INFO.name]
        build.update({"version": event.versions.get("nvrx_sre", ""), "catalog": catalog.VERSION})
        build.update({name: event.versions.get(name, "") for name in ("python", "torch")})

    def _on_launcher_started(self, record: Record, event: schema.LauncherStarted) -> None:
        self.values.add(catalog.LAUNCHER_STARTS, 1)
        self.values.info[catalog.RUN_INFO.name]["node"] = event.node
        self.values.set(catalog.EXIT_CODE, -1)
        self._clear_halt()
        self._draining = False
        self._enter(RunState.STARTING, record.time_ns)

    def _on_launcher_stopped(self, record: Record, event: schema.LauncherStopped) -> None:
        self.values.add(catalog.LAUNCHER_STOPS, 1)
        self._end(record, event.exit_code)

    def _on_run_finished(self, record: Record, event: schema.RunFinished) -> None:
        self.values.add(catalog.RUN_ENDS, 1, run_end(event.exit_code))
        self._end(record, event.exit_code)

    def _end(self, record: Record, exit_code: int) -> None:
        self.values.set(catalog.EXIT_CODE, exit_code)
        state = run_state_after(exit_code)
        if state is RunState.HALTED:
            self._halt(record)
            return
        self._clear_halt()  # a second Ctrl-C may end otherwise what was to end for good
        self._enter(state, record.time_ns)

    def _on_restart_decided(self, record: Record, event: schema.RestartDecided) -> None:
        """A run that nobody will start again is halted from the decision on: its end saves, which may take minutes.

        With the same record the budgets are seen to be used up: no scrape sees a loop without its halt.
        """
        if event.action is Action.STOP and event.exit_code == ExitCode.DO_NOT_RESTART:
            self._halt_reason = HaltReason.CAP if event.is_capped else HaltReason.INCURABLE
            self._halt(record)

    def _halt(self, record: Record) -> None:
        if self._state is not RunState.HALTED:
            self.values.set(catalog.HALTED_TIMESTAMP, seconds(record.time_ns), self._halt_reason)
            self._enter(RunState.HALTED, record.time_ns)

    def _on_deadline_chosen(self, _: Record, event: schema.DeadlineChosen) -> None:
        self.values.set(catalog.PHASE_DEADLINE, event.limit_s, event.phase)

    def _on_preemption(self, _: Record, event: schema.PreemptionReceived) -> None:
        self.values.add(catalog.PREEMPTIONS, 1)
        if event.limit:
            self.values.set(catalog.BUDGET_USED, event.attempts, Cap.PREEMPTION)
        self._draining = True

    def _on_halt_requested(self, _: Record, event: schema.HaltRequested) -> None:
        self.values.add(catalog.HALT_REQUESTS, 1)
        self._halt_reason = event.by
        self._draining = True

    def _on_cap_reached(self, _: Record, __: schema.CapReached) -> None:
        reason, self._halt_reason = self._halt_reason, HaltReason.CAP
        if self._state is RunState.HALTED:  # decided by a version that did not say `is_capped`
            halted_s = self.values.get(catalog.HALTED_TIMESTAMP, reason)
            self.values.set(catalog.HALTED_TIMESTAMP, 0, reason)
            self.values.set(catalog.HALTED_TIMESTAMP, halted_s, HaltReason.CAP)

    def _on_budget_reset(self, _: Record, __: schema.BudgetReset) -> None:
        self._clear_halt()

    def _clear_halt(self) -> None:
        self._halt_reason = HaltReason.INCURABLE
        for reason in HaltReason:
            self.values.set(catalog.HALTED_TIMESTAMP, 0, reason)

    # --- steps and telemetry ------------------------------------------------------------------------------

    def _on_steps_committed(self, _: Record, event: schema.StepsCommitted) -> None:
        num_steps = event.last_step - event.first_step + 1
        self.values.add(catalog.STEPS, num_steps, event.kind)
        self.values.add(catalog.TOKENS, event.tokens, event.kind)
        self.values.set(catalog.STEP_HIGH_WATER, self._ledger.high_water)
        if event.proven_by_restore:
            return
        self.values.set(catalog.LAST_STEP, seconds(event.committed_ns))
        if event.loss is not None:
            self.values.set(catalog.LOSS, event.loss)
        if event.kind is StepKind.NEW:
            self.values.set(catalog.LAST_NEW_STEP, seconds(event.committed_ns))
            step_s = seconds(max(0, event.committed_ns - event.started_ns)) / num_steps
            self.values.set(catalog.STEP_SECONDS, step_s)

    def _on_telemetry_degraded(self, _: Record, event: schema.TelemetryDegraded) -> None:
        known = event.component in tuple(catalog.Component)
        self.values.add(catalog.TELEMETRY_DEGRADATIONS, 1, event.component if known else catalog.Component.OTHER)


class SeriesFold(Snapshotted):
    """Fold of records into `values`. Ledger and tracker have seen a record before `apply` does."""

    STATE = ("values", "_run", "_recovery", "_checkpoints", "_phases")

    def __init__(self, ledger: Ledger, tracker: IncidentTracker, limits: Limits) -> None:
        self.values = Values()
        self._ledger = ledger
        self._run = RunSeries(self.values, ledger, limits)
        self._recovery = RecoverySeries(self.values, ledger, tracker, limits.caps)
        self._checkpoints = CheckpointSeries(self.values)
        self._phases = PhaseSeries(self.values)

    @property
    def run_state(self) -> RunState | None:
        """State of the run as of the last record, None before any."""
        return self._run.state

    def version(self) -> str:
        """Values are those of this catalog."""
        return catalog.VERSION

    def apply(self, record: Record) -> None:
        """Fold one record."""
        if not self._run.has_begun:
            self._run.begin(record)
            self._checkpoints.begin(seconds(record.time_ns))
        for part in (self._run, self._recovery, self._checkpoints, self._phases):
            part.apply(record)
        self._run.settle(record)

    def compute(self, values: Values, now_ns: int) -> None:
        """Fill in what is computed at scrape: times, goodput, the open incident."""
        values.set(catalog.WALL_SECONDS, self._ledger.wall_s(now_ns))
        values.set(catalog.OPEN_INTERVAL, self._ledger.open_s(now_ns))
        for state, spent_s in self._ledger.booked().items():
            values.set(catalog.TIME_SECONDS, spent_s, state)
        for state, spent_s in self._ledger.booked_by_ranks().items():
            values.set(catalog.GPU_SECONDS, spent_s, state)
        for kind, ratio in self._ledger.goodput(now_ns).items():
            values.set(catalog.GOODPUT_RATIO, ratio, kind)
        values.set(catalog.STEP_REFERENCE, self._ledger.reference_step_s or 0.0)
        self._recovery.compute(values)


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
