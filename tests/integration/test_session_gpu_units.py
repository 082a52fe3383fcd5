"""FSDP2 on a real group of one: which unit is followed, and that its hooks lie inside of FSDP's own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from nvrx_sre.session.gpu_time import GpuTimer, last_unit


class Block(nn.Linear):
    """A unit of its own."""


class Model(nn.Module):
    """Embedding, three blocks and a head: each its own unit, as large models are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]  # a module's call is untyped


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Seen:
    """An event that notes whether the unit's parameters were whole when it was recorded."""

    def __init__(self, unit: nn.Module, whole: list[bool]) -> None:
        self._unit, self._whole = unit, whole

    def record(self) -> None:
        self._whole.append(not any(isinstance(item, DTensor) for item in self._unit.parameters()))

    def query(self) -> bool:
        return False

    def elapsed_time(self, other: Seen) -> float:
        raise AssertionError("nothing was over")


def test_the_last_block_is_followed_while_its_parameters_are_there(mesh: DeviceMesh) -> None:
    """Gathered before, given up after: no collective of a step falls between the two events."""
    model = Model()
    for unit in (model.embedding, *model.blocks, model.head):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    unit = last_unit([{"step": 1}, model])
    assert unit is model.blocks[2]
    whole: list[bool] = []
    timer = GpuTimer(new_event=lambda: Seen(unit, whole), may_record=lambda: True)
    timer.follow_unit(unit)
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
        timer.boundary()
    assert whole == [True] * 4 and timer.is_on


def test_a_model_sharded_as_a_whole_is_one_unit(mesh: DeviceMesh) -> None:
    """Its forward lies between the one gathering and the backward; found in an object of the script's as well."""
    model = fully_shard(Model(), mesh=mesh)
    assert last_unit([model]) is model
    assert last_unit([SimpleNamespace(models=[None, model])]) is last_unit([SimpleNamespace(model=model)]) is model


def test_a_unit_that_communicates_by_itself_is_not_followed(mesh: DeviceMesh) -> None:
    """Gathered parameters that are still parts: tensor parallelism waits for others inside of the forward."""
    unit = Block(4, 4)
    for name, parameter in list(unit.named_parameters()):
        unit.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    whole: list[bool] = []
    timer = GpuTimer(new_event=lambda: Seen(unit, whole), may_record=lambda: True)
    timer.follow_unit(unit)
    unit(distribute_tensor(torch.zeros(2, 4), mesh, [Replicate()]))
    assert not whole and not timer.is_on and not unit._forward_hooks
