"""Series of faults, restarts, incidents and budgets: one part of `telemetry.series`.

Invariants: those of `telemetry.series_part`. A restart is counted when its outcome is known. Not thread-safe.
"""

from __future__ import annotations

import math

from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.ids import node_of
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import NODE_FAULTS, Action, Cap, Layer, Record, RestoredFrom, Verdict
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.catalog import FreshProgress, IncidentOutcome, RestartOutcome, Suspect, TeardownOutcome
from nvrx_sre.telemetry.series_part import SeriesPart
from nvrx_sre.telemetry.values import Values

MAX_NODES = 256
"""Nodes that get a series of their own; the faults of further ones count for `OTHER_NODE`."""
OTHER_NODE = "other"


def cap_limit(cap: Cap, caps: CapLimits) -> float:
    """The limit that `cap` compares with; infinite for a cap that is off."""
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
            Cap.PREEMPTION: caps.preemption_attempts,
            Cap.LIFETIME: caps.lifetime_faults or math.inf,
        }[cap]
    )


class RecoverySeries(SeriesPart):
    """From a fault to the end of its incident."""

    STATE = ("_pending", "_standbys", "_has_committed")

    def __init__(self, values: Values, ledger: Ledger, tracker: IncidentTracker, caps: CapLimits) -> None:
        super().__init__(values)
        self._ledger = ledger
        self._tracker = tracker
        self._pending: list[Layer] = []
        self._standbys: set[int] = set()
        self._has_committed = False
        self._export_caps(caps)
        self.handlers = {
            schema.RunStarted: lambda _, __: self._export_caps(tracker.caps),
            schema.LauncherStarted: self._on_launcher_started,
            schema.WorkerStarted: lambda _, event: values.add(catalog.WORKER_STARTS, 1, event.role),
            schema.WorkerExited: self._on_worker_exited,
            schema.StandbyReady: self._on_standby_ready,
            schema.GenerationFormed: self._on_generation_formed,
            schema.FaultInjected: self.counting(catalog.FAULTS_INJECTED),
            schema.FaultDetected: self._on_fault_detected,
            schema.RestartDecided: self._on_restart_decided,
            schema.DecisionUnrecorded: self.counting(catalog.DECISIONS_UNRECORDED),
            schema.InterruptRaised: self.counting(catalog.INTERRUPTS),
            schema.TeardownFinished: self._on_teardown_finished,
            schema.RankReplaced: self._on_rank_replaced,
            schema.RankExcluded: self.counting(catalog.RANKS_EXCLUDED),
            schema.NodeJoined: self.counting(catalog.NODES_JOINED),
            schema.NodeLost: self.counting(catalog.NODES_LOST),
            schema.RolledBack: lambda _, event: values.add(catalog.ROLLBACKS, 1, event.source),
            schema.StateRestored: self._on_state_restored,
            schema.ProgressResumed: self._on_progress_resumed,
            schema.IncidentClosed: self._on_incident_closed,
            schema.SaveCommitted: self._on_save_committed,
            schema.CapReached: lambda _, event: values.add(catalog.CAPS_REACHED, 1, event.cap),
            schema.BudgetReset: self._on_budget_reset,
            schema.RunFinished: self._on_run_finished,
        }

    def _export_caps(self, caps: CapLimits) -> None:
        for cap in Cap:
            self.values.set(catalog.BUDGET_LIMIT, cap_limit(cap, caps), cap)

    def compute(self, values: Values) -> None:
        """What is read at scrape: the open incident, and which standbys there are."""
        incident = self._tracker.open
        values.set(catalog.INCIDENT_OPENED, 0 if incident is None else seconds(incident.opened_ns))
        values.set(catalog.INCIDENT_ATTEMPTS, 0 if incident is None else incident.attempts)

    def _on_launcher_started(self, _: Record, event: schema.LauncherStarted) -> None:
        self._standbys.clear()
        self.values.set(catalog.STANDBY_READY, 0)
        self._meet_node(event.node)

    def _on_worker_exited(self, _: Record, event: schema.WorkerExited) -> None:
        self.values.add(catalog.WORKER_EXITS, 1, event.role)
        self._drop_standby(event.pid)

    def _on_standby_ready(self, _: Record, event: schema.StandbyReady) -> None:
        self._standbys.add(event.pid)
        self.values.set(catalog.STANDBY_READY, len(self._standbys))

    def _drop_standby(self, pid: int) -> None:
        self._standbys.discard(pid)
        self.values.set(catalog.STANDBY_READY, len(self._standbys))

    def _on_generation_formed(self, _: Record, event: schema.GenerationFormed) -> None:
        self.values.add(catalog.GENERATIONS, 1)
        self.values.set(catalog.WORLD_SIZE, event.world_size)
        for device in event.devices:
            self._meet_node(node_of(device))

    def _meet_node(self, node: str) -> str:
        """The node's label value; its series exist from now on, so that its first fault is an increase."""
        series = self.values.numbers[catalog.NODE_FAULTS.name]
        if (node, Suspect.NODE) not in series and len(series) >= MAX_NODES * len(Suspect):
            node = OTHER_NODE
        for suspect in Suspect:
            series.setdefault((node, suspect.value), 0.0)
        return node

    def _on_fault_detected(self, record: Record, event: schema.FaultDetected) -> None:
        self._settle(RestartOutcome.NO_PROGRESS)
        self.values.add(catalog.FAULTS, 1, event.fault)
        self.values.set(catalog.FAULT_TIMESTAMP, seconds(record.time_ns), event.fault)
        if event.device:
            suspect = Suspect.NODE if event.fault in NODE_FAULTS else Suspect.OTHER
            self.values.add(catalog.NODE_FAULTS, 1, self._meet_node(node_of(event.device)), suspect)
        incident = self._tracker.open
        if incident is None:
            return
        detection_s = seconds(max(0, record.time_ns - event.evidence_ns))
        self.values.observe(
            catalog.DETECTION_SECONDS, detection_s, incident.trace_id, record.time_ns, (event.detector,)
        )
        self.values.raise_to(catalog.DETECTION_MAX, detection_s, event.detector)
        if incident.attempts == 1:
            self.values.add(catalog.INCIDENTS, 1, Verdict.RECOVERING)
            self.values.add(catalog.INCIDENT_OUTCOMES, 1, incident.fault, IncidentOutcome.OPENED)
            self.values.set(catalog.INCIDENT_ROOT_RANK, -1 if record.rank is None else record.rank)
        if incident.attempts == self._tracker.caps.crash_loop_attempts:
            self.values.add(catalog.INCIDENTS, 1, Verdict.CRASH_LOOP)

    def _on_restart_decided(self, _: Record, event: schema.RestartDecided) -> None:
        self.values.add(catalog.DECISIONS, 1, event.action)
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

    def _on_teardown_finished(self, _: Record, event: schema.TeardownFinished) -> None:
        self.values.add(catalog.TEARDOWNS, len(event.kept), TeardownOutcome.KEPT)
        self.values.add(catalog.TEARDOWNS, len(event.killed), TeardownOutcome.KILLED)

    def _on_rank_replaced(self, _: Record, event: schema.RankReplaced) -> None:
        self.values.add(catalog.RANK_REPLACEMENTS, 1)
        self._drop_standby(event.new_pid)
        if self._pending and self._pending[-1] is Layer.IN_PROCESS:
            self._pending[-1] = Layer.WORKER  # it could not be interrupted in process

    def _on_state_restored(self, _: Record, event: schema.StateRestored) -> None:
        self.values.add(catalog.RESTORES, 1, event.source)
        is_fresh = event.source is RestoredFrom.FRESH
        self.values.set(catalog.RESTORED_STEP, -1 if is_fresh else event.step)
        if is_fresh:
            has_lost = self._has_committed or self._ledger.high_water > 0
            self.values.add(catalog.FRESH_STARTS, 1, FreshProgress.LOST if has_lost else FreshProgress.NONE)

    def _on_save_committed(self, _: Record, __: schema.SaveCommitted) -> None:
        self._has_committed = True

    def _on_progress_resumed(self, _: Record, __: schema.ProgressResumed) -> None:
        self.values.add(catalog.PROGRESS_RESUMED, 1)
        self._settle(RestartOutcome.RESUMED)

    def _on_incident_closed(self, record: Record, event: schema.IncidentClosed) -> None:
        self.values.add(catalog.INCIDENTS, 1, event.verdict)
        has_recovered = event.verdict is not Verdict.EXHAUSTED
        self.values.add(catalog.INCIDENTS_DEGRADED, int(event.degraded and has_recovered))
        outcome = IncidentOutcome.RECOVERED if has_recovered else IncidentOutcome.EXHAUSTED
        self.values.add(catalog.INCIDENT_OUTCOMES, 1, event.fault, outcome)
        if event.outage_s is not None:
            self.values.observe(catalog.OUTAGE_SECONDS, event.outage_s, event.trace_id, record.time_ns, (event.layer,))
            self.values.raise_to(catalog.OUTAGE_MAX, event.outage_s, event.layer)
            self.values.set(catalog.OUTAGE_LAST, event.outage_s)
        if event.verdict in (Verdict.RECOVERED, Verdict.FLAPPING):
            self.values.observe(catalog.ROLLBACK_STEPS, event.rollback_steps, event.trace_id, record.time_ns)
            self.values.set(catalog.ROLLBACK_LAST, event.rollback_steps)
            self.values.raise_to(catalog.ROLLBACK_MAX, event.rollback_steps)
            self._reset_budgets(keep=(Cap.WINDOW, Cap.PREEMPTION, Cap.LIFETIME))

    def _on_budget_reset(self, _: Record, __: schema.BudgetReset) -> None:
        self.values.add(catalog.BUDGET_RESETS, 1)
        self._reset_budgets()

    def _reset_budgets(self, keep: tuple[Cap, ...] = ()) -> None:
        """Attempts with progress do not count; an operator's reset clears every cap."""
        self.values.set(catalog.RESTARTS_SINCE_PROGRESS, 0)
        for cap in Cap:
            if cap not in keep:
                self.values.set(catalog.BUDGET_USED, 0, cap)

    def _on_run_finished(self, _: Record, event: schema.RunFinished) -> None:
        if event.exit_code == ExitCode.FINISHED:
            self._settle(RestartOutcome.RESUMED)


def gpu_of(device: str) -> str | None:
    """GPU UUID of a device's identity, None where it is a local rank."""
    own = device.rpartition("/")[2]
    return None if own.isdecimal() else own
