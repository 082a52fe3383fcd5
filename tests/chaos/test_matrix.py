"""Every kind of fault in every phase of a run, on each kind of victim: real processes, and the unfaulted run as oracle.

One launched run a row: each of its cells strikes it once, and all of them together must not show in its result.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_sre.core import processes
from nvrx_sre.events.schema import FaultInjected, GenerationFormed, Record, WorkerStarted
from nvrx_sre.faults.plan import FaultKind
from tests.chaos import failing_launcher, judging
from tests.chaos.cells import (
    EVERY,
    HELD_RANK,
    NPROC,
    STEPS,
    Row,
    rank_rows,
    second_rank_rows,
    struck_launchers,
)
from tests.integration.launched import Ended, finish, read, start, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(900)]

DEADLINE_S = 5
"""Of every phase: a machine with more ranks than cores stays below."""
STOPPED_S = DEADLINE_S + 1
LIMIT_S = 600
"""Longest run: a row of hangs waits for as many deadlines as it has cells."""
LAUNCHER = "tests.chaos.failing_launcher"
LIMITS = f"""
[caps]
# The caps have their own tests. Of two ranks that are struck in the same place the second may come an attempt later.
backoff_s = [0.0]
flapping_faults = 1000
same_fingerprint_attempts = 10
consecutive_attempts = 10
window_attempts = 100
device_faults = 10
startup_attempts = 10
nonfinite_attempts = 5
[deadlines]
init_s = 20
rendezvous_s = {DEADLINE_S}
rebuild_s = {DEADLINE_S}
load_s = {DEADLINE_S}
first_step_s = {DEADLINE_S}
step_s = {DEADLINE_S}
data_s = {DEADLINE_S}
evaluate_s = {DEADLINE_S}
save_s = {DEADLINE_S}
finalize_s = {DEADLINE_S}
teardown_s = {DEADLINE_S}
"""


def arguments(run_dir: Path, *more: str) -> list[str]:
    """Command line of a run of the matrix."""
    limits = run_dir.with_name("limits.toml")
    limits.write_text(LIMITS, encoding="utf-8")
    sizes = ["--nproc", str(NPROC), "--steps", str(STEPS), "--seq-len", "32", "--batch-size", "6"]
    often = ["--save-every", str(EVERY), "--evaluate-every", str(EVERY), "--metrics-linger", "0"]
    return ["train", "--config", str(limits), "--run-dir", str(run_dir), *sizes, *often, *more]


def run(run_dir: Path, *more: str) -> Ended:
    """A run of the matrix, to its end."""
    return finish(start(arguments(run_dir, *more)), run_dir, limit_s=LIMIT_S)


@pytest.fixture(scope="module")
def unfaulted(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The run that every other must equal."""
    ended = run(tmp_path_factory.mktemp("plain") / "run", "--standbys", "0")
    assert ended.exit_code == 0, ended.explain()
    return ended


def faults_of(row: Row) -> list[str]:
    """Command line of a row's faults."""
    return [word for spec in row.specs for word in ("--fault", spec)]


def conclude(row: Row, verdicts: list[judging.Judged], ended: Ended, results: Path | None) -> None:
    """Leave the row's results, and fail for what is not as it has to be."""
    judging.write(results, row, verdicts)
    problems = [verdict for verdict in verdicts if verdict.problem]
    assert not problems, f"{problems}\n{ended.explain()}"


@pytest.mark.parametrize("row", list(rank_rows()), ids=lambda row: row.name)
def test_faults_of_ranks(row: Row, unfaulted: Ended, tmp_path: Path, chaos_results: Path | None) -> None:
    """The cells of one kind and victim: each is found to be what it is, the run ends as if nothing had been."""
    ended = run(tmp_path / "run", "--standbys", "2", *faults_of(row))
    conclude(row, judging.judge(row, ended, unfaulted), ended, chaos_results)


@pytest.mark.parametrize("row", list(second_rank_rows()), ids=lambda row: row.name)
def test_second_faults(row: Row, unfaulted: Ended, tmp_path: Path, chaos_results: Path | None) -> None:
    """A second fault at each stage of the recovery from a first: both are survived, and cost no step's result."""
    run_dir = tmp_path / "run"
    popen = start(arguments(run_dir, "--standbys", "2", *faults_of(row)))
    for strike in row.strikes:
        if strike.kills_from_outside:
            record = wait_for(run_dir, popen, is_struck(strike.openers[-1]))
            os.kill(pid_of(run_dir, record.generation, strike.ranks[0]), signal.SIGKILL)
    ended = finish(popen, run_dir, limit_s=LIMIT_S)
    conclude(row, judging.judge(row, ended, unfaulted), ended, chaos_results)


def is_struck(spec: str) -> Callable[[Record], bool]:
    """The record says that a planned fault strikes."""
    return lambda record: isinstance(record.event, FaultInjected) and record.event.spec == spec


def pid_of(run_dir: Path, generation: int, rank: int) -> int:
    """Process that was `rank` in a generation."""
    formed = [r.event for r in read(run_dir) if r.generation == generation and isinstance(r.event, GenerationFormed)]
    return formed[-1].pids[rank]


@pytest.mark.parametrize(("kind", "row"), [pytest.param(*pair, id=pair[1].name) for pair in struck_launchers()])
def test_faults_of_the_launcher(
    kind: FaultKind, row: Row, unfaulted: Ended, tmp_path: Path, chaos_results: Path | None
) -> None:
    """The launcher fails, dies, dies with its ranks, or stands still in each phase; what follows it goes on."""
    run_dir = tmp_path / "run"
    command = arguments(run_dir, "--standbys", "1", *faults_of(row))
    popen = start(command, LAUNCHER)
    ends: list[int | None] = []
    for strike in sorted(row.strikes, key=lambda strike: strike.step):
        wait_for(run_dir, popen, is_struck(strike.last_spec))
        STRIKES[kind](popen, run_dir)
        ends.append(None if kind is FaultKind.SIGSTOP else finish(popen, run_dir).exit_code)
        popen = popen if kind is FaultKind.SIGSTOP else start(command, LAUNCHER)
    ended = finish(popen, run_dir, limit_s=LIMIT_S)
    assert set(ends) == {ENDS[kind]}, f"{ends}\n{ended.explain()}"
    conclude(row, judging.judge_launcher(row, ENDS[kind], ended, unfaulted), ended, chaos_results)


def let_fail(popen: subprocess.Popen[str], run_dir: Path) -> None:
    """An error in the launcher's own loop."""
    (run_dir / failing_launcher.REQUEST).touch()


def kill(popen: subprocess.Popen[str], run_dir: Path) -> None:
    """SIGKILL."""
    popen.kill()


def stop_and_continue(popen: subprocess.Popen[str], run_dir: Path) -> None:
    """SIGSTOP for longer than any deadline, then SIGCONT; so is the rank, which thereby stays in the phase."""
    [rank] = [r.event.pid for r in read(run_dir) if isinstance(r.event, WorkerStarted) and r.rank == HELD_RANK]
    popen.send_signal(signal.SIGSTOP)
    os.kill(rank, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        popen.wait(timeout=STOPPED_S)
    popen.send_signal(signal.SIGCONT)
    os.kill(rank, signal.SIGCONT)


def kill_all(popen: subprocess.Popen[str], run_dir: Path) -> None:
    """SIGKILL of the launcher and of every child, as when the kernel ends a container (failure case C74)."""
    started = {e.pid: e.start_ticks for e in (r.event for r in read(run_dir)) if isinstance(e, WorkerStarted)}
    popen.kill()
    for pid, ticks in started.items():
        if processes.is_alive(pid, ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


STRIKES = {
    FaultKind.EXCEPTION: let_fail,
    FaultKind.SIGKILL: kill,
    FaultKind.OOM_KILL: kill_all,
    FaultKind.SIGSTOP: stop_and_continue,
}
ENDS = {FaultKind.EXCEPTION: 70, FaultKind.SIGKILL: -9, FaultKind.OOM_KILL: -9, FaultKind.SIGSTOP: None}
"""How a launcher that is struck ends, None: it does not."""
