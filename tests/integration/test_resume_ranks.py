"""Two ranks agree on a state although they see different things. Real processes, real files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.commit import SaveRequest
from nvrx_sre.checkpoint.save import Saver, Source
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.checkpoint.storage import WriteOptions
from tests.integration.resume_ranks import build, train

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
CASES = ["visible", "late", "never", "damaged", "replicas"]


class Seen:
    """What two ranks told of every case, and what they must go on with from each step."""

    def __init__(self, told: list[dict[str, Any]], expected: dict[int, list[list[str]]]) -> None:
        self.told = told
        self.expected = expected

    def both(self, case: str, key: str) -> list[Any]:
        """A value of both ranks."""
        return [rank[case][key] for rank in self.told]

    def rejections(self, case: str, rank: int) -> list[list[Any]]:
        """What a rank told the launcher to reject."""
        rejected: list[list[Any]] = self.told[rank][case]["rejected"]
        return rejected


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Two ranks trained 20 steps, each from a stream of its own, and were saved at 10 and 20."""
    root = tmp_path_factory.mktemp("resume")
    expected = save_two_steps(root / "rank-0")
    shutil.copytree(root / "rank-0", root / "rank-1")
    order = {
        "run_dirs": [str(root / f"rank-{rank}") for rank in range(2)],
        "store": str(root / "store"),
        "cases": CASES,
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.resume_ranks", json.dumps({**order, "rank": rank})],
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [json.loads(process.communicate(timeout=LIMIT_S)[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return Seen(told, expected)


def save_two_steps(run_dir: Path) -> dict[int, list[list[str]]]:
    """Commits of steps 10 and 20; step -> the losses of the next three steps of each rank."""
    slots: list[SlotFile] = []
    expected: dict[int, list[list[str]]] = {10: [], 20: []}
    for rank in range(2):
        torch.manual_seed(0)
        state = build()
        torch.manual_seed(100 + rank)
        capturer = Capturer(state)
        for slot, step in enumerate((10, 20)):
            train(state, 10)
            capturer.refresh()
            if len(slots) == rank:
                slots.append(SlotFile.create(*capturer.required_bytes(), name="nvrx-test"))
            capturer.capture(slots[rank], slot, generation=1, step=step, durable=True, now_mono_ns=1)
            again = torch.get_rng_state()
            twin = build()
            for name in ("model", "optimizer", "scheduler"):
                twin[name].load_state_dict(state[name].state_dict())
            torch.set_rng_state(again)
            expected[step].append(train(twin, 3))
            torch.set_rng_state(again)
    for slot, step in enumerate((10, 20)):
        request = SaveRequest(run="demo", step=step, epoch=1, generation=1, captured_ns=1, world_size=2)
        Saver(run_dir, WriteOptions()).save(request, Source(slot_files=slots, slots=[slot, slot]))
    for file in slots:
        file.close()
    return expected


def test_c23_each_rank_goes_on_with_its_own_random_stream(seen: Seen) -> None:
    """Dropout and data of both ranks are the uninterrupted run's, and not each other's."""
    assert seen.both("visible", "step") == [20, 20]
    assert seen.both("visible", "losses") == seen.expected[20]
    assert seen.expected[20][0] != seen.expected[20][1]


def test_c13_a_directory_that_one_rank_sees_late_is_waited_for(seen: Seen) -> None:
    """Both restore it; nobody rejects what is only late."""
    assert seen.both("late", "step") == [20, 20]
    assert seen.both("late", "rejected") == [[], []]


def test_c13_a_directory_that_one_rank_never_sees_is_given_up_by_all(seen: Seen) -> None:
    """A bounded wait, then both take the older one; the rank that missed it says which."""
    assert seen.both("never", "step") == [10, 10]
    assert seen.rejections("never", 0) == []
    [[step, tier, reason, message]] = seen.rejections("never", 1)
    assert (step, tier, reason) == (20, "durable", "no_commit_marker")
    assert "step-00000020-g00001" in message


def test_c14_c25_what_one_rank_rejects_no_rank_loads(seen: Seen) -> None:
    """A flipped letter in one rank's file: both go back to the older step, with everything that belongs to it."""
    assert seen.both("damaged", "step") == [10, 10]
    assert [item[:3] for item in seen.rejections("damaged", 1)] == [[20, "durable", "checksum"]]
    assert seen.rejections("damaged", 0) == []


def test_c21_c24_position_scheduler_and_streams_move_back_together(seen: Seen) -> None:
    """After the fallback nothing is of the newer step: position, learning rate, moments and random numbers."""
    assert seen.both("damaged", "position") == [10, 10]
    assert seen.both("damaged", "last_epoch") == [10, 10]
    assert seen.both("damaged", "losses") == seen.expected[10]


def test_copies_that_differ_are_found_before_they_are_loaded(seen: Seen) -> None:
    """Averaged models are equal on all ranks; a hot state in which they are not is rejected by both, by name."""
    assert seen.both("replicas", "step") == [30, 30]
    assert seen.both("replicas", "source") == ["hot", "hot"]
    for rank in range(2):
        [[step, tier, reason, message]] = seen.rejections("replicas", rank)
        assert (step, tier, reason) == (40, "hot", "digest")
        assert "model.module.0.bias differs between rank 0 and rank 1" in message
