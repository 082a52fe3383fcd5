"""What can all ranks restore? Pure: headers, findings and fences in, candidates out, best first.

A candidate is a dict, because it travels in `channel.Go`:
    {"tier": "hot", "step", "generation", "slots": [of each rank], "layout_hashes": [of each rank]}
    {"tier": "durable", "step", "generation", "directory"}

A fence (g, s) says: what generations before g made above step s is abandoned for ever.
Must not: do I/O, import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nvrx_sre.checkpoint.slots import SlotHeader


@dataclass(frozen=True, kw_only=True)
class Fence:
    """Everything above `step` of generations before `generation` is abandoned."""

    generation: int
    step: int


def is_abandoned(fences: Iterable[Fence], generation: int, step: int) -> bool:
    """True if what `generation` made at `step` lies on an abandoned line."""
    return any(generation < fence.generation and step > fence.step for fence in fences)


def common_hot(headers: Sequence[Sequence[SlotHeader | None]], fences: Iterable[Fence]) -> list[dict[str, Any]]:
    """Steps that one generation sealed on every rank and that no fence cuts off, newest first.

    `headers[rank][slot]`. No rank at all, or a rank without slots, leaves nothing.
    """
    fences = tuple(fences)
    per_rank = [
        {(header.step, header.generation): slot for slot, header in enumerate(slots) if header is not None}
        for slots in headers
    ]
    if not per_rank:
        return []
    common = set.intersection(*(set(sealed) for sealed in per_rank))
    candidates = []
    for step, generation in sorted(common, reverse=True):
        if is_abandoned(fences, generation, step):
            continue
        slots = [sealed[step, generation] for sealed in per_rank]
        hashes = [_hash(headers[rank][slot]) for rank, slot in enumerate(slots)]
        candidates.append(
            {"tier": "hot", "step": step, "generation": generation, "slots": slots, "layout_hashes": hashes}
        )
    return candidates


def order(
    hot: Sequence[dict[str, Any]],
    durable: Sequence[dict[str, Any]],
    *,
    checkpoints_back: int = 0,
    hot_allowed: bool = True,
) -> list[dict[str, Any]]:
    """All candidates, newest step first, hot before durable at the same step.

    `checkpoints_back` > 0 leaves out every hot candidate and puts that many of the newest durable ones last, but not
    the oldest: should those before them turn out damaged, a newer one is still better than none.
    """
    by_age = sorted(durable, key=lambda candidate: (candidate["step"], candidate["generation"]), reverse=True)
    if checkpoints_back > 0:
        num_last = min(checkpoints_back, max(0, len(by_age) - 1))
        return [*by_age[num_last:], *by_age[:num_last]]
    both = [*(hot if hot_allowed else ()), *by_age]
    return sorted(both, key=lambda candidate: (-candidate["step"], candidate["tier"] != "hot"))


def for_rank(candidates: Sequence[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """Candidates as `rank` gets them in `Go`: its own `slot` and `layout_hash` instead of everyone's."""
    mine = []
    for candidate in candidates:
        if candidate["tier"] == "hot":
            own = {"slot": candidate["slots"][rank], "layout_hash": candidate["layout_hashes"][rank]}
            candidate = {key: candidate[key] for key in ("tier", "step", "generation")} | own
        mine.append(candidate)
    return mine


def _hash(header: SlotHeader | None) -> str:
    assert header is not None  # the slot was taken from the sealed ones
    return header.layout_hash
