"""What holds for every journal, however odd: sums, monotonicity, replay equal to live."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_sre.events.schema import (
    Action,
    FaultClass,
    Layer,
    Phase,
    PreemptionReceived,
    Record,
    RestoredFrom,
    StepsCommitted,
)
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.goodput.summary import SummaryFold
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import MetricType
from nvrx_sre.telemetry.metrics import MetricsFold
from nvrx_sre.telemetry.spans import FinishedSpan, SpanFold
from nvrx_sre.testing.clock import ManualClock
from tests.stories import RUN, Story, ns

ACTIONS = st.sampled_from(
    ["steps", "fault", "torn_down", "form", "phase", "save", "reject", "preempt", "stop", "launcher", "backoff"]
)
SCRIPTS = st.lists(
    st.tuples(ACTIONS, st.floats(0.0, 50.0), st.floats(0.0, 60.0), st.sampled_from(list(FaultClass))), max_size=40
)


def build(script: list[tuple[str, float, float, FaultClass]], *, live: bool) -> list[Record]:
    """A journal from arbitrary actions; `before` reaches back from the record's time, in any direction of sense."""
    story = Story(live=live)
    story.start(0.0)
    at_s = 0.0
    for action, wait_s, before_s, fault in script:
        at_s += wait_s
        _act(story, action, at_s, before_s, fault)
    return story.records


def _act(story: Story, action: str, at_s: float, before_s: float, fault: FaultClass) -> None:
    first = story.high_water + 1 if before_s < 30 else max(1, story.high_water - 3)
    actions = {
        "steps": lambda: story.steps(at_s - before_s, at_s - before_s / 2, first, first + 2, data_s=before_s),
        "fault": lambda: story.fault(at_s - before_s, at_s, fault, 1, layer=Layer.WORKER),
        "torn_down": lambda: story.torn_down(at_s),
        "form": lambda: story.form(at_s, max(0, story.high_water - 2), RestoredFrom.HOT),
        "phase": lambda: story.phase(at_s, list(Phase)[int(before_s) % len(Phase)]),
        "save": lambda: story.save(at_s, story.high_water),
        "reject": lambda: story.reject(at_s, story.high_water),
        "preempt": lambda: story.add(at_s, PreemptionReceived(signal=15, by_person=False)),
        "stop": lambda: story.finish(at_s, exit_code=[0, 75, 93, 143][int(before_s) % 4]),
        "launcher": lambda: story.start(at_s),
        "backoff": lambda: story.decide(at_s, Layer.WORKER, Action.RESTART, backoff_s=before_s),
    }
    actions[action]()


class Views:
    """Every fold, wired as the hub does it."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.tracker = IncidentTracker(RUN)
        self.summary = SummaryFold(RUN, self.ledger, self.tracker)
        self.clock = ManualClock(start_ns=0, wall_offset_ns=ns(0.0))
        self.metrics = MetricsFold(RUN, self.ledger, self.tracker, self.clock)
        self.spans = SpanFold(RUN, self.tracker)
        self.finished: list[FinishedSpan] = []

    def apply(self, record: Record) -> None:
        """One record through all views."""
        if record.time_ns > self.clock.wall_ns():
            self.clock.advance_to(record.time_ns - ns(0.0))
        self.ledger.apply(record)
        self.tracker.apply(record)
        self.summary.apply(record)
        self.metrics.apply(record)
        self.finished += self.spans.apply(record)

    def counters(self) -> dict[tuple[str, str], float]:
        """Every counter's and histogram's series with its value."""
        return {
            (sample.name, str(sorted(sample.labels.items()))): sample.value
            for family in self.metrics.collect()
            for sample in family.samples
            if (metric := catalog.metric_of(sample.name)) is not None
            and metric.type in (MetricType.COUNTER, MetricType.HISTOGRAM)
        }


@settings(max_examples=60, deadline=None)
@given(SCRIPTS)
def test_states_always_sum_to_wall_time_and_never_fall(script: list[tuple[str, float, float, FaultClass]]) -> None:
    """W = booked + open at every record; no state and no wall reading ever falls."""
    ledger, before, wall_before = Ledger(), None, 0.0
    for record in build(script, live=True):
        ledger.apply(record)
        spent = ledger.booked()
        wall_s, open_s = ledger.wall_s(record.time_ns), ledger.open_s(record.time_ns)
        assert abs(wall_s - sum(spent.values()) - open_s) < 1e-6
        assert open_s >= 0.0
        assert wall_s >= wall_before - 1e-9
        assert before is None or all(spent[state] >= before[state] for state in spent)
        before, wall_before = spent, wall_s


@settings(max_examples=40, deadline=None)
@given(SCRIPTS)
def test_how_many_ranks_do_what_is_counted_right(script: list[tuple[str, float, float, FaultClass]]) -> None:
    """The counts that are kept from record to record are those of a look at every rank."""
    ledger = Ledger()
    for record in build(script, live=True):
        ledger.apply(record)
        assert ledger._num_by_activity() == Counter(ledger._activities.values())
        assert 0 not in ledger._num_by_activity().values()


@settings(max_examples=25, deadline=None)
@given(SCRIPTS)
def test_counters_never_fall_and_series_never_change(script: list[tuple[str, float, float, FaultClass]]) -> None:
    """Scraped after each record: the same series, none lower than before."""
    views = Views()
    before = views.counters()
    for record in build(script, live=True):
        views.apply(record)
        now = views.counters()
        assert all("('node', " in series for _, series in now.keys() - before.keys()), "more than a node appeared"
        assert all(now[series] >= before.get(series, 0) for series in now), "a counter fell"
        before = now


@settings(max_examples=40, deadline=None)
@given(SCRIPTS)
def test_a_replay_equals_the_live_folds(script: list[tuple[str, float, float, FaultClass]]) -> None:
    """Folding the journal again, in one go, gives the same summary, metrics and spans."""
    records = build(script, live=True)
    live, replayed = Views(), Views()
    for record in records:
        live.apply(record)
        live.counters()  # a scrape changes nothing
    for record in records:
        replayed.apply(record)
    assert replayed.summary.to_dict(records[-1].time_ns) == live.summary.to_dict(records[-1].time_ns)
    assert replayed.counters() == live.counters()
    assert replayed.finished == live.finished


@settings(max_examples=40, deadline=None)
@given(SCRIPTS)
def test_follow_ups_change_no_state_when_they_come_back(script: list[tuple[str, float, float, FaultClass]]) -> None:
    """A journal without the derived events gives the same incidents as one with them."""
    with_events, without = IncidentTracker(RUN), IncidentTracker(RUN)
    for record in build(script, live=True):
        with_events.apply(record)
    for record in build(script, live=False):
        without.apply(record)
    assert list(with_events.closed) == list(without.closed)
    assert with_events.open == without.open


@settings(max_examples=40, deadline=None)
@given(SCRIPTS)
def test_every_incident_ends_or_stays_visible_and_span_ids_are_unique(
    script: list[tuple[str, float, float, FaultClass]],
) -> None:
    """Opened = closed + open; every finished span has an id of its own and ends after it began."""
    views = Views()
    for record in build(script, live=True):
        views.apply(record)
    assert views.tracker.num_opened == views.tracker.num_closed + (views.tracker.open is not None)
    assert all(span.end_ns >= span.start_ns for span in views.finished)
    incidents = [span.span_id for span in views.finished if span.name == "nvrx.incident"]
    assert len(incidents) == len(set(incidents)) == views.tracker.num_closed


def test_steps_of_a_script_are_in_the_schema() -> None:
    """The generator really produces what it says."""
    records = build([("form", 1.0, 0.0, FaultClass.HANG), ("steps", 5.0, 2.0, FaultClass.HANG)], live=True)
    assert any(isinstance(record.event, StepsCommitted) for record in records)
