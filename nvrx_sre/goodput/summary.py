"""The summary of a run: the table at its end and the file behind `--summary`. A fold over records.

Composes ledger and incident tracker; either share them with other views (then the caller applies records
to them, once) or let the summary own them. Invariants: the same records give the same summary; open
incidents are in the list with their verdict so far. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record, StepKind, Tier
from nvrx_sre.events.snapshot import Snapshotted
from nvrx_sre.goodput.incidents import Incident, IncidentTracker
from nvrx_sre.goodput.ledger import Ledger

RESULT_KEYS = ("loss_digest", "samples_digest", "state_digest")
_OUTCOMES = ("committed", "failed", "skipped", "rejected")


def incident_row(incident: Incident) -> dict[str, Any]:
    """One row of the summary's incident list; seconds, None while unknown."""
    return {
        "incident": incident.number,
        "fault": incident.fault.value,
        "rank": incident.rank,
        "step": incident.step,
        "layer": incident.layer.value,
        "attempts": incident.attempts,
        "detection_s": incident.detection_s,
        "outage_s": incident.outage_s,
        "resume_s": incident.resume_s,
        "rollback_steps": incident.rollback_steps,
        "verdict": incident.verdict.value,
        "degraded": incident.degraded,
        "trace_id": incident.trace_id,
    }


class SummaryFold(Snapshotted):
    """Fold of records into the summary."""

    STATE = (
        *("_exit_code", "_world_size", "_step", "_redone", "_loss", "_result", "_saves", "_blocking_s"),
        *("_mismatches", "_num_events", "_planned", "_struck"),
    )

    def __init__(
        self,
        run: str,
        ledger: Ledger | None = None,
        tracker: IncidentTracker | None = None,
        *,
        caps: CapLimits | None = None,
    ) -> None:
        self._run = run
        self._own_ledger = Ledger() if ledger is None else None
        self._own_tracker = IncidentTracker(run, caps) if tracker is None else None
        self.ledger = ledger if ledger is not None else self._own_ledger
        self.tracker = tracker if tracker is not None else self._own_tracker
        self._exit_code: int | None = None
        self._world_size = 0
        self._step = 0
        self._redone = 0
        self._loss: float | None = None
        self._result: dict[str, Any] = {}
        self._saves = {tier.value: dict.fromkeys(_OUTCOMES, 0) for tier in Tier}
        self._blocking_s = 0.0
        self._mismatches = 0
        self._num_events = 0
        self._planned: list[str] = []
        self._struck: set[str] = set()
        self._handlers: dict[type[schema.Event], Callable[[Any], None]] = {
            schema.RunStarted: self._on_run_started,
            schema.LauncherStarted: self._on_launcher_started,
            schema.FaultInjected: self._on_fault_injected,
            schema.GenerationFormed: self._on_generation_formed,
            schema.StateRestored: self._on_state_restored,
            schema.StepsCommitted: self._on_steps_committed,
            schema.SaveCommitted: lambda _: self._count(Tier.DURABLE, "committed"),
            schema.SaveFailed: lambda event: self._count(event.tier, "failed"),
            schema.SaveSkipped: self._on_save_skipped,
            schema.CheckpointRejected: lambda event: self._count(event.tier, "rejected"),
            schema.ReplayDiverged: self._on_replay_diverged,
            schema.RunFinished: self._on_run_finished,
            schema.LauncherStopped: self._on_launcher_stopped,
        }

    def apply(self, record: Record) -> None:
        """Fold one record (and into the ledger and tracker that this summary owns)."""
        if self._own_ledger is not None:
            self._own_ledger.apply(record)
        if self._own_tracker is not None:
            self._own_tracker.apply(record)
        self._num_events += 1
        handler = self._handlers.get(type(record.event))
        if handler is not None:
            handler(record.event)

    def to_dict(self, now_ns: int, *, dropped: int = 0, spans: int = 0) -> dict[str, Any]:
        """The summary as JSON-ready dict. `dropped`: telemetry items lost, `spans`: spans finished."""
        assert self.ledger is not None and self.tracker is not None
        incidents = list(self.tracker.closed)
        if self.tracker.open is not None:
            incidents.append(self.tracker.open)
        return {
            "run": self._run,
            "exit_code": self._exit_code,
            "world_size": self._world_size,
            "steps": self._step,
            "high_water": self.ledger.high_water,
            "redone_steps": self._redone,
            "final_loss": self._result.get("final_loss", self._loss),
            **{key: self._result.get(key) for key in RESULT_KEYS},
            "result": {key: value for key, value in self._result.items() if key not in RESULT_KEYS},
            "loss_mismatches": self._mismatches,
            "goodput": {kind.value: ratio for kind, ratio in self.ledger.goodput(now_ns).items()},
            "ledger": {state.value: spent_s for state, spent_s in self.ledger.booked().items()},
            "wall_s": self.ledger.wall_s(now_ns),
            "faults_never_struck": [spec for spec in self._planned if spec not in self._struck],
            "incidents": [incident_row(item) for item in incidents],
            "saves": {**{tier: dict(counts) for tier, counts in self._saves.items()}, "blocking_s": self._blocking_s},
            "telemetry": {"events": self._num_events, "dropped": dropped, "spans": spans},
        }

    def _count(self, tier: Tier, outcome: str) -> None:
        self._saves[tier.value][outcome] += 1

    def _on_run_started(self, event: schema.RunStarted) -> None:
        self._planned = list(event.faults)

    def _on_fault_injected(self, event: schema.FaultInjected) -> None:
        """Counts for the whole run: a fault that has fired as often as it may does not strike another launcher."""
        self._struck.add(event.spec)

    def _on_launcher_started(self, _: schema.LauncherStarted) -> None:
        self._exit_code = None

    def _on_generation_formed(self, event: schema.GenerationFormed) -> None:
        self._world_size = event.world_size

    def _on_state_restored(self, event: schema.StateRestored) -> None:
        self._step = event.step

    def _on_steps_committed(self, event: schema.StepsCommitted) -> None:
        self._step = event.last_step
        if event.kind is StepKind.REDONE:
            self._redone += event.last_step - event.first_step + 1
        if event.loss is not None:
            self._loss = event.loss
        self._blocking_s += event.checkpoint_block_s
        self._saves[Tier.HOT.value]["committed"] += event.hot_captured
        self._saves[Tier.HOT.value]["skipped"] += event.hot_skipped

    def _on_save_skipped(self, event: schema.SaveSkipped) -> None:
        """Hot skips come with `StepsCommitted`."""
        if event.tier is Tier.DURABLE:
            self._count(event.tier, "skipped")

    def _on_replay_diverged(self, _: schema.ReplayDiverged) -> None:
        self._mismatches += 1

    def _on_run_finished(self, event: schema.RunFinished) -> None:
        self._exit_code = event.exit_code
        self._step = max(self._step, event.step)
        self._result = dict(event.result)

    def _on_launcher_stopped(self, event: schema.LauncherStopped) -> None:
        self._exit_code = event.exit_code
