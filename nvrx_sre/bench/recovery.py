"""How long does a fault cost? Our launcher and `torchrun --max-restarts`, the same model, in the same run.

Model: a case is a fault kind. Ours runs the reference trainer with that fault again and again, far enough apart
that the run is back to normal; times come from the journal. The peer runs `torchrun_peer` the same way; times come
from its stamp files. Per fault

    total    = fault -> first new step committed on the slowest rank
    overhead = total - (redone + 1) x median fault-free step

so that a rollback's repeated work is not counted as recovery, and totals stand beside it. A contestant's median
step is its own, of the same run.

Blocking: minutes; starts processes and waits for them. Must not: run anything else beside a measurement.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.bench.rows import Row, summarize
from nvrx_sre.bench.subprocesses import run_to_end
from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import InternalError, UserError
from nvrx_sre.events.journal import read_journal
from nvrx_sre.events.schema import (
    FaultInjected,
    GenerationFormed,
    ProgressResumed,
    RankReplaced,
    Record,
    Role,
    RolledBack,
    StandbyReady,
    StepKind,
    StepsCommitted,
    WorkerStarted,
)

BENCH = "recovery"
OURS = "nvrx-sre"
PEER = "torchrun"
CASES = ("exception", "sigkill")
EXCEPTION_GAP_S = 1.5
"""Time between exceptions (seconds): a journal's aggregate of steps covers one second."""
STANDBY_S = 4.0
"""Warm-up of a standby where the calibration saw none become ready (seconds)."""
FIRST_FAULT_STEP = 20
CALIBRATION_STEPS = 100
PEER_SAVE_EVERY = 20
PEER_GAP_STEPS = 30


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure."""

    num_faults: int = 30
    """Faults of each case for our launcher."""
    num_peer_faults: int = 10
    """Faults of each case for torchrun, which needs seconds for each."""
    ranks: int = 2
    cases: tuple[str, ...] = CASES

    def __post_init__(self) -> None:
        if self.num_faults < 1 or self.num_peer_faults < 0 or self.ranks < 1:
            raise UserError("bench recovery needs at least 1 fault, 0 or more faults of the peer and 1 rank")


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One fault and what it cost."""

    total_s: float
    redone_steps: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All faults of one case and contestant."""

    recoveries: tuple[Recovery, ...]
    step_s: float
    """Median fault-free step."""
    note: str

    def overheads_s(self) -> list[float]:
        """Overhead of each fault."""
        return [item.total_s - (item.redone_steps + 1) * self.step_s for item in self.recoveries]


# --- reading what happened (pure) -------------------------------------------------------------------------


def from_records(records: Iterable[Record]) -> Measured:
    """Faults of a run of ours, from its journal's records. Raises `InternalError` if none was recovered."""
    recoveries: list[Recovery] = []
    steps: list[tuple[float, int]] = []
    injected: FaultInjected | None = None
    redone = num_warm = num_replaced = 0
    fresh_generation = True
    for record in records:
        event = record.event
        if isinstance(event, FaultInjected) and injected is None:
            injected, redone = event, 0
        elif isinstance(event, RolledBack):
            redone = max(0, event.high_water - event.step)
        elif isinstance(event, RankReplaced):
            num_replaced += 1
            num_warm += event.warm
        elif isinstance(event, GenerationFormed):
            fresh_generation = True
        elif isinstance(event, StepsCommitted) and event.kind is StepKind.NEW and not event.proven_by_restore:
            if not fresh_generation:
                steps.append(_per_step(event))
            fresh_generation = False
        elif isinstance(event, ProgressResumed) and injected is not None:
            total_s = seconds(event.committed_ns - injected.injected_ns)
            recoveries.append(Recovery(total_s=total_s, redone_steps=redone))
            injected = None
    if not recoveries or not steps:
        raise InternalError("the benchmark's run recorded no recovery or no fault-free step")
    note = f"{num_warm} of {num_replaced} replacements by a warm standby" if num_replaced else "no process replaced"
    return Measured(recoveries=tuple(recoveries), step_s=weighted_median(steps), note=note)


def _per_step(event: StepsCommitted) -> tuple[float, int]:
    num_steps = event.last_step - event.first_step + 1
    return seconds(event.committed_ns - event.started_ns) / num_steps, num_steps


def weighted_median(values: Sequence[tuple[float, int]]) -> float:
    """Median of values that stand for so many steps each."""
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    seen = 0
    for value, weight in ordered:
        seen += weight
        if seen >= half:
            return value
    raise InternalError("a median of nothing was asked for")


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """One line of the peer's stamp files."""

    kind: str
    step: int
    ns: int


def from_stamps(ranks: Sequence[Sequence[Stamp]], save_every: int) -> Measured:
    """Faults of a run of the peer, from each rank's stamps in order of time."""
    faults = sorted((stamp for stamps in ranks for stamp in stamps if stamp.kind == "fault"), key=lambda item: item.ns)
    recoveries = []
    for fault in faults:
        first_new_ns = [_first_after(stamps, "step", fault).ns for stamps in ranks]
        restored = _first_after(ranks[0], "restored", fault)
        recoveries.append(
            Recovery(total_s=seconds(max(first_new_ns) - fault.ns), redone_steps=max(0, fault.step - 1 - restored.step))
        )
    return Measured(
        recoveries=tuple(recoveries),
        step_s=_median_step_s(ranks[0], save_every),
        note=f"a DCP save every {save_every} steps",
    )


def _first_after(stamps: Sequence[Stamp], kind: str, fault: Stamp) -> Stamp:
    """First stamp of `kind` after the fault; for steps, the first above the high water mark."""
    for stamp in stamps:
        if stamp.kind == kind and stamp.ns > fault.ns and (kind != "step" or stamp.step >= fault.step):
            return stamp
    raise InternalError(f"the peer did not come back from its fault at step {fault.step}")


def _median_step_s(stamps: Sequence[Stamp], save_every: int) -> float:
    """Median time between two steps without a save between them."""
    return statistics.median(
        seconds(later.ns - earlier.ns)
        for earlier, later in itertools.pairwise(stamps)
        if earlier.kind == later.kind == "step" and earlier.step % save_every
    )


# --- making it happen -------------------------------------------------------------------------------------


def measure(config: BenchConfig) -> list[Row]:
    """Run every case for both contestants and return the rows."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="nvrx-sre-bench-") as scratch:
        pace = _calibrate(Path(scratch) / "calibration", config.ranks)
        for case in config.cases:
            measured = _run_ours(Path(scratch) / case, case, config, pace.gap_steps(case))
            rows += _rows(OURS, case, config, measured)
            if config.num_peer_faults:
                rows += _rows(PEER, case, config, _run_peer(Path(scratch) / f"peer-{case}", case, config))
    return rows


def _rows(contestant: str, case: str, config: BenchConfig, measured: Measured) -> list[Row]:
    redone = statistics.median(item.redone_steps for item in measured.recoveries)
    note = f"step {measured.step_s * 1000:.1f} ms, median {redone:g} steps redone, {measured.note}"
    values = {
        case: measured.overheads_s(),
        f"{case} total": [item.total_s for item in measured.recoveries],
    }
    return [
        summarize(samples, bench=BENCH, contestant=contestant, case=name, ranks=config.ranks, unit="s", note=note)
        for name, samples in values.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast this machine is now: decides only how far apart the faults stand."""

    step_s: float
    standby_s: float

    def gap_steps(self, case: str) -> int:
        """Steps between two faults of `case`: after a SIGKILL the next standby must have warmed up again."""
        gap_s = EXCEPTION_GAP_S if case == "exception" else 2 * self.standby_s
        return max(2, round(gap_s / self.step_s))


def pace_of(records: Iterable[Record]) -> Pace:
    """Pace from the records of a run without faults. Raises `InternalError` if it took no step."""
    total_s, total_steps, standby_s = 0.0, 0, STANDBY_S
    started_ns: int | None = None
    for record in records:
        event = record.event
        if isinstance(event, StepsCommitted):
            value_s, num_steps = _per_step(event)
            total_s, total_steps = total_s + value_s * num_steps, total_steps + num_steps
        elif isinstance(event, WorkerStarted) and event.role is Role.STANDBY:
            started_ns = record.time_ns
        elif isinstance(event, StandbyReady) and started_ns is not None:
            standby_s = seconds(record.time_ns - started_ns)
    if not total_steps:
        raise InternalError("the benchmark's calibration took no step")
    return Pace(step_s=total_s / total_steps, standby_s=standby_s)


def _calibrate(run_dir: Path, ranks: int) -> Pace:
    """Pace of a short run without faults."""
    _train(run_dir, ranks, CALIBRATION_STEPS, ())
    return pace_of(read_journal(run_dir / "journal"))


def _run_ours(run_dir: Path, case: str, config: BenchConfig, gap_steps: int) -> Measured:
    fault_steps = [FIRST_FAULT_STEP + gap_steps * number for number in range(config.num_faults)]
    specs = [f"{case}@{number % config.ranks}:{step}" for number, step in enumerate(fault_steps)]
    _train(run_dir, config.ranks, fault_steps[-1] + gap_steps, specs)
    return from_records(read_journal(run_dir / "journal"))


def _train(run_dir: Path, ranks: int, steps: int, specs: Sequence[str]) -> None:
    faults = [argument for spec in specs for argument in ("--fault", spec)]
    arguments = ["--run-dir", str(run_dir), "--nproc", str(ranks), "--steps", str(steps), "--metrics-linger", "0"]
    run_to_end([sys.executable, "-m", "nvrx_sre", "train", *arguments, *faults], run_dir.with_suffix(".log"))


def _run_peer(out: Path, case: str, config: BenchConfig) -> Measured:
    out.mkdir()
    fault_steps = [FIRST_FAULT_STEP + 5 + PEER_GAP_STEPS * number for number in range(config.num_peer_faults)]
    run_to_end(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(config.ranks), "--max-restarts", str(config.num_peer_faults)),
            *("-m", "nvrx_sre.bench.torchrun_peer", "--out", str(out), "--case", case),
            *("--steps", str(fault_steps[-1] + PEER_GAP_STEPS), "--save-every", str(PEER_SAVE_EVERY)),
            *("--fault-steps", *map(str, fault_steps)),
        ],
        out.with_suffix(".log"),
    )
    return from_stamps([read_stamps(out / f"rank-{rank}.jsonl") for rank in range(config.ranks)], PEER_SAVE_EVERY)


def read_stamps(path: Path) -> list[Stamp]:
    """Stamps of one rank, in order."""
    return [Stamp(**json.loads(line)) for line in path.read_text().splitlines()]
