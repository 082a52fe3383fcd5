"""A real run whose one device kills its rank again and again: it goes on without it, and loses no sample."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nvrx_sre.cli.main import main
from nvrx_sre.events.schema import (
    FaultDetected,
    GenerationFormed,
    IncidentClosed,
    RankExcluded,
    SaveVerified,
    StateRestored,
    WorkerStarted,
)
from tests.integration.launched import PATIENT, Ended, live, train

pytestmark = pytest.mark.processes

CAPS = "\n[caps]\nbackoff_s = [0.0]\n"
FAULTED_STEP = 6


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Three ranks; the middle one is killed three times in the same step, two may go on."""
    directory = tmp_path_factory.mktemp("shrinking")
    config = directory / "caps.toml"
    config.write_text(Path(PATIENT[1]).read_text() + CAPS)
    size = ["--nproc", "3", "--min-world-size", "2", "--standbys", "2", "--steps", "12"]
    ended = train(directory / "run", *size, "--config", str(config), "--fault", f"sigkill@1:{FAULTED_STEP}x3")
    assert ended.exit_code == 0, ended.explain()
    return ended


def test_run_finishes_in_the_smaller_world(shrunk: Ended) -> None:
    """The device is named, the incident is a degraded recovery, nothing stays behind."""
    ((record, excluded),) = shrunk.events(RankExcluded)
    assert (record.rank, excluded.world_size) == (1, 2)
    assert [event.world_size for _, event in shrunk.events(GenerationFormed)] == [3, 3, 3, 2]
    (incident,) = [event for _, event in shrunk.events(IncidentClosed)]
    assert (incident.verdict, incident.degraded, incident.attempts) == ("recovered", True, 3)
    assert (shrunk.summary["steps"], shrunk.summary["world_size"]) == (12, 2)
    assert not live(shrunk.pids())


def test_survivors_keep_their_processes_and_devices(shrunk: Ended) -> None:
    """Who was rank 0 and 2 is 0 and 1, in the same processes on the same devices."""
    *_, before, after = [event for _, event in shrunk.events(GenerationFormed)]
    assert after.pids == [before.pids[0], before.pids[2]], shrunk.explain()
    assert after.devices == [before.devices[0], before.devices[2]]


def test_nothing_that_was_sealed_is_lost(shrunk: Ended) -> None:
    """The newest sealed step was saved for the smaller world, and that is what it restored.

    The step before the kill, or the one before that if the kill came while it was still being copied; older by as many
    as were skipped where the launcher was behind.
    """
    sealed = [event for _, event in shrunk.events(FaultDetected)][-1].hot_sealed_step
    skipped = shrunk.summary["saves"]["hot"]["skipped"]
    assert FAULTED_STEP - 2 - skipped <= sealed < FAULTED_STEP, shrunk.explain()
    restored = [event for _, event in shrunk.events(StateRestored)][-1]
    assert (restored.step, restored.source) == (sealed, "durable"), shrunk.explain()
    saved = [event.step for _, event in shrunk.events(SaveVerified)]
    assert sealed in saved
    assert saved[-1] == 12


def test_policy_explains_what_happened(shrunk: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    """Three rows from the journal; the last says which device went, and why."""
    assert main(["policy", "explain", str(shrunk.run_dir), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["fault"], row["attempt"], row["decision"]) for row in rows] == [
        (f"killed@1:{FAULTED_STEP}", attempt, "restart") for attempt in (1, 2, 3)
    ]
    assert rows[-1]["excluded"] == shrunk.events(RankExcluded)[0][1].device
    assert rows[-1]["left"]["device"] == 0
    assert "on without it" in rows[-1]["reason"]


@pytest.mark.slow
def test_smaller_world_trains_the_same_samples(shrunk: Ended, tmp_path: Path) -> None:
    """As an uninterrupted run: no sample lost, none twice."""
    whole = train(tmp_path / "whole", "--nproc", "2", "--standbys", "0", "--steps", "12")
    assert shrunk.summary["samples_digest"] == whole.summary["samples_digest"]


@pytest.mark.slow
def test_next_launcher_starts_without_the_device(shrunk: Ended, tmp_path: Path) -> None:
    """It is excluded until an operator resumes the run. In a copy: the other tests look at how the first one ended."""
    run_dir = shutil.copytree(shrunk.run_dir, tmp_path / "run", symlinks=True)
    started_before = len(shrunk.events(WorkerStarted))
    size = ["--nproc", "3", "--min-world-size", "2", "--standbys", "0", "--steps", "14"]
    again = train(run_dir, *size)
    assert again.exit_code == 0, again.explain()
    assert again.summary["world_size"] == 2
    assert len(again.events(WorkerStarted)) == started_before + 3, "two ranks and a writer"
