"""Overlapped captures: what is copied when, who waits for it, what is told, what stays behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nvrx_sre.checkpoint.capture import Capturer, parse_blob, slot_views
from nvrx_sre.checkpoint.filling import HostFilling
from nvrx_sre.checkpoint.ring import Ring
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.events import messages as wire
from nvrx_sre.session.process import HotSchedule
from nvrx_sre.session.saving import NOT_DUE, Captured, HotSaver
from nvrx_sre.testing.clock import ManualClock

LIMIT_S = 60.0


class Rank:
    """One rank's state, its slots, and a channel that keeps what was sent."""

    def __init__(self, hot_every: int = 1) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.position = {"sample": 0}
        self.told: list[wire.Sealed] = []
        self.asked: list[tuple[int, int]] = []
        self.wanted: list[tuple[int, int]] = []
        self.has_room = True
        self.clock = ManualClock()
        self.slots: SlotFile | None = None
        self.is_full = False
        self.num_slots = 3
        self.heard_late = 0
        """Step of which the launcher hears while this rank waits that it is sealed everywhere."""
        self.num_points = 0
        process: Any = SimpleNamespace(
            settings=SimpleNamespace(save_every=50),
            slots=None,
            told_snapshot=None,
            hot_schedule=HotSchedule(hot_every),
            slots_for=self._slots_for,
            ask_slots=lambda generation, layout_hash, data_bytes, blob_bytes: self.asked.append(
                (data_bytes, blob_bytes)
            ),
            control=SimpleNamespace(
                clock=self.clock,
                interrupted=-1,
                pass_point=self._pass_point,
                channel=SimpleNamespace(send_nowait=self._send_nowait),
                send=self.told.append,
                enter=lambda *_, **__: None,
                wait_until=self._wait_until,
            ),
        )
        self.process = process
        tracked = {"model": self.model, "optimizer": self.optimizer, "position": self.position}
        self.saver = HotSaver(process, Capturer(tracked), generation=1, restored_step=0)

    def step(self) -> None:
        """One optimizer step."""
        self.model(torch.ones(2, 64)).pow(2).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.position["sample"] += 2

    def stored(self, slot: int) -> dict[str, Any]:
        """What the slot holds: tensors by name, and the position."""
        assert self.slots is not None
        header = self.slots.header(slot)
        assert header is not None
        layout, state = parse_blob(self.slots, slot, header)
        return {**slot_views(self.slots, slot, layout), "position": state["values"]["position"]}

    def close(self) -> None:
        """End the capture thread, drop the slots."""
        self.saver.close()
        if self.slots is not None:
            self.slots.close()

    def _slots_for(self, generation: int, layout_hash: str, data_bytes: int, blob_bytes: int) -> Any:
        self.wanted.append((data_bytes, blob_bytes))
        if self.is_full:
            return SimpleNamespace(free_slot=lambda *_, **__: None)
        if self.slots is None or self.slots.data_bytes < data_bytes:
            self.slots = SlotFile.create(data_bytes, blob_bytes, num_slots=self.num_slots, name="nvrx-test")
            self.process.slots = self.slots
        return self.slots

    def _pass_point(self) -> int:
        self.num_points += 1
        return self.clock.monotonic_ns()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """The launcher releases what the writer held, and publishes what it hears meanwhile; then it must hold."""
        if self.slots is not None and not condition():
            self.slots.held_slot = -1
            self.slots.sealed_step = max(self.slots.sealed_step, self.heard_late)
        assert condition()

    def _send_nowait(self, message: wire.Sealed) -> bool:
        if self.has_room:
            self.told.append(message)
        return self.has_room


@pytest.fixture
def rank() -> Iterator[Rank]:
    """A rank after its first step."""
    made = Rank()
    made.step()
    yield made
    made.close()


class Gate:
    """Copies stop at the gate until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        original = HostFilling.copy

        def copy(filling: HostFilling) -> None:
            self.reached.set()
            assert self.open.wait(LIMIT_S)
            original(filling)

        monkeypatch.setattr(HostFilling, "copy", copy)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A closed gate."""
    return Gate(monkeypatch)


def copies(rank: Rank) -> dict[str, torch.Tensor]:
    """Parameters and moments as they are now."""
    found = {f"model.{name}": item.detach().clone() for name, item in rank.model.named_parameters()}
    for name, item in rank.model.named_parameters():
        for key, value in rank.optimizer.state[item].items():
            found[f"optimizer.state.{name}.{key}"] = value.clone()
    return found


def test_c11_the_optimizer_waits_until_its_tensors_are_copied(rank: Rank, gate: Gate) -> None:
    """A copy that is held up holds up the optimizer, and the slot holds the step of the commit, bit for bit."""
    at_commit = copies(rank)
    assert rank.saver.at_boundary(1) == Captured(slot=0, durable=False)
    rank.position["sample"] = 99
    stepping = threading.Thread(target=rank.step)
    waiting = threading.Event()
    hook = rank.optimizer.register_step_pre_hook(lambda *_: waiting.set())
    rank.optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)
    stepping.start()
    assert waiting.wait(LIMIT_S) and gate.reached.wait(LIMIT_S)
    assert all(torch.equal(now, at_commit[name]) for name, now in copies(rank).items())
    assert rank.told == []
    gate.open.set()
    stepping.join(LIMIT_S)
    rank.saver.finish(1)
    stored = rank.stored(0)
    assert {name for name in stored if name != "position"} == set(at_commit)
    assert all(torch.equal(stored[name], value) for name, value in at_commit.items())
    assert not torch.equal(at_commit["model.weight"], rank.model.weight)


def test_c20_small_state_is_that_of_the_commit(rank: Rank, gate: Gate) -> None:
    """The data position moves on while the tensors are still copied; the slot holds the one of the commit."""
    rank.saver.at_boundary(1)
    rank.position["sample"] = 99
    gate.open.set()
    rank.saver.finish(1)
    assert rank.stored(0)["position"] == {"sample": 2}


def test_a_seal_is_told_when_the_slot_holds_the_step(rank: Rank, gate: Gate) -> None:
    """Not before: the launcher hands a slot to the writer as soon as every rank has told."""
    rank.saver.at_boundary(1)
    assert gate.reached.wait(LIMIT_S)
    assert rank.slots is not None and rank.slots.headers() == [None] * 3
    assert rank.told == []
    gate.open.set()
    rank.saver.finish(1)
    assert [(item.generation, item.step, item.slot) for item in rank.told] == [(1, 1, 0)]


def test_a_seal_that_found_no_room_is_told_at_the_end(rank: Rank) -> None:
    """A full channel drops it; the last one must arrive, or the last step would not be saved."""
    rank.has_room = False
    rank.saver.at_boundary(1)
    rank.saver.finish(1)
    assert [item.step for item in rank.told] == [1]


def test_a_seal_that_found_no_room_is_told_before_the_next_capture(rank: Rank) -> None:
    """Until the launcher knows of it no slot may be free: it would keep every later step from being captured."""
    rank.has_room = False
    rank.saver.at_boundary(1)
    rank.step()
    rank.has_room = True
    rank.saver.at_boundary(2)
    rank.saver.finish(2)
    assert [item.step for item in rank.told] == [1, 2]


def test_a_change_by_something_else_voids_the_capture(
    rank: Rank, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights clipped by hand after the commit: that slot is never sealed, the next capture is taken in one go."""
    rank.saver.at_boundary(1)
    assert gate.reached.wait(LIMIT_S)
    with torch.no_grad():
        rank.model.weight.clamp_(-0.01, 0.01)
    gate.open.set()
    rank.saver.finish(1)
    assert [item.slot for item in rank.told] == [-1]
    assert "something else than a tracked optimizer" in capsys.readouterr().err
    rank.step()
    clipped = copies(rank)
    rank.saver.at_boundary(2)
    with torch.no_grad():
        rank.model.weight.clamp_(-0.001, 0.001)
    rank.saver.finish(2)
    assert rank.told[-1].slot >= 0
    assert torch.equal(rank.stored(rank.told[-1].slot)["model.weight"], clipped["model.weight"])


def test_c16_the_end_of_a_generation_lets_the_copy_finish_and_leaves_nothing(rank: Rank, gate: Gate) -> None:
    """Interrupted between the commit and the seal: the step is sealed all the same, under its own generation."""
    before = set(threading.enumerate())
    rank.saver.at_boundary(1)
    closing = threading.Thread(target=rank.saver.close)
    closing.start()
    assert gate.reached.wait(LIMIT_S)
    assert closing.is_alive()
    gate.open.set()
    closing.join(LIMIT_S)
    assert rank.slots is not None
    header = rank.slots.header(0)
    assert header is not None and (header.generation, header.step) == (1, 1)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("nvrx-capture")]
    assert not rank.optimizer._optimizer_step_pre_hooks


def test_c33_a_closed_generation_keeps_no_tensor() -> None:
    """Model and moments go with the training function's own references, the capture thread's included."""
    made = Rank()
    made.step()
    made.saver.at_boundary(1)
    made.saver.finish(1)
    made.close()
    weight = weakref.ref(made.model.weight)
    moment = weakref.ref(made.optimizer.state[made.model.weight]["exp_avg"])
    del made
    gc.collect()
    assert weight() is None and moment() is None


def test_the_last_step_is_captured_at_the_end() -> None:
    """Every tenth step is captured; training ends at 13, which is captured then, and once only."""
    rank = Rank(hot_every=10)
    rank.step()
    assert [rank.saver.at_boundary(step).slot for step in (10, 11, 12, 13)] == [0, -1, -1, -1]
    rank.saver.finish(13)
    rank.saver.finish(13)
    assert [(item.step, item.slot) for item in rank.told] == [(10, 0), (13, 1)]
    rank.close()


def test_a_step_that_was_not_due_is_captured_before_weights_are_changed_by_hand() -> None:
    """Averaged weights are swapped in for good after the last step: what is saved at the end is the commit's state."""
    rank = Rank(hot_every=10)
    rank.step()
    assert rank.saver.at_boundary(1).slot == -1
    committed = rank.model.weight.detach().clone()
    rank.saver.let_change()
    with torch.no_grad():
        rank.model.weight.zero_()
    rank.saver.let_change()
    rank.saver.finish(1)
    assert [(item.step, item.slot) for item in rank.told] == [(1, 0)]
    assert torch.equal(rank.stored(0)["model.weight"], committed)
    rank.close()


@pytest.mark.parametrize(
    "begin", [lambda rank: rank.step(), lambda rank: rank.saver.begin_step()], ids=["step", "batch"]
)
def test_a_step_is_not_captured_once_the_next_one_has_begun(begin: Callable[[Rank], None]) -> None:
    """An evaluation behind the optimizer's step, or behind the next batch: that is not the state of the commit."""
    rank = Rank(hot_every=10)
    rank.step()
    rank.saver.at_boundary(1)
    begin(rank)
    rank.saver.let_change()
    assert rank.saver.num_captured == 0 and rank.told == []
    rank.close()


def test_no_change_by_hand_waits_for_a_slot() -> None:
    """Where none is free the step is left to the end, and the evaluation begins."""
    rank = Rank(hot_every=10)
    rank.is_full = True
    rank.step()
    rank.saver.at_boundary(1)
    rank.saver.let_change()
    assert rank.told == []
    rank.is_full = False
    rank.saver.finish(1)
    assert [item.step for item in rank.told] == [1]
    rank.close()


def change_by_hand(rank: Rank) -> None:
    """Behind the last commit, where nothing says so."""
    with torch.no_grad():
        rank.model.weight.zero_()


@pytest.mark.parametrize("change", [change_by_hand, Rank.step])
@pytest.mark.parametrize("skipped", ["not due", "no slot"])
def test_a_state_that_is_gone_is_not_saved_as_the_last_step(
    change: Callable[[Rank], None], skipped: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step was not captured, and now the weights are others: better none than one with the wrong name."""
    rank = Rank(hot_every=10 if skipped == "not due" else 1)
    rank.is_full = skipped == "no slot"
    rank.step()
    assert rank.saver.at_boundary(1).slot == -1
    rank.is_full = False
    change(rank)
    rank.saver.finish(1)
    assert rank.told == []
    assert "step 1 cannot be saved" in capsys.readouterr().err
    rank.close()


@pytest.mark.parametrize("why", ["no slot", "batch fetched"])
def test_weights_that_were_exchanged_without_a_capture_are_saved_if_they_are_back(why: str) -> None:
    """Two evaluations with averaged weights, the second begun inside the first; no capture could precede them."""
    rank = Rank(hot_every=10)
    rank.is_full = why == "no slot"
    rank.step()
    rank.saver.at_boundary(1)
    if why == "batch fetched":
        rank.saver.begin_step()
    rank.saver.let_change()
    committed = rank.model.weight.detach().clone()
    change_by_hand(rank)
    rank.saver.let_change()
    with torch.no_grad():
        rank.model.weight.copy_(committed)
    rank.is_full = False
    rank.saver.finish(1)
    assert [item.step for item in rank.told] == [1]
    assert torch.equal(rank.stored(0)["model.weight"], committed)
    rank.close()


def test_an_evaluation_behind_a_change_by_hand_captures_nothing() -> None:
    """What is there is not the state of the commit any more, whatever the place of the next change."""
    rank = Rank(hot_every=10)
    rank.step()
    rank.saver.at_boundary(1)
    change_by_hand(rank)
    rank.saver.let_change()
    rank.saver.finish(1)
    assert rank.saver.num_captured == 0 and rank.told == []
    rank.close()


def test_the_last_step_waits_for_the_slot_that_the_writer_reads() -> None:
    """Two slots, one held and one the newest of all ranks: the last step is captured when the writer is done."""
    rank = Rank()
    rank.num_slots = 2
    rank.step()
    assert [rank.saver.at_boundary(step).slot for step in (1, 2)] == [0, 1]
    assert rank.slots is not None
    rank.slots.held_slot, rank.slots.sealed_step = 0, 2
    assert rank.saver.at_boundary(3).slot == -1
    rank.saver.finish(3)
    assert (rank.told[-1].step, rank.told[-1].slot) == (3, 0)
    assert rank.num_points == 1, "as long as the writer holds it, the rank is not hung"
    rank.close()


def test_the_last_step_waits_for_what_the_launcher_has_yet_to_hear() -> None:
    """Two slots: whether step 1 or 2 is the newest of all ranks is not known yet, so neither may be overwritten."""
    rank = Rank()
    rank.num_slots, rank.heard_late = 2, 2
    rank.step()
    assert [rank.saver.at_boundary(step).slot for step in (1, 2)] == [0, 1]
    assert rank.slots is not None
    rank.slots.sealed_step = 1
    rank.process.hot_schedule = HotSchedule(0)
    assert rank.saver.at_boundary(3) is NOT_DUE
    rank.saver.finish(3)
    assert (rank.told[-1].step, rank.told[-1].slot) == (3, 0)
    assert rank.saver.num_skipped == 0
    rank.close()


def test_a_boundary_that_raises_does_not_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script goes on to its end: step 9 is the newest commit then, and the state is step 10's. Nothing is saved."""
    rank = Rank(hot_every=10)
    rank.step()
    assert rank.saver.at_boundary(9) is NOT_DUE
    rank.step()
    with monkeypatch.context() as patched:
        patched.setattr(Capturer, "refresh", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rank.saver.at_boundary(10)
    rank.saver.finish(9)
    assert rank.told == [] and "step 9 cannot be saved: an optimizer has stepped since" in capsys.readouterr().err
    rank.close()


def test_slots_are_asked_for_before_the_first_capture_needs_them() -> None:
    """At the first boundary without a capture, once, in the size that the capture will want."""
    rank = Rank(hot_every=3)
    rank.step()
    assert rank.saver.at_boundary(1) is rank.saver.at_boundary(2) is NOT_DUE
    assert len(rank.asked) == 1 and rank.slots is None
    rank.saver.at_boundary(3)
    assert rank.slots is not None and rank.asked == rank.wanted
    rank.close()


def test_a_due_save_without_a_free_slot_is_made_up_for(rank: Rank) -> None:
    """Step 50 finds no slot and is told as due, once; the next boundary that finds one is captured for it."""
    rank.process.hot_schedule = HotSchedule(0)
    rank.is_full = True
    assert rank.saver.at_boundary(50) == Captured(slot=-1, durable=True)
    assert rank.saver.at_boundary(51) == Captured(slot=-1, durable=False)
    rank.is_full = False
    assert rank.saver.at_boundary(52) == Captured(slot=0, durable=False)
    assert rank.saver.at_boundary(53) == Captured(slot=-1, durable=False)
    rank.process.hot_schedule = HotSchedule(1)
    assert rank.saver.at_boundary(53) == Captured(slot=1, durable=False)
    rank.saver.finish(53)
    assert (rank.saver.num_skipped, rank.saver.num_captured) == (2, 2)
    headers = cast(SlotFile, rank.slots).headers()
    assert [header.durable if header else None for header in headers] == [True, False, None]


def test_what_a_copy_raises_reaches_the_training_function(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in the thread is a fault of the rank, at its next optimizer step, not a silent end of captures."""

    def fail(_: HostFilling) -> None:
        raise RuntimeError("no copy today")

    monkeypatch.setattr(HostFilling, "copy", fail)
    rank.saver.at_boundary(1)
    with pytest.raises(RuntimeError, match="no copy today"):
        rank.step()
    assert rank.slots is not None and rank.slots.headers() == [None] * 3


def on_a_device(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The rank captures through a ring; what is appended says whether its slots are there, False at first."""
    are_there = [False]
    tracked = {"model": rank.model, "optimizer": rank.optimizer, "position": rank.position}
    rank.saver.close()
    rank.saver = HotSaver(
        rank.process, Capturer(tracked, ring=Ring(torch.device("cpu"))), generation=1, restored_step=0
    )
    monkeypatch.setattr(rank.process, "has_slots", lambda *_: are_there[-1], raising=False)
    return are_there


def test_on_a_device_no_step_waits_for_slots_that_are_being_mapped(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """To map and lock them takes seconds: captures are skipped and counted until they are there."""
    are_there = on_a_device(rank, monkeypatch)
    assert rank.saver.at_boundary(1).slot == -1
    assert (rank.saver.num_captured, rank.saver.num_skipped, rank.wanted) == (0, 1, [])
    are_there.append(True)
    slot = rank.saver.at_boundary(2).slot
    rank.saver.finish(2)
    assert rank.saver.num_captured == 1 and torch.equal(rank.stored(slot)["model.weight"], rank.model.weight)


def test_a_due_save_and_the_end_wait_for_slots_on_a_device(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """What must not be lost is worth the seconds."""
    on_a_device(rank, monkeypatch)
    assert rank.saver.at_boundary(50).slot >= 0
    rank.step()
    rank.process.hot_schedule = HotSchedule(0)
    assert rank.saver.at_boundary(51) is NOT_DUE
    rank.saver.finish(51)
    assert [told.step for told in rank.told] == [50, 51]


def test_on_a_device_an_optimizer_does_not_wait_for_the_drain(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device holds its own work back; the training function books no waiting, and the slot has the old values."""
    are_there = on_a_device(rank, monkeypatch)
    are_there.append(True)
    before = rank.model.weight.detach().clone()
    slot = rank.saver.at_boundary(1).slot
    rank.step()
    assert rank.saver.take_waited_ns() == 0
    rank.saver.finish(1)
    assert torch.equal(rank.stored(slot)["model.weight"], before)
