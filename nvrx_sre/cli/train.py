"""`nvrx-sre train`: the reference trainer under the resilient launcher.

Must not import torch: the ranks do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from nvrx_sre.cli.devices import num_nvidia_devices
from nvrx_sre.cli.run_options import RunOptions, build_run_config, run_options
from nvrx_sre.cli.running import check_fault_specs, run_and_report
from nvrx_sre.launcher.config import RunConfig
from nvrx_sre.trainer.config import MODELS, TrainerConfig

DEFAULTS = TrainerConfig()

_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option(
        "--nproc", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Ranks on this node."
    ),
    click.option(
        "--steps",
        type=click.IntRange(0),
        default=DEFAULTS.steps,
        show_default=True,
        metavar="N",
        help="Optimizer steps.",
    ),
    click.option(
        "--data",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="File or folder of text.  [default: sources of the installed Python standard library]",
    ),
    click.option(
        "--model", default=DEFAULTS.model, show_default=True, metavar="NAME", help=f"One of {', '.join(MODELS)}."
    ),
    click.option(
        "--seed",
        type=click.IntRange(0),
        default=DEFAULTS.seed,
        show_default=True,
        metavar="S",
        help="Weights and order.",
    ),
    click.option(
        "--grad-accum",
        type=click.IntRange(1),
        default=DEFAULTS.grad_accum,
        show_default=True,
        metavar="N",
        help="Micro-batches per step.",
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(1),
        default=DEFAULTS.batch_size,
        show_default=True,
        metavar="N",
        help="Samples of a micro-batch over all ranks.",
    ),
    click.option(
        "--seq-len",
        type=click.IntRange(2),
        default=DEFAULTS.seq_len,
        show_default=True,
        metavar="N",
        help="Bytes that a sample predicts.",
    ),
    click.option(
        "--learning-rate",
        type=click.FloatRange(0, min_open=True),
        metavar="RATE",
        help="Peak learning rate.  [default: the model's own]",
    ),
    click.option(
        "--evaluate-every",
        type=click.IntRange(0),
        default=DEFAULTS.evaluate_every,
        show_default=True,
        metavar="N",
        help="Steps between evaluations, 0 for none.",
    ),
)


def trainer_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: add the reference trainer's options, named as the fields of `TrainerConfig`, and `nproc`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command("train")
@trainer_options
@run_options
def command(options: RunOptions, nproc: int, **values: Any) -> int:
    """Train a small language model, and recover from faults.

    The model works on bytes. Without --data it learns the installed Python standard library.
    """
    trainer = TrainerConfig(**values)
    config = training_run(options, trainer, nproc)
    return run_and_report(config, num_steps=trainer.steps)


def training_run(options: RunOptions, trainer: TrainerConfig, nproc: int) -> RunConfig:
    """The launcher's configuration of a training run. Reads the data; raises `UserError` before anything starts."""
    trainer.check_world(nproc)
    check_fault_specs(options.fault_specs, nproc, trainer.steps)
    return build_run_config(
        options,
        command=("-m", "nvrx_sre.trainer", *trainer.to_argv()),
        nproc=nproc,
        config_items=trainer.config_items(),
        exact_replay=num_nvidia_devices() == 0,  # kernels of an accelerator may add in another order
    )
