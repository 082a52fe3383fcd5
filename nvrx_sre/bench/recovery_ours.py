"""The recovery benchmark's runs of our own launcher: real processes, planned faults, times from the journal.

Model: faults stand as far apart as the run needs to be back to normal: after a death the next standby must have warmed
up, after anything else a moment is enough. How many steps that is says a short run without faults (`calibrate`).

Blocking: as long as the runs take. Must not: run anything else beside a measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nvrx_sre.bench.recovery_cases import COLLECTIVE, SIGKILL, STEP_DEADLINE_S
from nvrx_sre.bench.recovery_reading import Measured, Pace, from_records, pace_of
from nvrx_sre.bench.subprocesses import run_to_end
from nvrx_sre.events.journal import read_journal
from nvrx_sre.trainer.config import TrainerConfig

CALIBRATION_STEPS = 100
FIRST_FAULT_STEP = 20
GAP_S = 0.5
"""Time between faults that cost no process (seconds)."""
SLOW_FACTOR = 10
"""Usual steps that the failing rank of `collective` lets the others wait."""
RANK = ("-m", "nvrx_sre.bench.recovery_rank")


def batch_size(ranks: int) -> int:
    """Samples of a step: the trainer's usual number, or one a rank."""
    return max(TrainerConfig().batch_size, ranks)


def calibrate(run_dir: Path, ranks: int, steps: int = CALIBRATION_STEPS) -> Pace:
    """Pace of a short run without faults."""
    train(run_dir, ranks, steps, ())
    return pace_of(read_journal(run_dir / "journal"))


def victims(num_faults: int, ranks: int) -> list[int]:
    """Rank 0 and the last rank in turn."""
    return [(0, ranks - 1)[number % 2] for number in range(num_faults)]


def plan(case: str, ranks: int, num_faults: int, pace: Pace) -> tuple[list[str], int]:
    """(fault specs, steps of the run) of a case."""
    gap_steps = pace.steps_in(1.5 * pace.standby_s + GAP_S if case == SIGKILL else GAP_S)
    steps = [FIRST_FAULT_STEP + gap_steps * number for number in range(num_faults)]
    places = [f"{victim}:{step}" for victim, step in zip(victims(num_faults, ranks), steps, strict=True)]
    if case == COLLECTIVE:
        specs = [f"{kind}@{place}{rest}" for place in places for kind, rest in _KEEPS_WAITING]
    else:
        specs = [f"{case}@{place}" for place in places]
    return specs, steps[-1] + gap_steps


_KEEPS_WAITING = (("slow", f"={SLOW_FACTOR}.0x/forward"), ("exception", "/forward"))
"""One after the other at the same point: the others are then inside the forward's first collective."""


def run_case(run_dir: Path, case: str, ranks: int, num_faults: int, pace: Pace) -> Measured:
    """Run the reference trainer through all faults of a case."""
    specs, steps = plan(case, ranks, num_faults, pace)
    train(run_dir, ranks, steps, specs, ("--step-deadline", str(STEP_DEADLINE_S)) if case == "hang" else ())
    return from_records(read_journal(run_dir / "journal"))


def run_collective(run_dir: Path, ranks: int, num_faults: int, pace: Pace, group_timeout_s: float) -> Measured:
    """The case `collective` at one timeout of the process group."""
    specs, steps = plan(COLLECTIVE, ranks, num_faults, pace)
    launch(run_dir, ranks, specs, ("--steps", str(steps), "--group-timeout", str(group_timeout_s)))
    return from_records(read_journal(run_dir / "journal"))


def train(run_dir: Path, ranks: int, steps: int, specs: Sequence[str], extra: Sequence[str] = ()) -> None:
    """`nvrx-sre train` to its end."""
    trainer = ("--nproc", str(ranks), "--steps", str(steps), "--batch-size", str(batch_size(ranks)))
    _run(run_dir, ("train", *_run_options(run_dir, specs), *trainer, *extra))


def launch(run_dir: Path, ranks: int, specs: Sequence[str], arguments: Sequence[str]) -> None:
    """`nvrx-sre launch` of `recovery_rank`, to its end."""
    _run(run_dir, ("launch", *_run_options(run_dir, specs), "--nproc-per-node", str(ranks), *RANK, *arguments))


def _run_options(run_dir: Path, specs: Sequence[str]) -> list[str]:
    faults = [argument for spec in specs for argument in ("--fault", spec)]
    return ["--run-dir", str(run_dir), "--metrics-linger", "0", *faults]


def _run(run_dir: Path, arguments: Sequence[str]) -> None:
    run_to_end([sys.executable, "-m", "nvrx_sre", *arguments], run_dir.with_suffix(".log"))
