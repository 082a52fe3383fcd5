"""The metric fold: values of known journals, closed series, exemplars, and what a scrape may expose."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.events.schema import (
    Action,
    Cap,
    CapReached,
    FaultClass,
    FaultDetected,
    HaltReason,
    Layer,
    LedgerState,
    Record,
    RestartDecided,
    RestoredFrom,
    Verdict,
)
from nvrx_sre.goodput.incidents import IncidentTracker, incident_trace_id
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.goodput.verdict import RunState
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.catalog import Component, RestartOutcome, SaveOutcome
from nvrx_sre.telemetry.metric import Bound, Metric
from nvrx_sre.telemetry.metrics import MetricsFold, MetricSources
from nvrx_sre.testing.clock import ManualClock
from tests.stories import RUN, Story, begin, crash_loop_story, exception_story, fallback_story, lost_launcher_story, ns


class Board:
    """A metric fold with its ledger and tracker, read at the time of the last record."""

    def __init__(self, records: list[Record] = (), sources: MetricSources | None = None) -> None:  # type: ignore[assignment]  # an empty default
        self.ledger, self.tracker = Ledger(), IncidentTracker(RUN)
        self.clock = ManualClock(wall_offset_ns=ns(0.0))
        limits = Limits(deadlines=Deadlines(step_s=33.0))
        self.fold = MetricsFold(RUN, self.ledger, self.tracker, self.clock, limits, sources)
        self.apply(records)

    def apply(self, records: list[Record]) -> None:
        """Fold `records` in the hub's order."""
        for record in records:
            if record.time_ns > self.clock.wall_ns():
                self.clock.advance_to(record.time_ns - ns(0.0))
            self.ledger.apply(record)
            self.tracker.apply(record)
            self.fold.apply(record)

    def value(self, metric: Metric, *labels: str) -> float:
        """One series."""
        return self.fold.value(metric, *labels)

    def samples(self) -> dict[str, float]:
        """Every exposed series of a scrape."""
        return {
            f"{sample.name}{sorted(sample.labels.items())}": sample.value
            for family in self.fold.registry.collect()
            for sample in family.samples
        }

    def state(self) -> str:
        """The run state with the largest entry time."""
        return max(RunState, key=lambda state: self.value(catalog.RUN_STATE_ENTERED, state))


def test_c63_every_known_series_is_there_at_zero_before_the_first_event() -> None:
    """An `increase()` over the first fault of any class is 1: the series was at 0 before."""
    board = Board()
    before = board.samples()
    for fault in FaultClass:
        assert board.value(catalog.FAULTS, fault) == 0.0
    board.apply(fallback_story().records)
    assert {
        series for series in board.samples() if "_info[" not in series and "('node', " not in series
    } == before.keys()
    assert all(
        value == 0.0 for series, value in before.items() if re.match(r"nvrx_\w+_(total|bucket|count|sum)\[", series)
    )


def test_c57_series_count_is_the_same_after_5_and_after_500_faults() -> None:
    """Unique messages, frames, steps, pids and attempts never become label values."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    counts = []
    for number in range(500):
        at_s = 20.0 + number
        message = f"address {number:#x} at offset {number}"
        story.fault(at_s, at_s + 0.1, FaultClass.EXCEPTION, number % 2, message=message, frame=message, pid=number)
        story.torn_down(at_s + 0.2)
        story.form(at_s + 0.2, 10, RestoredFrom.HOT)
        if number == 4:
            counts.append(Board(story.records).samples())
    counts.append(Board(story.records).samples())
    assert counts[0].keys() == counts[1].keys()
    assert counts[1][f"nvrx_faults_total[('fault', 'exception'), ('run', '{RUN}')]"] == 500.0


def test_a_step_that_a_restore_proves_is_counted_and_has_no_time() -> None:
    """Counted as new and part of H; when the last step ended, how long one takes and the ledger stay as they were."""
    story, begin_s = begin()
    story.steps(begin_s, 11.4, 1, 9)
    story.fault(12.5, 12.6, FaultClass.EXCEPTION, 1)
    story.torn_down(12.7)
    board = Board(story.records)
    before, booked = board.samples(), board.ledger.booked()
    num_records = len(story.records)
    story.steps(12.7, 12.7, 10, 10, proven_by_restore=True, hot_sealed_step=-1, tokens=0, loss=None, hot_captured=0)
    board.apply(story.records[num_records:])
    assert board.value(catalog.STEPS, "new") == board.value(catalog.STEP_HIGH_WATER) == 10
    assert board.ledger.booked() == booked
    changed = {series.split("[")[0] for series, value in board.samples().items() if before[series] != value}
    assert changed == {"nvrx_steps_total", "nvrx_step_high_water", "nvrx_telemetry_events_total"}


def test_c17_the_resumed_step_is_a_series() -> None:
    """-1 before anything was restored and after a fresh start, else the step; a fresh start is counted."""
    assert Board().value(catalog.RESTORED_STEP) == -1.0
    story = Story()
    story.start(0.0)
    story.form(2.0, 0, RestoredFrom.FRESH)
    fresh = Board(story.records)
    assert fresh.value(catalog.RESTORED_STEP) == -1.0
    assert fresh.value(catalog.RESTORES, RestoredFrom.FRESH) == 1.0
    story.form(9.0, 7, RestoredFrom.DURABLE)
    assert Board(story.records).value(catalog.RESTORED_STEP) == 7.0


def test_c30_detection_and_recovery_are_histograms_of_their_own() -> None:
    """One incident, one observation in each: evidence to detection, and the whole outage."""
    samples = Board(exception_story().records).samples()

    def total(name: str, part: str) -> float:
        return sum(value for series, value in samples.items() if series.startswith(f"{name}_{part}["))

    assert total("nvrx_detection_seconds", "count") == total("nvrx_outage_seconds", "count") == 1.0
    assert total("nvrx_detection_seconds", "sum") == pytest.approx(0.1)
    assert total("nvrx_outage_seconds", "sum") == pytest.approx(2.2)


def test_values_of_the_exception_story() -> None:
    """Steps, faults, restarts, incidents, world, saves of a run with one recovered fault."""
    board = Board(exception_story().records)
    expected = {
        (catalog.STEPS, "new"): 11,
        (catalog.STEPS, "redone"): 0,
        (catalog.TOKENS, "new"): 1100,
        (catalog.STEP_HIGH_WATER,): 11,
        (catalog.FAULTS, "exception"): 1,
        (catalog.RESTARTS, "in_process", RestartOutcome.RESUMED): 1,
        (catalog.INCIDENTS, Verdict.RECOVERING): 1,
        (catalog.INCIDENTS, Verdict.RECOVERED): 1,
        (catalog.INCIDENT_OPENED,): 0,
        (catalog.INCIDENT_ROOT_RANK,): 1,
        (catalog.RESTARTS_SINCE_PROGRESS,): 0,
        (catalog.BUDGET_USED, Cap.CONSECUTIVE): 0,
        (catalog.BUDGET_LIMIT, Cap.CONSECUTIVE): 3,
        (catalog.GENERATIONS,): 2,
        (catalog.WORLD_SIZE,): 2,
        (catalog.WORLD_SIZE_CONFIGURED,): 2,
        (catalog.WORLD_SIZE_MIN,): 1,
        (catalog.RESTORES, RestoredFrom.HOT): 1,
        (catalog.RESTORES, RestoredFrom.FRESH): 1,
        (catalog.RESTORED_STEP,): 10,
        (catalog.SAVES, "hot", SaveOutcome.COMMITTED): 11,
        (catalog.EXIT_CODE,): 0,
        (catalog.TELEMETRY_EVENTS,): len(exception_story().records),
    }
    assert {key: board.value(*key) for key in expected} == expected
    assert board.value(catalog.TIME_SECONDS, LedgerState.LOST_STEP) == pytest.approx(0.5)
    assert board.value(catalog.WALL_SECONDS) == pytest.approx(15.0)
    assert board.value(catalog.OUTAGE_LAST) == pytest.approx(2.2)
    assert board.value(catalog.LAST_NEW_STEP) == pytest.approx(ns(14.6) / 1e9)
    assert board.state() == RunState.FINISHED


def test_values_of_the_fallback_story() -> None:
    """A rejected checkpoint: counted by reason, no longer the newest; redone steps are not new ones."""
    board = Board(fallback_story().records)
    assert board.value(catalog.CHECKPOINT_REJECTED, "size") == 1
    assert board.value(catalog.SAVES, "durable", SaveOutcome.COMMITTED) == 2
    assert board.value(catalog.SAVES, "durable", SaveOutcome.REJECTED) == 1
    assert board.value(catalog.INCIDENTS_DEGRADED) == 1
    assert board.value(catalog.CHECKPOINT_STEP, "durable") == 10
    assert board.value(catalog.CHECKPOINT_CAPTURED, "durable") == pytest.approx(ns(12.4) / 1e9)
    assert board.value(catalog.STEPS, "redone") == 15
    assert board.value(catalog.ROLLBACK_LAST) == 15
    assert board.value(catalog.STEPS, "new") == 26
    assert board.value(catalog.CHECKPOINT_INTERVAL) == pytest.approx(10.0)
    assert board.value(catalog.CHECKPOINT_SATURATION) == pytest.approx(0.02)


def test_a_crash_loop_shows_while_it_lasts_and_halts() -> None:
    """Attempts without progress, then exit 93 and the time of the halt; the next launcher clears it."""
    story = crash_loop_story()
    board = Board(story.records)
    assert board.value(catalog.INCIDENTS, Verdict.CRASH_LOOP) == 1
    assert board.value(catalog.INCIDENTS, Verdict.EXHAUSTED) == 1
    assert board.value(catalog.RESTARTS, "in_process", RestartOutcome.NO_PROGRESS) == 3
    assert board.value(catalog.RESTARTS, "job", RestartOutcome.STOPPED) == 1
    assert board.value(catalog.HALTED_TIMESTAMP, HaltReason.INCURABLE) > 0
    assert board.value(catalog.HALTED_TIMESTAMP, HaltReason.OPERATOR) == 0
    assert board.value(catalog.RESTARTS_SINCE_PROGRESS) == 1
    assert board.state() == RunState.HALTED
    seen = len(story.records)
    story.start(100.0)
    board.apply(story.records[seen:])
    assert board.value(catalog.HALTED_TIMESTAMP, HaltReason.INCURABLE) == 0
    assert board.state() == RunState.STARTING


@pytest.mark.parametrize(("is_capped", "reason"), [(True, HaltReason.CAP), (False, HaltReason.INCURABLE)])
def test_a_run_is_halted_from_the_decision_on(is_capped: bool, reason: HaltReason) -> None:
    """While it still saves, and not from its exit; saves and steps of its end do not make it another state."""
    story = crash_loop_story()
    decided = next(n for n, item in enumerate(story.records) if isinstance(item.event, RestartDecided) and _stops(item))
    record = replace(story.records[decided], event=replace(story.records[decided].event, is_capped=is_capped))  # type: ignore[type-var]  # it is a RestartDecided
    board = Board([*story.records[:decided], record])
    halted_s = board.value(catalog.HALTED_TIMESTAMP, reason)
    assert (board.state(), halted_s) == (RunState.HALTED, pytest.approx(record.time_ns / 1e9))
    assert board.value(catalog.EXIT_CODE) == -1
    story.save(40.0, 10)
    board.apply(story.records[decided + 1 :])
    assert (board.state(), board.value(catalog.HALTED_TIMESTAMP, reason)) == (RunState.HALTED, halted_s)
    assert board.value(catalog.EXIT_CODE) == 93


def _stops(record: Record) -> bool:
    return getattr(record.event, "action", None) is Action.STOP


def test_an_end_that_is_interrupted_is_no_halt() -> None:
    """Two Ctrl-C within the end for good: the launcher leaves with 130, and the run may be started again."""
    story = crash_loop_story()
    story.records = story.records[:-3]
    story.finish(30.0, exit_code=130)
    board = Board(story.records)
    assert board.state() == RunState.PREEMPTED
    assert board.value(catalog.HALTED_TIMESTAMP, HaltReason.INCURABLE) == 0


def test_the_cap_of_an_older_journal_is_the_reason() -> None:
    """Its decisions do not say that it was a cap; the record behind them does."""
    story = crash_loop_story()
    story.records = story.records[:-3]
    story.add(30.0, CapReached(cap=Cap.CONSECUTIVE, used=3, limit=3))
    board = Board(story.records)
    assert board.value(catalog.HALTED_TIMESTAMP, HaltReason.CAP) > 0
    assert board.value(catalog.HALTED_TIMESTAMP, HaltReason.INCURABLE) == 0


def test_the_newest_fault_is_told_from_those_before() -> None:
    """When a fault of each class was last detected; 0 for a class that never was."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.HANG, 0)
    story.fault(20.5, 20.6, FaultClass.KILLED, 1)
    board = Board(story.records)
    seen = {fault: board.value(catalog.FAULT_TIMESTAMP, fault) for fault in FaultClass}
    assert {fault for fault, at in seen.items() if at} == {FaultClass.HANG, FaultClass.KILLED}
    assert seen[FaultClass.KILLED] - seen[FaultClass.HANG] == pytest.approx(8.0)


def test_an_exhausted_incident_is_no_degraded_recovery() -> None:
    """The last attempt began from an older checkpoint, and nothing came of it."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.EXCEPTION, 1)
    story.decide(12.6, Layer.JOB, Action.STOP, exit_code=93, checkpoints_back=1)
    board = Board(story.records)
    assert board.value(catalog.INCIDENTS, Verdict.EXHAUSTED) == 1
    assert board.value(catalog.INCIDENTS_DEGRADED) == 0


def test_an_open_incident_is_visible_with_its_age() -> None:
    """Opened at the evidence; gone when it closed."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.HANG, None)
    board = Board(story.records)
    assert board.value(catalog.INCIDENT_OPENED) == pytest.approx(ns(12.5) / 1e9)
    assert board.value(catalog.INCIDENT_ATTEMPTS) == 1
    assert board.value(catalog.INCIDENT_ROOT_RANK) == -1
    assert board.state() == RunState.RECOVERING


def test_before_the_first_save_the_newest_checkpoint_is_the_runs_start() -> None:
    """Never 0: an age computed from it must not be fifty years."""
    story, _ = begin()
    board = Board(story.records)
    for tier in ("hot", "durable"):
        assert board.value(catalog.CHECKPOINT_CAPTURED, tier) == pytest.approx(ns(0.0) / 1e9)


def test_every_limit_in_force_is_a_series() -> None:
    """Those of the constructor first, those that the run recorded afterwards."""
    board = Board()
    assert board.value(catalog.PHASE_DEADLINE, "step") == 33.0
    assert board.value(catalog.LIMIT, "caps.window_s") == 1800.0
    assert board.value(catalog.LIMIT, "caps.backoff_s") == 120.0
    board.apply(exception_story().records)
    assert board.value(catalog.PHASE_DEADLINE, "step") == 45.0


def test_outages_carry_the_trace_of_their_incident() -> None:
    """OpenMetrics exemplars on the buckets, parsed back by the reference parser."""
    board = Board(exception_story().records)
    text = generate_openmetrics(board.fold.registry).decode()
    exemplars = {
        sample.name: sample.exemplar.labels["trace_id"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar
    }
    trace_id = incident_trace_id(RUN, 1)
    assert exemplars == dict.fromkeys(
        ["nvrx_outage_seconds_bucket", "nvrx_detection_seconds_bucket", "nvrx_rollback_steps_bucket"], trace_id
    )


def test_the_classic_text_format_has_the_catalogs_names() -> None:
    """What Prometheus calls a series is what the catalog calls it, in both formats."""
    text = generate_latest(Board(exception_story().records).fold.registry).decode()
    names = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line and not line.startswith("#")}
    of_ranks = {metric.name for metric in catalog.CATALOG.values() if metric.bound is Bound.RANKS}
    assert names == catalog.sample_names() - of_ranks


def test_a_replay_continues_the_counters() -> None:
    """After a launcher's restart every counter is at least what was ever scraped."""
    records = lost_launcher_story().records
    cut = next(index for index, record in enumerate(records) if record.epoch == 2)
    first, second = Board(records[:cut]), Board(records[:cut])
    second.apply(records[cut : cut + 1])
    for series, value in first.samples().items():
        if "_total[" in series:
            assert second.samples()[series] >= value, series


def test_a_scrape_exposes_only_what_the_journal_has_synced() -> None:
    """While the disk does not answer, counters stand still; gauges and telemetry's own errors go on."""
    synced = [True]
    errors = {Component.JOURNAL: 7}
    board = Board(sources=MetricSources(sync=lambda: synced[0], errors=lambda: errors))
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    board.apply(story.records)
    steps = f"nvrx_steps_total[('kind', 'new'), ('run', '{RUN}')]"
    assert board.samples()[steps] == 10.0
    synced[0] = False
    seen = len(story.records)
    story.steps(12.4, 13.4, 11, 11)
    board.apply(story.records[seen:])
    frozen = board.samples()
    assert frozen[steps] == 10.0
    assert frozen[f"nvrx_step_high_water[('run', '{RUN}')]"] == 11.0
    assert frozen[f"nvrx_telemetry_errors_total[('component', 'journal'), ('run', '{RUN}')]"] == 7.0
    synced[0] = True
    assert board.samples()[steps] == 11.0


def test_the_loop_heartbeat_is_a_series() -> None:
    """Wall time of the launcher's last turn."""
    board = Board()
    board.fold.loop_turned(ns(5.0))
    assert board.value(catalog.LAUNCHER_LOOP) == pytest.approx(ns(5.0) / 1e9)


def test_run_states_of_one_instant_stay_in_order() -> None:
    """Two states entered at the same nanosecond: the later one is the largest."""
    story = Story()
    story.start(0.0)
    story.finish(0.0, exit_code=78)
    board = Board(story.records)
    assert board.state() == RunState.FAILED


def test_an_unexpected_fault_label_is_impossible() -> None:
    """The schema's enum is the label set: a record cannot carry another value."""
    record = next(item for item in exception_story().records if isinstance(item.event, FaultDetected))
    assert isinstance(record.event, FaultDetected)
    odd = replace(record, event=replace(record.event, fault="0xdeadbeef"))  # type: ignore[arg-type]  # on purpose
    with pytest.raises(KeyError):
        Board([odd])


def test_c35_an_exception_of_the_program_does_not_speak_against_its_node() -> None:
    """Faults are counted on the node of their rank, and apart by what they speak against; both from 0 on."""
    story, at_s = begin()
    board = Board(story.records)
    counts = {suspect: board.value(catalog.NODE_FAULTS, "n1", suspect) for suspect in catalog.Suspect}
    assert counts == {"node": 0, "other": 0}
    kinds = (FaultClass.EXCEPTION, FaultClass.EXCEPTION, FaultClass.OOM_KILL, FaultClass.HANG, FaultClass.NODE_LOST)
    for index, fault in enumerate(kinds, start=1):
        story.fault(at_s + index, at_s + index + 0.1, fault, 1)
    board = Board(story.records)
    counts = {suspect: board.value(catalog.NODE_FAULTS, "n1", suspect) for suspect in catalog.Suspect}
    assert counts == {"node": 2, "other": 3}
