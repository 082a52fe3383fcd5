"""What the reference trainer is told: one frozen dataclass, its command line and its identity.

Model: a `TrainerConfig` is complete and valid, or constructing it raises `UserError` with one line that says
what is wrong and what would work. `to_argv` and `from_argv` are inverse, so a launcher can hand a
configuration to `python -m nvrx_sre.trainer`. `config_items` is what makes two runs the same run: everything
that changes a step, and not `steps` or `evaluate_every`, so that a run may be extended or watched closer.

Thread safety: immutable. Must not: load torch, read the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nvrx_sre.core.errors import UsageError, UserError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Size of a Llama-shaped byte model and the learning rate that suits it."""

    dim: int
    """Width of the residual stream; a multiple of `2 * num_heads`."""
    num_layers: int
    num_heads: int
    hidden_dim: int
    """Width of the SwiGLU."""
    learning_rate: float
    """Peak learning rate of AdamW."""


MODELS: dict[str, ModelShape] = {
    "tiny": ModelShape(dim=128, num_layers=3, num_heads=4, hidden_dim=352, learning_rate=1.5e-3),
    "small": ModelShape(dim=384, num_layers=6, num_heads=6, hidden_dim=1024, learning_rate=1e-3),
    "base": ModelShape(dim=1024, num_layers=16, num_heads=16, hidden_dim=2816, learning_rate=6e-4),
    "large": ModelShape(dim=2048, num_layers=36, num_heads=16, hidden_dim=5760, learning_rate=3e-4),
}
"""tiny: 0.67 M parameters, for two shared CPU cores; small: 11 M; base: 206 M and large: 1.88 B, for GPUs."""

_IDENTITY = ("model", "seed", "grad_accum", "batch_size", "seq_len", "learning_rate", "warmup_steps", "decay_steps")
_AT_LEAST = {
    "steps": 0,
    "seed": 0,
    "grad_accum": 1,
    "batch_size": 1,
    "seq_len": 2,
    "warmup_steps": 0,
    "decay_steps": 1,
    "evaluate_every": 0,
}


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Configuration of the reference trainer."""

    steps: int = 300
    """Optimizer steps of the whole run; 0 trains nothing."""
    data: Path | None = None
    """File or folder of text; None for the sources of the installed Python standard library."""
    model: str = "tiny"
    """Name in `MODELS`."""
    seed: int = 0
    """Seed of the weights and of the data order."""
    grad_accum: int = 1
    """Micro-batches per optimizer step."""
    batch_size: int = 8
    """Samples of one micro-batch over all ranks; at least the world size."""
    seq_len: int = 64
    """Bytes a sample predicts."""
    learning_rate: float | None = None
    """Peak learning rate; None for the model's own."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    decay_steps: int = 2000
    """Step at which the cosine reaches a tenth of the peak. Not tied to `steps`: extending a run repeats nothing."""
    evaluate_every: int = 0
    """Steps between evaluations on held-out samples; 0 for none."""

    def __post_init__(self) -> None:
        for name, smallest in _AT_LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"{_flag(name)} is {value!r}: use a whole number")
            if value < smallest:
                raise UserError(f"{_flag(name)} is {value}: use {smallest} or more")
        if self.model not in MODELS:
            raise UserError(f"--model is {self.model!r}: {_known_models(self.model)}")
        if self.learning_rate is not None and not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise UserError(f"--learning-rate is {self.learning_rate}: use a finite number above 0")
        if self.data is not None and not os.path.exists(
            self.data
        ):  # unlike Path.exists, False where a folder may not be entered
            raise UserError(f"--data {self.data}: there is no such file or folder")

    @property
    def shape(self) -> ModelShape:
        """Shape of the chosen model."""
        return MODELS[self.model]

    @property
    def peak_learning_rate(self) -> float:
        """Learning rate at the end of the warm-up."""
        return self.shape.learning_rate if self.learning_rate is None else self.learning_rate

    @property
    def samples_per_step(self) -> int:
        """Samples that one optimizer step consumes over all ranks."""
        return self.batch_size * self.grad_accum

    def check_world(self, world_size: int) -> None:
        """Raise `UserError` if `world_size` ranks cannot share a micro-batch."""
        if self.batch_size < world_size:
            raise UserError(f"--batch-size is {self.batch_size}: use at least the number of ranks, {world_size}")

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of `step` (from 1): linear warm-up, then a cosine down to a tenth of the peak."""
        peak = self.peak_learning_rate
        if step <= self.warmup_steps:
            return peak * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        return peak * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))

    def to_argv(self) -> tuple[str, ...]:
        """Arguments for `python -m nvrx_sre.trainer` that `from_argv` turns back into an equal configuration."""
        argv: list[str] = []
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is not None:
                argv += [_flag(item.name), str(value)]
        return tuple(argv)

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> TrainerConfig:
        """Parse a command line. Raises `UsageError` (exit 2) if it cannot be parsed, `UserError` if it cannot work."""
        parser = _Parser(prog="python -m nvrx_sre.trainer", allow_abbrev=False, description=__doc__)
        add_arguments(parser)
        return cls.from_mapping(vars(parser.parse_args(argv)))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainerConfig:
        """Build from names and values such as a configuration file's; None keeps the default, unknown names raise."""
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UserError(f"unknown trainer option {unknown[0]!r}: known are {', '.join(sorted(known))}")
        given = {name: value for name, value in values.items() if value is not None}
        if isinstance(given.get("data"), str):
            given["data"] = Path(given["data"])
        if isinstance(given.get("learning_rate"), str):
            raise UserError(f"--learning-rate is {given['learning_rate']!r}: use a number")
        return cls(**given)

    def config_items(self) -> dict[str, str]:
        """Identity of the run's configuration, data content included. Reads the data; blocks on the disk.

        Raises `UserError` if the data is missing, empty or too short.
        """
        from nvrx_sre.trainer.corpus import load_corpus

        corpus = load_corpus(self.data)
        corpus.check_length(self.seq_len)
        items = {name: str(getattr(self, name)) for name in _IDENTITY}
        items["learning_rate"] = repr(self.peak_learning_rate)
        items["data"] = corpus.digest
        return items


_HELP = {
    "steps": "optimizer steps of the whole run",
    "data": "file or folder of text (default: sources of the installed Python standard library)",
    "model": f"one of {', '.join(MODELS)}",
    "seed": "seed of the weights and of the data order",
    "grad_accum": "micro-batches per optimizer step",
    "batch_size": "samples of one micro-batch over all ranks",
    "seq_len": "bytes a sample predicts",
    "learning_rate": "peak learning rate (default: the model's own)",
    "warmup_steps": "steps of linear warm-up",
    "decay_steps": "step at which the learning rate reaches a tenth of its peak",
    "evaluate_every": "steps between evaluations, 0 for none",
}


def add_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add one flag per field of `TrainerConfig`; flags that are not given become None."""
    types: dict[str, Any] = {"data": Path, "model": str, "learning_rate": float}
    metavars = {"data": "PATH", "model": "NAME", "learning_rate": "RATE", "seed": "S"}
    for item in dataclasses.fields(TrainerConfig):
        parser.add_argument(
            _flag(item.name),
            dest=item.name,
            type=types.get(item.name, int),
            metavar=metavars.get(item.name, "N"),
            default=None,
            help=_HELP[item.name],
        )


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours, so that one place prints them and chooses the exit code."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _known_models(name: str) -> str:
    near = difflib.get_close_matches(name, MODELS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known are {', '.join(MODELS)}"
