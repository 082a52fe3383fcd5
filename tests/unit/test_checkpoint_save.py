"""One save in this process: plans kept, no process group touched, records between writers, pacing, reasons."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nvrx_sre.checkpoint import discover, write
from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.commit import SaveRefused, SaveRequest, check_current, failure_of
from nvrx_sre.checkpoint.pacing import Pacer
from nvrx_sre.checkpoint.parts import PART, PLAN, Exchange, Share
from nvrx_sre.checkpoint.save import Saved, Saver, Source
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.checkpoint.storage import WriteOptions
from nvrx_sre.core.errors import StorageError
from nvrx_sre.events.schema import SaveFailure


@pytest.fixture
def slots() -> Iterator[SlotFile]:
    """Slots of one rank."""
    made = SlotFile.create(1 << 14, 1 << 16, name="nvrx-test")
    yield made
    made.close()


def request_of(step: int) -> SaveRequest:
    """A save of `step` in a world of one."""
    return SaveRequest(run="demo", step=step, epoch=1, generation=1, captured_ns=step, world_size=1)


def save(saver: Saver, slots: SlotFile, capturer: Capturer, step: int) -> Saved:
    """Capture `step` and save it."""
    capturer.capture(slots, step % 3, generation=1, step=step, durable=True, now_mono_ns=1)
    return saver.save(request_of(step), Source(slot_files=[slots], slots=[step % 3]))


def test_plans_are_made_once_for_a_layout(slots: SlotFile, tmp_path: Path) -> None:
    """Merging costs milliseconds: the next save of the same layout takes the same plans, another layout does not."""
    saver = Saver(tmp_path, WriteOptions())
    model = nn.Linear(4, 4)
    capturer = Capturer({"model": model})
    save(saver, slots, capturer, 1)
    ranks = write.read_slots([slots], [1], request_of(1))
    plans = saver.plans.plans_for([write.plan_of(ranks[0])])
    save(saver, slots, capturer, 2)
    assert saver.plans.plans_for([write.plan_of(ranks[0])]) is plans
    save(saver, slots, Capturer({"other": model}), 3)
    assert saver.plans.plans_for([write.plan_of(ranks[0])]) is not plans


def test_c07_capture_and_save_use_no_process_group(
    slots: SlotFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every collective raises while a step is captured, written and committed: none is called."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a save used a process group")

    names = ("all_reduce", "all_gather", "all_gather_object", "gather_object", "broadcast", "broadcast_object_list")
    for name in (*names, "scatter_object_list", "reduce_scatter_tensor", "barrier", "new_group", "send", "recv"):
        monkeypatch.setattr(dist, name, refuse)
    saved = save(Saver(tmp_path, WriteOptions()), slots, Capturer({"model": nn.Linear(4, 4)}), 1)
    assert saved.directory is not None and saved.directory.name == "step-00000001-g00001"
    assert not dist.is_initialized()


def test_a_rank_that_changes_its_slot_during_the_save_voids_it(slots: SlotFile, tmp_path: Path) -> None:
    """What was written is then no state of any step."""
    capturer = Capturer({"model": nn.Linear(4, 4)})

    def overwrite(stage: str) -> None:
        if stage == "fsync":
            capturer.capture(slots, 1, generation=1, step=9, durable=False, now_mono_ns=1)

    with pytest.raises(SaveRefused, match="changed during the save"):
        save(Saver(tmp_path, WriteOptions(at_stage=overwrite)), slots, capturer, 1)
    assert list(discover.checkpoints_path(tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, SaveFailure.NO_SPACE),
        (errno.EDQUOT, SaveFailure.NO_SPACE),
        (errno.EFBIG, SaveFailure.NO_SPACE),
        (errno.EIO, SaveFailure.STORAGE),
        (errno.EROFS, SaveFailure.STORAGE),
    ],
)
@pytest.mark.parametrize("stage", ["write", "fsync", "manifest", "rename"])
def test_c08_the_reason_of_a_refusal_is_its_errno(
    number: int, reason: SaveFailure, stage: str, slots: SlotFile, tmp_path: Path
) -> None:
    """Also from below torch's C++ writer, which swallows the cause; nothing of the attempt stays."""

    def refuse(reached: str) -> None:
        if reached == stage:
            raise OSError(number, "refused")

    saver = Saver(tmp_path, WriteOptions(at_stage=refuse))
    with pytest.raises(StorageError) as caught:
        save(saver, slots, Capturer({"model": nn.Linear(4, 4)}), 1)
    assert failure_of(caught.value) is reason
    assert list(discover.checkpoints_path(tmp_path).iterdir()) == []


def exchange_of(directory: Path, part: int, deadline_s: float = 60.0) -> Exchange:
    """The exchange of one of two writers."""
    share = Share(part=part, num_parts=2, first_rank=part, attempt="a", deadline_s=deadline_s)
    return Exchange(directory, share, lambda: None)


def test_records_come_in_the_order_of_parts_and_go_again(tmp_path: Path) -> None:
    """Whoever was first; after `clear` nothing is left in the directory."""
    for part in (1, 0):
        exchange_of(tmp_path, part).put(PART, {"of": part})
    assert [body["of"] for body in exchange_of(tmp_path, 0).gather(PART)] == [0, 1]
    exchange_of(tmp_path, 0).clear()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "altered", "of another attempt"])
def test_a_record_that_is_not_whole_is_not_taken(damage: str, tmp_path: Path) -> None:
    """It counts as not there; the deadline ends the wait."""
    for part in (0, 1):
        exchange_of(tmp_path, part).put(PLAN, {"of": part})
    path = tmp_path / "plan-00001.json"
    record = json.loads(path.read_text())
    if damage == "of another attempt":
        other = Share(part=1, num_parts=2, attempt="b")
        Exchange(tmp_path, other, lambda: None).put(PLAN, {"of": 1})
    elif damage == "altered":
        path.write_text(json.dumps({**record, "body": record["body"].replace("1", "2")}))
    else:
        path.write_text(path.read_text()[:-9])
    with pytest.raises(SaveRefused, match="plan 1 did not come"):
        exchange_of(tmp_path, 0, deadline_s=0.01).gather(PLAN)


def test_a_writer_that_waits_notices_the_end_of_its_attempt(tmp_path: Path) -> None:
    """The other gave up, the attempt is gone, or another launcher leads: refused at once, long before the deadline."""
    exchange_of(tmp_path, 1).give_up()
    with pytest.raises(SaveRefused, match="gave attempt a up"):
        exchange_of(tmp_path, 0).gather(PLAN)
    with pytest.raises(SaveRefused, match="gave attempt a up"):
        exchange_of(tmp_path / "gone", 0).gather(PLAN)
    (tmp_path / "epochs").mkdir()
    (tmp_path / "epochs" / "00000002.json").write_text("{}")
    share = Share(part=0, num_parts=2, attempt="a")
    with pytest.raises(SaveRefused, match="epoch 2 has taken over"):
        Exchange(tmp_path, share, lambda: check_current(tmp_path, 1, 1, 1)).gather(PLAN)


def test_a_pacer_saves_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece waits for its own time, also after a pause: no burst follows a stall."""
    waits: list[float] = []

    def wait(wait_s: float) -> bool:
        waits.append(wait_s)
        return True

    pacer = Pacer(1000.0, wait)
    clock = iter([0, 10_000_000_000, 10_000_000_000])
    monkeypatch.setattr(pacer, "_clock", type("Clock", (), {"monotonic_ns": staticmethod(lambda: next(clock))}))
    for num_bytes in (500, 500, 2000):
        pacer.wrote(num_bytes)
    assert waits == pytest.approx([0.5, 0.5, 2.5])


def test_a_bound_keeps_what_is_written_whole(slots: SlotFile, tmp_path: Path) -> None:
    """Pieces that are pushed out one by one make the same file as without a bound."""
    model = nn.Linear(4, 4)
    capturer = Capturer({"model": model})
    options = WriteOptions(bandwidth_bytes_s=1e9)
    saved = save(Saver(tmp_path, options), slots, capturer, 1)
    assert saved.directory is not None
    state = {"model.weight": torch.zeros(4, 4), "model.bias": torch.zeros(4)}
    torch.distributed.checkpoint.load(state, checkpoint_id=saved.directory, no_dist=True)
    assert torch.equal(state["model.weight"], model.weight)
