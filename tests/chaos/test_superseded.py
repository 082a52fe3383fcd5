"""A launcher that slept while another took its run: it neither commits nor decides, and ends with 75."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from nvrx_sre.checkpoint import discover
from nvrx_sre.core import processes
from nvrx_sre.events.schema import LauncherStarted, SaveVerified, WorkerStarted
from tests.integration.launched import Ended, finish, live, start, train, train_arguments, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

COMMON = ("--nproc", "2", "--standbys", "0", "--save-every", "40")


def move_to_another_host(run_dir: Path) -> None:
    """What the run directory tells of its launcher and children is of another machine."""
    for path in (run_dir / "epochs" / "00000001.json", run_dir / "children.json"):
        value = json.loads(path.read_text())
        path.write_text(json.dumps({**value, "boot_id": "another"}))


def test_a_superseded_launcher_that_wakes_up_ends(tmp_path: Path) -> None:
    """SIGSTOP launcher A, let B of another host take and finish the run, SIGCONT A: exit 75, nothing is changed."""
    run_dir = tmp_path / "run"
    first = start(train_arguments(run_dir, *COMMON, "--steps", "100000"))
    good = wait_for(run_dir, first, lambda record: isinstance(record.event, SaveVerified)).event
    assert isinstance(good, SaveVerified)
    first.send_signal(signal.SIGSTOP)
    move_to_another_host(run_dir)
    second = train(run_dir, *COMMON, "--steps", str(good.step + 60))
    assert second.exit_code == 0, second.explain()
    [taken] = [record for record, _ in second.events(LauncherStarted) if record.epoch == 2]
    before = (second.summary, sorted(os.listdir(discover.checkpoints_path(run_dir))))

    first.send_signal(signal.SIGCONT)
    ended = finish(first, run_dir)
    assert ended.exit_code == 75, ended.explain()
    [line] = [line for line in ended.output.splitlines() if line.startswith("nvrx-sre:")]
    assert "epoch 2 has taken over" in line
    assert (ended.summary, sorted(os.listdir(discover.checkpoints_path(run_dir)))) == before
    late = [type(item.event).__name__ for item in ended.records if item.epoch == 1 and item.time_ns > taken.time_ns]
    assert not late, ended.explain()
    started = {event.pid: event.start_ticks for _, event in ended.events(WorkerStarted)}
    assert not {pid for pid, ticks in started.items() if processes.is_alive(pid, ticks)}
    assert live({first.pid}) == set()


def test_two_launchers_of_one_host_do_not_share_a_run(tmp_path: Path) -> None:
    """The second is refused with 78 and one line; the first does not notice."""
    run_dir = tmp_path / "run"
    first = start(train_arguments(run_dir, *COMMON, "--steps", "100000"))
    wait_for(run_dir, first, lambda record: isinstance(record.event, LauncherStarted))
    refused: Ended = train(run_dir, *COMMON, "--steps", "100000")
    assert refused.exit_code == 78 and "in use by launcher process" in refused.output
    assert discover.highest_epoch(run_dir) == 1
    first.send_signal(signal.SIGINT)
    assert finish(first, run_dir).exit_code == 130
