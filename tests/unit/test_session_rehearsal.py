"""Which captured states a standby can rehearse, and what it makes of them."""

from __future__ import annotations

from typing import Any

from nvrx_sre.checkpoint.layout import ItemKind, ItemRole, Layout, LayoutItem, pack
from nvrx_sre.session.rehearsal import part_of

ADAM = {"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}, "eps": 1e-8, "amsgrad": False, "fused": True}
SGD = {"lr": 0.1, "momentum": 0.9, "nesterov": False}


def item(fqn: str, rows: int, rank: int = 0, world_size: int = 2, **changes: Any) -> LayoutItem:
    """One rank's shard of a matrix of `rows` rows."""
    chunk = -(-rows // world_size)
    start = min(rows, rank * chunk)
    values: dict[str, Any] = {
        "fqn": fqn,
        "kind": ItemKind.SHARD,
        "role": ItemRole.PARAMETER,
        "dtype": "float32",
        "local_shape": (max(0, min(chunk, rows - start)), 3),
        "global_offset": (start, 0),
        "global_shape": (rows, 3),
        "offset_bytes": 0,
        "size_bytes": 0,
        "requires_grad": True,
    }
    return LayoutItem(**{**values, **changes})


def state_of(fqn: str, rows: int, **place: int) -> list[LayoutItem]:
    """What Adam keeps for a parameter."""
    return [item(f"{fqn}.{key}", rows, role=ItemRole.OPTIMIZER, **place) for key in ("exp_avg", "exp_avg_sq")]


def layout(*parameters: str, rows: int = 8, **place: int) -> Layout:
    """Parameters of a module `m`, with Adam's state of each in `o`."""
    items = [item(f"m.{name}", rows, **place) for name in parameters]
    states = [state for name in parameters for state in state_of(f"o.state.{name}", rows, **place)]
    return pack([*items, *states])


def small(names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Small state with one optimizer of one group."""
    return {"optimizers": {"o": {"groups": [{"names": names, "options": options}], "scalars": {}}}}


def test_adam_over_even_shards_is_rehearsed_for_any_rank() -> None:
    """Options and parameters are those that were captured, in the optimizer's order."""
    part = part_of(layout("a", "b"), small(["b", "a"], ADAM), 2)
    assert part is not None and part.is_even
    [[group]] = part.optimizers
    assert group == {**ADAM, "betas": (0.9, 0.95), "names": ["b", "a"]}
    assert part.parameters["b"].fqn == "m.b"


def test_uneven_shards_are_rehearsed_for_one_rank() -> None:
    """Of 7 rows one rank has 4 and the other 3: a plan of the one may be wrong for the other."""
    for rank in (0, 1):
        part = part_of(layout("a", rows=7, rank=rank), small(["a"], ADAM), 2)
        assert part is not None and not part.is_even


def test_a_rank_without_a_row_is_rehearsed_too() -> None:
    """Three rows over four ranks leave the last one an empty shard."""
    part = part_of(layout("a", rows=3, rank=3, world_size=4), small(["a"], ADAM), 4)
    assert part is not None and not part.is_even


def test_other_optimizers_are_left_alone() -> None:
    """The build alone is rehearsed then; so it is before the first step, when there is no state of an optimizer."""
    for state, options in ((layout("a"), SGD), (pack([item("m.a", 8)]), ADAM)):
        part = part_of(state, small(["a"], options), 2)
        assert part is not None and part.optimizers == ()


def test_an_optimizer_with_a_parameter_that_is_not_sharded_is_left_alone() -> None:
    """A plan names all tensors of a step: without one of them it is another."""
    part = part_of(layout("a"), small(["a", "whole"], ADAM), 2)
    assert part is not None and part.optimizers == ()


def test_what_is_sharded_another_way_is_not_rehearsed() -> None:
    """Columns, or a mesh smaller than the world, or nothing sharded: those plans would serve nobody."""
    columns = item("m.a", 8, local_shape=(8, 1), global_offset=(0, 0))
    smaller = item("m.a", 8, world_size=4)
    whole = item("m.a", 8, kind=ItemKind.TENSOR, local_shape=(8, 3))
    for found in (columns, smaller, whole):
        assert part_of(pack([found]), small([], ADAM), 2) is None
