"""The user's tracked objects as a flat list of named tensors and a tree of small state.

Names, which are also the keys of the DCP checkpoint:
    <name>.<fqn>                          parameters and buffers of the module tracked as <name>
    <name>.state.<parameter fqn>.<key>    tensor state of the optimizer tracked as <name>
    <name>                                a tensor tracked by itself
    <name>.<path>                         a big tensor inside the state_dict of another object
With one tracked module the parameter fqn is the module's own; with several it begins with the module's name. A
tensor that a module holds under several names (tied weights) is one source; the further names are its aliases.

Small state: {"rng", "optimizers": {name: {"groups", "scalars", "shared"}}, "extra": {name: {submodule: extra state}},
"objects": {name: state_dict}, "values": {name: value}}, encoded by `encoding`. Parameters and buffers seldom change
their identity (`fixed`); optimizer state may come into being at any step. Must not: run a collective or an optimizer
step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nvrx_sre.checkpoint import encoding, rng
from nvrx_sre.checkpoint.layout import ItemRole
from nvrx_sre.core.errors import UserError


class Source(NamedTuple):
    """A live tensor (DTensor or plain) under its name. A tuple: each capture makes thousands."""

    fqn: str
    role: ItemRole
    tensor: torch.Tensor
    aliases: tuple[str, ...] = ()


def is_stateful(value: object) -> bool:
    """True for objects with `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_restorable(value: object) -> bool:
    """True if what was saved can be put into the object itself."""
    return is_stateful(value) or isinstance(value, torch.Tensor | dict | list)


def held_by(holder: object) -> Iterator[tuple[str, object]]:
    """(attribute, object) of what an object has of its own, one by one where that is a list, tuple or dict."""
    for attribute, value in getattr(holder, "__dict__", {}).items():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for part in parts:
            yield attribute, part


def modules(tracked: Mapping[str, object]) -> Iterator[tuple[str, nn.Module]]:
    """Tracked modules by name."""
    for name, value in tracked.items():
        if isinstance(value, nn.Module):
            yield name, value


def optimizers(tracked: Mapping[str, object]) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Tracked optimizers by name."""
    for name, value in tracked.items():
        if isinstance(value, torch.optim.Optimizer):
            yield name, value


def objects(tracked: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Tracked objects with a state_dict that are neither modules nor optimizers."""
    for name, value in tracked.items():
        if is_stateful(value) and not isinstance(value, nn.Module | torch.optim.Optimizer):
            yield name, value


def values(tracked: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Tracked plain values."""
    for name, value in tracked.items():
        if not is_stateful(value) and not isinstance(value, torch.Tensor):
            yield name, value


def fixed_sources(tracked: Mapping[str, object]) -> list[Source]:
    """Parameters, buffers and tracked tensors: the part that seldom changes its identity within a generation.

    FSDP modules are resharded first, so that a name means the shard and never a gathered parameter.
    """
    found: list[Source] = []
    for name, module in modules(tracked):
        for inner in module.modules():
            if isinstance(inner, FSDPModule):
                inner.reshard()
        found += _named(name, ItemRole.PARAMETER, module.named_parameters(remove_duplicate=False))
        found += _buffers(name, module)
    for name, value in tracked.items():
        if isinstance(value, torch.Tensor):
            found.append(Source(name, ItemRole.STATE, value))
    return found


def buffer_sources(tracked: Mapping[str, object]) -> list[Source]:
    """The buffers among `fixed_sources`, as modules hold them now."""
    return [source for name, module in modules(tracked) for source in _buffers(name, module)]


def _buffers(name: str, module: nn.Module) -> list[Source]:
    return _named(name, ItemRole.BUFFER, module.named_buffers(remove_duplicate=False))


def _named(name: str, role: ItemRole, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Source]:
    """One source a tensor, under its first name."""
    names: dict[int, list[str]] = {}
    first: dict[int, torch.Tensor] = {}
    for fqn, tensor in tensors:
        first.setdefault(id(tensor), tensor)
        names.setdefault(id(tensor), []).append(f"{name}.{fqn}")
    return [Source(names[key][0], role, tensor, tuple(names[key][1:])) for key, tensor in first.items()]


def extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, submodule) of every submodule that has state of its own beside tensors (`get_extra_state`)."""
    for path, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            yield path, inner


def parameter_names(tracked: Mapping[str, object]) -> dict[torch.Tensor, str]:
    """Parameter -> its name in optimizer state."""
    tracked_modules = dict(modules(tracked))
    several = len(tracked_modules) > 1
    return {
        parameter: f"{name}.{fqn}" if several else fqn
        for name, module in tracked_modules.items()
        for fqn, parameter in module.named_parameters()
    }


def group_names(name: str, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> list[list[str]]:
    """Names of the parameters of each group. Raises `UserError` for a parameter of no tracked module."""
    try:
        return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise UserError(
            f"optimizer {name!r} holds a parameter that belongs to no tracked module: track that module as well"
        ) from None


def optimizer_sources(
    name: str, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> tuple[list[Source], dict[str, dict[str, Any]]]:
    """(tensor state, other state by parameter name and key) of an optimizer, as far as it exists yet.

    Raises `UserError` for state that no name can be given.
    """
    found: list[Source] = []
    scalars: dict[str, dict[str, Any]] = {}
    role = ItemRole.OPTIMIZER
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        fqn = names[parameter]
        prefix = f"{name}.state.{fqn}."
        for key, value in optimizer.state.get(parameter, {}).items():
            if type(key) is not str:
                raise UserError(
                    f"optimizer {name!r} keeps state of {fqn} under {key!r}, which cannot be saved: use text as keys"
                )
            if isinstance(value, torch.Tensor):
                found.append(Source(prefix + key, role, value))
            else:
                scalars.setdefault(fqn, {})[key] = value
    return found, scalars


def split_state_key(path: str, parameters: Container[str]) -> tuple[str, str] | None:
    """(parameter name, state key) of what stands behind `<name>.state.`; both may have dots. None if it is of none."""
    end = path.rfind(".")
    while end > 0 and path[:end] not in parameters:
        end = path.rfind(".", 0, end)
    return (path[:end], path[end + 1 :]) if end > 0 else None


def _shared_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """State that is of no parameter, by its key."""
    state: Mapping[Any, Any] = optimizer.state
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def small_state(
    tracked: Mapping[str, object],
    groups: Mapping[str, list[list[str]]],
    scalars: Mapping[str, Any],
    random: Mapping[str, Any] | None = None,
    states: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[Source]]:
    """(JSON-ready small state, big tensors found inside it).

    `random` and `states` (by name) go before what the generators and those objects say now.
    """
    big: list[Source] = []

    def take(name: str, tensor: torch.Tensor) -> None:
        big.append(Source(name, ItemRole.STATE, tensor))

    random, states = random or rng.get_state(), states or {}
    state: dict[str, Any] = {"rng": random, "optimizers": {}, "extra": {}, "objects": {}, "values": {}}
    for name, optimizer in optimizers(tracked):
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        encoded = encoding.encode(options, f"{name}.group", take)
        state["optimizers"][name] = {
            "groups": [{"names": listed, "options": item} for listed, item in zip(groups[name], encoded, strict=True)],
            "scalars": encoding.encode(scalars[name], f"{name}.scalar", take),
            "shared": encoding.encode(_shared_state(optimizer), f"{name}.shared", take),
        }
    for name, module in modules(tracked):
        state["extra"][name] = {
            path: encoding.encode(inner.get_extra_state(), f"{name}.{path}._extra_state", take)
            for path, inner in extra_states(module)
        }
    for name, value in objects(tracked):
        state["objects"][name] = encoding.encode(states[name] if name in states else value.state_dict(), name, take)
    for name, value in values(tracked):
        state["values"][name] = encoding.encode(value, name, take)
    return state, big
