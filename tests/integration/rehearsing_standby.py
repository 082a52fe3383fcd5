"""A standby rehearses, and then becomes a rank; prints what came of it as JSON. `rehearsing_standby.py rehearse|fresh`.

Groups are torch's fake ones: one process stands for its rank of a world of two. What to rehearse is told as it is in a
run, by what a rank has captured into its slot.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from nvrx_sre.checkpoint.capture import Capturer, open_blob
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.restart.abort import ProcessGroups
from nvrx_sre.session.rehearsal import part_of, rehearse
from nvrx_sre.trainer.config import TrainerConfig
from nvrx_sre.trainer.model import build_model, build_optimizer

WORLD_SIZE = 2
REHEARSED_RANK, RANK = 0, 1


class Planned:
    """Operators that DTensor has planned since the last look."""

    def __init__(self) -> None:
        self._names: list[str] = []
        original = ShardingPropagator.propagate_op_sharding_non_cached

        def noted(propagator: ShardingPropagator, schema: Any) -> Any:
            self._names.append(str(schema.op))
            return original(propagator, schema)

        ShardingPropagator.propagate_op_sharding_non_cached = noted  # type: ignore[method-assign]  # to count calls

    def take(self) -> list[str]:
        """Names, in order."""
        names, self._names = self._names, []
        return names


def generation(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A rank's first step, without forward and backward."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    model = build_model(TrainerConfig().shape, torch.device("cpu"))
    optimizer = build_optimizer(model, 1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def end(groups: ProcessGroups) -> bool:
    """As a teardown does; True if nothing holds the generation's group afterwards."""
    group = weakref.ref(c10d.GroupMember.WORLD)
    groups.clear()
    gc.collect()
    groups.let_go()
    groups.let_go()
    return group() is None


def captured(groups: ProcessGroups) -> tuple[SlotFile, Any]:
    """A slot, and what it says of the state that some rank captured into it."""
    model, optimizer = generation(REHEARSED_RANK)
    capturer = Capturer({"model": model, "optimizer": optimizer})
    capturer.refresh()
    slots = SlotFile.create(*capturer.required_bytes(), name="nvrx-test")
    capturer.capture(slots, 0, 1, 1, False, SystemClock().monotonic_ns())
    header = slots.header(0)
    assert header is not None
    return slots, open_blob(slots, 0, header)


def main(mode: str) -> dict[str, Any]:
    """What a fresh or a rehearsed process had to plan as a rank, and where it thinks that its shards are."""
    planned, groups = Planned(), ProcessGroups()
    slots, (layout, state) = captured(groups)
    found = {"is_captured_group_gone": end(groups)}
    groups_of_standby = forget(groups, planned)
    generator = torch.get_rng_state()
    part = part_of(layout, state, WORLD_SIZE)
    assert part is not None
    if mode == "rehearse":
        rehearse(groups_of_standby, part, REHEARSED_RANK, WORLD_SIZE)
    found["num_rehearsed"] = len(planned.take())
    found["is_generator_untouched"] = bool(torch.equal(generator, torch.get_rng_state()))
    found["is_group_left"] = dist.is_initialized()
    model, optimizer = generation(RANK)
    found["planned"] = planned.take()
    found["ranks"] = sorted(
        {
            compute_local_shape_and_global_offset(state.shape, state.device_mesh, state.placements)[1][0]
            * WORLD_SIZE
            // state.shape[0]
            for values in optimizer.state.values()
            for state in values.values()
            if state.dim()
        }
    )
    del model, optimizer
    found["is_group_gone"] = end(groups_of_standby)
    slots.close()
    return found


def forget(groups: ProcessGroups, planned: Planned) -> ProcessGroups:
    """As if this process had been no rank yet: a group of another shape drops all plans."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    end(groups)
    planned.take()
    return groups


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
