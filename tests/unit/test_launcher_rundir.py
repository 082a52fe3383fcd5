"""The run directory: identity, epochs, leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_sre.core import processes
from nvrx_sre.core.errors import RunDirectoryBusy, UserError
from nvrx_sre.launcher.main import write_summary
from nvrx_sre.launcher.rundir import RunDirectory

ITEMS = {"model": "tiny", "seed": "1"}


def test_a_new_directory_is_private_and_recognised_again(tmp_path: Path) -> None:
    """Mode 0700 whatever the umask; the second preparation finds the run."""
    directory = RunDirectory(tmp_path / "run")
    assert directory.prepare("r", ITEMS) is False
    assert directory.prepare("r", ITEMS) is True
    assert directory.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("run", "items", "text"), [("other", ITEMS, "belongs to run 'r'"), ("r", {**ITEMS, "seed": "2"}, "seed: 1 -> 2")]
)
def test_another_run_or_configuration_is_refused(tmp_path: Path, run: str, items: dict[str, str], text: str) -> None:
    """The message says what differs and what to do; nothing is changed."""
    directory = RunDirectory(tmp_path / "run")
    directory.prepare("r", ITEMS)
    before = (directory.path / "run.json").read_bytes()
    with pytest.raises(UserError, match=text) as caught:
        directory.prepare(run, items)
    assert "--run-dir" in str(caught.value)
    assert (directory.path / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    ("was", "now", "made"),
    [
        ({"script": "mine.py"}, ITEMS, "`nvrx-sre launch mine.py`"),
        (ITEMS, {"script": "mine.py"}, "`nvrx-sre train`"),
    ],
)
def test_a_directory_of_another_command_names_it(
    tmp_path: Path, was: dict[str, str], now: dict[str, str], made: str
) -> None:
    """Not every key of a configuration that the run never had."""
    directory = RunDirectory(tmp_path / "run")
    directory.prepare("r", was)
    with pytest.raises(UserError) as caught:
        directory.prepare("r", now)
    assert f"was made by {made}; choose another with --run-dir" in str(caught.value)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A file in the way is one clear line."""
    (tmp_path / "run").write_text("x")
    with pytest.raises(UserError, match="cannot be used"):
        RunDirectory(tmp_path / "run").prepare("r", ITEMS)


def test_epochs_rise_and_a_live_holder_is_refused(tmp_path: Path) -> None:
    """This process holds epoch 1, so a second taker is refused; a dead holder is succeeded."""
    directory = RunDirectory(tmp_path / "run")
    directory.prepare("r", ITEMS)
    assert directory.take_epoch().number == 1
    with pytest.raises(RunDirectoryBusy, match=f"process {os.getpid()}"):
        directory.take_epoch()
    holder = json.loads((directory.epochs / "00000001.json").read_text())
    holder["start_ticks"] -= 1  # the pid was recycled: another process has it now
    (directory.epochs / "00000001.json").write_text(json.dumps(holder))
    assert directory.take_epoch().number == 2


def test_c43_leftovers_are_ended_by_pid_and_start_time(tmp_path: Path) -> None:
    """Of two recorded children only the one whose start time fits is ended."""
    directory = RunDirectory(tmp_path / "run")
    directory.prepare("r", ITEMS)
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    ours, stranger = (subprocess.Popen(command, start_new_session=True) for _ in range(2))
    try:
        directory.record_children(
            {
                ours.pid: processes.start_ticks(ours.pid),
                stranger.pid: processes.start_ticks(stranger.pid) + 1,
            }
        )
        assert directory.end_leftovers() == 1
        assert ours.wait() == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        for popen in (ours, stranger):
            popen.kill()
            popen.wait()


@pytest.mark.parametrize("blocked", ["run", "wanted"])
def test_c09_a_summary_is_written_where_there_is_room(tmp_path: Path, blocked: str) -> None:
    """One that cannot be written is told, and costs the other nothing."""
    (tmp_path / blocked).write_text("in the way")
    (tmp_path / ("wanted" if blocked == "run" else "run")).mkdir()
    own, wanted = tmp_path / "run" / "summary.json", tmp_path / "wanted" / "end.json"
    told = write_summary(own, wanted, {"steps": 3})
    refused, written = (own, wanted) if blocked == "run" else (wanted, own)
    assert told.count("; ") == 1 and str(refused) in told
    assert json.loads(written.read_text()) == {"steps": 3}
    written.unlink()
    (tmp_path / blocked).unlink()
    (tmp_path / blocked).mkdir()
    assert write_summary(own, wanted, {"steps": 4}) == ""
    assert own.read_text() == wanted.read_text()
