"""Which tensors can be saved, and by which road.

    slots       plain tensors, and DTensors whose shards are contiguous blocks of the whole: both tiers
    the ranks   what a slot cannot hold at every step (`RANKS_ONLY`): the durable tier alone, at the step boundary
    refused     everything else, before training, in one message: a state that is saved in part is worse than none;
                so is what a `state_dict` of somebody's own adds to tensors and `torch.optim`'s state

Asked before training (`check`), and again for what comes into being later. Must not: run a collective, touch data.
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
from nvrx_sre.checkpoint.routes import local_of
from nvrx_sre.core.errors import UserError

NUM_NAMED = 5
"""Tensors named in the message; the rest is counted."""
RANKS_ONLY = "FSDP1 wrappers, strided shards, tensor subclasses"
_PLAIN = (torch.Tensor, nn.Parameter)


def check(tracked: Mapping[str, object], *, is_recovery: bool = False) -> list[str]:
    """'name (kind)' of whatever only the ranks can save, as far as it exists yet; [] if slots hold it all.

    Raises `UserError` that names whatever cannot be saved at all, and if there is nothing to save: each fault would
    begin training anew and look recovered. Calls state dicts that objects have of their own, which may take any time:
    not in a recovery (`is_recovery`), where they were asked as training began.
    """
    if not tracked:
        raise UserError("nothing is tracked: call ctx.track(model=..., optimizer=..., ...) before ctx.restore()")
    wrappers = fsdp1_wrappers(tracked)
    inside = {id(tensor) for module in wrappers.values() for tensor in (*module.parameters(), *module.buffers())}
    others = [source for source in tracking.fixed_sources(tracked) if id(source.tensor) not in inside]
    refuse(refusals(others))
    if not is_recovery:
        _refuse_hidden_state(tracked, wrappers.values())
    found = [(source.fqn, kind_for_ranks(source.tensor)) for source in others]
    return [f"{path} (FSDP1 wrapper)" for path in wrappers] + [f"{fqn} ({kind})" for fqn, kind in found if kind]


def fsdp1_wrappers(tracked: Mapping[str, object]) -> dict[str, FullyShardedDataParallel]:
    """The outermost FSDP1 wrappers inside tracked modules, by their full names."""
    found: dict[str, FullyShardedDataParallel] = {}
    for name, module in tracking.modules(tracked):
        for path, inner in module.named_modules():
            full = f"{name}.{path}".rstrip(".")
            if isinstance(inner, FullyShardedDataParallel) and not any(
                full == outer or full.startswith(f"{outer}.") for outer in found
            ):
                found[full] = inner
    return found


def _refuse_hidden_state(tracked: Mapping[str, object], wrappers: Iterable[nn.Module]) -> None:
    """Raise `UserError` for what only a `state_dict` of the object's own knows: nothing here calls it at a capture."""
    for name, optimizer in tracking.optimizers(tracked):
        if _has_state_of_its_own(optimizer):
            raise UserError(
                f"optimizer {name!r} cannot be saved: {type(optimizer).__name__} has a state_dict() of its own; "
                "use one that keeps all its state in `state` and `param_groups`"
            )
        for attribute, inner in tracking.held_by(optimizer):
            is_hidden = isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state
            if is_hidden and not any(inner is value for value in tracked.values()):
                raise UserError(
                    f"optimizer {name!r} steps another one, `{attribute}`, whose state would be lost: "
                    "give that one to ctx.track() as well"
                )
    inside = {inner for wrapper in wrappers for inner in wrapper.modules()}
    for name, module in tracking.modules(tracked):
        for path, inner in module.named_modules():
            if inner in inside or (inside and not inside.isdisjoint(inner.modules())):
                continue  # FSDP1 takes its own state dict of these, and would gather for each further one
            hidden = sorted(_hidden_keys(inner))
            if hidden and not _is_frozen(inner):
                raise UserError(
                    f"module {f'{name}.{path}'.rstrip('.')!r} cannot be saved: state_dict() of {type(inner).__name__} "
                    f"adds {listed(hidden)}: make it a buffer, or return it from get_extra_state()"
                )


def _is_frozen(module: nn.Module) -> bool:
    """Nothing of its own is trained: what a packed form (4 or 8 bit) adds to weights comes with them when they load."""
    own = list(module.parameters(recurse=False))
    is_whole = type(module).state_dict is nn.Module.state_dict
    return is_whole and bool(own) and not any(parameter.requires_grad for parameter in own)


def _has_state_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """False if its state dict has torch's two parts and no more, as wrappers' have that hand out another's."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return False
    try:
        state: object = optimizer.state_dict()
    except RuntimeError:  # `ZeroRedundancyOptimizer`: it is to be gathered first
        return True
    return not isinstance(state, Mapping) or not state.keys() <= {"state", "param_groups"}


def _hidden_keys(module: nn.Module) -> set[str]:
    """Keys of the module's state dict that are neither a parameter, a buffer nor extra state."""
    if type(module).state_dict is not nn.Module.state_dict:
        state = module.state_dict()
    elif type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
        state = {}
        module._save_to_state_dict(state, "", False)
    else:
        return set()
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    places = {local_of(tensor).data_ptr() for _, tensor in tensors}
    unnamed = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
    for key, _ in tensors:
        unnamed.pop(key, None)
    return {
        key
        for key, value in unnamed.items()
        if not isinstance(value, torch.Tensor) or local_of(value).data_ptr() not in places
    }


def refusals(sources: Iterable[tracking.Source]) -> list[str]:
    """'name (why)' of each tensor that cannot be saved at all."""
    found = ((source.fqn, _refusal(source.tensor)) for source in sources)
    return [f"{fqn} ({why})" for fqn, why in found if why]


def problems(sources: Iterable[tracking.Source]) -> list[str]:
    """'name (why)' of each tensor that a slot cannot hold."""
    found = ((source.fqn, _refusal(source.tensor) or kind_for_ranks(source.tensor)) for source in sources)
    return [f"{fqn} ({why})" for fqn, why in found if why]


def refuse(found: list[str]) -> None:
    """Raise `UserError` if anything was found."""
    if found:
        raise UserError(
            f"these cannot be saved: {listed(found)}; use FSDP2 (fully_shard), HSDP or DDP with "
            "plain or evenly nested shards, or leave them out of ctx.track()"
        )


def listed(found: list[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(found) - NUM_NAMED} more" if len(found) > NUM_NAMED else ""
    return ", ".join(found[:NUM_NAMED]) + more


def is_subclass(tensor: torch.Tensor) -> bool:
    """True for a tensor of a type of somebody else's."""
    return not isinstance(tensor, DTensor) and type(tensor) not in _PLAIN and not _is_unfinished(tensor)


def kind_for_ranks(tensor: torch.Tensor) -> str:
    """Why only the ranks can save it, '' if a slot can hold it. Of a tensor that is not refused."""
    if isinstance(tensor, FlatParameter):
        return "FSDP1 flat parameter"
    if isinstance(tensor, DTensor):
        is_strided = any(isinstance(placement, _StridedShard) for placement in tensor.placements)
        return "strided shard" if is_strided else ""
    return f"tensor subclass {type(tensor).__name__}" if is_subclass(tensor) else ""


def _refusal(tensor: torch.Tensor) -> str:
    if _is_unfinished(tensor):
        return "not initialised yet"
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            return "partial sum over ranks: reduce it first"
        if not _is_block(tensor):
            return "strided shard that is no contiguous block"
        tensor = tensor._local_tensor
        if is_subclass(tensor):
            return f"shard of tensor subclass {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}".replace("torch.", "")
    if tensor.is_inference():
        return "made in torch.inference_mode(), where nothing can be restored into it"
    return "on the meta device: give it memory before ctx.restore()" if tensor.is_meta else ""


def _is_unfinished(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def _is_block(tensor: DTensor) -> bool:
    """True unless a strided shard leaves gaps: its factor must be what later mesh dimensions split the same way."""
    for place, strided in enumerate(tensor.placements):
        if not isinstance(strided, _StridedShard):
            continue
        later = 1
        for size, other in list(zip(tensor.device_mesh.shape, tensor.placements, strict=True))[place + 1 :]:
            if other.is_shard(strided.dim) or (isinstance(other, _StridedShard) and other.dim == strided.dim):
                later *= size
        if later != strided.split_factor:
            return False
    return True
