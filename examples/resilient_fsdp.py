"""`plain_fsdp.py` with the lines that let it survive faults.

    nvrx-sre launch --nproc-per-node 2 --fault sigkill@1:70 examples/resilient_fsdp.py

It still runs under torchrun and plain Python, where nothing is saved or recovered.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import nvrx_sre

NUM_STEPS = 200
SAMPLES_PER_RANK = 256
WIDTH = 128


def choose_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(1)
    return torch.device("cpu")


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(2, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)]
    model = nn.Sequential(*layers).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def make_batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    seed = step * dist.get_world_size() + dist.get_rank()
    points = torch.rand(SAMPLES_PER_RANK, 2, generator=torch.Generator().manual_seed(seed)) * 4 - 2
    values = torch.sin(points[:, :1] * 3) * torch.cos(points[:, 1:])
    return points.to(device), values.to(device)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@nvrx_sre.resilient
def main(ctx: nvrx_sre.Context) -> None:
    device = choose_device()
    ctx.init_process_group()
    model, optimizer = build(device)
    ctx.track(model=model, optimizer=optimizer)
    ctx.restore()
    for step in range(ctx.step + 1, NUM_STEPS + 1):
        with ctx.phase("data"):
            points, values = make_batch(step, device)
        loss = F.mse_loss(model(points), values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = mean_over_ranks(loss)
        ctx.commit(loss=mean_loss, tokens=SAMPLES_PER_RANK * dist.get_world_size())
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {mean_loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
