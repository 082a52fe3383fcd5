"""`nvrx-sre halt` and `resume` on runs in every state: one line that says what came of it, and the exit code."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from nvrx_sre.cli.main import main
from nvrx_sre.core import processes
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.journal import JournalWriter, read_journal
from nvrx_sre.events.schema import (
    BudgetReset,
    FaultDetected,
    HaltReason,
    LauncherStopped,
    Record,
    RunFinished,
    RunStarted,
)
from nvrx_sre.launcher.past import look_back
from nvrx_sre.launcher.rundir import RunDirectory
from tests.stories import RUN, exception_story

SYNC_S = 60.0
DEAD_PID = 2**30
"""Above what the kernel gives out."""


def run_directory(path: Path, records: list[Record], *, node: str = "", is_live: bool = False) -> RunDirectory:
    """A run that has come as far as `records`; its launcher is this process, or one that is dead."""
    directory = RunDirectory(path)
    directory.prepare(RUN, {"nproc": "2"})
    if is_live:
        directory.take_epoch()
    else:
        holder = {"node": node or socket.gethostname(), "pid": DEAD_PID, "start_ticks": 1}
        holder["boot_id"] = processes.boot_id() if not node else "another"
        (directory.epochs / "00000001.json").write_text(json.dumps(holder))
    writer = JournalWriter(directory.journal, RUN, 1)
    for record in records:
        writer.append(record)
    assert writer.close(SYNC_S)
    return directory


def running() -> list[Record]:
    """A run in the middle of its training."""
    return [item for item in exception_story().records if not isinstance(item.event, LauncherStopped | RunFinished)]


def ended(exit_code: int) -> list[Record]:
    """A run whose launcher has ended with that code."""
    before = running()
    last = before[-1]
    finished = RunFinished(exit_code=exit_code, reason="why", step=3, result={})
    stopped = LauncherStopped(exit_code=exit_code, reason="why")
    events = [finished, stopped] if exit_code in (0, 93) else [stopped]
    return before + [
        replace(last, rank=None, seq=last.seq + number, time_ns=last.time_ns + number, event=event)
        for number, event in enumerate(events, 1)
    ]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code, and the one line."""
    exit_code = main([*arguments, "--reason", "because"])
    shown = capsys.readouterr()
    [line] = (shown.out + shown.err).splitlines()
    return exit_code, line


@pytest.mark.parametrize(
    ("records", "exit_code", "says"),
    [
        (running(), 0, "it is not running, and does not start again until it is resumed"),
        (ended(75), 0, "it is not running"),
        (ended(143), 0, "it is not running"),
        (ended(78), 0, "it is not running"),
        ([], 0, "it is not running"),
        (ended(0), 78, f"run {RUN} has finished: there is nothing to halt"),
        (ended(93), 0, "was stopped for good already (exit 93): now --start-fresh does not start it either"),
    ],
    ids=["killed", "retryable", "preempted", "failed", "not started", "finished", "stopped"],
)
def test_halt_of_a_run_that_does_not_run(
    records: list[Record], exit_code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can start again, if only from step 0, does not any more; what cannot is left alone."""
    directory = run_directory(tmp_path / "run", records)
    code, line = said(capsys, "halt", str(directory.path))
    assert (code, says in line) == (exit_code, True), line
    assert directory.halt.exists() == (exit_code == 0)


def test_halt_of_a_run_that_runs_is_asked_of_its_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a second halt changes nothing: the first one's reason stays."""
    directory = run_directory(tmp_path / "run", running(), is_live=True)
    assert said(capsys, "halt", str(directory.path)) == (
        0,
        f"halt of run {RUN} requested: its launcher saves, stops and exits 93",
    )
    assert main(["halt", str(directory.path), "--reason", "another"]) == 0
    assert "is halted already (by operator: because): nothing was changed" in capsys.readouterr().out
    assert directory.halt_request() == ("because", HaltReason.OPERATOR)


def test_halt_while_a_launcher_lives_is_asked_of_it_whatever_stopped_the_run_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was started afresh, and has not recorded that yet."""
    directory = run_directory(tmp_path / "run", ended(93), is_live=True)
    code, line = said(capsys, "halt", str(directory.path))
    assert (code, line) == (0, f"halt of run {RUN} requested: its launcher saves, stops and exits 93")
    assert directory.halt_request() == ("because", HaltReason.OPERATOR)


def test_halt_of_a_run_elsewhere_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether its launcher lives cannot be seen from here."""
    directory = run_directory(tmp_path / "run", running(), node="other-host")
    code, line = said(capsys, "halt", str(directory.path))
    assert code == 0 and "its launcher on other-host, if it lives, reads it" in line
    assert directory.halt.exists()


@pytest.mark.parametrize(
    ("records", "exit_code", "says"),
    [
        (ended(93), 0, "may be started again: its halt is lifted and its budgets are full"),
        (ended(75), 0, f"run {RUN} was not halted: its budgets are full again"),
        (ended(0), 78, f"run {RUN} has finished: there is nothing to resume"),
    ],
    ids=["stopped", "retryable", "finished"],
)
def test_resume_of_a_run_without_a_halt(
    records: list[Record], exit_code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Budgets are refilled where that means something, and it says whether there was a halt to lift."""
    directory = run_directory(tmp_path / "run", records)
    code, line = said(capsys, "resume", str(directory.path))
    assert (code, says in line) == (exit_code, True), line
    resets = [record for record in read_journal(directory.journal) if isinstance(record.event, BudgetReset)]
    assert len(resets) == (exit_code == 0)


def end_holder(directory: RunDirectory) -> None:
    """The process that took the newest epoch, which is this one, is gone."""
    newest = max(directory.epochs.glob("*.json"))
    newest.write_text(json.dumps(json.loads(newest.read_text()) | {"pid": DEAD_PID}))


def unharmed(exit_code: int) -> list[Record]:
    """A run that has ended without a fault before."""
    return [record for record in ended(exit_code) if not isinstance(record.event, FaultDetected)]


def files(path: Path) -> dict[Path, bytes]:
    """Everything below a directory."""
    return {item: item.read_bytes() for item in path.rglob("*") if item.is_file()}


@pytest.mark.parametrize("records", [[], unharmed(143), unharmed(75)], ids=["not started", "preempted", "retryable"])
def test_resume_of_a_run_that_needs_none_changes_nothing(
    records: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No record, no epoch: neither a halt nor a used budget is there."""
    directory = run_directory(tmp_path / "run", records)
    before = files(directory.path)
    code, line = said(capsys, "resume", str(directory.path))
    assert (code, line) == (0, f"run {RUN} is not halted and its budgets are full: nothing was changed")
    assert files(directory.path) == before


@pytest.mark.parametrize("is_halted", [True, False], ids=["halted", "stopped by a cap"])
def test_a_second_resume_changes_nothing(is_halted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a halt after it is one again: the run may start, so it is told not to."""
    directory = run_directory(tmp_path / "run", ended(93))
    if is_halted:
        directory.request_halt("disk", HaltReason.OPERATOR)
    assert "its halt is lifted and its budgets are full" in said(capsys, "resume", str(directory.path))[1]
    end_holder(directory)
    assert "nothing was changed" in said(capsys, "resume", str(directory.path))[1]
    assert len([item for item in read_journal(directory.journal) if isinstance(item.event, BudgetReset)]) == 1
    assert "does not start again until it is resumed" in said(capsys, "halt", str(directory.path))[1]
    assert directory.halt.exists()


def test_a_run_that_was_started_afresh_is_stopped_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--start-fresh` starts what had stopped with 93: from then on it can be halted, and started after a crash."""
    stopped = ended(93)
    [first] = [record for record in stopped if isinstance(record.event, RunStarted)]
    again = replace(first, epoch=2, event=replace(first.event, fresh=True, resumed=True))
    directory = run_directory(tmp_path / "run", [*stopped, again])
    assert look_back(directory).past.stop_reason == ""
    assert "does not start again until it is resumed" in said(capsys, "halt", str(directory.path))[1]


def test_resume_lifts_a_halt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a run that has finished in the moment in which it was halted: nothing is left that refuses a start."""
    for number, records in enumerate([ended(93), ended(0), []]):
        directory = run_directory(tmp_path / str(number), records)
        directory.request_halt("disk", HaltReason.OPERATOR)
        code, line = said(capsys, "resume", str(directory.path))
        assert code == 0 and "may be started again" in line
        assert not directory.halt.exists()


@pytest.mark.parametrize(
    ("is_halted", "says"), [(False, "is running: there is nothing to resume"), (True, "is being halted")]
)
def test_resume_of_a_run_that_runs_is_refused(
    is_halted: bool, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the process; the halt, if there is one, goes on."""
    directory = run_directory(tmp_path / "run", running(), is_live=True)
    if is_halted:
        directory.request_halt("disk", HaltReason.OPERATOR)
    code, line = said(capsys, "resume", str(directory.path))
    assert code == ExitCode.CONFIG and says in line and "(launcher process " in line
    assert directory.halt.exists() is is_halted
