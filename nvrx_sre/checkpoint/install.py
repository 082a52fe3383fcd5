"""Stored state into the tracked objects: targets first, then their values, then small state and random streams.

    Targets(...)      what is to be filled, by checkpoint key; optimizer state is made here, the model not touched
    install(...)      hands optimizer state, objects, values and random streams to their owners

Parameters are filled in place; optimizer state is made with `empty_like`, so no optimizer step is run.

Small state into another world size: random streams and a rank's own copies of tensors stay with the ranks that
exist, a rank that did not exist derives a stream and takes the lowest rank's copies. An object that can deal its
state out has `load_resharded(states, rank, world_size)`; otherwise it is loaded where it was the same on all
ranks and cannot be iterated over, and refused where not: a loader's position in another world is other data.

Thread safety: main thread of the rank. Must not: run a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from nvrx_sre.checkpoint import encoding, rng
from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.checkpoint.dcp_metadata import StoredTensor
from nvrx_sre.checkpoint.fit import Mismatch
from nvrx_sre.checkpoint.manifest import own_key
from nvrx_sre.checkpoint.spare import Spare
from nvrx_sre.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SmallState:
    """`own`: what this rank takes. `saved`: of every rank of the old world; empty if the world is the same one."""

    own: dict[str, Any]
    rank: int
    world_size: int
    saved: Sequence[dict[str, Any]] = field(default=())
    own_copies: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Tensors that ranks of the old world had each for themselves, by their keys."""

    def key_of(self, saved_rank: int, name: str) -> str:
        """Key under which the big tensor `name` of a saved rank's state is stored."""
        key = own_key(name, saved_rank)
        return key if key in self.own_copies else name

    def is_common(self, kind: str, name: str) -> bool:
        """True if all ranks had saved the same, big tensors included."""
        first = self.saved[0][kind].get(name)
        if any(state[kind].get(name) != first for state in self.saved):
            return False
        return all(
            self.key_of(rank, big) == big for big in encoding.big_names(first) for rank in range(len(self.saved))
        )


Moments = dict[str, dict[str, tuple[str, torch.Tensor]]]
"""Parameter name -> state key -> (checkpoint key, tensor)."""


class Targets:
    """Tensors to fill, DTensor or plain, by checkpoint key. `made`: those that nobody holds yet."""

    def __init__(self, tracked: Mapping[str, object], stored: Mapping[str, StoredTensor], spare: Spare) -> None:
        """Targets of all tensors but those inside small state, new ones in memory of `spare`. Call under no_grad.

        Raises `Mismatch` for state of another model.
        """
        self.moments: dict[str, Moments] = {}
        self.made: dict[str, torch.Tensor] = {}
        self._stored = stored
        names = tracking.parameter_names(tracked)
        for name, optimizer in tracking.optimizers(tracked):
            tracking.group_names(name, optimizer, names)
            self.moments[name] = _optimizer_targets(name, optimizer, names, stored)
            for states in self.moments[name].values():
                self.made.update(dict(states.values()))
        for tensor in self.made.values():
            spare.provide(tensor)
        self.sources = tracking.fixed_sources(tracked)
        self.fixed = {source.fqn: source.tensor.detach() for source in self.sources}

    def add_big(self, small: SmallState) -> None:
        """Targets of the big tensors inside `small`, which fits what is tracked (`fit.check_fit`)."""
        for key in _big_keys(small):
            form = small.own_copies.get(key) or self._stored[key]
            self.made[key] = torch.empty(form.shape, dtype=_dtype(form))

    def all(self) -> dict[str, torch.Tensor]:
        """All of them."""
        return self.fixed | self.made

    def big(self, key: str) -> torch.Tensor:
        """A big tensor of the small state, filled by now."""
        return self.made[key]


def check_resharding(tracked: Mapping[str, object], small: SmallState) -> None:
    """Raise `UserError` if something tracked cannot go into another world size. Changes nothing."""
    for source in tracking.fixed_sources(tracked):
        for saved_rank in range(len(small.saved)):
            if source.tensor.requires_grad and own_key(source.fqn, saved_rank) in small.own_copies:
                raise _cannot_deal_out(
                    source.fqn, small, "it differs between ranks and is no DTensor: shard it with DTensor"
                )
    for name, value in tracking.objects(tracked):
        if _deals_out(value):
            continue
        if hasattr(value, "__iter__"):
            raise _cannot_deal_out(
                name, small, "its position belongs to one rank: track a plain DataLoader over a DistributedSampler"
            )
        if not small.is_common("objects", name):
            raise _cannot_deal_out(name, small, "its state differs between ranks: give it load_resharded()")
    for kind, listed in (("values", tracking.values(tracked)), ("extra", tracking.modules(tracked))):
        for name, _ in listed:
            if not small.is_common(kind, name):
                raise _cannot_deal_out(name, small, "it differs between ranks: track an object with load_resharded()")


def install(tracked: Mapping[str, object], targets: Targets, small: SmallState) -> dict[str, Any]:
    """Give everything but the filled parameters to its owner; values that cannot change in place, by name."""
    names = tracking.parameter_names(tracked)
    state = small.own
    for name, optimizer in tracking.optimizers(tracked):
        _install_optimizer(optimizer, names, targets.moments[name], state["optimizers"][name], targets)
    for name, module in tracking.modules(tracked):
        for path, inner in tracking.extra_states(module):
            inner.set_extra_state(encoding.decode(state["extra"][name][path], targets.big))
    for name, value in tracking.objects(tracked):
        if small.saved and _deals_out(value):
            value.load_resharded(_all_states(name, targets, small), small.rank, small.world_size)
        else:
            value.load_state_dict(encoding.decode(state["objects"][name], targets.big))
    fixed = _install_values(tracked, state["values"], targets)
    if small.saved and small.rank >= len(small.saved):
        rng.set_derived_state(state["rng"], small.rank)
    else:
        rng.set_state(state["rng"])
    return fixed


def _deals_out(value: object) -> bool:
    return callable(getattr(value, "load_resharded", None))


def _all_states(name: str, targets: Targets, small: SmallState) -> list[dict[str, Any]]:
    """What every rank of the old world had saved of the object `name`."""

    def big_of(rank: int) -> Callable[[str], torch.Tensor]:
        return lambda big: targets.big(small.key_of(rank, big))

    return [encoding.decode(saved["objects"][name], big_of(rank)) for rank, saved in enumerate(small.saved)]


def _big_keys(small: SmallState) -> set[str]:
    """Checkpoint keys of all big tensors of the small states in use."""
    keys = set(encoding.big_names(small.own))
    for rank, saved in enumerate(small.saved):
        keys.update(small.key_of(rank, name) for name in encoding.big_names(saved["objects"]))
    return keys


def _cannot_deal_out(name: str, small: SmallState, why: str) -> UserError:
    return UserError(
        f"{name!r} was saved by {len(small.saved)} ranks and does not go into a world of {small.world_size}: {why}, "
        "or start again with that number of ranks"
    )


def _optimizer_targets(
    name: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    stored: Mapping[str, StoredTensor],
) -> Moments:
    parameters = {
        names[parameter]: (parameter, group) for group in optimizer.param_groups for parameter in group["params"]
    }
    made: Moments = {}
    prefix = f"{name}.state."
    for key, tensor in stored.items():
        if not key.startswith(prefix):
            continue
        found = tracking.split_state_key(key.removeprefix(prefix), parameters)
        if found is None:
            raise Mismatch(f"it holds {key}, which is not tracked here")
        parameter_name, state_key = found
        parameter, group = parameters[parameter_name]
        made.setdefault(parameter_name, {})[state_key] = (key, _empty_state(parameter, group, tensor))
    return made


def _empty_state(parameter: torch.Tensor, group: dict[str, Any], stored: StoredTensor) -> torch.Tensor:
    """What the optimizer would have made: sharded like the parameter, or plain where the shape is its own."""
    if stored.shape == tuple(parameter.shape) and parameter.dim() > 0:
        return _empty_like(parameter, _dtype(stored))
    # torch keeps scalar state on the CPU unless the implementation reads it on the device.
    on_device = bool(stored.shape) or group.get("capturable") or group.get("fused")
    return torch.empty(stored.shape, dtype=_dtype(stored), device=parameter.device if on_device else "cpu")


def _empty_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """New tensor of the parameter's form. A DTensor is put together: `empty_like` asks the sharding rules, 6 ms."""
    if not isinstance(parameter, DTensor):
        return torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format).detach()
    local = torch.empty_like(parameter.to_local(), dtype=dtype, memory_format=torch.preserve_format)
    if dtype == parameter.dtype:
        # What `from_local` comes to where nothing is to be asked or differentiated: 4 us, against 40.
        made = DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch's own
        return cast(torch.Tensor, made)
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _install_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    made: Moments,
    state: dict[str, Any],
    targets: Targets,
) -> None:
    scalars = encoding.decode(state["scalars"], targets.big)
    optimizer.state.update(encoding.decode(state.get("shared", {}), targets.big))
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(encoding.decode(saved["options"], targets.big))
        for parameter in group["params"]:
            name = names[parameter]
            own = {key: tensor for key, (_, tensor) in made.get(name, {}).items()} | scalars.get(name, {})
            optimizer.state.pop(parameter, None)
            if own:
                optimizer.state[parameter] = own


def _install_values(tracked: Mapping[str, object], state: dict[str, Any], targets: Targets) -> dict[str, Any]:
    """Dicts and lists are changed in place; the rest is returned, because it cannot be."""
    fixed = {}
    for name, value in tracking.values(tracked):
        saved = encoding.decode(state[name], targets.big)
        if isinstance(value, dict):
            value.clear()
            value.update(saved)
        elif isinstance(value, list):
            value[:] = saved
        else:
            fixed[name] = saved
    return fixed


def _dtype(stored: StoredTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    return dtype
