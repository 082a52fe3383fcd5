"""A plain script with a DataLoader, workers, dropout and a step-wise schedule, told step by step into files.

    nvrx-sre launch --nproc-per-node 2 ... tests/integration/loader_script.py DIRECTORY NUM_STEPS [stateful]

Each rank appends one JSON line a step: step, sample ids, what the augmentation drew, learning rate, loss in hex, and
the name of its process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import nvrx_sre

NUM_SAMPLES = 52
GLOBAL_BATCH = 8


class Noisy(Dataset[Any]):
    """Item i is its number and a point near it that depends on the random stream of whoever loads it."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([index / NUM_SAMPLES, torch.rand(()).item()])


def build_loader(stateful: bool, world_size: int) -> Any:
    """Two workers that run ahead; torchdata's loader or torch's own."""
    batch = GLOBAL_BATCH // world_size
    data = Noisy()
    kind: Any = DataLoader
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    return kind(data, batch_size=batch, sampler=DistributedSampler(data, seed=5), num_workers=2, prefetch_factor=2)


@nvrx_sre.resilient
def main(ctx: nvrx_sre.Context) -> None:
    """Train to the last step, epoch after epoch."""
    directory, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    ctx.init_process_group()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.25), nn.Linear(16, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 15], 0.5)
    loader = build_loader("stateful" in sys.argv, ctx.world_size)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    torch.manual_seed(100 + ctx.rank)
    ctx.restore()
    with open(directory / f"rank-{ctx.rank}.jsonl", "a") as told:
        for epoch in range(loader.sampler.epoch if "stateful" not in sys.argv else ctx.step // len(loader), 99):
            loader.sampler.set_epoch(epoch)
            for ids, points in loader:
                rate = optimizer.param_groups[0]["lr"]
                loss = model(points).square().mean()
                loss.backward()
                ctx.mark("optimizer")
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                line = {"step": ctx.step + 1, "ids": ids.tolist(), "lr": rate, "loss": loss.item().hex()}
                line["process"] = Path("/proc/self/comm").read_text().strip()
                if "stateful" not in sys.argv:
                    line["drawn"] = points[:, 1].tolist()
                told.write(json.dumps(line) + "\n")
                told.flush()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                ctx.commit(loss=mean.item() / ctx.world_size, tokens=GLOBAL_BATCH)
                if ctx.step == num_steps:
                    return


if __name__ == "__main__":
    main()
