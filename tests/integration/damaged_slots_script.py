"""Trains two numbers a rank; in the first generation, at step 4, rank 1 damages all of its slots and fails."""

import json
import sys
from pathlib import Path

import torch

from nvrx_sre.session import Context, resilient
from nvrx_sre.session.process import current

NUM_STEPS = 6
FAIL_AT = 4


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model as a run begins with it."""
    torch.manual_seed(7)
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step."""
    model(torch.ones(2, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(ctx: Context, folder: Path) -> None:
    ctx.init_process_group()
    model, optimizer = make()
    ctx.track(model=model, optimizer=optimizer)
    begun_at = ctx.restore()
    (folder / f"begun-{ctx.rank}-{ctx.generation}.json").write_text(json.dumps(begun_at))
    while ctx.step < NUM_STEPS:
        if ctx.generation == 1 and ctx.step == FAIL_AT:
            torch.distributed.barrier()
            if ctx.rank == 1:
                damage(ctx)
                raise ValueError("planned")
        step(model, optimizer)
        ctx.commit()
    torch.save(model.state_dict(), folder / f"end-{ctx.rank}.pt")


def damage(ctx: Context) -> None:
    """One bit of each slot, once the capture in hand is sealed."""
    ctx._saver.finish(ctx.step)
    slots = current().slots
    for slot in range(slots.num_slots):
        slots.data(slot)[16] ^= 1


if __name__ == "__main__":
    resilient(train)(Path(sys.argv[1]))
