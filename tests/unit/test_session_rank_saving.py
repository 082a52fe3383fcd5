"""Saves by the ranks themselves, in one process: what stands in for what, what is told, what a failure leaves."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nvrx_sre.checkpoint import discover
from nvrx_sre.checkpoint.restore import DurableCandidate
from nvrx_sre.checkpoint.stand_ins import StandIns
from nvrx_sre.core.errors import UserError
from nvrx_sre.events import messages as wire
from nvrx_sre.session.rank_saving import RankSaver
from nvrx_sre.testing.clock import ManualClock
from tests.integration.ranks_only_script import Marked, Pair, Scaled, digest_of

STAGES = ["started", "written", "committed", "verified"]


class Rank:
    """The only rank of a world: a model that no slot can hold, and what its saver tells."""

    def __init__(self, run_dir: Path, seed: int = 1, generation: int = 3) -> None:
        torch.manual_seed(seed)
        self.run_dir = run_dir
        self.model = Scaled(rank=seed)
        self.optimizer = torch.optim.SGD([self.model.weight], lr=0.1 * seed, momentum=0.9)
        self.bare = torch.randn(3).as_subclass(Marked)
        self.told: list[wire.RankSave] = []
        self.tracked = {"model": self.model, "optimizer": self.optimizer, "bare": self.bare, "at": {"sample": seed}}
        process: Any = SimpleNamespace(
            settings=SimpleNamespace(run="demo", run_dir=str(run_dir), save_every=5),
            control=SimpleNamespace(clock=ManualClock(), send=self.told.append, enter=lambda *_, **__: None),
        )
        go: Any = SimpleNamespace(epoch=1, generation=generation, world_size=1)
        self.saver = RankSaver(process, self.tracked, go, 0, 0)

    def step(self) -> None:
        """One optimizer step."""
        self.model(torch.ones(2, 6)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def stages(self) -> list[str]:
        """What was told, in order."""
        return [message.stage for message in self.told]

    def bits(self) -> tuple[str, list[float], dict[str, int]]:
        """Every bit of the state."""
        return digest_of(self.model, self.optimizer), self.bare.tolist(), dict(self.tracked["at"])  # type: ignore[arg-type]  # a dict


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """A rank after two steps."""
    made = Rank(tmp_path)
    made.step()
    made.step()
    yield made
    made.saver.close()


def test_subclasses_come_back_bit_for_bit(rank: Rank) -> None:
    """Both kinds of parameter, momentum of one, a bare tensor, a rank's own buffer; then the next step."""
    rank.saver.save(5)
    other = Rank(rank.run_dir, seed=2)
    stand_ins = StandIns(other.tracked)
    candidate = DurableCandidate(rank.run_dir / "checkpoints" / "step-00000005-g00003", "demo", 0, 1, stand_ins.tracked)
    candidate.check()
    candidate.load()
    stand_ins.push()
    assert other.bits() == rank.bits()
    assert isinstance(other.model.weight, Marked) and isinstance(other.model.fixed, Pair)
    for both in (rank, other):
        both.step()
    assert other.bits() == rank.bits()


def test_each_stage_is_told_and_the_commit_is_verified(rank: Rank) -> None:
    """As the writer does it: the launcher makes the same events of it."""
    rank.saver.save(5)
    assert rank.stages() == STAGES
    (found,) = discover.discover(rank.run_dir, []).restorable
    assert (found.step, found.generation, found.verified) == (5, 3, True)
    assert {message.directory for message in rank.told[2:]} == {"step-00000005-g00003"}


def test_saves_are_due_as_in_any_run(rank: Rank) -> None:
    """Every `save_every` steps, on request, and once at the end; nothing is captured in between."""
    due = [rank.saver.at_boundary(step).save is not None for step in range(1, 7)]
    assert due == [False, False, False, False, True, False]
    rank.saver.request_durable()
    captured = rank.saver.at_boundary(7)
    assert captured.slot == -1 and not captured.durable and captured.save is not None
    captured.save(7)
    assert rank.saver.at_boundary(8).save is None
    rank.saver.finish(7)
    assert rank.stages() == STAGES
    rank.saver.finish(8)
    assert rank.stages() == STAGES * 2


def test_a_save_that_fails_is_told_and_the_next_one_is_tried(rank: Rank) -> None:
    """No directory to write to: training goes on, and nothing of the attempt stays."""
    blocker = rank.run_dir / "checkpoints"
    blocker.write_text("not a directory")
    rank.saver.save(5)
    assert [(message.stage, message.reason) for message in rank.told] == [("started", ""), ("failed", "storage")]
    blocker.unlink()
    rank.saver.save(10)
    assert rank.stages()[2:] == STAGES
    assert [path.name for path in blocker.iterdir() if path.is_dir()] == ["step-00000010-g00003"]


def test_a_state_that_is_not_finite_is_not_committed(rank: Rank) -> None:
    """Looked for in the parts of a subclass as well."""
    with torch.no_grad():
        rank.model.fixed.low[2] = math.nan  # type: ignore[attr-defined]  # a part of the wrapper
    rank.saver.save(5)
    assert rank.told[-1].reason == "nonfinite" and "model.fixed.low" in rank.told[-1].message
    assert discover.discover(rank.run_dir, []).restorable == []


def test_what_earlier_generations_left_is_removed(rank: Rank) -> None:
    """A rank 0 that was killed in its save could not; the attempt of this generation stays."""
    root = rank.run_dir / "checkpoints"
    for name in (".tmp-step-00000005-g00002-ranks", ".tmp-step-00000005-g00003-ranks"):
        (root / name).mkdir(parents=True)
    Rank(rank.run_dir).saver.close()
    assert [path.name for path in root.iterdir()] == [".tmp-step-00000005-g00003-ranks"]
    shutil.rmtree(root)


def test_an_optimizer_over_more_than_an_fsdp1_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's state dict of an FSDP1 optimizer knows one module."""
    inside, outside = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*inside.parameters(), *outside.parameters()], lr=0.1)
    monkeypatch.setattr("nvrx_sre.checkpoint.supported.fsdp1_wrappers", lambda _: {"inside": inside})
    with pytest.raises(UserError, match="more than the parameters of 'inside'"):
        StandIns({"inside": inside, "outside": outside, "optimizer": optimizer})
