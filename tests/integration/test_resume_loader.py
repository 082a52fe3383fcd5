"""Whole runs with a loader: what a faulted run trains is what the uninterrupted one does, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvrx_sre.events.schema import RankReplaced, StateRestored
from tests.integration.launched import PATIENT, Ended, finish, start

pytestmark = pytest.mark.processes

SCRIPT = str(Path(__file__).with_name("loader_script.py"))
NUM_STEPS = 18
FAULTS = ("exception@1:5/optimizer", "sigkill@0:11/optimizer", "exception@0:14")


def run(root: Path, *options: str, faults: tuple[str, ...] = (), num_ranks: int = 2) -> tuple[Ended, Path]:
    """A launched run of the script, or its next launch, and the folder it told its steps into."""
    told = root / "told"
    told.mkdir(parents=True, exist_ok=True)
    common = [
        "--nproc-per-node",
        str(num_ranks),
        "--run-dir",
        str(root / "run"),
        "--save-every",
        "8",
        "--metrics-linger",
        "0",
    ]
    planned = [word for fault in faults for word in ("--fault", fault)]
    arguments = ["launch", *common, *PATIENT, *planned, SCRIPT, str(told), str(NUM_STEPS), *options]
    return finish(start(arguments), root / "run"), told


def executed(told: Path, rank: int) -> list[dict[str, Any]]:
    """Every execution of a step by a rank, in order."""
    return [json.loads(line) for line in (told / f"rank-{rank}.jsonl").read_text().splitlines()]


def trained(told: Path, rank: int) -> list[dict[str, Any]]:
    """The last execution of each step: what the final weights are made of."""
    last = {line["step"]: line for line in executed(told, rank)}
    return [last[step] for step in sorted(last)]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    ended, told = run(tmp_path_factory.mktemp("oracle"))
    assert ended.exit_code == 0, ended.explain()
    return told


def test_c20_c22_c24_a_faulted_run_trains_the_same(oracle: Path, tmp_path: Path) -> None:
    """Ids, augmentation, rate and loss of every step, redone ones included, over two epochs and three faults."""
    ended, told = run(tmp_path, faults=FAULTS)
    assert ended.exit_code == 0, ended.explain()
    assert len(ended.events(RankReplaced)) == 1, ended.explain()
    assert len(ended.events(StateRestored)) >= 3, ended.explain()
    for rank in range(2):
        expected = executed(oracle, rank)
        assert [line["step"] for line in expected] == list(range(1, NUM_STEPS + 1))
        assert trained(told, rank) == expected, ended.explain()
        assert [line for line in executed(told, rank) if line != expected[line["step"] - 1]] == []
    # An interrupt that arrives while a loader ends its workers is nobody's error.
    for log in (ended.run_dir / "logs").glob("*.log"):
        assert "Exception ignored" not in log.read_text(errors="replace"), log


def test_a_process_has_the_name_of_its_rank(oracle: Path) -> None:
    """In `ps` and `top`."""
    for rank in range(2):
        assert {line["process"] for line in executed(oracle, rank)} == {f"nvrx-rank-{rank:05d}"}


def test_c20_no_sample_is_lost_or_twice_in_an_epoch(oracle: Path) -> None:
    """The oracle itself: an epoch of 52 samples on two ranks, each once (7 batches a rank, the last ones short)."""
    epoch = [sample for rank in range(2) for line in executed(oracle, rank)[:7] for sample in line["ids"]]
    assert sorted(epoch) == list(range(52))
    assert [line["lr"] for line in executed(oracle, 0)] == [0.01] * 10 + [0.005] * 5 + [0.0025] * 3


@pytest.mark.slow
def test_c22_a_script_is_launched_again_with_another_number_of_ranks(oracle: Path, tmp_path: Path) -> None:
    """Preempted at step 9 with two ranks, gone on with one: each step has the same samples and learning rate."""
    preempted, told = run(tmp_path, faults=("sigterm@0:9",))
    assert preempted.exit_code == 143, preempted.explain()
    ended, _ = run(tmp_path, faults=("sigterm@0:9",), num_ranks=1)
    assert ended.exit_code == 0, ended.explain()
    first = ended.events(StateRestored)[-1][1].step + 1
    assert 1 < first <= NUM_STEPS, ended.explain()
    expected = [executed(oracle, rank) for rank in range(2)]
    for line in executed(told, 0)[-(NUM_STEPS - first + 1) :]:
        of_ranks = [lines[line["step"] - 1] for lines in expected]
        assert sorted(line["ids"]) == sorted(of_ranks[0]["ids"] + of_ranks[1]["ids"]), ended.explain()
        assert line["lr"] == of_ranks[0]["lr"]
    assert [line["step"] for line in trained(told, 0)] == list(range(1, NUM_STEPS + 1))


@pytest.mark.slow
def test_a_stateful_loader_of_torchdata_is_resumed(tmp_path: Path) -> None:
    """torchdata's own loader, tracked like any object: the same ids and losses as without faults."""
    whole, told_whole = run(tmp_path / "whole", "stateful")
    faulted, told = run(tmp_path / "faulted", "stateful", faults=FAULTS[:2])
    assert (whole.exit_code, faulted.exit_code) == (0, 0), faulted.explain()
    for rank in range(2):
        ids = [line["ids"] for line in trained(told_whole, rank)]
        assert [line["ids"] for line in trained(told, rank)] == ids, faulted.explain()
