"""How a launcher ends, and what it leaves: nothing that runs, no shared memory, and a run that can go on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from nvrx_sre.core import processes
from nvrx_sre.events.schema import (
    CheckpointRejected,
    FaultDetected,
    LeaderLost,
    PreemptionReceived,
    Record,
    RestoredFrom,
    SaveVerified,
    StateRestored,
    StepsCommitted,
    WorkerStarted,
)
from tests.integration.launched import Ended, finish, live, start, train, train_arguments, wait_for

LONG = ("--nproc", "2", "--steps", "100000", "--standbys", "0")


def has_steps(record: Record) -> bool:
    """Training is under way."""
    return isinstance(record.event, StepsCommitted) and record.event.last_step >= 12


def started_processes(run_dir: Path, popen: subprocess.Popen[str]) -> dict[int, int]:
    """pid -> start ticks of every child so far."""
    records = Ended(exit_code=0, output="", run_dir=run_dir)
    return {event.pid: event.start_ticks for _, event in records.events(WorkerStarted)}


def assert_nothing_left(children: dict[int, int]) -> None:
    """No child of the run is alive."""
    left = {pid for pid, ticks in children.items() if processes.is_alive(pid, ticks)}
    assert not left


def hot_memory_names() -> set[str]:
    """memfds of hot slots that any process of ours still has open."""
    names: set[str] = set()
    for fd_dir in Path("/proc").glob("[0-9]*/fd"):
        try:
            names |= {os.readlink(item) for item in fd_dir.iterdir() if "nvrx-hot-exit" in os.readlink(item)}
        except OSError:
            continue
    return names


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of 24 steps that ended well, with checkpoints of steps 8, 16 and 24."""
    ended = train(tmp_path_factory.mktemp("finished") / "run", "--nproc", "2")
    assert ended.exit_code == 0, ended.explain()
    return ended


@pytest.fixture
def copied(finished: Ended, tmp_path: Path) -> Path:
    """A copy of the finished run's directory, to damage and start again."""
    shutil.copytree(finished.run_dir, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def test_a_finished_run_leaves_nothing(finished: Ended) -> None:
    """After exit 0 no child is alive, no temporary directory is left and the directory is private."""
    assert not live(finished.pids())
    assert not list((finished.run_dir / "checkpoints").glob(".tmp-*"))
    assert finished.run_dir.stat().st_mode & 0o077 == 0
    assert not hot_memory_names()


def test_a_run_can_be_extended_from_its_last_checkpoint(copied: Path) -> None:
    """A second launcher on the same directory goes on at the last step of the first."""
    second = train(copied, "--nproc", "2", "--steps", "26", "--standbys", "0")
    assert second.exit_code == 0, second.explain()
    restored = [event for record, event in second.events(StateRestored) if record.epoch == 2]
    assert [(event.step, event.source) for event in restored] == [(24, RestoredFrom.DURABLE)], second.explain()


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    """SIGINT: exit 130, recorded as a person's, and nothing is left."""
    run_dir = tmp_path / "exit-interrupted"
    popen = start(train_arguments(run_dir, *LONG))
    wait_for(run_dir, popen, has_steps)
    children = started_processes(run_dir, popen)
    popen.send_signal(signal.SIGINT)
    ended = finish(popen, run_dir)
    assert ended.exit_code == 130, ended.explain()
    assert_nothing_left(children)
    [(_, event)] = ended.events(PreemptionReceived)
    assert event.by_person


def test_preemption_flushes_the_newest_step(tmp_path: Path) -> None:
    """SIGTERM: exit 143, the newest common hot step is durable, and the next start goes on from it."""
    run_dir = tmp_path / "exit-preempted"
    popen = start(train_arguments(run_dir, *LONG, "--save-every", "100000"))
    wait_for(run_dir, popen, has_steps)
    popen.send_signal(signal.SIGTERM)
    ended = finish(popen, run_dir)
    assert ended.exit_code == 143, ended.explain()
    verified = [event.step for _, event in ended.events(SaveVerified)]
    assert verified and verified[-1] >= 12, ended.explain()
    again = train(
        run_dir, "--nproc", "2", "--standbys", "0", "--steps", str(verified[-1] + 2), "--save-every", "100000"
    )
    assert again.exit_code == 0, again.explain()
    restored = [event for record, event in again.events(StateRestored) if record.epoch == 2]
    assert [(event.step, event.source) for event in restored] == [(verified[-1], RestoredFrom.DURABLE)]


def test_c43_a_killed_launcher_takes_its_workers_along(tmp_path: Path) -> None:
    """SIGKILL of the launcher: its children are gone within 3 s; the next start of the run goes on."""
    run_dir = tmp_path / "exit-killed"
    popen = start(train_arguments(run_dir, *LONG))
    wait_for(run_dir, popen, lambda record: isinstance(record.event, SaveVerified))
    children = started_processes(run_dir, popen)
    pidfds = [os.pidfd_open(pid) for pid, ticks in children.items() if processes.is_alive(pid, ticks)]
    popen.kill()
    popen.communicate()
    assert_gone_within(pidfds, 3.0)
    assert not hot_memory_names()
    again = train(run_dir, "--nproc", "2", "--standbys", "0")
    assert again.exit_code == 0, again.explain()
    assert again.events(LeaderLost), again.explain()


def assert_gone_within(pidfds: list[int], limit_s: float) -> None:
    """Every process ends within the limit (3 s is a promise of the launcher, not a timing)."""
    import select

    poller = select.poll()
    waiting = set(pidfds)
    for descriptor in pidfds:
        poller.register(descriptor, select.POLLIN)
    while waiting:
        ready = poller.poll(limit_s * 1000)
        assert ready, f"{len(waiting)} children outlived their launcher"
        for descriptor, _ in ready:
            waiting.discard(descriptor)
            poller.unregister(descriptor)
            os.close(descriptor)


def test_a_live_run_directory_is_refused(tmp_path: Path) -> None:
    """A second launcher on the directory of a live one: exit 78, one line, and the first goes on."""
    run_dir = tmp_path / "exit-busy"
    popen = start(train_arguments(run_dir, *LONG))
    wait_for(run_dir, popen, has_steps)
    second = train(run_dir, *LONG)
    assert second.exit_code == 78
    assert "in use by launcher process" in second.output
    assert popen.poll() is None
    popen.send_signal(signal.SIGINT)
    popen.communicate()


def test_c17_nothing_loadable_is_not_a_silent_fresh_start(copied: Path) -> None:
    """Commits on record and none loadable: exit 93 with what to do; --start-fresh begins again."""
    for manifest in (copied / "checkpoints").glob("step-*/manifest.json"):
        manifest.unlink()
    refused = train(copied, "--nproc", "2", "--standbys", "0")
    assert refused.exit_code == 93, refused.explain()
    assert "--start-fresh" in refused.output
    fresh = train(copied, "--nproc", "2", "--standbys", "0", "--start-fresh")
    assert fresh.exit_code == 0, fresh.explain()


@pytest.mark.parametrize("damage", ["half", "no_manifest"])
def test_c03_c05_a_damaged_newest_checkpoint_falls_back(copied: Path, damage: str) -> None:
    """The newest checkpoint is damaged between two starts: the next one goes on from the one before it.

    More kinds of damage, without a run: tests/unit/test_checkpoint_directory.py.
    """
    newest = max((copied / "checkpoints").glob("step-*"))
    shard = newest / "__1_0.distcp"
    if damage == "no_manifest":
        (newest / "manifest.json").unlink()
    else:
        os.truncate(shard, shard.stat().st_size // 2)
    again = train(copied, "--nproc", "2", "--steps", "26", "--standbys", "0")
    assert again.exit_code == 0, again.explain()
    restored = [event for record, event in again.events(StateRestored) if record.epoch == 2]
    assert [event.step for event in restored] == [16], again.explain()
    [(_, rejected)] = again.events(CheckpointRejected)
    assert rejected.reason == ("no_commit_marker" if damage == "no_manifest" else "size")
    assert (damage == "no_manifest") == (rejected.moved_to == "")
    assert not again.events(FaultDetected), "a fallback uses up no restart"
