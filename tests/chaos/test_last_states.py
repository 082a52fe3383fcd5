"""What a run leaves at its end: the save in flight, an error beside a failing save, a state that is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_sre.checkpoint import discover
from nvrx_sre.events.schema import (
    CapReached,
    CheckpointRejected,
    FaultDetected,
    IncidentClosed,
    RestartDecided,
    RunFinished,
    SaveCommitted,
    SaveFailed,
    SaveFailure,
    SaveVerified,
    StateRestored,
)
from tests.integration.launched import Ended, train

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

COMMON = ("--nproc", "2", "--standbys", "0", "--on-busy", "wait")


def verified(ended: Ended) -> list[int]:
    """Steps of the verified checkpoints that can be restored, newest first; nothing else may lie beside them."""
    found = discover.discover(ended.run_dir, discover.read_fences(ended.run_dir))
    assert not found.interrupted, ended.explain()
    return [item.step for item in found.restorable if item.verified]


def test_c15_the_last_save_is_waited_for(tmp_path: Path) -> None:
    """The last step is a due one and its save outlasts the training: verified before the run is finished, exit 0."""
    ended = train(tmp_path / "run", *COMMON, "--fault", "slow_storage@0:24=1.0s")
    assert ended.exit_code == 0, ended.explain()
    order = [
        (type(record.event).__name__, getattr(record.event, "step", None))
        for record in ended.records
        if isinstance(record.event, SaveVerified | RunFinished)
    ]
    assert order[-2:] == [("SaveVerified", 24), ("RunFinished", 24)], ended.explain()
    assert verified(ended)[0] == 24
    assert "not saved" not in ended.output


def test_c15_a_failing_save_does_not_hide_the_error(tmp_path: Path) -> None:
    """The step after a due save raises, again and again, and that save fails each time: the error is the cause."""
    faults = ("--fault", "no_space@0:16/writex*", "--fault", "exception@1:17x*")
    ended = train(tmp_path / "run", *COMMON, *faults)
    assert ended.exit_code == 93, ended.explain()
    assert {event.fault for _, event in ended.events(FaultDetected)} == {"exception"}, ended.explain()
    [(_, incident)] = ended.events(IncidentClosed)
    assert (incident.fault, incident.step) == ("exception", 17), ended.explain()
    failed = {(event.step, event.reason) for _, event in ended.events(SaveFailed)}
    assert failed == {(16, SaveFailure.NO_SPACE)}, ended.explain()
    [(_, finished)] = ended.events(RunFinished)
    assert "same_fingerprint" in finished.reason and "space" not in finished.reason, ended.explain()
    assert verified(ended) == [8]


def test_c36_poison_is_never_committed_and_retried_once(tmp_path: Path) -> None:
    """One rank's loss is not a number at step 14, each time: one retry from an older checkpoint, then exit 93."""
    ended = train(tmp_path / "run", *COMMON, "--save-every", "4", "--keep", "2", "--fault", "nonfinite@1:14x*")
    assert ended.exit_code == 93, ended.explain()
    assert [event.fault for _, event in ended.events(FaultDetected)] == ["nonfinite"] * 2, ended.explain()
    assert [event.action for _, event in ended.events(RestartDecided)] == ["restart", "stop"], ended.explain()
    assert [event.cap for _, event in ended.events(CapReached)] == ["nonfinite"], ended.explain()
    restored = [event.step for _, event in ended.events(StateRestored)]
    assert restored[0] == 0 and restored[1] < 12, "further back than the newest checkpoint"
    assert not ended.events(CheckpointRejected)
    assert max(event.step for _, event in ended.events(SaveCommitted)) < 14, ended.explain()
    assert len(verified(ended)) >= 2, ended.explain()
