"""A rank of the GPU benchmark: the reference trainer, with weights that are drawn on the device.

Started by the launcher as any worker: `-m nvrx_sre.bench.gpu_rank MODEL STEPS BATCH SEQ_LEN [--census FOLDER]`. To draw
1.9 billion weights on the CPU takes longer than many recoveries; everything else is the trainer's own. With a census it
appends what the device and this process hold to `FOLDER/rank-R.jsonl` at the end of each generation's third step.

Attention's backward adds in any order on a GPU where sequences are longer than one of its blocks. Process safety: one
process a rank. Must not: run outside `bench gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from nvrx_sre.bench.recovery_census import holdings
from nvrx_sre.bench.recovery_rank import CENSUS_STEP
from nvrx_sre.session import Context, resilient
from nvrx_sre.trainer.config import TrainerConfig
from nvrx_sre.trainer.corpus import Corpus, load_corpus
from nvrx_sre.trainer.loop import Generation
from nvrx_sre.trainer.model import local_tensor


def train(ctx: Context, config: TrainerConfig, corpus: Corpus, census: Path | None) -> None:
    """One generation. Collective; blocks until the end."""
    ctx.init_process_group()
    generation = Generation(ctx, config, corpus)
    if ctx.restore() == 0:
        draw(generation.model, config.seed)
    census_at = ctx.step + CENSUS_STEP
    while ctx.step < config.steps:
        generation.run_step()
        if census is not None and ctx.step == census_at:
            count(census / f"rank-{ctx.rank}.jsonl")
    with ctx.phase("evaluate"):  # to digest gigabytes takes longer than a step
        results = generation.results()
    ctx.finish(**results)


@torch.no_grad()
def draw(model: torch.nn.Module, seed: int) -> None:
    """Fill this rank's part of each parameter: norms with 1, the rest normal, the same at every start."""
    for number, parameter in enumerate(model.parameters()):
        local = local_tensor(parameter)
        if parameter.ndim == 1:
            local.fill_(1.0)
        else:
            generator = torch.Generator(local.device).manual_seed(seed * 10_007 + number)
            local.normal_(0.0, 0.02, generator=generator)


def count(path: Path) -> None:
    """Append what this process holds, and what is taken of its device by all processes."""
    held = holdings(os.getpid())
    if torch.cuda.is_available():
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        held |= {"device_bytes": total_bytes - free_bytes, "reserved_bytes": torch.cuda.memory_reserved()}
    with path.open("a") as file:
        file.write(json.dumps(held) + "\n")


def main(argv: Sequence[str]) -> None:
    """Train under the launcher."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("steps", type=int)
    parser.add_argument("batch", type=int)
    parser.add_argument("seq_len", type=int)
    parser.add_argument("--census", type=Path)
    options = parser.parse_args(argv)
    config = TrainerConfig(
        model=options.model, steps=options.steps, batch_size=options.batch, seq_len=options.seq_len, warmup_steps=100
    )
    corpus = load_corpus(config.data)
    resilient(train)(config, corpus, options.census)


if __name__ == "__main__":
    main(sys.argv[1:])
