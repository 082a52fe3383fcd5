"""What both tiers must do, in one suite: exact restore, refusal of damage, refusal of what does not fit."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.commit import SaveRefused, SaveRequest
from nvrx_sre.checkpoint.restore import DurableCandidate, HotCandidate
from nvrx_sre.checkpoint.save import Saver, Source
from nvrx_sre.checkpoint.slots import PAGE_BYTES, SlotFile
from nvrx_sre.checkpoint.storage import WriteOptions
from nvrx_sre.core.errors import CheckpointCorrupt, UserError
from nvrx_sre.events.schema import RejectReason

STEP = 4


class Loader:
    """A user's object: small values, a big tensor, an array."""

    def __init__(self) -> None:
        self.order = torch.arange(3000)
        self.seen: dict[Any, Any] = {"epoch": 0, 3: (1, 2)}
        self.weights = np.ones(4)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.clone(), "seen": dict(self.seen), "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.seen, self.weights = state["order"], state["seen"], state["weights"]


def build(seed: int, optimizer: str = "adamw", width: int = 24) -> dict[str, Any]:
    """A rank's state."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 30), nn.BatchNorm1d(30), nn.Dropout(0.2), nn.Linear(30, 3))
    model[3].bias.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:1], "lr": 0.05}, {"params": trained[1:]}]
    made: torch.optim.Optimizer = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=0.01),
    }[optimizer]()
    return {
        "model": model,
        "optimizer": made,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(made, [2, 6]),
        "loader": Loader(),
        "counts": {"tokens": seed},
        "scale": torch.tensor([float(seed)] * 2),
        "epoch": seed,
    }


def step(state: dict[str, Any]) -> float:
    """One optimizer step that draws from all random streams."""
    width = state["model"][0].in_features
    x = torch.randn(8, width) * random.random() + np.random.rand()
    loss = state["model"](x).pow(2).mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    state["loader"].seen["epoch"] += 1
    state["loader"].order = state["loader"].order.roll(1)
    state["counts"]["tokens"] += 8
    return loss.item()


class SavedState:
    """A captured step in one tier, and ways to restore and to damage it."""

    def __init__(self, tier: str, state: dict[str, Any], run_dir: Path) -> None:
        self.tier = tier
        capturer = Capturer(state)
        capturer.refresh()
        self.slots = SlotFile.create(*capturer.required_bytes(), name="nvrx-test")
        capturer.capture(self.slots, 0, generation=1, step=STEP, durable=True, now_mono_ns=1)
        self.layout_hash = capturer.layout_hash
        self.directory = run_dir
        if tier == "durable":
            self.directory = self._commit(run_dir)

    def _commit(self, run_dir: Path) -> Path:
        request = SaveRequest(run="demo", step=STEP, epoch=1, generation=1, captured_ns=1, world_size=1)
        saved = Saver(run_dir, WriteOptions()).save(request, Source(slot_files=[self.slots], slots=[0]))
        assert saved.directory is not None
        return saved.directory

    def candidate(self, state: dict[str, Any]) -> HotCandidate | DurableCandidate:
        """The saved state as something to restore into `state`."""
        if self.tier == "hot":
            return HotCandidate(self.slots, 0, STEP, self.layout_hash, state)
        return DurableCandidate(self.directory, "demo", 0, 1, state)

    def damage(self, generator: random.Random) -> str:
        """Change one thing at random; what was done."""
        if self.tier == "hot":
            header = self.slots.header(0)
            assert header is not None
            start = PAGE_BYTES + generator.choice([0, PAGE_BYTES, PAGE_BYTES + self.slots.data_bytes])
            used = {PAGE_BYTES: 100, 2 * PAGE_BYTES: header.data_bytes}.get(start, header.blob_bytes)
            return flip(self.slots.fd, start + generator.randrange(used), generator)
        path = self.directory / generator.choice(sorted(os.listdir(self.directory)))
        with open(path, "rb+") as file:
            size = os.fstat(file.fileno()).st_size
            kind = generator.choice(["flip", "flip", "truncate", "append", "zero", "remove"])
            if kind == "truncate":
                file.truncate(generator.randrange(size))
            elif kind == "append":
                os.pwrite(file.fileno(), b"\0", size)
            elif kind == "zero":
                start = generator.randrange(max(1, size - 4096))
                os.pwrite(file.fileno(), bytes(min(4096, size - start)), start)
            elif kind == "remove":
                path.unlink()
            else:
                flip(file.fileno(), generator.randrange(size), generator)
        return f"{kind} {path.name}"


def flip(fd: int, position: int, generator: random.Random) -> str:
    """Flip one bit."""
    byte = os.pread(fd, 1, position)[0]
    os.pwrite(fd, bytes([byte ^ (1 << generator.randrange(8))]), position)
    return f"flip {position}"


@pytest.fixture(params=["hot", "durable"])
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each tier; the random streams of the test process are put back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    yield request.param
    random.setstate(python)
    np.random.set_state(numpy)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_restore_continues_bit_for_bit(tier: str, optimizer: str, tmp_path: Path) -> None:
    """Losses after a restore into other values are those of the uninterrupted run, whatever the optimizer keeps."""
    state = build(1, optimizer)
    for _ in range(STEP):
        step(state)
    saved = SavedState(tier, state, tmp_path)
    expected = [step(state) for _ in range(4)]
    fresh = build(2, optimizer)
    candidate = saved.candidate(fresh)
    candidate.check()
    candidate.load()
    assert candidate.values == {"epoch": 1}
    assert fresh["scale"].tolist() == [1.0, 1.0]
    assert [step(fresh) for _ in range(4)] == expected
    assert fresh["loader"].seen == state["loader"].seen and fresh["loader"].seen[3] == (1, 2)
    assert torch.equal(fresh["loader"].order, state["loader"].order)
    assert fresh["counts"] == state["counts"]
    assert fresh["scheduler"].get_last_lr() == state["scheduler"].get_last_lr()


def test_restore_before_the_first_step_clears_optimizer_state(tier: str, tmp_path: Path) -> None:
    """A state without moments restored over one with moments leaves none."""
    saved = SavedState(tier, build(1), tmp_path)
    used = build(2)
    step(used)
    candidate = saved.candidate(used)
    candidate.check()
    candidate.load()
    assert len(used["optimizer"].state) == 0


def test_what_a_check_may_change(tier: str, tmp_path: Path) -> None:
    """A candidate may be checked and then not be chosen: what a slot's check has filled, it says it has touched."""
    saved = SavedState(tier, build(1), tmp_path)
    fresh = build(2)
    before = [parameter.clone() for parameter in fresh["model"].parameters()]
    drawn, groups = torch.get_rng_state(), str(fresh["optimizer"].param_groups[0]["lr"])
    candidate = saved.candidate(fresh)
    candidate.check()
    is_same = all(torch.equal(old, new) for old, new in zip(before, fresh["model"].parameters(), strict=True))
    assert (candidate.is_touched, is_same) == ((True, False) if tier == "hot" else (False, True))
    assert torch.equal(drawn, torch.get_rng_state()) and not fresh["optimizer"].state
    assert (fresh["counts"], str(fresh["optimizer"].param_groups[0]["lr"])) == ({"tokens": 2}, groups)


def test_c04_no_random_corruption_loads(tier: str, tmp_path: Path) -> None:
    """Forty random damages, one at a time: each is refused with a reason of the closed set, none is loaded."""
    state = build(1)
    step(state)
    for seed in range(40):
        run_dir = tmp_path / str(seed)
        run_dir.mkdir()
        saved = SavedState(tier, state, run_dir)
        done = saved.damage(random.Random(seed))
        with pytest.raises(CheckpointCorrupt) as caught:
            saved.candidate(state).check()
        assert caught.value.reason in set(RejectReason), done
        saved.slots.close()


def test_a_state_of_another_model_is_refused_before_anything_changes(tier: str, tmp_path: Path) -> None:
    """Another width: in the hot tier the slot does not fit, in the durable tier it is the user's to cure."""
    saved = SavedState(tier, build(1), tmp_path)
    other = build(2, width=25)
    candidate = saved.candidate(other)
    with pytest.raises(CheckpointCorrupt if tier == "hot" else UserError, match=r"model\.0\.weight"):
        candidate.check()
    assert not candidate.is_touched


@pytest.mark.parametrize("change", ["more", "less", "groups"])
def test_half_a_state_is_never_restored(tier: str, change: str, tmp_path: Path) -> None:
    """Tracking more, less or otherwise grouped state than was saved is an error that names it."""
    saved = SavedState(tier, build(1), tmp_path)
    other = build(2)
    if change == "more":
        other["extra"] = {"a": 1}
    elif change == "less":
        del other["loader"]
    else:
        other["optimizer"].param_groups[1]["params"].reverse()
    with pytest.raises((CheckpointCorrupt, UserError), match={"more": "extra", "less": "loader"}.get(change, "groups")):
        saved.candidate(other).check()


def test_a_newer_capture_in_the_same_slot_is_not_mistaken_for_the_candidate(tmp_path: Path) -> None:
    """What the launcher named must still be there when the rank looks."""
    state = build(1)
    saved = SavedState("hot", state, tmp_path)
    Capturer(state).capture(saved.slots, 0, generation=1, step=STEP + 1, durable=False, now_mono_ns=2)
    with pytest.raises(CheckpointCorrupt) as caught:
        saved.candidate(state).check()
    assert caught.value.reason == RejectReason.UNREADABLE


def test_optimizer_state_that_appears_later_gives_a_new_layout(tmp_path: Path) -> None:
    """AdamW's moments exist only after the first step; slots too small for them are refused, not overrun."""
    state = build(1)
    capturer = Capturer(state)
    capturer.refresh()
    before = capturer.layout
    small = SlotFile.create(*capturer.required_bytes(), name="nvrx-test")
    step(state)
    capturer.refresh()
    after = capturer.layout
    assert after.hash != before.hash and after.data_bytes > small.data_bytes
    capturer.refresh()
    assert capturer.layout is after
    with pytest.raises(Exception, match="cannot take"):
        capturer.capture(small, 0, generation=1, step=1, durable=False, now_mono_ns=1)
    assert small.headers() == [None] * 3
    small.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_not_committed(value: float, tmp_path: Path) -> None:
    """NaN and infinity in a trained parameter are refused by name."""
    state = build(1)
    with torch.no_grad():
        state["model"][0].weight[3, 4] = value
    with pytest.raises(SaveRefused, match=r"model\.0\.weight") as caught:
        SavedState("durable", state, tmp_path)
    assert caught.value.reason == "nonfinite"


def test_infinities_in_a_buffer_are_data(tmp_path: Path) -> None:
    """An attention mask of -inf is no fault; NaN in a buffer is."""
    state = build(1)
    state["model"].register_buffer("mask", torch.full((3,), float("-inf")))
    SavedState("durable", state, tmp_path)
    state["model"].mask[1] = float("nan")
    with pytest.raises(SaveRefused, match="mask"):
        SavedState("durable", state, tmp_path / "second")


def test_an_untracked_parameter_is_named(tmp_path: Path) -> None:
    """An optimizer over a module that is not tracked cannot be restored, so it is refused at the first capture."""
    state = build(1)
    del state["model"]
    with pytest.raises(UserError, match="track that module"):
        Capturer(state).refresh()
