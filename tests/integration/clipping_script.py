"""A sharded model whose optimizer step depends on a DTensor reduction: shows a stale mesh at once.

Each generation holds memory of its own while it runs: one that is kept behind it shows in the resident size.
"""

import os
import threading
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nvrx_sre

NUM_STEPS = 60
BALLAST_MIB = 64


def resources() -> list[int]:
    """Descriptors, native threads and Python threads of this process."""
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()]


def resident_mib() -> int:
    """Resident memory of this process, without what it shares with the launcher (the hot slots)."""
    _, resident, shared, *_ = (int(value) for value in Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") >> 20


@nvrx_sre.resilient
def train(ctx: nvrx_sre.Context) -> None:
    torch.set_num_threads(1)
    ctx.init_process_group()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ctx.track(model=model, optimizer=optimizer)
    ctx.restore()
    ballast = torch.ones(BALLAST_MIB << 18)
    norm = 0.0
    while ctx.step < NUM_STEPS:
        loss = model(torch.full((2, 8), float(ctx.step))).square().mean()
        loss.backward()
        ctx.mark("backward")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        ctx.commit(loss=loss.detach(), tokens=2)
        if ctx.rank == 0:
            print("resources", ctx.generation, *resources(), flush=True)
            print("resident", ctx.generation, resident_mib(), flush=True)
    ctx.finish(norm=norm, ballast=float(ballast[0]))


train()
