"""How a launcher ends, and what it leaves: nothing that runs, no shared memory, and a run that can go on."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from nvrx_sre.core import processes
from nvrx_sre.events.schema import (
    CheckpointRejected,
    FaultDetected,
    FaultInjected,
    GenerationFormed,
    HaltReason,
    IncidentClosed,
    LauncherStarted,
    LauncherStopped,
    LeaderLost,
    PreemptionReceived,
    Record,
    RestoredFrom,
    SaveCommitted,
    SaveFailed,
    SaveFailure,
    SaveStarted,
    SaveVerified,
    StateRestored,
    StepsCommitted,
    WorkerStarted,
)
from nvrx_sre.launcher.rundir import RunDirectory
from tests.integration.launched import Ended, finish, start, train, train_arguments, wait_for
from tests.patience import PATIENCE_S, wait_until

LONG = ("--nproc", "2", "--steps", "100000", "--standbys", "0")


def has_steps(record: Record) -> bool:
    """Training is under way."""
    return isinstance(record.event, StepsCommitted) and record.event.last_step >= 12


def started_processes(run_dir: Path, popen: subprocess.Popen[str]) -> dict[int, int]:
    """pid -> start ticks of every child so far, and of the fork server."""
    records = Ended(exit_code=0, output="", run_dir=run_dir)
    children = {event.pid: event.start_ticks for _, event in records.events(WorkerStarted)}
    recorded = json.loads((run_dir / "children.json").read_text())["children"]
    assert len(recorded.keys() - {str(pid) for pid in children}) == 1, "a successor knows of the fork server as well"
    return children | {int(pid): ticks for pid, ticks in recorded.items()}


def private_temporary(run_dir: Path) -> dict[str, str]:
    """Environment with a temporary directory of the run's own, so that a test sees what is left there."""
    place = run_dir.parent / f"{run_dir.name}-tmp"
    place.mkdir(exist_ok=True)
    return {"TMPDIR": str(place)}


def assert_nothing_left(run_dir: Path, children: dict[int, int]) -> None:
    """No child of the run is alive, nobody holds its hot memory, nothing listens, no temporary file is left."""
    temporary = run_dir.parent / f"{run_dir.name}-tmp"
    assert not {pid for pid, ticks in children.items() if processes.is_alive(pid, ticks)}
    assert not hot_memory_names(run_dir.name)
    # torch itself makes one cache directory a user on import, launcher or not.
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    with contextlib.suppress(OSError), urlopen(metrics_url(run_dir), timeout=60) as answer:
        assert run_dir.name not in answer.read().decode(), "the port may be somebody else's by now"


def hot_memory_names(run: str) -> set[str]:
    """memfds of the run's hot slots that any process still has open."""
    names: set[str] = set()
    for fd_dir in Path("/proc").glob("[0-9]*/fd"):
        try:
            names |= {name for item in fd_dir.iterdir() if f"nvrx-hot-{run}" in (name := os.readlink(item))}
        except OSError:
            continue
    return names


def metrics_url(run_dir: Path) -> str:
    """Where the run's discovery file says that its metrics are."""
    return str(json.loads((run_dir / "metrics.json").read_text())["url"])


def scraped(url: str) -> str:
    """What a scrape says now."""
    with urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def last_scraped(popen: subprocess.Popen[str], url: str) -> str:
    """Scrape until nobody answers any more; the newest whole answer."""
    seen = ""
    with contextlib.suppress(OSError, HTTPException):
        while popen.poll() is None:
            seen = scraped(url)
    return seen


SIGINT_IGNORED = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of 24 steps that ended well, with checkpoints of steps 8 and 24, and 16 unless the writer was busy.

    It was scraped, and Ctrl-C kept it from waiting for another one, though it was started as shells start what runs in
    the background of a script. `output` begins with what it said of that.
    """
    run_dir = tmp_path_factory.mktemp("finished") / f"exit-finished-{os.getpid()}"
    arguments = train_arguments(run_dir, "--nproc", "2", "--standbys", "0", "--metrics-linger", "600")
    popen = start(arguments, prefix=SIGINT_IGNORED, **private_temporary(run_dir))
    wait_for(run_dir, popen, lambda record: isinstance(record.event, GenerationFormed))
    scraped(metrics_url(run_dir))
    assert popen.stdout is not None
    said = next((line for line in popen.stdout if line.startswith("metrics stay")), "")
    popen.send_signal(signal.SIGINT)
    ended = finish(popen, run_dir)
    assert ended.exit_code == 0, ended.explain()
    return replace(ended, output=said + ended.output)


@pytest.fixture
def copied(finished: Ended, tmp_path: Path) -> Path:
    """A copy of the finished run's directory, to damage and start again."""
    return Path(shutil.copytree(finished.run_dir, tmp_path / finished.run_dir.name, symlinks=True))


def test_ctrl_c_while_metrics_wait_for_their_last_scrape_leaves_the_exit_code(finished: Ended) -> None:
    """The launcher says what it waits for; the run has finished, so it was not interrupted."""
    assert finished.output.startswith("metrics stay up to 600 s for the last scrape; Ctrl-C ends it\n")
    assert "exit 0, 24 of 24 steps" in finished.output, finished.output


def test_a_finished_run_leaves_nothing(finished: Ended) -> None:
    """After exit 0 no child is alive, no temporary directory is left and the directory is private."""
    assert_nothing_left(finished.run_dir, {event.pid: event.start_ticks for _, event in finished.events(WorkerStarted)})
    assert not list((finished.run_dir / "checkpoints").glob(".tmp-*"))
    assert finished.run_dir.stat().st_mode & 0o077 == 0


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    """SIGINT: exit 130, recorded as a person's, nothing is left, and no scrape is waited for."""
    run_dir = tmp_path / f"exit-interrupted-{os.getpid()}"
    popen = start(train_arguments(run_dir, *LONG, "--metrics-linger", "600"), **private_temporary(run_dir))
    wait_for(run_dir, popen, has_steps)
    scraped(metrics_url(run_dir))
    children = started_processes(run_dir, popen)
    assert hot_memory_names(run_dir.name), "the check below sees what there is"
    popen.send_signal(signal.SIGINT)
    ended = finish(popen, run_dir)
    assert ended.exit_code == 130, ended.explain()
    assert "metrics stay" not in ended.output
    assert_nothing_left(run_dir, children)
    [(_, event)] = ended.events(PreemptionReceived)
    assert event.by_person


def test_c78_a_signal_as_soon_as_the_launcher_is_on_record_ends_it_in_order(tmp_path: Path) -> None:
    """Nothing has begun that could be saved: exit 143, which is on record, so that no launcher counts as lost."""
    run_dir = tmp_path / f"exit-at-once-{os.getpid()}"
    popen = start(train_arguments(run_dir, *LONG))
    wait_for(run_dir, popen, lambda record: isinstance(record.event, LauncherStarted))
    popen.send_signal(signal.SIGTERM)
    ended = finish(popen, run_dir)
    assert ended.exit_code == 143, ended.explain()
    assert [event.exit_code for _, event in ended.events(LauncherStopped)] == [143]


def test_preemption_flushes_the_newest_step(tmp_path: Path) -> None:
    """SIGTERM: exit 143, the newest common hot step is durable, and the next start goes on from it.

    One scrape sees that it was preempted; it is waited for no longer than the signal's grace, 120 s in patient.toml.
    What the ranks print goes to logs of the new launcher's own: those of the first one stay as they were.
    """
    run_dir = tmp_path / f"exit-preempted-{os.getpid()}"
    popen = start(train_arguments(run_dir, *LONG, "--save-every", "100000", "--metrics-linger", "600"))
    wait_for(run_dir, popen, has_steps)
    scraped(metrics_url(run_dir))
    popen.send_signal(signal.SIGTERM)
    assert popen.stdout is not None
    output: list[str] = []
    while not (output and output[-1].startswith("metrics stay up to ")):
        output.append(popen.stdout.readline())
        assert output[-1], "".join(output)
    assert 0 < float(output[-1].split()[4]) <= 120
    assert f'nvrx_exit_code{{run="{run_dir.name}"}} 143' in last_scraped(popen, metrics_url(run_dir))
    ended = finish(popen, run_dir)
    assert ended.exit_code == 143, ended.explain()
    verified = [event.step for _, event in ended.events(SaveVerified)]
    assert verified and verified[-1] >= 12, ended.explain()
    before = rank_logs(run_dir)
    again = train(
        run_dir, "--nproc", "2", "--standbys", "0", "--steps", str(verified[-1] + 2), "--save-every", "100000"
    )
    assert again.exit_code == 0, again.explain()
    after = rank_logs(run_dir)
    assert {name: after[name] for name in before} == before
    assert {name.split("-attempt-")[0] for name in after.keys() - before.keys()} == {
        f"rank-{rank:05d}-epoch-0002" for rank in (0, 1)
    }
    restored = [event for record, event in again.events(StateRestored) if record.epoch == 2]
    assert [(event.step, event.source) for event in restored] == [(verified[-1], RestoredFrom.DURABLE)]


def rank_logs(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Logs of ranks: name -> size and time of the last write. Links to the newest are left out."""
    logs = [path for path in (run_dir / "logs").glob("rank-*.log") if not path.is_symlink()]
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in logs}


def test_c01_c43_a_launcher_killed_in_mid_save(tmp_path: Path) -> None:
    """Its children go with it; the next start goes on from the save before, and counts the torn one as failed.

    The storage is so slow from step 41 on that the second save can never end.
    """
    run_dir = tmp_path / f"exit-killed-{os.getpid()}"
    slow = ("--save-every", "40", "--fault", "slow_storage@0:41=600s")
    popen = start(train_arguments(run_dir, *LONG, *slow), **private_temporary(run_dir))
    wait_for(run_dir, popen, lambda record: isinstance(record.event, SaveVerified))
    wait_for(run_dir, popen, lambda record: isinstance(record.event, FaultInjected))
    children = started_processes(run_dir, popen)
    pidfds = [os.pidfd_open(pid) for pid, ticks in children.items() if processes.is_alive(pid, ticks)]
    popen.kill()
    popen.communicate()
    assert_gone(pidfds)
    assert_nothing_left(run_dir, children)

    killed = Ended(exit_code=-9, output="", run_dir=run_dir)
    good = [event.step for _, event in killed.events(SaveCommitted)]
    [torn] = {event.step for _, event in killed.events(SaveStarted)} - set(good)
    more = ("--save-every", "40", "--steps", str(good[-1] + 2))
    again = train(run_dir, "--nproc", "2", "--standbys", "0", *more)
    assert again.exit_code == 0, again.explain()
    assert again.events(LeaderLost), again.explain()
    restored = [event.step for record, event in again.events(StateRestored) if record.epoch == 2]
    assert restored == [good[-1]], again.explain()
    failed = [(record.epoch, event.step, event.reason) for record, event in again.events(SaveFailed)]
    assert failed == [(2, torn, SaveFailure.INTERRUPTED)], again.explain()
    assert again.summary["saves"]["durable"]["failed"] == 1
    status = {span["attributes"]["nvrx.step"]: span["status"] for span in again.spans if span["name"] == "nvrx.save"}
    assert status[torn] == "error" and status[good[0]] == "unset"


def assert_gone(pidfds: list[int]) -> None:
    """Every process ends, though nobody tells it to and its work is far from done."""
    poller = select.poll()
    waiting = set(pidfds)
    for descriptor in pidfds:
        poller.register(descriptor, select.POLLIN)
    while waiting:
        ready = poller.poll(PATIENCE_S * 1000)
        assert ready, f"{len(waiting)} children outlived their launcher"
        for descriptor, _ in ready:
            waiting.discard(descriptor)
            poller.unregister(descriptor)
            os.close(descriptor)


def test_c58_a_live_run_is_found_by_its_file_and_refuses_a_second_launcher(tmp_path: Path) -> None:
    """The real port is in the run directory, up through a restart; a second launcher there: exit 78, the first goes on.

    So does a run elsewhere on this host that asks for the same port.
    """
    run_dir = tmp_path / f"exit-busy-{os.getpid()}"
    popen = start(train_arguments(run_dir, *LONG, "--fault", "exception@1:5"))
    wait_for(run_dir, popen, lambda record: isinstance(record.event, IncidentClosed))
    wait_for(run_dir, popen, has_steps)
    url = metrics_url(run_dir)
    series = f'nvrx_incidents_total{{run="{run_dir.name}",verdict="recovered"}} 1.0'
    wait_until(lambda: series in scraped(url), "the incident is counted")  # once the journal is on the disk
    port = str(urlsplit(url).port)
    elsewhere = train(tmp_path / f"exit-elsewhere-{os.getpid()}", "--nproc", "1", "--metrics-port", port)
    assert (elsewhere.exit_code, port in elsewhere.output) == (78, True), elsewhere.output
    second = train(run_dir, *LONG)
    assert second.exit_code == 78
    assert "in use by launcher process" in second.output
    assert popen.poll() is None
    popen.send_signal(signal.SIGINT)
    assert finish(popen, run_dir).exit_code == 130


def test_c17_nothing_loadable_is_not_a_silent_fresh_start(copied: Path) -> None:
    """Commits on record and none loadable: exit 93 with what to do; --start-fresh begins again, unless it is halted."""
    for manifest in (copied / "checkpoints").glob("step-*/manifest.json"):
        manifest.unlink()
    refused = train(copied, "--nproc", "2", "--standbys", "0")
    assert refused.exit_code == 93, refused.explain()
    assert "bring one back, or --start-fresh" in refused.output
    again = train(copied, "--nproc", "2", "--standbys", "0")
    assert again.exit_code == 93 and "lets it go on, --start-fresh begins at step 0" in again.output
    directory = RunDirectory(copied)
    directory.request_halt("bad data", HaltReason.OPERATOR)
    halted = train(copied, "--nproc", "2", "--standbys", "0", "--start-fresh")
    assert halted.exit_code == 93 and "lets it go on, nothing else does" in halted.output
    directory.halt.unlink()
    fresh = train(copied, "--nproc", "2", "--standbys", "0", "--start-fresh")
    assert fresh.exit_code == 0, fresh.explain()


@pytest.mark.parametrize("damage", ["half", "no_manifest"])
def test_c03_c05_a_damaged_newest_checkpoint_falls_back(copied: Path, damage: str) -> None:
    """The newest checkpoint is damaged between two starts: the next one goes on from the one before it.

    More kinds of damage, without a run: tests/unit/test_checkpoint_directory.py.
    """
    *_, older, newest = sorted((copied / "checkpoints").glob("step-*"))  # under load a save may have been skipped
    shard = newest / "__1_0.distcp"
    if damage == "no_manifest":
        (newest / "manifest.json").unlink()
    else:
        os.truncate(shard, shard.stat().st_size // 2)
    again = train(copied, "--nproc", "2", "--steps", "26", "--standbys", "0")
    assert again.exit_code == 0, again.explain()
    restored = [event for record, event in again.events(StateRestored) if record.epoch == 2]
    assert [event.step for event in restored] == [int(older.name.split("-")[1])], again.explain()
    [(_, rejected)] = again.events(CheckpointRejected)
    assert rejected.reason == ("no_commit_marker" if damage == "no_manifest" else "size")
    assert (damage == "no_manifest") == (rejected.moved_to == "")
    [span] = [span for span in again.spans if span["name"] == "nvrx.reject"]
    assert span["attributes"]["error.type"] == rejected.reason
    assert not again.events(FaultDetected), "a fallback uses up no restart"
