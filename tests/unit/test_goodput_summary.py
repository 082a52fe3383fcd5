"""The summary fold: the keys that `--summary` promises, and their values for known journals."""

from __future__ import annotations

import dataclasses
import json

import pytest

from nvrx_sre.events.schema import (
    FaultInjected,
    LedgerState,
    ReplayDiverged,
    RunStarted,
    SaveCommitted,
    SaveFailed,
    SaveFailure,
    SaveSkipped,
    SaveUnverified,
    SkipReason,
    Tier,
    Unverified,
)
from nvrx_sre.goodput.summary import SummaryFold
from tests.stories import RUN, Story, begin, exception_story, fallback_story


def summarize(story: Story) -> dict[str, object]:
    """The story's summary, as it would be read back from the file."""
    fold = SummaryFold(RUN)
    for record in story.records:
        fold.apply(record)
    answer: dict[str, object] = json.loads(json.dumps(fold.to_dict(story.records[-1].time_ns, dropped=3, spans=4)))
    return answer


def test_summary_has_every_promised_key() -> None:
    """The paragraph of `--summary` is a contract."""
    summary = summarize(exception_story())
    promised = (
        "run exit_code world_size steps high_water redone_steps final_loss loss_digest samples_digest state_digest"
    )
    assert set(promised.split()) | {"goodput", "ledger", "wall_s", "incidents", "saves", "telemetry"} <= set(summary)
    assert set(summary["goodput"]) == {  # type: ignore[call-overload]  # JSON
        "training",
        "durable",
        "infrastructure",
        "effective",
        "checkpoint_efficiency",
    }
    assert set(summary["ledger"]) == set(LedgerState)  # type: ignore[call-overload]  # JSON
    row = summary["incidents"][0]  # type: ignore[index]  # JSON
    wanted = "fault rank step layer attempts detection_s outage_s resume_s rollback_steps verdict"
    assert set(wanted.split()) <= set(row)


def test_summary_of_the_exception_story() -> None:
    """Values by hand."""
    summary = summarize(exception_story())
    assert (summary["run"], summary["exit_code"], summary["world_size"]) == (RUN, 0, 2)
    assert (summary["steps"], summary["high_water"], summary["redone_steps"]) == (11, 11, 0)
    assert (summary["final_loss"], summary["loss_digest"], summary["loss_mismatches"]) == (0.5, "aa", 0)
    assert summary["wall_s"] == pytest.approx(15.0)
    assert sum(summary["ledger"].values()) == pytest.approx(15.0)  # type: ignore[attr-defined]  # JSON
    assert summary["saves"] == {
        "hot": {"committed": 11, "failed": 0, "skipped": 0, "rejected": 0},
        "durable": {"committed": 0, "failed": 0, "skipped": 0, "rejected": 0},
        "blocking_s": 0.5,
    }
    assert summary["telemetry"] == {"events": len(exception_story().records), "dropped": 3, "spans": 4}


def test_summary_counts_redone_steps_and_saves() -> None:
    """Two commits, one of them rejected; fifteen steps done again."""
    summary = summarize(fallback_story())
    assert (summary["redone_steps"], summary["steps"]) == (15, 26)
    assert summary["saves"]["durable"] == {  # type: ignore[index]  # JSON
        "committed": 2,
        "failed": 0,
        "skipped": 0,
        "rejected": 1,
    }


def test_summary_counts_failed_skipped_and_diverged() -> None:
    """Each outcome has its own count."""
    story, _ = begin()
    story.add(3.0, SaveSkipped(step=1, tier=Tier.DURABLE, reason=SkipReason.WRITER_BUSY))
    story.add(3.0, SaveFailed(step=1, tier=Tier.DURABLE, reason=SaveFailure.STORAGE, message=""))
    story.add(3.0, ReplayDiverged(step=1, expected="a", actual="b"))
    summary = summarize(story)
    assert summary["loss_mismatches"] == 1
    assert summary["saves"]["durable"] == {  # type: ignore[index]  # JSON
        "committed": 0,
        "failed": 1,
        "skipped": 1,
        "rejected": 0,
    }
    assert summary["exit_code"] is None


def test_a_commit_that_nobody_read_back_is_counted_once() -> None:
    """As committed: it has not failed."""
    story, _ = begin()
    story.add(3.0, SaveCommitted(step=1, directory="d", size_bytes=1, seconds=1.0, captured_ns=1))
    story.add(4.0, SaveUnverified(step=1, reason=Unverified.INTERRUPTED, message=""))
    durable = summarize(story)["saves"]["durable"]  # type: ignore[index]  # JSON
    assert durable == {"committed": 1, "failed": 0, "skipped": 0, "rejected": 0}


def test_an_open_incident_is_in_the_list() -> None:
    """Open incidents are counted as open, never dropped."""
    story = exception_story()
    fold = SummaryFold(RUN)
    for record in story.records[:30]:
        fold.apply(record)
        if fold.tracker is not None and fold.tracker.open is not None:
            break
    row = fold.to_dict(record.time_ns)["incidents"][0]
    assert (row["verdict"], row["outage_s"]) == ("recovering", None)


def start_with(story: Story, at_s: float, *specs: str) -> None:
    """A launcher of the story starts with this plan."""
    started = next(record.event for record in story.records if isinstance(record.event, RunStarted))
    story.add(at_s, dataclasses.replace(started, faults=list(specs)))


def strike(story: Story, at_s: float, spec: str) -> None:
    """A fault of the plan fires on rank 0."""
    story.add(at_s, FaultInjected(spec=spec, step=3, passes=1, injected_ns=0), 0)


def test_faults_that_never_struck_are_named_in_the_order_of_the_plan() -> None:
    """One that struck, on a rank or in the writer, is none of them; nor is any once all have."""
    story, _ = begin()
    start_with(story, 3.0, "exception@0:900", "hang@0:3", "slow_storage@0:3=0.5s")
    assert summarize(story)["faults_never_struck"] == ["exception@0:900", "hang@0:3", "slow_storage@0:3=0.5s"]
    strike(story, 4.0, "hang@0:3")
    strike(story, 4.0, "slow_storage@0:3=0.5s")
    assert summarize(story)["faults_never_struck"] == ["exception@0:900"]
    strike(story, 5.0, "exception@0:900")
    assert summarize(story)["faults_never_struck"] == []


def test_a_fault_that_struck_under_an_earlier_launcher_has_struck() -> None:
    """The plan in force is the newest launcher's; what fired stays fired."""
    story, _ = begin()
    start_with(story, 3.0, "sigterm@0:3", "hang@0:5")
    strike(story, 4.0, "sigterm@0:3")
    start_with(story, 6.0, "sigterm@0:3", "hang@0:9")
    assert summarize(story)["faults_never_struck"] == ["hang@0:9"]
