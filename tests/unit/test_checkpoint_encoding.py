"""Small state as JSON and back: values, tensors, random streams."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.checkpoint import encoding, rng
from nvrx_sre.core.errors import UserError

JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def round_trip(value: Any) -> Any:
    """Through text, as a slot or a file would hold it."""
    kept: dict[str, torch.Tensor] = {}
    text = json.dumps(encoding.encode(value, "x", kept.__setitem__), allow_nan=False)
    encoded = json.loads(text)
    assert sorted(encoding.big_names(encoded)) == sorted(kept)
    return encoding.decode(encoded, kept.__getitem__)


@given(JSON_LIKE)
def test_every_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    """Tuples stay tuples, integer keys stay integers, bytes stay bytes, infinities stay."""
    again = round_trip(value)
    assert again == value
    assert type(again) is type(value)


def test_dicts_that_look_like_tags_are_not_taken_for_them() -> None:
    """A user's own key with a dollar sign is data."""
    for value in ({"$tuple": [1]}, {"$big": "x"}, {"a": {"$float": "inf"}}):
        assert round_trip(value) == value


def test_nan_and_counter_come_back() -> None:
    """What JSON lacks has its own form."""
    assert math.isnan(round_trip({"x": math.nan})["x"])
    again = round_trip(Counter({2: 1, 5: 3}))
    assert isinstance(again, Counter) and again == Counter({2: 1, 5: 3})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 4),
        torch.randn(3, 5).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(40, 40).t(),
        torch.randn(2000),
    ],
)
def test_tensors_come_back_bit_equal(tensor: torch.Tensor) -> None:
    """Small ones in the text, big ones by name; shape, dtype and bits stay."""
    again = round_trip({"t": tensor})["t"]
    assert again.dtype == tensor.dtype and torch.equal(again, tensor)


def test_numpy_comes_back_with_its_type() -> None:
    """Arrays and scalars."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(round_trip(array), array)
    scalar = round_trip(np.float64(0.1))
    assert isinstance(scalar, np.float64) and scalar == np.float64(0.1)


def test_containers_come_back_of_their_type() -> None:
    """What a script does with them works as before: the default is made, the order can be changed, bytes written."""
    again = round_trip({"a": defaultdict(list, x=[1]), "b": OrderedDict(p=1, q=2), "c": bytearray(b"12")})
    again["a"]["y"].append(2)
    again["b"].move_to_end("p")
    again["c"][0] = 51
    assert again == {"a": {"x": [1], "y": [2]}, "b": OrderedDict(q=2, p=1), "c": b"32"}


def test_a_conjugate_view_comes_back_equal() -> None:
    """Its memory holds other numbers than it."""
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(round_trip(value.conj()), value.conj().clone())


def test_a_tensor_goes_back_to_the_kind_of_device_that_it_was_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process uses one; who only reads a checkpoint begins to use none. `meta` stands for a GPU."""
    handed: dict[str, torch.Tensor] = {}
    value = torch.zeros(encoding.BIG_BYTES, device="meta")
    encoded = encoding.encode([value, torch.ones(2)], "x", handed.__setitem__)
    assert encoding.big_names(encoded) == ["x.0"]
    filled = {"x.0": torch.zeros(encoding.BIG_BYTES)}
    kinds = []
    for is_in_use in (True, False):
        monkeypatch.setattr(encoding, "_is_in_use", lambda kind, used=is_in_use: used and kind == "meta")
        kinds.append([tensor.device.type for tensor in encoding.decode(encoded, filled.__getitem__)])
    assert kinds == [["meta", "cpu"], ["cpu", "cpu"]]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (namedtuple("Pair", "a b")(1, 2), "named tuple"),
        (defaultdict(lambda: 3), "defaultdict whose default"),
        (np.ma.array([1, 2], mask=[0, 1]), "a mask, fields"),
        (np.zeros(2, dtype=[("a", "f8")]), "a mask, fields"),
        (torch.eye(2).to_sparse(), "sparse or quantized"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value: Any, why: str) -> None:
    """It is named at the first capture, not found to be missing after a fault."""
    with pytest.raises(UserError, match=f"'x.deep' is .*{why}"):
        round_trip({"deep": value})


def test_what_cannot_be_saved_is_named() -> None:
    """The message names the path to the value."""
    with pytest.raises(UserError, match=r"x\.a\.1"):
        round_trip({"a": [1, object()]})
    with pytest.raises(UserError, match="Python objects"):
        round_trip(np.array([object()]))


def draw() -> tuple[Any, ...]:
    """One draw from every generator, Gaussian ones included (they keep a spare value)."""
    return torch.randn(3).tolist(), random.random(), random.gauss(0, 1), np.random.randn(), np.random.rand()


def test_random_streams_go_on_where_they_were() -> None:
    """All three generators continue with the same numbers after a round trip through text."""
    random.gauss(0, 1)
    np.random.randn()
    state = json.loads(json.dumps(rng.get_state()))
    expected = [draw(), draw()]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    rng.set_state(state)
    assert [draw(), draw()] == expected


def test_derived_streams_differ_by_rank_and_repeat() -> None:
    """A rank without a stream of its own gets one that no other rank has, the same at each restore."""
    state = rng.get_state()
    seen = []
    for rank in (2, 3, 2):
        rng.set_derived_state(state, rank)
        seen.append(draw())
    assert seen[0] == seen[2] != seen[1]
    rng.set_state(state)
