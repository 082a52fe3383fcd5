"""Walking down the candidates: what is filled from a damaged slot never becomes the state of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.commit import SaveRequest
from nvrx_sre.checkpoint.save import Saver, Source
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.checkpoint.storage import WriteOptions
from nvrx_sre.core.errors import CheckpointCorrupt, NothingRestorable
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import RestoredFrom
from nvrx_sre.session.restoring import Restorer
from nvrx_sre.testing.clock import ManualClock


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(value: float) -> dict[str, Any]:
    """Something to train, every number of it `value`; the optimizer has stepped."""
    model = nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.data.fill_(value)
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


class Run:
    """One rank's slots with steps 1 to 3 in them, whose parameters are the step's number, and step 1 on the disk."""

    def __init__(self, run_dir: Path) -> None:
        self.said: list[wire.Rejected] = []
        self.run_dir = run_dir
        for step in (1, 2, 3):
            capturer = Capturer(build(step))
            capturer.refresh()
            if step == 1:
                self.slots = SlotFile.create(*capturer.required_bytes(), name="nvrx-test")
            capturer.capture(self.slots, step - 1, generation=1, step=step, durable=False, now_mono_ns=1)
            self.layout_hash = capturer.layout_hash
        request = SaveRequest(run="demo", step=1, epoch=1, generation=1, captured_ns=1, world_size=1)
        saved = Saver(run_dir, WriteOptions()).save(request, Source(slot_files=[self.slots], slots=[0]))
        assert saved.directory is not None
        self.directory = saved.directory.name
        self.process: Any = SimpleNamespace(
            slots=self.slots,
            ring=None,
            settings=SimpleNamespace(run="demo", run_dir=str(run_dir)),
            control=SimpleNamespace(clock=ManualClock(), send=self.said.append),
        )

    def damage(self, *steps: int) -> None:
        """One bit of these steps' slots is another."""
        for step in steps:
            self.slots.data(step - 1)[4001] ^= 4

    def restore(
        self, tracked: dict[str, Any], *, durable: bool = False, commits_ever: bool = False
    ) -> tuple[int, RestoredFrom]:
        """Restore as the launcher would have it: what slots hold, newest first, then the disk."""
        sealed = [(header.step, slot) for slot, header in enumerate(self.slots.headers()) if header is not None]
        candidates: list[dict[str, Any]] = [
            {"tier": "hot", "step": step, "generation": 1, "slot": slot, "layout_hash": self.layout_hash}
            for step, slot in sorted(sealed, reverse=True)
        ]
        if durable:
            candidates.append({"tier": "durable", "step": 1, "generation": 1, "directory": self.directory})
        go: Any = SimpleNamespace(
            candidates=candidates, require_restore=commits_ever or durable, world_size=1, generation=2
        )
        return Restorer(self.process, go, 0, torch.device("cpu")).restore(tracked)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run with four states to restore."""
    made = Run(tmp_path)
    yield made
    made.slots.close()


def is_state_of(tracked: dict[str, Any], step: int) -> bool:
    """Parameters and moments are that step's."""
    expected = build(step)
    same = [
        torch.equal(mine, its)
        for mine, its in zip(tracked["model"].parameters(), expected["model"].parameters(), strict=True)
    ]
    for mine, its in zip(tracked["model"].parameters(), expected["model"].parameters(), strict=True):
        own, other = tracked["optimizer"].state[mine], expected["optimizer"].state[its]
        same += [torch.equal(own[key], other[key]) for key in ("exp_avg", "exp_avg_sq", "step")]
    return all(same)


def test_c04_a_damaged_slot_gives_way_to_an_older_one(run: Run) -> None:
    """What was filled from the damaged one is overwritten, all of it, and the slot holds nothing any more."""
    run.damage(3, 2)
    tracked = build(9)
    assert run.restore(tracked) == (1, RestoredFrom.HOT)
    assert is_state_of(tracked, 1)
    assert [header and header.step for header in run.slots.headers()] == [1, None, None]
    assert [(item.step, item.reason) for item in run.said] == [(3, "digest"), (2, "digest")]


def test_c04_damaged_slots_give_way_to_the_disk(run: Run) -> None:
    """The same with nothing good left in memory."""
    run.damage(1, 2, 3)
    tracked = build(9)
    assert run.restore(tracked, durable=True) == (1, RestoredFrom.DURABLE)
    assert is_state_of(tracked, 1)


def test_c04_no_run_begins_with_what_a_damaged_slot_left(run: Run) -> None:
    """No good state anywhere: the generation ends; the next one is offered nothing and begins with its own model."""
    run.damage(1, 2, 3)
    touched = build(9)
    with pytest.raises(CheckpointCorrupt, match="built anew"):
        run.restore(touched)
    assert not is_state_of(touched, 9)
    tracked = build(9)
    assert run.restore(tracked) == (0, RestoredFrom.FRESH)
    assert is_state_of(tracked, 9)


def test_damaged_slots_do_not_hide_that_commits_are_on_record(run: Run) -> None:
    """The stricter verdict counts: no restart cures it."""
    run.damage(1, 2, 3)
    with pytest.raises(NothingRestorable):
        run.restore(build(9), commits_ever=True)


def test_a_slot_of_another_model_is_left_alone_and_touches_nothing(run: Run) -> None:
    """It is found before a byte is copied, so a new run may begin at step 0 at once."""
    other = build(9)
    other["model"] = nn.Linear(40, 31)
    other["optimizer"] = torch.optim.AdamW(other["model"].parameters())
    before = [parameter.clone() for parameter in other["model"].parameters()]
    assert run.restore(other) == (0, RestoredFrom.FRESH)
    assert all(torch.equal(*pair) for pair in zip(before, other["model"].parameters(), strict=True))
    assert [header and header.step for header in run.slots.headers()] == [1, 2, 3]
    assert {item.reason for item in run.said} == {"layout"}


def test_where_the_time_of_a_restore_went_is_told(run: Run) -> None:
    """By part, from plan to installation; the durable tier has parts of its own."""
    run.restore(build(9))
    assert list(run.process.restore_parts_s) == ["plan", "fill", "agree", "install"]
    for slot in range(3):
        run.slots.begin(slot, 2, 4, False)
    run.restore(build(9), durable=True)
    assert list(run.process.restore_parts_s) == ["describe", "read", "plan", "agree", "copy", "install"]
