"""Stand-ins for tracked objects that a layout cannot describe: the same state as plain tensors and DTensors.

    stand_ins = StandIns(tracked)    looks at the objects as they are now
    stand_ins.tracked                what is saved, or filled, in place of `tracked`
    stand_ins.push()                 after a load: what was filled goes into the originals

An FSDP1 module stands as its original parameters, one shard a rank, through torch's own state dicts; torch gathers for
that over the wrapper's group, so that making and pushing are collective, in the main thread of every rank. A tensor
subclass stands as the plain tensors that it is made of, over the same memory; nothing of it is pickled. Everything
else stands for itself.

Names are those of `tracked`; part `p` of a wrapping subclass is `<name>.<p>`, in optimizer state `<key>/<p>`.
Thread safety: main thread. Must not: be kept across an optimizer step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor, Shard

from nvrx_sre.checkpoint import supported
from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.core.errors import UserError


class StandIns:
    """Stand-ins of one moment."""

    def __init__(self, tracked: Mapping[str, object]) -> None:
        self.tracked: dict[str, Any] = dict(tracked)
        self._pushes: list[_OfFsdp1 | _OfOptimizer] = []
        fsdp1 = {path.partition(".")[0] for path in supported.fsdp1_wrappers(tracked)}
        parts: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for name, module in tracking.modules(tracked):
            if name in fsdp1:
                self._stand_in_fsdp1(name, module)
            else:
                self._stand_in_parts(name, module, parts)
        for name, optimizer in tracking.optimizers(tracked):
            if any(parameter in parts for group in optimizer.param_groups for parameter in group["params"]):
                of_optimizer = _OfOptimizer(optimizer, parts)
                self.tracked[name] = of_optimizer.stand_in
                self._pushes.append(of_optimizer)
        for name, value in tracked.items():
            if isinstance(value, torch.Tensor) and supported.is_subclass(value):
                del self.tracked[name]
                self.tracked.update(_parts(value, name))

    def push(self) -> None:
        """Give the originals what their stand-ins were filled with."""
        for item in self._pushes:
            item.push()

    def _stand_in_fsdp1(self, name: str, module: nn.Module) -> None:
        parameters = set(module.parameters())
        mine = {
            key: optimizer
            for key, optimizer in tracking.optimizers(self.tracked)
            if parameters & {parameter for group in optimizer.param_groups for parameter in group["params"]}
        }
        for key, optimizer in mine.items():
            if not parameters >= {parameter for group in optimizer.param_groups for parameter in group["params"]}:
                raise UserError(f"optimizer {key!r} holds more than the parameters of {name!r}, which FSDP1 wraps")
        of_module = _OfFsdp1(module, mine)
        self.tracked[name] = of_module.stand_in
        self.tracked.update(of_module.optimizers)
        self._pushes.append(of_module)

    def _stand_in_parts(self, name: str, module: nn.Module, parts: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        named = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        if not any(supported.is_subclass(tensor) for tensor in (*named.values(), *buffers.values())):
            return
        stand_in = _Module(module)
        for path, parameter in named.items():
            stand_in.parameters_by_name.update(_named_parts(path, parameter, parts))
        for path, buffer in buffers.items():
            stand_in.buffers_by_name.update(_named_parts(path, buffer, {}))
        self.tracked[name] = stand_in


class _Module(nn.Module):
    """Parameters and buffers under given names; submodules, for their extra state, are the original's."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._originals = [original]  # in a list, so that it does not become a submodule
        self.parameters_by_name: dict[str, nn.Parameter | torch.Tensor] = {}
        self.buffers_by_name: dict[str, torch.Tensor] = {}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        yield from self.parameters_by_name.items()

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.buffers_by_name.items()

    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Module]]:
        for path, inner in self._originals[0].named_modules():
            yield clean_tensor_name(path), inner


class _Optimizer(torch.optim.Optimizer):
    """Groups and state under stand-in parameters; it never steps."""

    def __init__(self, groups: list[dict[str, Any]], state: Mapping[Any, dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self.state.update(state)


class _OfFsdp1:
    """A module with FSDP1 wrappers and its optimizers, as torch's sharded state dicts have them."""

    def __init__(self, module: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._module = module
        self._originals = dict(optimizers)
        self.stand_in = _Module(module)
        buffers = {clean_tensor_name(path): buffer for path, buffer in module.named_buffers()}
        with _unwarned():
            # Buffers and extra state are saved from, and filled in, the original itself.
            self._state: dict[str, Any] = {
                path: tensor
                for path, tensor in get_model_state_dict(module).items()
                if isinstance(tensor, torch.Tensor) and path not in buffers
            }
            self._optimizer_states = {
                key: get_optimizer_state_dict(module, optimizer) for key, optimizer in optimizers.items()
            }
            self.stand_in.buffers_by_name.update(buffers)
            for path, tensor in self._state.items():
                shard = _as_dtensor(tensor)
                self.stand_in.parameters_by_name[path] = nn.Parameter(shard, requires_grad=shard.is_floating_point())
            self.optimizers = {key: self._optimizer(state) for key, state in self._optimizer_states.items()}

    def push(self) -> None:
        """Collective. The optimizers first: torch gives fresh ones their state by a step that changes nothing."""
        with _unwarned():
            for key, optimizer in self._originals.items():
                state = self._filled(self._optimizer_states[key], self.optimizers[key])
                set_optimizer_state_dict(self._module, optimizer, state)
            set_model_state_dict(self._module, self._state, options=StateDictOptions(strict=False))

    def _optimizer(self, saved: Mapping[str, Any]) -> _Optimizer:
        named = self.stand_in.parameters_by_name
        groups = [{**group, "params": [named[path] for path in group["params"]]} for group in saved["param_groups"]]
        state = {
            named[path]: {key: _as_dtensor(value) if _is_sharded(value) else value for key, value in values.items()}
            for path, values in saved["state"].items()
        }
        return _Optimizer(groups, state)

    def _filled(self, pulled: Mapping[str, Any], stand_in: _Optimizer) -> dict[str, Any]:
        """The pulled state with the values of its stand-in; shards are filled where they lie."""
        named = self.stand_in.parameters_by_name
        states: dict[str, dict[str, Any]] = {}
        for path, values in pulled["state"].items():
            states[path] = {}
            for key, value in stand_in.state.get(named[path], {}).items():
                old = values.get(key)
                if _is_sharded(old):
                    _local(_as_dtensor(old)).copy_(_local(value))
                states[path][key] = old if _is_sharded(old) else value
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": old["params"]}
            for group, old in zip(stand_in.param_groups, pulled["param_groups"], strict=True)
        ]
        return {"state": states, "param_groups": groups}


class _OfOptimizer:
    """An optimizer over parameters that stand as their parts: all state of one hangs on its first part."""

    def __init__(self, original: torch.optim.Optimizer, parts: Mapping[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        self._original = original
        self._first = {
            parameter: next(iter(parts[parameter].values())) if parameter in parts else parameter
            for group in original.param_groups
            for parameter in group["params"]
        }
        groups = [
            {**group, "params": [self._first[parameter] for parameter in group["params"]]}
            for group in original.param_groups
        ]
        state = {self._first[parameter]: _flattened(values) for parameter, values in original.state.items()}
        self.stand_in = _Optimizer(groups, state)

    def push(self) -> None:
        """State that stands as parts is made anew in the form of its parameter."""
        for group, filled in zip(self._original.param_groups, self.stand_in.param_groups, strict=True):
            group.update({key: value for key, value in filled.items() if key != "params"})
        for parameter, first in self._first.items():
            self._original.state.pop(parameter, None)
            values = self.stand_in.state.get(first)
            if values:
                self._original.state[parameter] = _joined(parameter, values)


def _parts(tensor: torch.Tensor, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a tensor is made of, over its own memory."""
    if not supported.is_subclass(tensor):
        yield path, tensor
    elif hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(tensor, name), f"{path}.{name}")
    else:
        with torch._C.DisableTorchFunctionSubclass():
            yield path, tensor.detach().as_subclass(torch.Tensor)


def _named_parts(
    path: str, tensor: torch.Tensor, seen: dict[torch.Tensor, dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Parts under their names, the tensor itself if it has none; one that was seen before gives the same ones."""
    if not supported.is_subclass(tensor):
        return {path: tensor}
    if tensor not in seen:
        found = dict(_parts(tensor, ""))
        if isinstance(tensor, nn.Parameter):
            found = {
                name: nn.Parameter(part, requires_grad=tensor.requires_grad and part.is_floating_point())
                for name, part in found.items()
            }
        seen[tensor] = found
    return {path + name: part for name, part in seen[tensor].items()}


def _flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizer state of one parameter with every subclass as its parts."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and supported.is_subclass(value):
            flat.update({key + name.replace(".", "/"): part for name, part in _parts(value, "")})
        else:
            flat[key] = value
    return flat


def _joined(parameter: torch.Tensor, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `_flattened`: state of the parameter's shape has the parameter's type, as `zeros_like` gives it."""
    values: dict[str, Any] = {}
    for key, value in flat.items():
        name, slash, _ = key.partition("/")
        is_alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
        if name in values:
            continue
        if not slash and not (is_alike and supported.is_subclass(parameter)):
            values[name] = value
            continue
        values[name] = torch.zeros_like(parameter, requires_grad=False)
        for path, part in _parts(values[name], name):
            part.copy_(flat[path.replace(".", "/")])
    return values


def _is_sharded(value: object) -> bool:
    return isinstance(value, ShardedTensor | DTensor)


def _as_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor of FSDP1 as a DTensor over the same memory; any other tensor as it is."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    shards = tensor.local_shards()
    if len(shards) > 1:
        raise UserError("a sharded tensor with several shards on one rank cannot be saved")
    size = tensor.size()
    local = shards[0].tensor if shards else torch.empty((0, *size[1:]), dtype=tensor.dtype, device=_device_of(tensor))
    mesh = DeviceMesh.from_group(tensor._process_group, local.device.type)
    strides = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=size, stride=strides)


def _device_of(tensor: ShardedTensor) -> torch.device:
    """Where the other ranks' shards are, on this rank."""
    placement = tensor.metadata().shards_metadata[0].placement
    device = None if placement is None else placement.device()
    if device is None or device.type == "cpu":
        return torch.device("cpu")
    return torch.device(device.type, torch.cuda.current_device())


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@contextmanager
def _unwarned() -> Iterator[None]:
    """FSDP1's state dicts warn at every call that FSDP1 is old; our own message said so once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
