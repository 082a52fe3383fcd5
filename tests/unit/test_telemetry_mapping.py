"""Every event is a metric of its own, a place in a trace and a line of the log: nothing happens unseen."""

from __future__ import annotations

import dataclasses
import io
import json
import typing
from enum import StrEnum
from typing import Any

import pytest

from nvrx_sre.core.limits import Limits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import EVENT_TYPES, Event, Record, Tier
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.logs import EventLog
from nvrx_sre.telemetry.metric import Metric, MetricType
from nvrx_sre.telemetry.redact import Redactor
from nvrx_sre.telemetry.series import SeriesFold
from nvrx_sre.telemetry.spans import SpanFold
from tests.stories import RUN, Story, begin, ns

OWN_METRIC: dict[type[Event], tuple[Metric, tuple[str, ...]]] = {
    schema.RunStarted: (catalog.RUN_STARTS, ("new",)),
    schema.LauncherStarted: (catalog.LAUNCHER_STARTS, ()),
    schema.LauncherStopped: (catalog.LAUNCHER_STOPS, ()),
    schema.LeaderLost: (catalog.LEADERS_LOST, ()),
    schema.WorkerStarted: (catalog.WORKER_STARTS, ("worker",)),
    schema.WorkerExited: (catalog.WORKER_EXITS, ("worker",)),
    schema.StandbyReady: (catalog.STANDBY_READY, ()),
    schema.PhaseEntered: (catalog.PHASE_ENTERED, ("evaluate",)),
    schema.GenerationFormed: (catalog.GENERATIONS, ()),
    schema.StepsCommitted: (catalog.STEPS, ("new",)),
    schema.FaultInjected: (catalog.FAULTS_INJECTED, ()),
    schema.FaultDetected: (catalog.FAULTS, ("exception",)),
    schema.InterruptRaised: (catalog.INTERRUPTS, ()),
    schema.TeardownFinished: (catalog.TEARDOWNS, ("kept",)),
    schema.RestartDecided: (catalog.DECISIONS, ("restart",)),
    schema.DecisionUnrecorded: (catalog.DECISIONS_UNRECORDED, ()),
    schema.DeadlineChosen: (catalog.PHASE_DEADLINE, ("evaluate",)),
    schema.RankReplaced: (catalog.RANK_REPLACEMENTS, ()),
    schema.RankExcluded: (catalog.RANKS_EXCLUDED, ()),
    schema.NodeJoined: (catalog.NODES_JOINED, ()),
    schema.NodeLost: (catalog.NODES_LOST, ()),
    schema.RolledBack: (catalog.ROLLBACKS, ("hot",)),
    schema.StateRestored: (catalog.RESTORES, ("hot",)),
    schema.ProgressResumed: (catalog.PROGRESS_RESUMED, ()),
    schema.IncidentClosed: (catalog.INCIDENTS, ("recovered",)),
    schema.SaveStarted: (catalog.SAVE_STARTED, ()),
    schema.SaveSealed: (catalog.SAVE_SECONDS, ("seal",)),
    schema.SaveWritten: (catalog.SAVE_SECONDS, ("write",)),
    schema.SaveCommitted: (catalog.SAVES, ("durable", "committed")),
    schema.SaveVerified: (catalog.SAVE_SECONDS, ("verify",)),
    schema.SaveSkipped: (catalog.SAVES_SKIPPED, ("durable", "writer_busy")),
    schema.SaveUnverified: (catalog.SAVES_UNVERIFIED, ("interrupted",)),
    schema.SaveFailed: (catalog.SAVE_FAILURES, ("storage",)),
    schema.CheckpointRejected: (catalog.CHECKPOINT_REJECTED, ("checksum",)),
    schema.CheckpointDeleted: (catalog.CHECKPOINT_DELETIONS, ()),
    schema.HotIntervalChosen: (catalog.HOT_INTERVAL, ()),
    schema.HotSlotsAllocated: (catalog.HOT_SLOTS, ()),
    schema.ReplayDiverged: (catalog.REPLAY_DIVERGENCES, ()),
    schema.PreemptionReceived: (catalog.PREEMPTIONS, ()),
    schema.CapReached: (catalog.CAPS_REACHED, ("consecutive",)),
    schema.BudgetReset: (catalog.BUDGET_RESETS, ()),
    schema.HaltRequested: (catalog.HALT_REQUESTS, ()),
    schema.JournalRepaired: (catalog.JOURNAL_REPAIRS, ()),
    schema.TelemetryDegraded: (catalog.TELEMETRY_DEGRADATIONS, ("journal",)),
    schema.RunFinished: (catalog.RUN_ENDS, ("finished",)),
}
"""Event -> the series that only this event (of all events) is certain to move."""

COUNTED = [cls for cls, (metric, _) in OWN_METRIC.items() if metric.type in (MetricType.COUNTER, MetricType.HISTOGRAM)]
VALUES: dict[str, Any] = {
    "fault": schema.FaultClass.EXCEPTION,
    "reason": {
        schema.SaveSkipped: schema.SkipReason.WRITER_BUSY,
        schema.SaveUnverified: schema.Unverified.INTERRUPTED,
        schema.SaveFailed: schema.SaveFailure.STORAGE,
        schema.CheckpointRejected: schema.RejectReason.CHECKSUM,
    },
    "phase": schema.Phase.EVALUATE,
    "verdict": schema.Verdict.RECOVERED,
    "tier": Tier.DURABLE,
    "cap": schema.Cap.CONSECUTIVE,
    "kind": schema.StepKind.NEW,
    "component": "journal",
    "device": "n1/0",
    "first_step": 11,
    "last_step": 11,
    "kept": [0],
    "trace_id": "0" * 31 + "1",
    "resumed": False,
    "fresh": False,
    "exit_code": 0,
    "every_steps": 3,
}
"""Fields whose value matters; the others are filled in by type."""


def example(cls: type[Event]) -> Event:
    """An event of the class, from its fields' types."""
    hints = typing.get_type_hints(cls)
    values = {}
    for item in dataclasses.fields(cls):
        value = VALUES.get(item.name)
        value = value.get(cls) if isinstance(value, dict) else value
        values[item.name] = _of_type(hints[item.name], item.name) if value is None else value
    return cls(**values)


def _of_type(hint: Any, name: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return next(iter(hint))
    if name.endswith("_ns"):
        return ns(13.0)
    empty: dict[Any, Any] = {int: 7, float: 0.5, str: "text", bool: True}
    return empty.get(hint, {} if typing.get_origin(hint) is dict else [] if typing.get_origin(hint) is list else None)


class Views:
    """The folds, fed with a run that is training after ten steps."""

    def __init__(self) -> None:
        self.ledger, self.tracker = Ledger(), IncidentTracker(RUN)
        self.series = SeriesFold(self.ledger, self.tracker, Limits())
        self.spans = SpanFold(RUN, self.tracker)
        self.finished: list[Any] = []
        self.story, begin_s = begin()
        self.story.steps(begin_s, 12.4, 1, 10)
        for record in self.story.records:
            self.apply(record)

    def apply(self, record: Record) -> None:
        """In the hub's order."""
        self.ledger.apply(record)
        self.tracker.apply(record)
        self.series.apply(record)
        self.finished += self.spans.apply(record)

    def record(self, event: Event) -> Record:
        """The next record of the run, at 14 s."""
        seen = len(self.story.records)
        self.story.add(14.0, event, 1)
        record = self.story.records[seen]
        self.apply(record)
        return record


def test_the_table_names_every_event() -> None:
    """A new event needs a metric of its own here; none may share one with another."""
    assert set(OWN_METRIC) == set(EVENT_TYPES.values())
    assert len({(metric.name, labels) for metric, labels in OWN_METRIC.values()}) == len(OWN_METRIC)


@pytest.mark.parametrize("cls", EVENT_TYPES.values(), ids=lambda cls: cls.__name__)
def test_every_event_moves_its_own_metric(cls: type[Event]) -> None:
    """By one for what is counted; to another value for what is a state. No other event of the table moves it."""
    metric, labels = OWN_METRIC[cls]
    views = Views()
    before = views.series.values.get(metric, *labels)
    views.record(example(cls))
    after = views.series.values.get(metric, *labels)
    assert after == before + 1 if cls in COUNTED else after != before


@pytest.mark.parametrize("cls", COUNTED, ids=lambda cls: cls.__name__)
def test_no_other_event_moves_a_counter_of_its_own(cls: type[Event]) -> None:
    """The counter of an event stands still while every other event happens once."""
    metric, labels = OWN_METRIC[cls]
    views = Views()
    before = views.series.values.get(metric, *labels)
    for other in EVENT_TYPES.values():
        if other is not cls:
            views.apply(dataclasses.replace(views.story.records[-1], event=example(other), time_ns=ns(14.0)))
    assert views.series.values.get(metric, *labels) == before


@pytest.mark.parametrize("cls", EVENT_TYPES.values(), ids=lambda cls: cls.__name__)
def test_every_event_has_a_place_in_a_trace(cls: type[Event]) -> None:
    """It begins or ends a span, or it is a point in the one that is open."""
    views = Views()
    event = example(cls)
    trace_before = views.spans.current_trace
    num_before = len(views.finished)
    views.record(event)
    views.record(schema.RunFinished(exit_code=93, reason="end", step=11))
    points = {point.name for span in views.finished for point in span.points}
    begun = {name for name, handled in _SPANS_OF.items() if cls in handled}
    assert trace_before is not None
    assert cls.__name__ in points or begun, f"{cls.__name__} leaves no trace"
    assert len(views.finished) > num_before
    if begun:
        assert begun & {span.name for span in views.finished}


_SPANS_OF: dict[str, tuple[type[Event], ...]] = {
    "nvrx.generation": (schema.GenerationFormed, schema.StateRestored, schema.StepsCommitted, schema.TeardownFinished),
    "nvrx.detect": (schema.FaultDetected,),
    "nvrx.save": (schema.SaveStarted,),
    "nvrx.run": (
        *(schema.RunFinished, schema.LauncherStopped, schema.IncidentClosed),
        *(schema.SaveSealed, schema.SaveWritten, schema.SaveCommitted, schema.SaveVerified, schema.SaveFailed),
        schema.SaveUnverified,
    ),
    "nvrx.reject": (schema.CheckpointRejected,),
}
"""Span -> events that shape it; the tests of the spans say how."""


@pytest.mark.parametrize("cls", EVENT_TYPES.values(), ids=lambda cls: cls.__name__)
def test_every_event_is_a_line_of_the_log(cls: type[Event]) -> None:
    """Named by its class, with its stamp and fields."""
    views = Views()
    record = views.record(example(cls))
    stream = io.StringIO()
    EventLog(stream, Redactor()).write(record, "a" * 32, "b" * 16)
    line = json.loads(stream.getvalue())
    assert line["event"] == cls.__name__
    assert (line["run"], line["seq"], line["trace_id"]) == (RUN, record.seq, "a" * 32)
    assert {item.name for item in dataclasses.fields(cls) if getattr(record.event, item.name) is not None} <= {
        name.removeprefix("event_") for name in line
    } | {"event"}


def test_a_halt_says_who_asked_for_it() -> None:
    """Operator, brake, a cap, or nobody: a fault that no restart cures."""
    asked = {
        schema.HaltReason.OPERATOR: schema.HaltRequested(reason="x"),
        schema.HaltReason.BRAKE: schema.HaltRequested(reason="x", by=schema.HaltReason.BRAKE),
        schema.HaltReason.CAP: schema.CapReached(cap=schema.Cap.WINDOW, used=5, limit=5),
        schema.HaltReason.INCURABLE: schema.InterruptRaised(ranks=[0]),
    }
    for reason, event in asked.items():
        views = Views()
        views.record(event)
        views.record(schema.RunFinished(exit_code=93, reason="end", step=11))
        halted = {item: views.series.values.get(catalog.HALTED_TIMESTAMP, item) for item in schema.HaltReason}
        assert {item for item, value in halted.items() if value > 0} == {reason}
        views.record(schema.BudgetReset(reason="fixed"))
        assert views.series.values.get(catalog.HALTED_TIMESTAMP, reason) == 0


def test_the_job_is_in_the_phase_of_the_rank_that_is_behind() -> None:
    """Rank 0 loads while rank 1 still builds: the job builds. A fault tears down, then ranks meet again."""
    story = Story()
    story.start(0.0)
    ledger, tracker = Ledger(), IncidentTracker(RUN)
    fold = SeriesFold(ledger, tracker, Limits())

    def phase() -> str:
        entered = {item: fold.values.get(catalog.PHASE_ENTERED, item) for item in schema.Phase}
        return max(entered, key=lambda item: entered[item])

    def play(at_s: float, event: Event, rank: int | None = None) -> str:
        seen = len(story.records)
        story.add(at_s, event, rank)
        for record in story.records[seen:]:
            ledger.apply(record)
            tracker.apply(record)
            fold.apply(record)
        return phase()

    def enter(at_s: float, rank: int, name: schema.Phase) -> str:
        return play(at_s, schema.PhaseEntered(phase=name, entered_ns=ns(at_s)), rank)

    for record in list(story.records):
        ledger.apply(record)
        fold.apply(record)
    assert phase() == "init"
    assert fold.values.get(catalog.RENDEZVOUS_NODES, "missing") == 1
    assert [enter(1.0, 0, schema.Phase.RENDEZVOUS), enter(1.1, 1, schema.Phase.RENDEZVOUS)] == ["init", "rendezvous"]
    assert fold.values.get(catalog.RENDEZVOUS_NODES, "joined") == 1
    assert [enter(1.2, 0, schema.Phase.LOAD), enter(1.3, 1, schema.Phase.REBUILD)] == ["rendezvous", "rebuild"]
    assert enter(1.4, 1, schema.Phase.LOAD) == "load"
    assert [enter(1.5, rank, schema.Phase.FIRST_STEP) for rank in (0, 1)] == ["load", "first_step"]
    assert enter(2.0, 1, schema.Phase.EVALUATE) == "evaluate"
    story.steps(1.5, 3.0, 1, 1)
    for record in story.records[-1:]:
        ledger.apply(record)
        fold.apply(record)
    assert phase() == "step"
    assert play(4.0, example(schema.FaultDetected), 1) == "teardown"
    assert fold.values.get(catalog.RENDEZVOUS_NODES, "missing") == 1
    assert enter(4.1, 0, schema.Phase.TEARDOWN) == "teardown"
    assert play(4.2, schema.TeardownFinished(kept=[0], killed=[1])) == "rendezvous"
    for name in (schema.Phase.RENDEZVOUS, schema.Phase.REBUILD, schema.Phase.LOAD, schema.Phase.FIRST_STEP):
        assert [enter(5.0 + rank / 10, rank, name) for rank in (0, 1)][-1] == name
    assert enter(6.0, 0, schema.Phase.STEP) == "first_step", "rank 1 may take longer, and rank 0 waits for it"
    assert enter(9.0, 1, schema.Phase.STEP) == "step"
    assert fold.values.get(catalog.PHASE_ENTERED, schema.Phase.STEP) == pytest.approx(ns(9.0) / 1e9)


def test_a_fresh_start_with_progress_lost_is_told_apart() -> None:
    """Step 0 of a new run is nothing; step 0 after ten steps is a loss."""
    views = Views()
    assert views.series.values.get(catalog.FRESH_STARTS, "none") == 1
    views.record(schema.StateRestored(step=0, source=schema.RestoredFrom.FRESH, restored_ns=ns(13.5), seconds=0.1))
    assert views.series.values.get(catalog.FRESH_STARTS, "lost") == 1


def test_the_gpus_time_is_the_jobs_times_its_ranks() -> None:
    """Every booked second, in every state, with the world that was there."""
    views = Views()
    values = views.series.values.copy()
    views.series.compute(values, ns(14.0))
    spent = {state: values.get(catalog.TIME_SECONDS, state) for state in schema.LedgerState}
    assert sum(spent.values()) > 12
    assert {state: values.get(catalog.GPU_SECONDS, state) for state in spent} == pytest.approx(
        {state: 2 * value for state, value in spent.items()}
    )
