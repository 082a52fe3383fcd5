"""Pay the first-time costs of FSDP2 before they are in anybody's way.

What is slow to import the fork server has; the first step of a sharded model costs 25 ms more, and a standby that has
done it is ready 2 ms after its assignment. The model is a toy on a one-rank group with a store of its own. Afterwards
the heap is frozen: a collection over 244,000 objects would cost 130 ms in a recovery. What depends on the run's own
model comes later (`session.rehearsal`). On the CPU also where there is CUDA: which device a standby will need is not
known yet.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nvrx_sre.restart.abort import ProcessGroups

WIDTH = 8
HEAP_BYTES = 24 << 20
"""Heap that the first step finds mapped: the activations of a small model. A page's first touch costs 2 us."""


def warm_up(groups: ProcessGroups) -> None:
    """Build and step a one-rank FSDP2 model, clear everything it made, freeze the heap."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(torch.zeros(1, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del model, optimizer, mesh
    groups.clear()
    gc.collect()
    groups.let_go()
    _fetch_heap()
    gc.freeze()


def _fetch_heap() -> None:
    """Map memory for the allocator to hand out: glibc keeps what is freed up to twice its largest mapping so far."""
    for _ in range(2):
        torch.ones(HEAP_BYTES, dtype=torch.uint8)
