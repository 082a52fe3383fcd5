"""The reference trainer; a process that enters its first generation says what it imported until its third step."""

import json
import sys
from pathlib import Path

from nvrx_sre.session import Context, resilient
from nvrx_sre.trainer.config import TrainerConfig
from nvrx_sre.trainer.corpus import Corpus, load_corpus
from nvrx_sre.trainer.loop import Generation, make_deterministic

NUM_STEPS = 40
_calls: list[int] = []


def train(ctx: Context, config: TrainerConfig, corpus: Corpus, folder: Path) -> None:
    before = set(sys.modules)
    _calls.append(ctx.generation)
    make_deterministic(ctx.device)
    ctx.init_process_group()
    generation = Generation(ctx, config, corpus)
    generation.restore()
    last = ctx.step + 3
    while ctx.step < config.steps:
        generation.run_step()
        if ctx.step == last and len(_calls) == 1:
            found = sorted(set(sys.modules) - before)
            (folder / f"generation-{ctx.generation}-rank-{ctx.rank}.json").write_text(json.dumps(found))
    ctx.finish()


if __name__ == "__main__":
    config = TrainerConfig(steps=NUM_STEPS)
    resilient(train)(config, load_corpus(config.data), Path(sys.argv[1]))
