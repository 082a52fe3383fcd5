"""Series of checkpoints in both tiers: one part of `telemetry.series`.

Invariants: those of `telemetry.series_part`. Before the first save the newest checkpoint is the run's start.
Not thread-safe.
"""

from __future__ import annotations

import statistics
from collections import deque

from nvrx_sre.core.clock import seconds
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record, RestoredFrom, StepKind, Tier
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.catalog import SaveOutcome, SaveStage
from nvrx_sre.telemetry.context import run_trace_id
from nvrx_sre.telemetry.series_part import SeriesPart
from nvrx_sre.telemetry.values import Values

MAX_STEP_SAMPLES = 64
"""Aggregates whose median step time gives the expected checkpoint interval; verified steps remembered."""


class CheckpointSeries(SeriesPart):
    """Captures, saves, verification, retention, and what can be restored."""

    STATE = ("_verified", "_save_started_ns", "_written_ns", "_step_s", "_save_every")

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self._verified: dict[int, int] = {}
        self._save_started_ns: dict[int, int] = {}
        self._written_ns: dict[int, int] = {}
        self._step_s: deque[float] = deque(maxlen=MAX_STEP_SAMPLES)
        self._save_every = 0
        self.handlers = {
            schema.RunStarted: self._on_run_started,
            schema.LauncherStarted: self._on_launcher_started,
            schema.StepsCommitted: self._on_steps_committed,
            schema.StateRestored: self._on_state_restored,
            schema.RolledBack: self._on_rolled_back,
            schema.SaveSealed: self._on_save_sealed,
            schema.SaveStarted: self._on_save_started,
            schema.SaveWritten: self._on_save_written,
            schema.SaveCommitted: self._on_save_committed,
            schema.SaveVerified: self._on_save_verified,
            schema.SaveUnverified: self._on_save_unverified,
            schema.SaveSkipped: self._on_save_skipped,
            schema.SaveFailed: self._on_save_failed,
            schema.CheckpointRejected: self._on_checkpoint_rejected,
            schema.CheckpointDeleted: self._on_checkpoint_deleted,
            schema.HotIntervalChosen: self._on_hot_interval_chosen,
            schema.HotSlotsAllocated: self._on_hot_slots_allocated,
        }

    def begin(self, start_s: float) -> None:
        """The run's first record: until there is a checkpoint, its age is the run's."""
        for tier in Tier:
            self.values.set(catalog.CHECKPOINT_CAPTURED, start_s, tier)

    def _save(self, tier: Tier, outcome: SaveOutcome, count: int = 1) -> None:
        self.values.add(catalog.SAVES, count, tier, outcome)

    def _observe(self, record: Record, stage: SaveStage, spent_s: float) -> None:
        trace_id = run_trace_id(record.run)  # the trace of its `nvrx.save`
        self.values.observe(catalog.SAVE_SECONDS, spent_s, trace_id, record.time_ns, (stage,))
        self.values.raise_to(catalog.SAVE_MAX, spent_s, stage)

    def _on_run_started(self, _: Record, event: schema.RunStarted) -> None:
        self._save_every = event.save_every_steps
        self.values.set(catalog.HOT_INTERVAL, event.hot_every_steps)

    def _on_launcher_started(self, _: Record, __: schema.LauncherStarted) -> None:
        self._lose_hot_tier()
        self._end_save()

    def _on_steps_committed(self, _: Record, event: schema.StepsCommitted) -> None:
        if event.kind is StepKind.NEW and not event.proven_by_restore:
            num_steps = event.last_step - event.first_step + 1
            self._step_s.append(seconds(max(0, event.committed_ns - event.started_ns)) / num_steps)
            self.values.set(catalog.CHECKPOINT_INTERVAL, self._save_every * statistics.median(self._step_s))
        if event.hot_sealed_step > self.values.get(catalog.CHECKPOINT_STEP, Tier.HOT):
            self.values.set(catalog.CHECKPOINT_STEP, event.hot_sealed_step, Tier.HOT)
            self.values.set(catalog.CHECKPOINT_CAPTURED, seconds(event.committed_ns), Tier.HOT)
        self._save(Tier.HOT, SaveOutcome.COMMITTED, event.hot_captured)
        self._save(Tier.HOT, SaveOutcome.SKIPPED, event.hot_skipped)

    def _on_save_sealed(self, record: Record, event: schema.SaveSealed) -> None:
        self._observe(record, SaveStage.SEAL, seconds(max(0, record.time_ns - event.sealed_ns)))

    def _on_save_started(self, record: Record, event: schema.SaveStarted) -> None:
        self._save_started_ns = {event.step: record.time_ns}
        self.values.set(catalog.SAVE_STARTED, seconds(record.time_ns))

    def _on_save_written(self, record: Record, event: schema.SaveWritten) -> None:
        self._written_ns = {event.step: record.time_ns}
        self._observe(record, SaveStage.WRITE, event.seconds)

    def _on_save_committed(self, record: Record, event: schema.SaveCommitted) -> None:
        self._save(Tier.DURABLE, SaveOutcome.COMMITTED)
        self.values.set(catalog.CHECKPOINT_SIZE, event.size_bytes)
        started_ns = self._save_started_ns.get(event.step)
        write_s = event.seconds if started_ns is None else seconds(record.time_ns - started_ns)
        self.values.set(catalog.CHECKPOINT_WRITE_SECONDS, write_s)
        interval_s = self.values.get(catalog.CHECKPOINT_INTERVAL)
        self.values.set(catalog.CHECKPOINT_SATURATION, write_s / interval_s if interval_s > 0 else 0.0)
        written_ns = self._written_ns.get(event.step)
        if written_ns is not None:
            self._observe(record, SaveStage.COMMIT, seconds(max(0, record.time_ns - written_ns)))
        self._end_save()

    def _end_save(self) -> None:
        self._save_started_ns = {}
        self._written_ns = {}
        self.values.set(catalog.SAVE_STARTED, 0)

    def _on_save_verified(self, record: Record, event: schema.SaveVerified) -> None:
        self._observe(record, SaveStage.VERIFY, event.seconds)
        self._verified[event.step] = event.captured_ns
        while len(self._verified) > MAX_STEP_SAMPLES:
            del self._verified[min(self._verified)]
        self._export_durable()

    def _on_save_unverified(self, _: Record, event: schema.SaveUnverified) -> None:
        """No outcome of its own: the save was counted as committed, and is."""
        self.values.add(catalog.SAVES_UNVERIFIED, 1, event.reason)

    def _on_save_skipped(self, _: Record, event: schema.SaveSkipped) -> None:
        """Hot skips are counted as outcome with `StepsCommitted`; counting them here too would double them."""
        self.values.add(catalog.SAVES_SKIPPED, 1, event.tier, event.reason)
        if event.tier is Tier.DURABLE:
            self._save(event.tier, SaveOutcome.SKIPPED)

    def _on_save_failed(self, _: Record, event: schema.SaveFailed) -> None:
        self.values.add(catalog.SAVE_FAILURES, 1, event.reason)
        self._save(event.tier, SaveOutcome.FAILED)
        self._end_save()

    def _on_checkpoint_rejected(self, _: Record, event: schema.CheckpointRejected) -> None:
        self.values.add(catalog.CHECKPOINT_REJECTED, 1, event.reason)
        self._save(event.tier, SaveOutcome.REJECTED)
        if event.tier is Tier.DURABLE:
            self._verified.pop(event.step, None)
            self._export_durable()

    def _on_checkpoint_deleted(self, record: Record, event: schema.CheckpointDeleted) -> None:
        self.values.add(catalog.CHECKPOINT_DELETIONS, 1)
        self.values.observe(catalog.CHECKPOINT_DELETION_SECONDS, event.seconds, None, record.time_ns)
        self.values.raise_to(catalog.CHECKPOINT_DELETION_MAX, event.seconds)

    def _on_hot_interval_chosen(self, _: Record, event: schema.HotIntervalChosen) -> None:
        self.values.set(catalog.HOT_INTERVAL, event.every_steps)
        between_s = event.every_steps * event.step_s
        self.values.set(catalog.HOT_CAPTURE_COST, event.cost_s / between_s if between_s > 0 else 0.0)

    def _on_hot_slots_allocated(self, _: Record, event: schema.HotSlotsAllocated) -> None:
        self.values.set(catalog.HOT_SLOTS, event.num_slots)
        self.values.set(catalog.HOT_SLOTS_BYTES, event.total_bytes)
        self.values.set(catalog.HOT_SNAPSHOTS, event.num_snapshots)

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
        if event.source is not RestoredFrom.HOT:
            self._lose_hot_tier()

    def _lose_hot_tier(self) -> None:
        self.values.set(catalog.CHECKPOINT_STEP, -1, Tier.HOT)
        self.values.set(catalog.CHECKPOINT_CAPTURED, self.values.get(catalog.RUN_START_TIMESTAMP), Tier.HOT)
