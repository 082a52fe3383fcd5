"""Which states all ranks can restore, and in which order."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.checkpoint import agree, layout
from nvrx_sre.checkpoint.agree import Fence
from nvrx_sre.checkpoint.layout import ItemKind, ItemRole, LayoutItem
from nvrx_sre.checkpoint.slots import SlotHeader


def header(step: int, generation: int = 1, layout_hash: str = "a") -> SlotHeader:
    """A sealed header."""
    return SlotHeader(
        generation=generation,
        step=step,
        durable=False,
        sealed_mono_ns=0,
        data_bytes=0,
        blob_bytes=0,
        layout_hash=layout_hash,
        digest=bytes(16),
    )


def test_only_steps_sealed_on_every_rank_are_candidates() -> None:
    """Step 7 misses on rank 1; 6 and 5 are on both, in different slots."""
    found = agree.common_hot(
        [[header(5), header(6), header(7)], [header(6, layout_hash="b"), None, header(5, layout_hash="b")]], []
    )
    assert [(item["step"], item["slots"]) for item in found] == [(6, [1, 0]), (5, [0, 2])]
    assert found[0]["layout_hashes"] == ["a", "b"]
    assert found[0]["tier"] == "hot"


def test_one_step_of_two_generations_is_not_common() -> None:
    """A step counts only if the same generation sealed it everywhere."""
    assert agree.common_hot([[header(5, generation=1)], [header(5, generation=2)]], []) == []


def test_fenced_slots_never_come_back() -> None:
    """After a rollback to 5 for generation 3, older generations' later steps are out; generation 3's are in."""
    fences = [Fence(generation=3, step=5)]
    rank = [header(5, generation=2), header(6, generation=2), header(6, generation=3)]
    found = agree.common_hot([rank, rank], fences)
    assert [(item["step"], item["generation"]) for item in found] == [(6, 3), (5, 2)]


def test_a_rank_without_slots_leaves_nothing() -> None:
    """No rank, or one that lost its slots: no hot candidate."""
    assert agree.common_hot([], []) == []
    assert agree.common_hot([[header(5)], []], []) == []


def test_order_is_newest_first_and_hot_before_durable() -> None:
    """At the same step the hot tier is faster."""
    hot = [{"tier": "hot", "step": 6, "generation": 1}, {"tier": "hot", "step": 4, "generation": 1}]
    durable = [{"tier": "durable", "step": step, "generation": 1} for step in (4, 6)]
    assert [(item["tier"], item["step"]) for item in agree.order(hot, durable)] == [
        ("hot", 6),
        ("durable", 6),
        ("hot", 4),
        ("durable", 4),
    ]
    assert all(item["tier"] == "durable" for item in agree.order(hot, durable, hot_allowed=False))


@pytest.mark.parametrize(("back", "steps"), [(1, [2, 1, 3]), (2, [1, 3, 2]), (9, [1, 3, 2])])
def test_checkpoints_back_leaves_out_hot_and_puts_the_newest_durable_last(back: int, steps: list[int]) -> None:
    """Going back begins with an older durable checkpoint; if none of those is good, a newer one is left."""
    durable = [{"tier": "durable", "step": step, "generation": 1} for step in (1, 2, 3)]
    hot = [{"tier": "hot", "step": 3, "generation": 1}]
    assert [item["step"] for item in agree.order(hot, durable, checkpoints_back=back)] == steps
    assert agree.order(hot, [], checkpoints_back=back) == []


def test_for_rank_gives_a_rank_its_own_slot() -> None:
    """The list in `Go` names one slot and one layout."""
    hot = {"tier": "hot", "step": 6, "generation": 2, "slots": [0, 2], "layout_hashes": ["a", "b"]}
    durable = {"tier": "durable", "step": 4, "generation": 1, "directory": "d"}
    assert agree.for_rank([hot, durable], 1) == [
        {"tier": "hot", "step": 6, "generation": 2, "slot": 2, "layout_hash": "b"},
        durable,
    ]


@given(
    fences=st.lists(st.builds(Fence, generation=st.integers(1, 5), step=st.integers(0, 9)), max_size=4),
    sealed=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=3, unique=True),
)
def test_no_candidate_lies_behind_a_fence(fences: list[Fence], sealed: list[tuple[int, int]]) -> None:
    """Whatever is sealed and fenced: candidates are exactly what no fence cuts off."""
    rank = [header(step, generation) for step, generation in sealed]
    found = {(item["step"], item["generation"]) for item in agree.common_hot([rank, rank, rank], fences)}
    assert found == {
        (step, generation)
        for step, generation in sealed
        if not any(generation < fence.generation and step > fence.step for fence in fences)
    }


def item(fqn: str, size_bytes: int) -> LayoutItem:
    """A byte tensor."""
    return LayoutItem(
        fqn=fqn,
        kind=ItemKind.TENSOR,
        role=ItemRole.PARAMETER,
        dtype="uint8",
        local_shape=(size_bytes,),
        global_offset=(0,),
        global_shape=(size_bytes,),
        offset_bytes=0,
        size_bytes=size_bytes,
        requires_grad=True,
    )


@given(st.lists(st.integers(0, 300), max_size=8))
def test_layout_is_aligned_dense_and_survives_json(sizes: list[int]) -> None:
    """Offsets are multiples of 64, items do not overlap, and the hash is a function of the content."""
    packed = layout.pack([item(f"t{index}", size) for index, size in enumerate(sizes)])
    end_bytes = 0
    for placed in packed.items:
        assert placed.offset_bytes % 64 == 0
        assert 0 <= placed.offset_bytes - end_bytes < 64
        end_bytes = placed.offset_bytes + placed.size_bytes
    assert packed.data_bytes >= end_bytes
    again = layout.from_json(json.loads(packed.json))
    assert again == packed and again.hash == packed.hash


@pytest.mark.parametrize("value", [None, 3, [{}], [{"fqn": "a"}], ["a"]])
def test_what_is_no_layout_is_refused(value: object) -> None:
    """Damaged input is a ValueError, never another exception."""
    with pytest.raises(ValueError, match="not a layout"):
        layout.from_json(value)


def test_overlapping_or_doubled_items_are_refused() -> None:
    """Two tensors on the same bytes or under one name are damage."""
    first, second = item("a", 100), item("b", 100)
    overlapping = layout.Layout((first, replace(second, offset_bytes=64)))
    with pytest.raises(ValueError, match="overlaps"):
        layout.from_json(json.loads(overlapping.json))
    doubled = layout.pack([first, first])
    with pytest.raises(ValueError, match="twice"):
        layout.from_json(json.loads(doubled.json))
