"""A plain PyTorch FSDP2 script: a small network learns a function of two variables.

    torchrun --nproc-per-node 2 examples/plain_fsdp.py      (or: python examples/plain_fsdp.py)

`resilient_fsdp.py` is this script with the lines that let it survive faults.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

NUM_STEPS = 200
SAMPLES_PER_RANK = 256
WIDTH = 128


def choose_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(1)
    return torch.device("cpu")


def init_group(device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


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


def main() -> None:
    device = choose_device()
    init_group(device)
    model, optimizer = build(device)
    for step in range(1, NUM_STEPS + 1):
        points, values = make_batch(step, device)
        loss = F.mse_loss(model(points), values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = mean_over_ranks(loss)
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {mean_loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Without Python's own exit: in a busy process it can abort on a gloo thread that is not done yet (pytorch#190489).
    sys.stdout.flush()
    os._exit(0)
