"""A process dies or the storage refuses in each stage of a durable save: the run ends with the unfaulted digests.

One launched run strikes every stage in turn: a save is due each eight steps, `--on-busy wait` makes each of them
happen, and each has its fault.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nvrx_sre.checkpoint import discover
from nvrx_sre.events.schema import (
    CheckpointDeleted,
    FaultDetected,
    FaultInjected,
    LeaderLost,
    RankReplaced,
    Record,
    SaveCommitted,
    SaveFailed,
    SaveFailure,
    SaveUnverified,
    SaveVerified,
    StateRestored,
    WorkerExited,
    WorkerStarted,
)
from nvrx_sre.faults.plan import SAVE_STAGES
from tests.integration.launched import Ended, finish, start, train, train_arguments, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

EVERY = 8
STEPS = EVERY * (len(SAVE_STAGES) + 4)
"""The last stage, retention, is struck by the first delete after `step_of` it; then two more saves are due."""
DIGESTS = ("loss_digest", "samples_digest", "state_digest")
COMMON = ("--nproc", "2", "--steps", str(STEPS), "--save-every", str(EVERY), "--keep", "2", "--on-busy", "wait")
CAPTURED_WHEN_DUE = ("--hot-every", str(EVERY))
"""Each due save finds a free slot: of those that may hold a step not yet sealed, as far as the ranks know, there is
the last due one at most. With a capture each step a slow launcher leaves none, and the save is of the step after."""


@pytest.fixture(scope="module")
def unfaulted(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The run that every other must equal."""
    ended = train(tmp_path_factory.mktemp("plain") / "run", *COMMON, "--standbys", "0")
    assert ended.exit_code == 0, ended.explain()
    return ended


def step_of(stage: str) -> int:
    """Step whose save is struck at `stage`: late enough that retention has something to delete."""
    return EVERY * (SAVE_STAGES.index(stage) + 2)


def each_stage(kind: str) -> list[str]:
    """Arguments that strike every stage once, `kind` with its parameter."""
    name, equals, parameter = kind.partition("=")
    return [
        word for stage in SAVE_STAGES for word in ("--fault", f"{name}@0:{step_of(stage)}{equals}{parameter}/{stage}")
    ]


def assert_healthy(unfaulted: Ended, ended: Ended) -> None:
    """Exit 0, the digests of the unfaulted run, two verified checkpoints, the last step among them, no attempt left."""
    assert ended.exit_code == 0, ended.explain()
    differing = [name for name in DIGESTS if ended.summary[name] != unfaulted.summary[name]]
    assert not differing, ended.explain()
    found = discover.discover(ended.run_dir, discover.read_fences(ended.run_dir))
    verified = [item.step for item in found.restorable if item.verified]
    assert verified[0] == STEPS and len(verified) >= 2, ended.explain()
    assert (found.interrupted, found.rejected) == ([], []), ended.explain()


def struck(ended: Ended) -> set[str]:
    """Stages at which a fault of the plan was announced."""
    return {event.spec.rpartition("/")[2] for _, event in ended.events(FaultInjected)}


def test_c08_c09_refusals_in_every_stage_cost_saves_only(unfaulted: Ended, tmp_path: Path) -> None:
    """No space at each stage, the last tiny writes included: no fault of the run, the next due save is whole.

    A refused delete is made up for by a later one.
    """
    ended = train(tmp_path / "run", *COMMON, *CAPTURED_WHEN_DUE, "--standbys", "0", *each_stage("no_space"))
    assert_healthy(unfaulted, ended)
    assert struck(ended) == set(SAVE_STAGES), ended.explain()
    failed = {event.step: event.reason for _, event in ended.events(SaveFailed)}
    assert failed == {step_of(stage): SaveFailure.NO_SPACE for stage in SAVE_STAGES if stage != "retention"}
    assert not ended.events(FaultDetected), ended.explain()
    assert ended.events(CheckpointDeleted), ended.explain()


def test_an_io_error_in_every_stage_costs_saves_only(unfaulted: Ended, tmp_path: Path) -> None:
    """EIO: the reason is `storage`, a commit that could not be read back is not counted as verified."""
    ended = train(tmp_path / "run", *COMMON, "--standbys", "0", *each_stage("io_error"))
    assert_healthy(unfaulted, ended)
    assert struck(ended) == set(SAVE_STAGES), ended.explain()
    assert {event.reason for _, event in ended.events(SaveFailed)} == {SaveFailure.STORAGE}
    assert step_of("verify") not in [event.step for _, event in ended.events(SaveVerified)]


def test_a_writer_killed_in_every_stage_is_replaced(unfaulted: Ended, tmp_path: Path) -> None:
    """SIGKILL of the writer: each save that had not committed is written again by the next writer."""
    ended = train(tmp_path / "run", *COMMON, "--standbys", "0", *each_stage("writer_kill"))
    assert_healthy(unfaulted, ended)
    assert struck(ended) == set(SAVE_STAGES), ended.explain()
    deaths = [event for _, event in ended.events(WorkerExited) if event.role == "writer" and event.signal == 9]
    assert len(deaths) == len(SAVE_STAGES), ended.explain()
    assert not ended.events(FaultDetected), "the ranks never noticed"
    # Which saves these are depends on how soon there is another writer, and a delete may be struck beside one more.
    again = [event.step for _, event in ended.events(SaveFailed) if event.message == "not committed"]
    assert len(again) >= len(("plan", "write", "fsync", "manifest", "rename")), ended.explain()
    assert set(again) <= {event.step for _, event in ended.events(SaveCommitted)}, ended.explain()


def test_a_launcher_killed_in_every_stage_is_followed(unfaulted: Ended, tmp_path: Path) -> None:
    """SIGKILL of the launcher, which takes everybody along: each start goes on, and says how the open save ended."""
    arguments = train_arguments(tmp_path / "run", *COMMON, "--standbys", "0", *each_stage("launcher_kill"))
    for _ in SAVE_STAGES:
        killed = finish(start(arguments), tmp_path / "run")
        assert killed.exit_code == -signal.SIGKILL, killed.explain()
        found = discover.discover(killed.run_dir, discover.read_fences(killed.run_dir))
        assert found.restorable or not killed.events(SaveVerified), killed.explain()
    ended = finish(start(arguments), tmp_path / "run")
    assert ended.exit_code == 0, ended.explain()
    assert ended.summary["state_digest"] == unfaulted.summary["state_digest"], ended.explain()
    assert struck(ended) == set(SAVE_STAGES), ended.explain()
    assert len(ended.events(LeaderLost)) == len(SAVE_STAGES)
    interrupted = [event.step for _, event in ended.events(SaveFailed) if event.reason is SaveFailure.INTERRUPTED]
    unverified = [event.step for _, event in ended.events(SaveUnverified)]
    assert step_of("verify") in unverified, ended.explain()
    assert len(interrupted) + len(unverified) >= len(SAVE_STAGES) - 1, "all but a delete, which belongs to no save"


def test_a_worker_killed_in_every_stage_changes_no_save(unfaulted: Ended, tmp_path: Path) -> None:
    """SIGKILL of a rank while the writer stands in the stage: the save is committed from the launcher's slots."""
    run_dir = tmp_path / "run"
    popen = start(train_arguments(run_dir, *COMMON, "--standbys", "1", *each_stage("slow_storage=2s")))
    for number, stage in enumerate(SAVE_STAGES):
        generation = wait_for(run_dir, popen, lambda record, stage=stage: is_at(record, stage)).generation
        os.kill(newest_pid(run_dir, number % 2), signal.SIGKILL)
        wait_for(run_dir, popen, lambda record, old=generation: is_restored_after(record, old))
    ended = finish(popen, run_dir)
    assert_healthy(unfaulted, ended)
    assert len(ended.events(FaultDetected)) == len(SAVE_STAGES), ended.explain()
    assert not ended.events(SaveFailed), ended.explain()


def is_at(record: Record, stage: str) -> bool:
    """The writer stands in `stage`."""
    return isinstance(record.event, FaultInjected) and record.event.spec.endswith(f"/{stage}")


def is_restored_after(record: Record, generation: int) -> bool:
    """A later generation holds a state."""
    return isinstance(record.event, StateRestored) and record.generation > generation


def newest_pid(run_dir: Path, rank: int) -> int:
    """Process that is `rank` now."""
    ended = Ended(exit_code=0, output="", run_dir=run_dir)
    started = [(r.seq, e.pid) for r, e in ended.events(WorkerStarted) if r.rank == rank]
    replaced = [(r.seq, e.new_pid) for r, e in ended.events(RankReplaced) if r.rank == rank]
    return max(started + replaced)[1]
