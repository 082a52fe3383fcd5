"""Saves by the ranks, seen from the launcher: events like any other save's, fences, a generation that is left."""

from __future__ import annotations

from typing import Any

import pytest

from nvrx_sre.events import messages as wire
from nvrx_sre.events import schema
from nvrx_sre.launcher import commands as c
from nvrx_sre.testing.checkers import check_safety
from nvrx_sre.testing.driven import DrivenMachine

SAVE_EVENTS = (
    schema.SaveStarted,
    schema.SaveWritten,
    schema.SaveCommitted,
    schema.SaveVerified,
    schema.SaveFailed,
)


def begun() -> DrivenMachine:
    """A machine whose ranks have told that no slot can hold their state."""
    driven = DrivenMachine()
    driven.begin()
    tell(driven, 0, "begun", message="not captured in memory: model (FSDP1 wrapper)")
    return driven


def tell(driven: DrivenMachine, step: int, *stages: str, **changes: Any) -> None:
    """Rank 0 reports stages of the save of a step."""
    told: dict[str, Any] = {"generation": driven.machine.generation, "reason": "", "message": "", **changes}
    for stage in stages:
        message = wire.RankSave(
            step=step,
            stage=stage,
            directory=f"step-{step:08d}",
            size_bytes=7,
            seconds=0.5,
            mono_ns=driven.now_ns,
            **told,
        )
        driven.say(driven.child_of(0), message)


def report(driven: DrivenMachine, *steps: int) -> None:
    """Both ranks report steps that nobody captures."""
    for step in steps:
        driven.step(step, slot=-1)


def test_a_save_becomes_the_events_of_any_other() -> None:
    """Started to verified, durable at the end of the run, and the writer deletes what is surplus."""
    driven = begun()
    report(driven, 1, 2)
    tell(driven, 2, "started", "written", "committed", "verified")
    assert driven.order(*SAVE_EVENTS, c.RetainSaves) == [
        *("SaveStarted", "SaveWritten", "SaveCommitted", "SaveVerified", "RetainSaves")
    ]
    (verified,) = driven.events(schema.SaveVerified)
    assert (verified.step, verified.directory) == (2, "step-00000002")
    assert not driven.events(schema.SaveSkipped)
    assert check_safety(driven.records) == []


def test_no_hot_tier_is_told_once_a_launcher() -> None:
    """As an interval of 0, with the names; the next generation finds the same."""
    driven = begun()
    tell(driven, 0, "begun", message="again")
    (chosen,) = driven.events(schema.HotIntervalChosen)
    assert chosen.every_steps == 0 and "model (FSDP1 wrapper)" in chosen.reason


@pytest.mark.parametrize("stages", [("started",), ("started", "written"), ("started", "written", "committed")])
def test_a_save_whose_generation_is_left_goes_no_further(stages: tuple[str, ...]) -> None:
    """It has failed, or is unverified if it had committed; what the old generation still says of it is not heard."""
    driven = begun()
    report(driven, 1, 2)
    tell(driven, 2, *stages)
    driven.raise_in(1, 3)
    tell(driven, 2, "verified")
    (ended,) = driven.events(schema.SaveUnverified if "committed" in stages else schema.SaveFailed)
    assert (ended.step, ended.reason) == (2, "interrupted")
    assert not driven.events(schema.SaveVerified)
    assert len(driven.events(schema.SaveFailed)) == ("committed" not in stages)


def test_a_failure_is_told_with_its_reason() -> None:
    """Training goes on, and the next save is an ordinary one."""
    driven = begun()
    report(driven, 1, 2)
    tell(driven, 2, "started")
    tell(driven, 2, "failed", reason="no_space", message="disk full")
    report(driven, 3, 4)
    tell(driven, 4, "started", "written", "committed", "verified")
    (failed,) = driven.events(schema.SaveFailed)
    assert (failed.reason, failed.message) == (schema.SaveFailure.NO_SPACE, "disk full")
    assert [event.step for event in driven.events(schema.SaveVerified)] == [4]


def test_the_end_of_the_run_knows_what_is_durable() -> None:
    """The last step is saved before the ranks finish, so the end does not say that it is lost."""
    driven = begun()
    report(driven, 1, 2)
    tell(driven, 2, "started", "written", "committed", "verified")
    for rank in range(2):
        finished = wire.Finished(generation=1, step=2, result={}, mono_ns=driven.now_ns)
        driven.say(driven.child_of(rank), finished)
    driven.wait(60.0)
    (ended,) = driven.events(schema.RunFinished)
    assert ended.reason == "finished"
