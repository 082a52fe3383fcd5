"""A rank of ours whose process group has a timeout of its choice, and that may count what it holds.

Started by the launcher as any worker: `-m nvrx_sre.bench.recovery_rank --steps N --group-timeout S [--census FOLDER
--bench PID]`. It trains as the reference trainer does. With a census (`recovery_census`) it counts at the end of each
generation's third step.

Process safety: one process a rank. Must not: run outside `bench recovery`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nvrx_sre.bench.recovery_census import Census
from nvrx_sre.session import Context, resilient
from nvrx_sre.trainer.config import TrainerConfig
from nvrx_sre.trainer.corpus import Corpus, load_corpus
from nvrx_sre.trainer.loop import Generation, make_deterministic

CENSUS_STEP = 3
"""Step of a generation at whose end is counted."""


def train(ctx: Context, config: TrainerConfig, corpus: Corpus, group_timeout_s: float, census: Census | None) -> None:
    """One generation. Collective; blocks until the end."""
    make_deterministic(ctx.device)
    ctx.init_process_group(timeout_s=group_timeout_s)
    generation = Generation(ctx, config, corpus)
    generation.restore()
    census_at = ctx.step + CENSUS_STEP
    while ctx.step < config.steps:
        generation.run_step()
        if census is not None and ctx.step == census_at:
            census.take(ctx.rank)
    ctx.finish()


def main(argv: Sequence[str]) -> None:
    """Train under the launcher."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--group-timeout", type=float, required=True)
    parser.add_argument("--census", type=Path)
    parser.add_argument("--bench", type=int)
    options = parser.parse_args(argv)
    config = TrainerConfig(steps=options.steps)
    census = None if options.census is None else Census(folder=options.census, bench_pid=options.bench)
    resilient(train)(config, load_corpus(config.data), options.group_timeout, census)


if __name__ == "__main__":
    main(sys.argv[1:])
