"""A script whose blocks are compiled: the generation that ends tells what its cache held."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

import nvrx_sre

NUM_STEPS = 24
WIDTH = 32


class Block(nn.Module):
    """Two layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        """(samples, WIDTH) to the same shape."""
        return batch + self.down(torch.relu(self.up(batch)))


@nvrx_sre.resilient
def main(ctx: nvrx_sre.Context) -> None:
    """Train, with each loss in full in the log."""
    torch.set_num_threads(1)
    ctx.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))
    for block in model[:2]:
        block.compile()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ctx.track(model=model, optimizer=optimizer)
    ctx.restore()
    counters.clear()
    for step in range(ctx.step + 1, NUM_STEPS + 1):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        loss = model(torch.randn(8, WIDTH, generator=generator)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ctx.commit(loss=loss.item())
        print(f"generation {ctx.generation} step {step} loss {loss.item()!r}", flush=True)
    inductor = counters["inductor"]
    print(f"cache hit {inductor['fxgraph_cache_hit']} missed {inductor['fxgraph_cache_miss']}", flush=True)


if __name__ == "__main__":
    main()
