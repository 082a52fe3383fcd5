"""A plain DDP script whose loader workers pass batches of a given size through /dev/shm.

nvrx-sre launch --nproc-per-node 2 ... tests/chaos/shm_script.py NUM_FEATURES NUM_STEPS
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import nvrx_sre

NUM_FEATURES, NUM_STEPS = int(sys.argv[1]), int(sys.argv[2])
BATCH = 4
LINE = 5000
"""Longer than the rest of a page that a full file system has given out already."""


class Rows(Dataset[torch.Tensor]):
    """Item i is a row of i."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((NUM_FEATURES,), index / 400)


def fill(path: str) -> None:
    """Leave no room where `path` lies."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@nvrx_sre.resilient
def main(ctx: nvrx_sre.Context) -> None:
    """Train to the last step."""
    ctx.init_process_group()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(NUM_FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = Rows()
    loader: DataLoader[Any] = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data), num_workers=2)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    ctx.restore()
    for rows in loader:
        loss = model(rows).square().mean()
        loss.backward()
        ctx.mark("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        ctx.commit(loss=loss.detach(), tokens=BATCH)
        print(f"step {ctx.step} is done", "." * LINE, flush=True)
        if ctx.step == 3 and ctx.rank == 0 and len(sys.argv) > 3:
            fill(sys.argv[3])
        if ctx.step == NUM_STEPS:
            return


if __name__ == "__main__":
    main()
