"""FSDP2, HSDP, DDP and a meta-device build on four ranks: overlapped captures restore bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.integration.writer_process import LIMIT_S, ROOT

pytestmark = pytest.mark.processes
WORLD_SIZE = 4


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of four ranks says of each case."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.capture_ranks", str(store), str(rank), str(WORLD_SIZE)],
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        said = [process.communicate(timeout=3 * LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads(text) for text in said]


@pytest.mark.parametrize("case", ["fsdp2", "hsdp", "ddp", "meta"])
def test_the_state_of_the_commit_comes_back(verdicts: list[dict[str, str]], case: str) -> None:
    """Uneven and empty shards, a frozen part, tied weights, two optimizers, accumulation; none that is torn."""
    assert [said[case] for said in verdicts] == ["same"] * WORLD_SIZE


def test_what_no_slot_can_hold_is_named(verdicts: list[dict[str, str]]) -> None:
    """Strided shards and FSDP1 are left to the ranks; a shard with gaps is refused. Every rank says the same."""
    assert [said["strided"] for said in verdicts] == ["model.weight (strided shard)"] * WORLD_SIZE
    assert [said["fsdp1"] for said in verdicts] == ["model (FSDP1 wrapper)"] * WORLD_SIZE
    assert all("model.weight (strided shard that is no contiguous block)" in said["gaps"] for said in verdicts)
