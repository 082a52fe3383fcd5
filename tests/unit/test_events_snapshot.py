"""Snapshots of folds: put back into fresh ones, they go on as if they had seen everything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events import snapshot
from nvrx_sre.events.journal import Snapshot
from nvrx_sre.events.schema import Record, RunFinished
from nvrx_sre.events.snapshot import Snapshotted, fits, put_back, shape, take
from nvrx_sre.launcher.past import LauncherFolds
from nvrx_sre.telemetry.folded import FoldedRun
from nvrx_sre.testing.clock import ManualClock
from tests.stories import RUN, STORIES, crash_loop_story, ns


class Both:
    """The launcher's folds and telemetry's, as a snapshot holds them."""

    def __init__(self) -> None:
        self.views = FoldedRun(RUN, clock=ManualClock(wall_offset_ns=ns(500.0)))
        self.launcher = LauncherFolds()
        self.spans: list[dict[str, Any]] = []

    @property
    def parts(self) -> dict[str, Snapshotted]:
        """All folds by name."""
        return self.views.parts | self.launcher.parts

    def apply(self, records: list[Record]) -> None:
        """In the order of the launcher."""
        for record in records:
            self.launcher.apply(record)
            self.spans += [span.to_dict() for span in self.views.apply(record)]

    def answer(self) -> dict[str, Any]:
        """All that anybody reads of the folds."""
        samples = {
            f"{item.name}{sorted(item.labels.items())}": repr(item.value)
            for family in self.views.metrics.collect()
            for item in family.samples
        }
        history = {name: getattr(self.launcher.history, name) for name in self.launcher.history.STATE}
        past = vars(self.launcher.past)
        return {"samples": samples, "summary": self.views.summary.to_dict(ns(500.0)), "history": history, "past": past}


def through_json(value: dict[str, Any]) -> dict[str, Any]:
    """What the journal does to it."""
    result: dict[str, Any] = json.loads(json.dumps(value))
    return result


@pytest.mark.parametrize("name", sorted(STORIES))
def test_a_snapshot_and_the_rest_equal_the_whole(name: str) -> None:
    """Cut after every ninth record: metrics, summary, incidents, history and the spans from there on are the same."""
    records = STORIES[name]().records
    whole = Both()
    whole.apply(records)
    before = Both()
    for cut in range(9, len(records), 9):
        before.apply(records[cut - 9 : cut])
        after = Both()
        stored = through_json(take(before.parts))
        assert fits(after.parts, stored)
        put_back(after.parts, stored)
        after.apply(records[cut:])
        assert after.answer() == whole.answer(), f"cut after record {cut}"
        assert before.spans + after.spans == whole.spans


def test_a_snapshot_does_not_change_with_what_it_was_taken_of() -> None:
    """It is encoded when it is taken, not when it is written."""
    records = crash_loop_story().records
    folds = Both()
    folds.apply(records[:20])
    taken = take(folds.parts)
    kept = json.dumps(taken)
    folds.apply(records[20:])
    assert json.dumps(taken) == kept


def test_a_snapshot_of_another_shape_does_not_fit() -> None:
    """A fold that stores something else, or a fold that is missing."""
    folds = Both()
    taken = take(folds.parts)
    changed = taken | {"ledger": {**taken["ledger"], "shape": "other"}}
    assert fits(folds.parts, taken)
    assert not fits(folds.parts, changed)
    assert not fits(folds.parts, {name: item for name, item in taken.items() if name != "spans"})
    assert fits(FoldedRun(RUN).parts, taken)

    class Old(Snapshotted):
        STATE = ("_one",)
        _one = 1

    class New(Snapshotted):
        STATE = ("_one", "_two")
        _one, _two = 1, 2

    assert shape(Old()) != shape(New())


def test_a_reason_of_before_a_start_afresh_took_it_away_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fold kept it through `--start-fresh` up to version 2: such a snapshot says what its records do not."""
    folds = LauncherFolds()
    end = RunFinished(exit_code=ExitCode.DO_NOT_RESTART, reason="halted", step=3, result={})
    folds.apply(Record(run=RUN, epoch=1, generation=1, rank=None, seq=1, time_ns=1, event=end))
    monkeypatch.setattr(snapshot, "SNAPSHOT_VERSION", 2)
    old = take(folds.parts)
    monkeypatch.undo()
    assert folds.past.stop_reason == "halted" and fits(folds.parts, take(folds.parts))
    assert not fits(LauncherFolds().parts, old)


def test_a_damaged_snapshot_is_a_value_error() -> None:
    """Never anything else: the caller reads the journal from its beginning."""
    folds = Both()
    taken = through_json(take(folds.parts))
    taken["ledger"]["state"]["_booked_ns"] = ["dict", 3]
    with pytest.raises(ValueError, match="not a snapshot"):
        folds.views.replay(Snapshot(last=(1, 1), folds=taken), [])


def test_what_cannot_be_stored_is_found_when_it_is_taken() -> None:
    """No silent loss: an object of an unknown class raises."""

    class Fold(Snapshotted):
        STATE = ("_thing",)
        _thing = object()

    with pytest.raises(TypeError, match="object cannot be stored"):
        take({"fold": Fold()})
