"""Spans: tree, times, errors and ids, from known journals."""

from __future__ import annotations

import itertools

import pytest

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.schema import (
    FaultClass,
    LauncherStopped,
    Record,
    RestoredFrom,
    SaveFailed,
    SaveFailure,
    SaveUnverified,
    Tier,
    Unverified,
)
from nvrx_sre.goodput.incidents import IncidentTracker, incident_trace_id
from nvrx_sre.telemetry.spans import FinishedSpan, SpanFold, signal_name
from tests.stories import RUN, begin, crash_loop_story, exception_story, fallback_story, lost_launcher_story, ns


def spans_of(records: list[Record]) -> list[FinishedSpan]:
    """Every span that `records` finish, in order."""
    tracker = IncidentTracker(RUN)
    fold = SpanFold(RUN, tracker)
    finished: list[FinishedSpan] = []
    for record in records:
        tracker.apply(record)
        finished += fold.apply(record)
    assert fold.num_finished == len(finished)
    return finished


def named(spans: list[FinishedSpan], name: str) -> list[FinishedSpan]:
    """Spans of one name."""
    return [span for span in spans if span.name == name]


def test_an_incident_is_one_trace_with_a_span_for_each_stage() -> None:
    """Detection, teardown, rendezvous, restore and first step follow each other without a gap."""
    spans = spans_of(exception_story().records)
    (incident,) = named(spans, "nvrx.incident")
    assert incident.trace_id == incident_trace_id(RUN, 1)
    stages = [span for span in spans if span.parent_span_id == incident.span_id]
    assert [span.name for span in stages] == [
        "nvrx.detect",
        "nvrx.teardown",
        "nvrx.rendezvous",
        "nvrx.restore",
        "nvrx.first_step",
    ]
    assert {span.trace_id for span in stages} == {incident.trace_id}
    assert stages[0].start_ns == incident.start_ns == ns(12.9)
    for before, after in itertools.pairwise(stages):
        assert before.end_ns == after.start_ns
    assert stages[-1].end_ns == ns(14.6) == incident.end_ns


def test_a_recovered_run_is_no_error_and_the_failed_generation_is() -> None:
    """`error.type` stands on the generation that failed; the incident links to it."""
    spans = spans_of(exception_story().records)
    (run,) = named(spans, "nvrx.run")
    (incident,) = named(spans, "nvrx.incident")
    failed, good = named(spans, "nvrx.generation")
    assert not run.error
    assert not incident.error
    assert (failed.error, failed.attributes["error.type"]) == (True, "exception")
    assert not good.error
    assert failed.parent_span_id == good.parent_span_id == run.span_id
    assert incident.links == ((failed.trace_id, failed.span_id),)
    assert failed.end_ns == ns(12.9)
    assert (run.start_ns, run.end_ns) == (ns(0.0), ns(15.0))


def test_an_incident_names_its_root_and_signal() -> None:
    """Rank, fault, signal name, verdict and the numbers of the recovery are attributes."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.9, 13.0, FaultClass.KILLED, 1)
    story.torn_down(13.2)
    story.steps(story.form(13.2, 10, RestoredFrom.HOT), 14.6, 11, 11)
    (incident,) = named(spans_of(story.records), "nvrx.incident")
    assert incident.attributes["nvrx.root_rank"] == 1
    assert incident.attributes["nvrx.signal"] == "SIGKILL"
    assert incident.attributes["nvrx.verdict"] == "recovered"
    assert incident.attributes["nvrx.outage_s"] == pytest.approx(2.2)
    assert signal_name(99) == "signal 99"


def test_each_attempt_has_stages_of_its_own() -> None:
    """A fault in the middle of a recovery ends the stage under way as an error."""
    spans = spans_of(crash_loop_story().records)
    (incident,) = named(spans, "nvrx.incident")
    assert incident.error
    assert incident.attributes["error.type"] == "exception"
    assert incident.attributes["nvrx.attempts"] == 3
    assert [span.attributes["nvrx.attempt"] for span in named(spans, "nvrx.detect")] == [1, 2, 3]
    first_steps = named(spans, "nvrx.first_step")
    assert all(span.error for span in first_steps)
    (run,) = named(spans, "nvrx.run")
    assert (run.error, run.attributes["nvrx.exit_code"]) == (True, 93)


def test_a_save_is_a_span_with_its_stages() -> None:
    """Seal, write, commit, verify under the save, the save under the run."""
    spans = spans_of(fallback_story().records)
    save = named(spans, "nvrx.save")[0]
    (run,) = named(spans, "nvrx.run")
    assert save.parent_span_id == run.span_id
    stages = [span for span in spans if span.parent_span_id == save.span_id]
    assert [span.name for span in stages] == ["nvrx.seal", "nvrx.write", "nvrx.commit", "nvrx.verify"]
    assert save.attributes["nvrx.step"] == 10
    assert (stages[0].start_ns, stages[-1].end_ns) == (save.start_ns, save.end_ns) == (ns(12.4), ns(12.8))


def test_a_failed_save_is_an_error_with_its_reason() -> None:
    """The reason is the bounded one, not a message."""
    story = fallback_story()
    cut = next(index for index, item in enumerate(story.records) if type(item.event).__name__ == "SaveWritten")
    story.records = story.records[:cut]
    story.add(12.6, SaveFailed(step=10, tier=Tier.DURABLE, reason=SaveFailure.WRITER_DIED, message="pid 7"))
    (save,) = named(spans_of(story.records), "nvrx.save")
    assert save.attributes["error.type"] == "writer_died"


def test_a_save_that_was_not_verified_is_no_error_but_its_last_stage() -> None:
    """It committed: what was lost is the reading."""
    story = fallback_story()
    cut = next(index for index, item in enumerate(story.records) if type(item.event).__name__ == "SaveVerified")
    story.records = story.records[:cut]
    story.add(12.9, SaveUnverified(step=10, reason=Unverified.INTERRUPTED, message="the node was lost"))
    spans = spans_of(story.records)
    (save,), (verify,) = named(spans, "nvrx.save"), named(spans, "nvrx.verify")
    assert "error.type" not in save.attributes
    assert (verify.attributes["error.type"], verify.end_ns) == ("interrupted", ns(12.9))


def test_c03_a_rejected_checkpoint_is_one_moment_of_its_incident() -> None:
    """Step and bounded reason, no message; once."""
    spans = spans_of(fallback_story().records)
    (incident,) = named(spans, "nvrx.incident")
    (rejected,) = named(spans, "nvrx.reject")
    assert rejected.parent_span_id == incident.span_id
    assert (rejected.start_ns, rejected.end_ns) == (ns(30.0), ns(30.0))
    assert (rejected.attributes["nvrx.step"], rejected.attributes["error.type"]) == (20, "size")


def test_spans_of_a_killed_launcher_are_closed_by_the_next_one() -> None:
    """What it left open ends with its last record; the run goes on."""
    spans = spans_of(lost_launcher_story().records)
    lost = named(spans, "nvrx.generation")[0]
    assert (lost.error, lost.attributes["error.type"]) == (True, "launcher_lost")
    assert lost.end_ns == ns(12.9)
    (run,) = named(spans, "nvrx.run")
    assert (run.start_ns, run.end_ns, run.error) == (ns(0.0), ns(117.0), False)


@pytest.mark.parametrize("exit_code", [ExitCode.PREEMPTED, ExitCode.INTERRUPTED])
def test_a_run_that_is_to_go_on_has_no_span_yet(exit_code: ExitCode) -> None:
    """A collector has its trace without a root; the launcher that ends the run for good sends one span for all."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.add(13.0, LauncherStopped(exit_code=exit_code, reason="preempted"))
    generation = named(spans_of(story.records), "nvrx.generation")[0]
    assert generation.parent_span_id and not named(spans_of(story.records), "nvrx.run")
    story.start(100.0)
    story.finish(117.0)
    (run,) = named(spans_of(story.records), "nvrx.run")
    assert (run.span_id, run.start_ns, run.end_ns) == (generation.parent_span_id, ns(0.0), ns(117.0))


def test_an_open_incident_survives_the_launcher() -> None:
    """Its stage ends with the launcher, the incident with the recovery: one trace over two epochs."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.KILLED, 1)
    story.start(100.0)
    story.steps(story.form(101.0, 10, RestoredFrom.DURABLE), 102.4, 11, 11)
    spans = spans_of(story.records)
    (incident,) = named(spans, "nvrx.incident")
    (teardown,) = named(spans, "nvrx.teardown")
    assert teardown.attributes["error.type"] == "launcher_lost"
    assert (incident.start_ns, incident.end_ns) == (ns(12.5), ns(102.4))
    assert not incident.error


def test_ids_are_unique_and_the_same_on_every_replay() -> None:
    """Deterministic, well-formed, none twice."""
    spans = spans_of(fallback_story().records)
    assert spans == spans_of(fallback_story().records)
    assert len({span.span_id for span in spans}) == len(spans)
    assert all(len(span.trace_id) == 32 and len(span.span_id) == 16 for span in spans)
    parents = {span.parent_span_id for span in spans if span.parent_span_id}
    assert parents <= {span.span_id for span in spans}
