"""State through a ring, on the CPU by the code that a device runs: routes, turns, sums, what may change when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nvrx_sre.checkpoint import page_lock, ring
from nvrx_sre.checkpoint.capture import Capturer, parse_blob, slot_views
from nvrx_sre.checkpoint.filling import DeviceFilling
from nvrx_sre.checkpoint.layout import ItemKind, ItemRole, Layout, LayoutItem, pack
from nvrx_sre.checkpoint.restore import HotCandidate
from nvrx_sre.checkpoint.ring import Ring, fetch_ahead, snapshot_fits
from nvrx_sre.checkpoint.routes import num_blocks, pieces_of, routes_of
from nvrx_sre.checkpoint.slots import BLOCK_BYTES, SlotFile, block_sums
from nvrx_sre.core.errors import CheckpointCorrupt

PIECE = 2 * BLOCK_BYTES
CPU = torch.device("cpu")


class State:
    """A model with state of several types and odd sizes, its optimizer, and slots for it."""

    def __init__(self, seed: int, piece_bytes: int = PIECE) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(257, 301), nn.Linear(301, 7, bias=False))
        self.model.register_buffer("narrow", torch.randn(5001).to(torch.bfloat16))
        self.model.register_buffer("counts", torch.randint(0, 9, (3,)))
        self.model.register_buffer("turned", torch.randn(8, 3).t())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.position = {"sample": seed}
        self.step()
        self.ring = Ring(CPU, piece_bytes)
        self.capturer = Capturer(self.tracked, ring=self.ring)
        self.capturer.refresh()
        self.slots = SlotFile.create(*self.capturer.required_bytes(), name="nvrx-test")

    @property
    def tracked(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "position": self.position}

    def step(self) -> None:
        self.model(torch.ones(2, 257)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of everything, by name."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.state.{name}.{key}"] = value
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def begin(self, slot: int, step: int) -> DeviceFilling:
        filling = self.capturer.begin(self.slots, slot, generation=1, step=step, durable=False, now_mono_ns=1)
        assert isinstance(filling, DeviceFilling)
        return filling

    def capture(self, slot: int, step: int) -> None:
        self.capturer.capture(self.slots, slot, 1, step, False, 1)

    def stored(self, slot: int) -> dict[str, torch.Tensor]:
        """What the slot holds, by a digest that this side makes anew."""
        header = self.slots.header(slot)
        assert header is not None
        assert header.is_summed
        layout, _ = parse_blob(self.slots, slot, header)
        return {name: tensor.clone() for name, tensor in slot_views(self.slots, slot, layout).items()}

    def candidate(self, slot: int, step: int) -> HotCandidate:
        found = HotCandidate(self.slots, slot, step, self.capturer.layout_hash, self.tracked)
        found.ring = self.ring
        return found


@pytest.fixture(params=[PIECE, BLOCK_BYTES, 64 << 20], ids=["pieces", "blocks", "one piece"])
def state(request: pytest.FixtureRequest) -> Iterator[State]:
    made = State(1, request.param)
    yield made
    made.slots.close()


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_capture_holds_every_tensor(state: State) -> None:
    """All types, odd sizes, a tensor that is not contiguous and state of optimizers arrive as they were."""
    state.capture(0, 1)
    assert same(state.stored(0), state.tensors())


def test_offloaded_state_is_captured_from_the_host() -> None:
    """A rank on a device whose state is in host memory: as without a device, which would only be a longer way."""
    made = State(1)
    capturer = Capturer(made.tracked, ring=Ring(torch.device("meta")))
    capturer.capture(made.slots, 0, 1, 1, False, 1)
    header = made.slots.header(0)
    assert header is not None and not header.is_summed
    assert capturer.ring is None
    made.slots.close()


def test_later_captures_hold_later_values(state: State) -> None:
    """Remembered routes lead to what the tensors hold by then, staged ones included."""
    state.capture(0, 1)
    first = state.stored(0)
    state.step()
    state.model.narrow.mul_(2)
    state.capture(1, 2)
    assert same(state.stored(1), state.tensors())
    assert same(state.stored(0), first)


def test_new_optimizer_state_makes_new_routes(state: State) -> None:
    """Tensors that took the place of others are captured, not those of before."""
    state.capture(0, 1)
    for values in state.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"] + 1
    state.capture(1, 2)
    assert same(state.stored(1), state.tensors())


def test_few_pieces_take_turns(state: State) -> None:
    """Without room for a snapshot the same bytes arrive through a few pieces."""
    state.ring.is_snapshot = False
    state.capture(0, 1)
    assert same(state.stored(0), state.tensors())
    assert state.ring.for_few(1 << 40).numel() == ring.PIECES_MIN * state.ring.piece_bytes


def test_restore_fills_another_model(state: State) -> None:
    """What was captured is what is restored: tensors on the device by way of the ring, and small state."""
    state.capture(0, 1)
    wanted = state.tensors()
    state.step()
    state.position["sample"] = 99
    candidate = state.candidate(0, 1)
    candidate.check()
    candidate.load()
    assert same(state.tensors(), wanted)
    assert state.position["sample"] == 1


@pytest.mark.parametrize("area", ["data", "blob"])
def test_damage_is_found_and_empties_the_slot(state: State, area: str) -> None:
    """One bit in a tensor or in the small state is enough, and the slot is offered to nobody again."""
    state.capture(0, 1)
    header = state.slots.header(0)
    assert header is not None
    if area == "data":
        state.slots.data(0)[5000] ^= 8
    else:
        bytes_of_blob = bytes(state.slots.blob(0)[: header.blob_bytes])
        place = bytes_of_blob.rindex(b'"sample"')
        state.slots.blob(0)[place + 1] ^= 2
    with pytest.raises(CheckpointCorrupt):
        state.candidate(0, 1).check()
    assert state.slots.header(0) is None


def test_change_before_the_optimizer_voids_the_capture(state: State) -> None:
    """A parameter that something else changes right after the boundary may be torn: nobody gets that slot."""
    filling = state.begin(0, 1)
    with torch.no_grad():
        state.model[0].weight.add_(1)
    filling.copy()
    assert not filling.is_whole


def test_optimizer_may_step_before_the_copy_is_seen(state: State) -> None:
    """What the device was told to gather first is whole, although the counters have moved by then."""
    wanted = state.tensors()
    filling = state.begin(0, 1)
    assert filling.let_change()
    state.step()
    filling.copy()
    filling.seal()
    assert same(state.stored(0), wanted)


def test_change_before_a_step_is_not_hidden_by_it(state: State) -> None:
    """The verdict is of the moment in which the optimizer is let go on."""
    filling = state.begin(0, 1)
    with torch.no_grad():
        state.model[0].weight.add_(1)
    filling.let_change()
    state.step()
    filling.copy()
    assert not filling.is_whole


def test_interrupted_generation_seals_nothing(state: State) -> None:
    """What an abort set free may have computed anything."""
    filling = state.begin(0, 1)
    filling.counts = lambda: False
    filling.copy()
    assert not filling.is_whole


def test_fetched_ahead_is_what_is_restored(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way before there are tensors is taken from the ring; the slot is not read again."""
    page_lock.lock(state.slots, Cuda())
    state.capture(0, 1)
    wanted = state.tensors()
    state.step()
    fetch_ahead(state.ring, state.slots, 0)
    monkeypatch.setattr(ring, "_fetch", None)
    candidate = state.candidate(0, 1)
    candidate.check()
    candidate.load()
    assert same(state.tensors(), wanted)
    assert state.ring.fetched is None


def test_another_slot_than_was_fetched_is_read(state: State) -> None:
    """The launcher's first candidate may be rejected by another rank: the next one is fetched as usual."""
    page_lock.lock(state.slots, Cuda())
    state.capture(0, 1)
    wanted = state.tensors()
    state.step()
    state.capture(1, 2)
    fetch_ahead(state.ring, state.slots, 1)
    candidate = state.candidate(0, 1)
    candidate.check()
    candidate.load()
    assert same(state.tensors(), wanted)


def test_nothing_is_fetched_ahead_without_room_or_lock(state: State) -> None:
    """From memory that is not locked the copy would block; without room for a snapshot it has nowhere to go."""
    state.capture(0, 1)
    fetch_ahead(state.ring, state.slots, 0)
    assert state.ring.fetched is None
    page_lock.lock(state.slots, Cuda())
    state.ring.is_snapshot = False
    fetch_ahead(state.ring, state.slots, 0)
    assert state.ring.fetched is None


def test_released_ring_captures_again(state: State) -> None:
    """A generation gives the memory back; the next one makes its own routes into new memory."""
    state.capture(0, 1)
    state.ring.release()
    state.step()
    state.capture(1, 2)
    assert same(state.stored(1), state.tensors())


def test_a_generation_that_ran_out_of_memory_was_the_last_with_a_snapshot(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may be what a step was short of: the next one would run out of it again."""
    state.capture(0, 1)
    state.ring.release()
    assert state.ring.is_snapshot
    monkeypatch.setattr(ring, "_num_out_of_memory", lambda _: 1)
    state.ring.release()
    state.capture(1, 2)
    assert state.ring.is_snapshot is False
    assert same(state.stored(1), state.tensors())


def test_snapshot_needs_room_and_a_clean_record() -> None:
    """The choice: state and room must be free, and the process must never have run out of memory."""
    assert snapshot_fits(10 << 30, 12 << 30, 0)
    assert not snapshot_fits(10 << 30, (12 << 30) - 1, 0)
    assert not snapshot_fits(10 << 30, 100 << 30, 1)


def test_snapshot_that_does_not_fit_after_all_becomes_a_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is refused costs no capture."""
    made = State(1)
    original = Ring._get

    def refuse(self: Ring, size_bytes: int) -> torch.Tensor:
        if size_bytes > ring.PIECES_MIN * PIECE:
            raise torch.OutOfMemoryError("no room")
        return original(self, size_bytes)

    monkeypatch.setattr(Ring, "_get", refuse)
    made.capture(0, 1)
    assert made.ring.is_snapshot is False
    assert same(made.stored(0), made.tensors())
    made.slots.close()


@given(sizes=st.lists(st.integers(0, 5 * PIECE // 4), min_size=1, max_size=12))
def test_pieces_cover_every_element_once(sizes: list[int]) -> None:
    """Whatever the sizes, the cuts of an item follow one another from its first element to its last."""
    layout = pack([item(str(number), size) for number, size in enumerate(sizes)])
    pieces = pieces_of(layout, PIECE)
    assert [piece.start for piece in pieces] == list(range(0, layout.data_bytes, PIECE))
    for index, placed in enumerate(layout.items):
        cuts = [(piece, cut) for piece in pieces for cut in piece.cuts if cut.index == index]
        assert [cut.start for _, cut in cuts] == [0, *(cut.end for _, cut in cuts)][: len(cuts)]
        assert sum(cut.end - cut.start for _, cut in cuts) * 4 == placed.size_bytes
        for piece, cut in cuts:
            assert piece.start + cut.offset_bytes == placed.offset_bytes + cut.start * 4


def item(name: str, num_elements: int) -> LayoutItem:
    shape = (num_elements,)
    return LayoutItem(
        fqn=name,
        kind=ItemKind.TENSOR,
        role=ItemRole.PARAMETER,
        dtype="float32",
        local_shape=shape,
        global_offset=(0,),
        global_shape=shape,
        offset_bytes=0,
        size_bytes=4 * num_elements,
        requires_grad=True,
    )


@pytest.mark.parametrize("num_bytes", [0, 64, BLOCK_BYTES - 64, BLOCK_BYTES, 3 * BLOCK_BYTES + 128])
def test_sums_are_the_same_on_both_sides(num_bytes: int) -> None:
    """numpy's sums of a slot and torch's of the ring agree, overflow included."""
    content = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    sums = torch.empty(num_blocks(num_bytes), dtype=torch.int64)
    layout = Layout((item("x", num_bytes // 4),))
    memory = [content[piece.start : piece.end] for piece in pieces_of(layout, PIECE)]
    for route in routes_of(pieces_of(layout, PIECE), memory, {}):
        route.add_up(sums)
    assert sums.numpy().tobytes() == block_sums(memoryview(content.numpy()))


class Cuda:
    """A runtime that registers until it is asked once too often."""

    def __init__(self, num_granted: int = 1 << 30) -> None:
        self.num_granted = num_granted
        self.held: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if len(self.held) >= self.num_granted:
            return 2
        self.held[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.held[address]
        return 0


def test_all_pages_are_locked_until_the_slots_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of the mapping is registered once, in pieces, and given up before it is unmapped."""
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 3 * 4096)
    slots, cuda = SlotFile.create(100_000, 5_000, name="nvrx-test"), Cuda()
    assert page_lock.lock(slots, cuda) == ""
    assert sum(cuda.held.values()) == slots.size_bytes
    assert max(cuda.held.values()) == 3 * 4096
    slots.close()
    assert not cuda.held


def test_copies_are_cut_where_the_lock_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No portion crosses from one registered piece to the next, in any slot, and together they are all of it."""
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 3 * 4096)
    slots = SlotFile.create(100_000, 5_000, name="nvrx-test")
    assert slots.cuts(1, 64, 90_000) == [(64, 90_000)]
    page_lock.lock(slots, Cuda())
    for slot in range(slots.num_slots):
        first = slots._start(slot) + 4096
        cuts = slots.cuts(slot, 64, 90_000)
        assert [start for start, _ in cuts] == [64, *(end for _, end in cuts)][:-1]
        assert cuts[-1][1] == 90_000
        assert all((first + start) // 12_288 == (first + end - 1) // 12_288 for start, end in cuts)
    slots.close()


def test_refused_lock_holds_nothing_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a lock would be worse than none: copies could not know where it ends."""
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 3 * 4096)
    slots, cuda = SlotFile.create(100_000, 5_000, name="nvrx-test"), Cuda(num_granted=2)
    assert "refused to lock" in page_lock.lock(slots, cuda)
    assert not cuda.held
    assert slots.cuts(0, 0, 100_000) == [(0, 100_000)]
    slots.close()


def test_capture_into_locked_slots(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut portions carry the same bytes, both ways."""
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 5 * 4096)
    page_lock.lock(state.slots, Cuda())
    state.capture(1, 1)
    wanted = state.tensors()
    assert same(state.stored(1), wanted)
    state.step()
    candidate = state.candidate(1, 1)
    candidate.check()
    candidate.load()
    assert same(state.tensors(), wanted)
