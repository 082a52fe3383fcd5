"""Ends that leave something behind: a hanging teardown, a family of processes, a whole container, PID 1."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from nvrx_sre.core import processes
from nvrx_sre.events.schema import (
    FaultDetected,
    GenerationFormed,
    IncidentClosed,
    LauncherStarted,
    Layer,
    LeaderLost,
    PreemptionReceived,
    RankReplaced,
    Record,
    SaveVerified,
    StateRestored,
    StepsCommitted,
    WorkerStarted,
)
from tests.integration.launched import finish, read, start, train, train_arguments, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

LONG = ("--nproc", "2", "--steps", "100000", "--standbys", "0")


def is_training(record: Record) -> bool:
    """Training is under way."""
    return isinstance(record.event, StepsCommitted) and record.event.last_step >= 12


@pytest.mark.parametrize("kind", ["hang", "hang_native", "sigstop"])
def test_c31_a_teardown_that_hangs_is_escalated(kind: str, tmp_path: Path) -> None:
    """One rank is stopped, another hangs in its teardown: both get new processes, the third keeps its own.

    The recovery waits no longer for them than their deadlines say, and no step is missing in the end.
    """
    limits = tmp_path / "limits.toml"
    limits.write_text("[deadlines]\nteardown_s = 4\ninterrupt_grace_s = 2\n", encoding="utf-8")
    faults = ["--fault", "sigstop@2:8", "--fault", f"{kind}@0:5/teardown"]
    ended = train(tmp_path / "run", "--nproc", "3", "--config", str(limits), "--standbys", "2", *faults)
    assert ended.exit_code == 0, ended.explain()
    assert {record.rank for record, _ in ended.events(RankReplaced)} == {0, 2}, ended.explain()
    [(_, incident)] = ended.events(IncidentClosed)
    assert (incident.layer, incident.attempts) == (Layer.WORKER, 1), "one fault with one root, whatever it took"
    assert [record.rank for record, _ in ended.events(FaultDetected)] == [2], ended.explain()
    pids = [event.pids for _, event in ended.events(GenerationFormed)]
    assert [before == after for before, after in zip(pids[0], pids[-1], strict=True)] == [False, True, False]
    [teardown] = [span for span in ended.spans if span["name"] == "nvrx.teardown"]
    assert teardown["end_ns"] > teardown["start_ns"]
    assert (ended.summary["steps"], ended.summary["loss_mismatches"]) == (24, 0)


def test_c44_a_killed_rank_leaves_no_family(tmp_path: Path) -> None:
    """A shell that rank 1 had started, and the shell's own child, are gone before the next generation is formed."""
    script = str(Path(__file__).with_name("family_script.py"))
    arguments = ["launch", "--nproc-per-node", "2", "--standbys", "1", "--metrics-linger", "0", "--save-every", "1000"]
    faults = ["--fault", "sigkill@1:6"]
    run_dir = tmp_path / "run"
    ended = finish(start([*arguments, "--run-dir", str(run_dir), *faults, script, str(tmp_path)]), run_dir)
    assert ended.exit_code == 0, ended.explain()
    assert (tmp_path / "left").read_text() == "0 of 2", ended.explain()
    assert [record.rank for record, _ in ended.events(RankReplaced)] == [1], ended.explain()
    assert ended.summary["result"]["sum"] == 2 * 12, ended.explain()


def test_c74_one_oom_ends_launcher_and_ranks_together(tmp_path: Path) -> None:
    """SIGKILL of the launcher and every child at once, as the kernel does with a container; it is started again.

    It goes on from the durable tier. It is one lost launcher, no fault of any rank, and the budgets are as they were.
    """
    run_dir = tmp_path / "run"
    popen = start(train_arguments(run_dir, *LONG, "--fault", "exception@1:5"))
    wait_for(run_dir, popen, lambda record: isinstance(record.event, SaveVerified))
    started = {e.pid: e.start_ticks for e in (record.event for record in read(run_dir)) if isinstance(e, WorkerStarted)}
    popen.kill()
    for pid, ticks in started.items():
        if processes.is_alive(pid, ticks):
            with contextlib.suppress(ProcessLookupError):  # it ends with its launcher
                os.kill(pid, signal.SIGKILL)
    killed = finish(popen, run_dir)
    saved = max(event.step for _, event in killed.events(SaveVerified))
    again = train(run_dir, *LONG[:2], "--standbys", "0", "--steps", str(saved + 4))
    assert (killed.exit_code, again.exit_code) == (-signal.SIGKILL, 0), again.explain()
    assert len(again.events(LeaderLost)) == 1, again.explain()
    assert [record.epoch for record, _ in again.events(FaultDetected)] == [1], "the planned one, which fires once"
    restored = [event.step for record, event in again.events(StateRestored) if record.epoch == 2]
    assert len(restored) == 1 and restored[0] >= saved, again.explain()


@pytest.mark.parametrize("behind", [(), ("sh", "-c", 'exec "$0" "$@"')], ids=["itself", "behind a shell's exec"])
def test_c78_a_launcher_that_is_pid_1_ends_in_order(behind: tuple[str, ...], tmp_path: Path) -> None:
    """SIGTERM to the first process of a container: what was sealed is saved, exit 143, no process is left."""
    run_dir = tmp_path / "run"
    prefix = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *behind)
    popen = start(train_arguments(run_dir, *LONG, "--save-every", "100000"), prefix=prefix)
    wait_for(run_dir, popen, is_training)
    [launcher] = children_of(popen.pid)
    family = children_of(launcher)
    os.kill(launcher, signal.SIGTERM)
    ended = finish(popen, run_dir)
    assert ended.exit_code == 143, ended.explain()
    assert [event.pid for _, event in ended.events(LauncherStarted)] == [1], "it was the first process"
    assert len(ended.events(PreemptionReceived)) == 1 and ended.events(SaveVerified), ended.explain()
    assert family and not [pid for pid in family if Path(f"/proc/{pid}").exists()]


def children_of(pid: int) -> list[int]:
    """Children of a process, whatever namespace they live in."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
