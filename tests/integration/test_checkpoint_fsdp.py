"""FSDP2 ranks, a SIGKILL, the writer process, and what can be loaded afterwards. Real processes on gloo."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from nvrx_sre.checkpoint import discover
from nvrx_sre.checkpoint.slots import SlotFile
from tests.integration.writer_process import LIMIT_S, ROOT, WriterProcess

pytestmark = pytest.mark.processes


@contextmanager
def ranks(
    world_size: int, tmp_path: Path, slots: list[SlotFile] | None = None, **order: Any
) -> Iterator[list[subprocess.Popen[str]]]:
    """Rank processes with pipes; killed at the end whatever happened."""
    store = tmp_path / f"store-{order['mode']}-{world_size}"
    started = []
    for rank in range(world_size):
        mine: dict[str, Any] = {**order, "rank": rank, "world_size": world_size, "store": str(store)}
        fds: tuple[int, ...] = ()
        if slots is not None:
            file = slots[rank]
            mine |= {"fd": file.fd, "data_bytes": file.data_bytes, "blob_bytes": file.blob_bytes}
            mine["layout_hash"] = order.get("hashes", [""] * world_size)[rank]
            fds = (file.fd,)
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.integration.checkpoint_ranks", json.dumps(mine)],
                cwd=ROOT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                pass_fds=fds,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=LIMIT_S)


def said(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """One line of each rank. A rank that ends without a word fails the test at once: its peers would wait."""
    lines: dict[int, dict[str, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for rank, process in enumerate(processes):
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, (rank, process.stdout))
        while len(lines) < len(processes):
            ready = selector.select(LIMIT_S)
            assert ready, f"only ranks {sorted(lines)} reported"
            for key, _ in ready:
                rank, stdout = key.data
                line = stdout.readline()
                assert line, f"rank {rank} ended without a word"
                lines[rank] = json.loads(line)
                selector.unregister(stdout)
    return [lines[rank] for rank in range(len(processes))]


@dataclass
class Saved:
    """Two ranks trained, captured, were killed, and the writer committed."""

    slots: list[SlotFile]
    trained: list[dict[str, Any]]
    directory: Path
    run_dir: Path
    stages: list[str]
    values: dict[str, str] = field(default_factory=dict)
    """Global values as the first world size saw them; every other must see the same."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """The writer starts only after both ranks were SIGKILLed: nothing of theirs is needed."""
    run_dir = tmp_path_factory.mktemp("run")
    slots = [SlotFile.create(1 << 16, 1 << 16, name=f"nvrx-test-{rank}") for rank in range(2)]
    with ranks(2, run_dir, slots, mode="train") as processes:
        trained = said(processes)
    writer = WriterProcess(run_dir)
    writer.map(*slots)
    stages = [answer.stage for answer in writer.save(2, [1, 1])]
    assert writer.leave() == 0
    directory = discover.checkpoints_path(run_dir) / "step-00000002-g00001"
    yield Saved(slots, trained, directory, run_dir, stages)
    for file in slots:
        file.close()


def test_the_save_commits_after_every_rank_was_killed(saved: Saved) -> None:
    """Hot slots are the launcher's: a SIGKILL of all ranks takes nothing from the save."""
    assert saved.stages == ["written", "committed", "verified"]
    found = discover.discover(saved.run_dir, [])
    assert [(item.step, item.world_size, item.verified) for item in found.restorable] == [(2, 2, True)]
    assert found.interrupted == []


def test_new_ranks_continue_bit_for_bit(saved: Saved, tmp_path: Path) -> None:
    """Parameters, AdamW, scheduler, position, per-rank buffer, random stream; then the next step; from both tiers."""
    hashes = [line["layout_hash"] for line in saved.trained]
    with ranks(2, tmp_path, saved.slots, mode="restore", directory=str(saved.directory), hashes=hashes) as processes:
        restored = said(processes)
    for before, after in zip(saved.trained, restored, strict=True):
        assert after["hot"] == before["steps"]
        assert after["durable"] == before["steps"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_world_size_loads_the_same_values(saved: Saved, tmp_path: Path, world_size: int) -> None:
    """Plain dcp.load and our own restore see the same tensors; no two ranks draw the same random numbers."""
    with ranks(world_size, tmp_path, mode="load", directory=str(saved.directory)) as processes:
        loaded = said(processes)
    assert {line["by_torch"] for line in loaded} == {line["ours"] for line in loaded}
    assert len({line["ours"] for line in loaded}) == 1
    assert len({line["random"] for line in loaded}) == world_size
    assert saved.values.setdefault("all", loaded[0]["ours"]) == loaded[0]["ours"]


def test_torch_converts_it_to_one_file(saved: Saved, tmp_path: Path) -> None:
    """`dcp_to_torch_save` gives nested dicts under the tracked names, shapes global again."""
    target = tmp_path / "whole.pt"
    dcp_to_torch_save(saved.directory, target)
    whole = torch.load(target, weights_only=True)
    assert whole["model"]["odd"].shape == (3, 5)
    assert whole["model"]["gain"].shape == (1,)
    assert whole["optimizer"]["state"]["up.weight"]["exp_avg"].shape == (48, 16)
    assert torch.equal(whole["model"]["frozen"], torch.full((7, 3), 0.5))
