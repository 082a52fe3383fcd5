"""Which tensors can be saved: plain ones, and DTensors whose shards are contiguous blocks of the whole.

Asked before training (`check`) and again for what comes into being later. What is refused is refused in one
message that names it, because a state that is saved in part is worse than none.

Must not: run a collective, touch data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.core.errors import UserError

NUM_NAMED = 5
"""Tensors named in the message; the rest is counted."""
_PLAIN = (torch.Tensor, nn.Parameter)


def check(tracked: Mapping[str, object]) -> None:
    """Raise `UserError` that names whatever of `tracked` cannot be saved, as far as it exists yet."""
    flat = [
        f"{name}{'.' * bool(path)}{path} (FSDP1 wrapper)"
        for name, module in tracking.modules(tracked)
        for path, inner in module.named_modules()
        if isinstance(inner, FullyShardedDataParallel)
    ]
    refuse(flat or problems(tracking.fixed_sources(tracked)))


def problems(sources: Iterable[tracking.Source]) -> list[str]:
    """'name (why)' of each tensor that cannot be saved."""
    found = ((source.fqn, _problem(source.tensor)) for source in sources)
    return [f"{fqn} ({problem})" for fqn, problem in found if problem]


def refuse(found: list[str]) -> None:
    """Raise `UserError` if anything was found."""
    if not found:
        return
    more = f" and {len(found) - NUM_NAMED} more" if len(found) > NUM_NAMED else ""
    raise UserError(
        f"these cannot be saved: {', '.join(found[:NUM_NAMED])}{more}; use FSDP2 (fully_shard), HSDP or DDP with "
        "plain or evenly nested shards, or leave them out of ctx.track()"
    )


def _problem(tensor: torch.Tensor) -> str:
    if isinstance(tensor, FlatParameter):
        return "FSDP1 flat parameter"
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "not initialised yet"
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            return "partial sum over ranks: reduce it first"
        if any(isinstance(placement, _StridedShard) for placement in tensor.placements):
            return "strided shard"
        tensor = tensor._local_tensor
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}".replace("torch.", "")
    if tensor.is_meta:
        return "on the meta device: give it memory before ctx.restore()"
    return "" if type(tensor) in _PLAIN else f"tensor subclass {type(tensor).__name__}"
