"""State that no slot can hold, on four real ranks: saved by the ranks, killed, restored bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from nvrx_sre.checkpoint import discover, manifest
from nvrx_sre.checkpoint.restore import DurableCandidate
from nvrx_sre.checkpoint.stand_ins import StandIns
from nvrx_sre.events.schema import (
    FaultDetected,
    HotIntervalChosen,
    ReplayDiverged,
    SaveCommitted,
    SaveStarted,
    SaveVerified,
    StateRestored,
)
from tests.integration.launched import Ended, finish, start
from tests.integration.ranks_only_script import Halves, Scaled, flat, optimizers_of, tracked_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]
WORLD_SIZE = 4
SAVE_EVERY = 3


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Rank 1 is killed at the boundary of step 9; step 6 is the newest that all ranks have saved."""
    run_dir = tmp_path_factory.mktemp("ranks-only") / "run"
    script = Path(__file__).with_name("ranks_only_script.py")
    arguments = ["--run-dir", str(run_dir), "--nproc-per-node", str(WORLD_SIZE), "--standbys", "0"]
    arguments += ["--save-every", str(SAVE_EVERY), "--metrics-linger", "0", "--fault", "sigkill@1:9", str(script)]
    return finish(start(["launch", *arguments]), run_dir)


def bits(ended: Ended, rank: int) -> dict[tuple[int, int], list[str]]:
    """(generation, step) -> digests that the rank printed."""
    lines = [
        line.split()
        for path in (ended.run_dir / "logs").glob(f"rank-{rank:05d}-epoch-*.log")
        for line in path.read_text().splitlines()
        if line.startswith("bits ")
    ]
    return {(int(generation), int(step)): found for _, generation, step, *found in lines}


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_every_local_bit_comes_back(ended: Ended, rank: int) -> None:
    """FSDP1, strided shards, subclasses, their optimizers, a scheduler, random streams: restored, and two steps on."""
    assert ended.exit_code == 0, ended.explain()
    found = bits(ended, rank)
    for step in (6, 7, 8):
        assert found[2, step] == found[1, step], f"step {step}"
    assert (2, 12) in found


def test_the_run_goes_back_to_the_newest_save_of_the_ranks(ended: Ended) -> None:
    """One fault, restored from the durable tier, and losses of redone steps are the same ones."""
    assert len(ended.events(FaultDetected)) == 1, ended.explain()
    restored = [(event.step, event.source) for _, event in ended.events(StateRestored)]
    assert restored == [(0, "fresh"), (6, "durable")]
    assert not ended.events(ReplayDiverged)


def test_saves_are_events_and_commits_like_any_other(ended: Ended) -> None:
    """Every one that committed was verified, by whole checksums still good; nothing unfinished is left."""
    committed = [event.step for _, event in ended.events(SaveCommitted)]
    assert committed == [event.step for _, event in ended.events(SaveVerified)] == [3, 6, 9, 12]
    assert {event.step for _, event in ended.events(SaveStarted)} == {3, 6, 9, 12}
    found = discover.discover(ended.run_dir, discover.read_fences(ended.run_dir))
    assert [item.step for item in found.restorable] == [12, 9, 6]
    assert found.interrupted == [] and found.rejected == []
    for item in found.restorable:
        assert manifest.verify(item.path, deep=True).world_size == WORLD_SIZE


def test_one_message_names_what_no_slot_can_hold(ended: Ended) -> None:
    """On rank 0's output once a process, and in the journal as an interval of 0."""
    log = next((ended.run_dir / "logs").glob("rank-00000-epoch-*.log")).read_text()
    assert log.count("not captured in memory") == 1
    ((_, chosen),) = ended.events(HotIntervalChosen)
    assert chosen.every_steps == 0
    for part in ("wrapped (FSDP1 wrapper)", "halves.up.weight (strided shard)"):
        assert part in log and part in chosen.reason


def newest(ended: Ended) -> discover.Found:
    """The newest checkpoint of the run."""
    return discover.discover(ended.run_dir, discover.read_fences(ended.run_dir)).restorable[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what a plain load in one process says
def test_it_goes_into_plain_modules_of_another_world(ended: Ended) -> None:
    """One rank, without FSDP1 and tensor parallelism: what we restore is what torch's own load reads, whole."""
    models: list[nn.Module] = [Halves(), flat(), Scaled(0)]
    optimizers = optimizers_of(models)
    stand_ins = StandIns(tracked_of(models, optimizers))
    candidate = DurableCandidate(newest(ended).path, "run", 0, 1, stand_ins.tracked)
    candidate.check()
    candidate.load()
    stand_ins.push()
    halves, wrapped, scaled = models
    found = {
        "halves.up.weight": halves.up.weight,
        "halves_optimizer.state.halves.up.weight.exp_avg": optimizers[0].state[halves.up.weight]["exp_avg"],
        "wrapped.0.weight": wrapped[0].weight,
        "wrapped_optimizer.state.wrapped.0.bias.exp_avg_sq": optimizers[1].state[wrapped[0].bias]["exp_avg_sq"],
        "scaled.weight": scaled.weight.as_subclass(torch.Tensor),
        "scaled.fixed.low": scaled.fixed.low,
    }
    state = {key: torch.empty_like(tensor) for key, tensor in found.items()}
    dcp.load(state, checkpoint_id=newest(ended).path, no_dist=True)
    for key, tensor in found.items():
        assert torch.equal(tensor, state[key]) and bool(tensor.any()), key
    assert [group["lr"] for group in optimizers[1].param_groups] == [0.02 * 0.5**6]
