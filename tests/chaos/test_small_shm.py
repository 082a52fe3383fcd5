"""A small /dev/shm under loader workers: nothing piles up in it, and what it cannot hold is told by its name.

Each run has a mount namespace of its own with a tmpfs over /dev/shm, which goes away with it. What still lay there
at the run's end is listed into a file.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_sre.events.schema import FaultDetected, IncidentClosed, RankReplaced, Verdict
from tests.integration.launched import Ended, finish, start

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = str(Path(__file__).with_name("shm_script.py"))
NUM_STEPS = 14
NUM_FEATURES = 20_000
"""A batch of 320 kB: four workers with two batches each, and one in the hand of each rank, fit 8 MB."""


def over_small_shm(size: str, afterwards: str = "exit") -> list[str]:
    """Command prefix: a mount namespace with a /dev/shm of `size`; `afterwards` is done in it at the end."""
    inside = f'mount -t tmpfs -o size={size} none /dev/shm && {{ "$@"; {afterwards}; }}'
    return ["unshare", "--mount", "--map-root-user", "sh", "-c", inside, "sh"]


def run(root: Path, shm: str, num_features: int, *options: str) -> tuple[Ended, list[str]]:
    """A launched run over a /dev/shm of this size, and what it left there."""
    root.mkdir()
    left = root / "left"
    prefix = over_small_shm(shm, f"code=$?; ls /dev/shm > {left}; exit $code")
    common = ["--nproc-per-node", "2", "--run-dir", str(root / "run"), "--metrics-linger", "0"]
    popen = start(["launch", *common, *options, SCRIPT, str(num_features), str(NUM_STEPS)], prefix=prefix)
    ended = finish(popen, root / "run")
    return ended, left.read_text().split()


def test_c50_ranks_killed_with_their_workers_leave_no_shared_memory(tmp_path: Path) -> None:
    """Five SIGKILLs in a row in a small /dev/shm: all recover, the loss is the unfaulted one, nothing is left."""
    plain, _ = run(tmp_path / "plain", "8m", NUM_FEATURES, "--standbys", "0")
    faults = [word for number in range(5) for word in ("--fault", f"sigkill@{number % 2}:{3 + 2 * number}/optimizer")]
    ended, left = run(tmp_path / "faulted", "8m", NUM_FEATURES, *faults)
    assert (plain.exit_code, ended.exit_code) == (0, 0), ended.explain()
    assert [event.fault for _, event in ended.events(FaultDetected)] == ["killed"] * 5, ended.explain()
    assert len(ended.events(RankReplaced)) == 5, ended.explain()
    verdicts = {event.verdict for _, event in ended.events(IncidentClosed)}
    assert verdicts <= {Verdict.RECOVERED, Verdict.FLAPPING}, ended.explain()
    assert ended.summary["final_loss"] == plain.summary["final_loss"]
    assert left == []


def test_c50_shared_memory_that_is_too_small_is_told_by_its_name(tmp_path: Path) -> None:
    """Batches that /dev/shm cannot hold: class `shm_exhausted`, three attempts, exit 75."""
    ended, _ = run(tmp_path / "run", "256k", NUM_FEATURES, "--standbys", "0")
    assert ended.exit_code == 75, ended.explain()
    assert [event.fault for _, event in ended.events(FaultDetected)] == ["shm_exhausted"] * 3, ended.explain()


def test_hot_slots_are_not_bounded_by_dev_shm() -> None:
    """Slots of 3 MB beside a /dev/shm of 64 kB."""
    code = (
        "import shutil; from nvrx_sre.checkpoint.slots import SlotFile; "
        "print(shutil.disk_usage('/dev/shm').total, SlotFile.create(1 << 20, 4096, name='nvrx-test').size_bytes)"
    )
    done = subprocess.run(
        [*over_small_shm("64k"), sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    shm_bytes, slots_bytes = map(int, done.stdout.split())
    assert shm_bytes == 1 << 16 and slots_bytes > 3 << 20
