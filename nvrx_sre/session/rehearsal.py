"""What a standby rehearses: the sharded operators of its run's model, so that as a rank it does not plan them anew.

    Rehearse(world_size) -> layout and options of the newest state in a slot of its node -> a model of those shapes,
    fully_shard, to_empty, one optimizer step, on a group of that size that sends nothing -> all of it dropped again

DTensor works out once for each operator, shapes and mesh how it propagates sharding; that is 50 ms of a small model's
first build and step. The plans are kept (`restart.abort`): the mesh of the rehearsal equals the real one. Shapes,
number types and the optimizer's options are all that a plan depends on, so nothing has memory here (fake tensors) and
a big model costs what its number of tensors does. Plans depend on the rank as well where shards differ in size; only
plans of even shards are good for whatever rank the standby becomes.

Rehearsed is what FSDP2 makes of parameters on one mesh of all ranks, which it makes itself where it is given none, and
Adam or AdamW; other state is left alone. On the CPU alone: plans are a device's, and a standby holds none yet. Main
thread of a standby, since plans are a thread's.
Must not: touch the user's objects, generators or devices; fail a standby.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from nvrx_sre.checkpoint import encoding
from nvrx_sre.checkpoint.capture import open_blob
from nvrx_sre.checkpoint.layout import ItemKind, ItemRole, Layout, LayoutItem
from nvrx_sre.core.output import print_masked
from nvrx_sre.events import messages as wire
from nvrx_sre.restart.abort import ProcessGroups
from nvrx_sre.session.process import RankProcess

ADAM_STATE = frozenset({"exp_avg", "exp_avg_sq"})
ADAM_OPTIONS = frozenset({"betas", "eps", "amsgrad"})


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the slot of one rank says of its run's sharded state."""

    parameters: Mapping[str, LayoutItem]
    """By the name that an optimizer knows them under."""
    optimizers: tuple[list[dict[str, Any]], ...]
    """Of each optimizer its groups: options, and under `names` those of its parameters."""
    is_even: bool
    """Every rank's shard of a parameter has the same shape."""


def part_of(layout: Layout, state: Mapping[str, Any], world_size: int) -> Part | None:
    """What to rehearse of a captured state; None if it is not sharded the way that is rehearsed. Pure."""
    sharded = [item for item in layout.items if item.kind is ItemKind.SHARD]
    parameters = [item for item in sharded if item.role is ItemRole.PARAMETER]
    if not parameters or not all(_is_chunk(item, world_size) for item in sharded):
        return None
    names = dict(_optimizers_names(parameters))
    found = state["optimizers"].items()
    optimizers = tuple(groups for name, body in found if (groups := _adam_groups(name, body, layout, names)))
    is_even = all(item.global_shape[0] % world_size == 0 for item in sharded)
    return Part(parameters=names, optimizers=optimizers, is_even=is_even)


def _is_chunk(item: LayoutItem, world_size: int) -> bool:
    """The local part is one of `world_size` equal chunks of the first dimension, the last ones being smaller."""
    if not item.global_shape or item.local_shape[1:] != item.global_shape[1:]:
        return False
    chunk = -(-item.global_shape[0] // world_size)
    start = item.global_offset[0]
    return item.local_shape[0] == max(0, min(chunk, item.global_shape[0] - start)) and start % max(1, chunk) == 0


def _optimizers_names(parameters: list[LayoutItem]) -> Iterator[tuple[str, LayoutItem]]:
    """A parameter has its module's name before its own, which an optimizer leaves out if there is one module alone."""
    for item in parameters:
        yield item.fqn, item
        yield item.fqn.partition(".")[2], item


def _adam_groups(
    name: str, body: Mapping[str, Any], layout: Layout, parameters: Mapping[str, LayoutItem]
) -> list[dict[str, Any]]:
    """Groups of an optimizer that is Adam or AdamW over sharded parameters; none of any other."""
    groups = []
    for group in body["groups"]:
        options = encoding.decode(group["options"], _no_big_tensor)
        names = [fqn for fqn in group["names"] if fqn in parameters and parameters[fqn].requires_grad]
        states = all(f"{name}.state.{fqn}.{key}" in layout.by_fqn for fqn in names for key in ADAM_STATE)
        if not states or not options.keys() >= ADAM_OPTIONS or len(names) < len(group["names"]):
            return []
        groups.append({**options, "names": names})
    return groups


def _no_big_tensor(name: str) -> torch.Tensor:
    raise ValueError(f"{name} is not among an optimizer's options")


def rehearse_newest(groups: ProcessGroups, process: RankProcess, wanted: wire.Rehearse) -> None:
    """Rehearse what the newest state in the slots that this standby has mapped is of; nothing if none can be read."""
    found = None if torch.cuda.is_available() else process.newest_ahead(open_blob)
    if found is None:
        return
    rank, (layout, state) = found
    part = part_of(layout, state, wanted.world_size)
    if part is not None:
        rehearse(groups, part, rank, wanted.world_size)


def rehearse(groups: ProcessGroups, part: Part, rank: int, world_size: int) -> None:
    """Plan the operators of a build and of an optimizer's step. Leaves nothing but the plans.

    Blocks: 0.2 s for 20 parameters. What goes wrong is said in the log, and costs no more than the plans.
    """
    try:
        _plan(part, rank, world_size)
        succeeded = True
    except Exception as error:  # boundary: torch may refuse in any way what was not tried with its version
        print_masked(f"nvrx-sre: no rehearsal: {type(error).__name__}: {error}")
        succeeded = False
    groups.clear()
    gc.collect()
    groups.let_go()
    if succeeded and part.is_even:
        groups.hold_for_any_rank()
    gc.freeze()


def _plan(part: Part, rank: int, world_size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        _build_and_step(part, mesh)


def _build_and_step(part: Part, mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        made = {item.fqn: _parameter(item) for item in part.parameters.values()}
    module = nn.ParameterList(made.values())
    fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    sharded = dict(zip(made, module.parameters(), strict=True))
    for groups in part.optimizers:
        options = [
            {**group, "params": [sharded[part.parameters[name].fqn] for name in group["names"]]} for group in groups
        ]
        for group in options:
            del group["names"]
        optimizer = torch.optim.Adam(options)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def _parameter(item: LayoutItem) -> nn.Parameter:
    tensor = torch.empty(item.global_shape, dtype=getattr(torch, item.dtype))
    return nn.Parameter(tensor, requires_grad=item.requires_grad)
