"""Incidents against hand-written journals with known answers."""

from __future__ import annotations

import dataclasses
import math

import pytest

from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events.schema import (
    FaultClass,
    IncidentClosed,
    Layer,
    ProgressResumed,
    RankReplaced,
    Record,
    RestoredFrom,
    TeardownFinished,
    Verdict,
)
from nvrx_sre.goodput.incidents import Incident, IncidentTracker, incident_trace_id
from tests.stories import RUN, Story, begin, crash_loop_story, exception_story, fallback_story, ns


def track(records: list[Record], caps: CapLimits | None = None) -> IncidentTracker:
    """A tracker that has seen `records`."""
    tracker = IncidentTracker(RUN, caps)
    for record in records:
        tracker.apply(record)
    return tracker


def only(story: Story) -> Incident:
    """The story's single closed incident."""
    tracker = track(story.records)
    assert tracker.open is None
    assert len(tracker.closed) == 1
    return tracker.closed[0]


def test_exception_incident_has_the_defined_numbers() -> None:
    """Detection, outage, resume, rollback, root and layer of an in-process recovery."""
    incident = only(exception_story())
    assert (incident.fault, incident.rank, incident.step) == (FaultClass.EXCEPTION, 1, 11)
    assert (incident.layer, incident.attempts, incident.verdict) == (Layer.IN_PROCESS, 1, Verdict.RECOVERED)
    assert incident.detection_s == pytest.approx(0.1)
    assert incident.outage_s == pytest.approx(14.6 - 12.4)
    assert incident.resume_s == pytest.approx(13.6 - 12.9)
    assert incident.rollback_steps == 0
    assert not incident.degraded


def test_fallback_incident_counts_redone_steps_into_the_outage() -> None:
    """The outage ends with the first step above H, not with the first step."""
    incident = only(fallback_story())
    assert incident.layer is Layer.WORKER
    assert incident.rollback_steps == 15
    assert incident.outage_s == pytest.approx(46.4 - 27.4)
    assert incident.resume_s == pytest.approx(30.4 - 27.5)
    assert incident.degraded, "an older checkpoint and a rollback beyond the save interval"
    assert incident.rank is None


def test_follow_ups_are_emitted_once_and_in_order() -> None:
    """ProgressResumed, then IncidentClosed, each with the root as its rank."""
    emitted = [
        (record.event, record.rank)
        for record in exception_story().records
        if isinstance(record.event, (ProgressResumed, IncidentClosed))
    ]
    assert [type(event) for event, _ in emitted] == [ProgressResumed, IncidentClosed]
    assert [rank for _, rank in emitted] == [1, 1]
    resumed, closed = emitted[0][0], emitted[1][0]
    assert isinstance(resumed, ProgressResumed)
    assert isinstance(closed, IncidentClosed)
    assert (resumed.step, resumed.committed_ns) == (11, ns(14.6))
    assert closed.trace_id == incident_trace_id(RUN, 1)
    assert closed.opened_ns == ns(12.9)


def test_a_fault_during_recovery_is_a_further_attempt_of_the_same_incident() -> None:
    """One incident, two attempts; the highest layer used; the outage from the first fault on."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.EXCEPTION, 1)
    story.torn_down(12.7)
    story.fault(12.8, 12.9, FaultClass.KILLED, 0, layer=Layer.WORKER)
    story.torn_down(13.0)
    again_s = story.form(13.0, 10, RestoredFrom.HOT)
    story.steps(again_s, 14.4, 11, 11)
    incident = only(story)
    assert (incident.attempts, incident.layer, incident.rank) == (2, Layer.WORKER, 1)
    assert incident.outage_s == pytest.approx(2.0)


def test_crash_loop_is_seen_while_open_and_ends_exhausted() -> None:
    """Three attempts without progress: crash_loop while it lasts, exhausted when the policy stops."""
    story = crash_loop_story()
    seen = []
    tracker = IncidentTracker(RUN)
    for record in story.records:
        tracker.apply(record)
        if tracker.open is not None:
            seen.append(tracker.open.verdict)
    assert Verdict.CRASH_LOOP in seen
    assert only(story).verdict is Verdict.EXHAUSTED
    assert only(story).attempts == 3
    assert only(story).outage_s is None


def test_progress_must_survive_the_same_fault_again() -> None:
    """A step above H that nothing holds does not close the incident; a sealed one does."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.EXCEPTION, 1)
    story.torn_down(12.7)
    again_s = story.form(12.7, 10, RestoredFrom.HOT)
    story.steps(again_s, 14.1, 11, 11, hot_sealed_step=10)
    tracker = track(story.records)
    assert tracker.open is not None
    assert tracker.open.outage_s == pytest.approx(1.7)
    story.steps(14.1, 15.1, 12, 12)
    assert only(story).outage_s == pytest.approx(1.7), "the outage ended with the first step above H"


def test_a_verified_durable_commit_confirms_progress_without_a_hot_tier() -> None:
    """Without hot captures the incident waits for the next verified save."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10, hot_sealed_step=-1)
    story.fault(12.5, 12.6, FaultClass.EXCEPTION, 1)
    story.torn_down(12.7)
    again_s = story.form(12.7, 0, RestoredFrom.FRESH)
    story.steps(again_s, 23.1, 1, 10, hot_sealed_step=-1)
    story.steps(23.1, 24.1, 11, 11, hot_sealed_step=-1)
    assert track(story.records).open is not None
    story.save(24.2, 11)
    assert only(story).verdict is Verdict.RECOVERED


def test_a_nonfinite_loss_is_no_progress() -> None:
    """A step above H with a NaN loss leaves the incident open."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.NONFINITE, 1)
    story.torn_down(12.7)
    again_s = story.form(12.7, 10, RestoredFrom.HOT)
    story.steps(again_s, 14.1, 11, 11, loss=math.nan)
    tracker = track(story.records)
    assert tracker.open is not None
    assert tracker.open.outage_s is None


def test_a_preempted_launcher_leaves_the_incident_open() -> None:
    """The next launcher goes on with it; only a stop for good ends it."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.EXCEPTION, 1)
    story.finish(12.8, exit_code=143)
    assert track(story.records).open is not None
    story.start(100.0)
    again_s = story.form(101.0, 10, RestoredFrom.HOT)
    story.steps(again_s, 102.4, 11, 11)
    assert only(story).outage_s == pytest.approx(90.0)


def test_an_incident_after_the_last_step_ends_with_the_run() -> None:
    """A fault in the final drain cannot be followed by a step: recovered, without an outage."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.EXCEPTION, 1)
    story.torn_down(12.7)
    story.form(12.7, 10, RestoredFrom.HOT)
    story.finish(13.5)
    incident = only(story)
    assert (incident.verdict, incident.outage_s) == (Verdict.RECOVERED, None)


def test_often_enough_recovered_is_flapping() -> None:
    """The fifth recovered fault within the window is flapping, one outside the window is not counted."""
    story, at_s = begin()
    story.steps(at_s, at_s + 1, 1, 1)
    for number in range(5):
        fault_s = 4.0 + 10 * number
        story.fault(fault_s, fault_s + 0.1, FaultClass.EXCEPTION, 1)
        story.torn_down(fault_s + 0.2)
        again_s = story.form(fault_s + 0.2, number + 1, RestoredFrom.HOT)
        story.steps(again_s, again_s + 1, number + 2, number + 2)
    verdicts = [item.verdict for item in track(story.records).closed]
    assert verdicts == [Verdict.RECOVERED] * 4 + [Verdict.FLAPPING]
    wide = track(story.records, CapLimits(flapping_window_s=30.0)).closed
    assert {item.verdict for item in wide} == {Verdict.RECOVERED}


def test_the_first_step_above_the_high_water_mark_inside_an_aggregate_is_placed_evenly() -> None:
    """An aggregate of ten steps that crosses H at its third: three tenths of its time."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.EXCEPTION, 1)
    story.torn_down(12.7)
    again_s = story.form(12.7, 8, RestoredFrom.HOT)
    story.steps(again_s, again_s + 10.0, 9, 18)
    assert only(story).outage_s == pytest.approx(again_s + 3.0 - 12.4)


def test_a_step_that_a_restore_proves_is_no_progress() -> None:
    """Step 10 was executed before the fault and its report lost: the outage lasts until step 11, rollback is 0."""
    story, begin_s = begin()
    story.steps(begin_s, 11.4, 1, 9)
    story.fault(12.5, 12.6, FaultClass.EXCEPTION, 1)
    story.torn_down(12.7)
    story.steps(12.9, 12.9, 10, 10, proven_by_restore=True, hot_sealed_step=-1, tokens=0, loss=None)
    assert track(story.records).open is not None
    again_s = story.form(12.9, 10, RestoredFrom.HOT)
    story.steps(again_s, 14.4, 11, 11)
    incident = only(story)
    assert incident.outage_s == pytest.approx(14.4 - 11.4)
    assert incident.resume_s == pytest.approx(again_s - 12.5)
    assert (incident.first_high_water, incident.rollback_steps) == (10, 0)


def test_a_smaller_world_marks_the_incident_degraded() -> None:
    """Going on with fewer ranks is a recovery, but not a full one."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.NODE_LOST, 1)
    story.torn_down(12.7)
    again_s = story.form(12.7, 10, RestoredFrom.HOT, world=1)
    story.steps(again_s, 14.4, 11, 11)
    assert only(story).degraded


def test_a_rank_that_had_to_be_replaced_lifts_the_layer() -> None:
    """Decided in process, but a rank did not leave its native call: the recovery took layer worker."""
    records = []
    for record in exception_story().records:
        if isinstance(record.event, TeardownFinished):
            replaced = RankReplaced(old_pid=1, new_pid=2, warm=True)
            records.append(dataclasses.replace(record, event=replaced, rank=1))
        records.append(record)
    incident = track(records).closed[0]
    assert (incident.layer, incident.verdict) == (Layer.WORKER, Verdict.RECOVERED)
