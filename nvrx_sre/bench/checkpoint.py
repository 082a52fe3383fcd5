"""What does a durable checkpoint cost, and what does it give? Ours and torch's own, one run, one state.

Cases
    blocked       seconds that the training loop waits for one durable save; beside it the inflation of the following
                  steps, and whether a save was committed although a rank was killed 50 ms after the next optimizer step
    efficiency R  steps x median step without saving / wall, where a write takes R times the compute between saves,
                  throttled; beside it freshness and the share of possible commits. Ours alone: only it can throttle
    restore       from a warm slot, in a fresh process, from the disk; beside it plain copies, disk read, checksum
    memory        shared and private memory for saving, in units of the state: three slots are 3 (`checkpoint_memory`)

Ours is the real launcher with its standby and writer around the same loop (`checkpoint_training`) that the others run
under torchrun. Terms and formulas: `checkpoint_reading`. Blocking: about ten minutes; starts processes and waits.
Must not: run anything else beside a measurement.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from nvrx_sre.bench import checkpoint_memory as memory
from nvrx_sre.bench import checkpoint_reading as reading
from nvrx_sre.bench import checkpoint_reference as reference
from nvrx_sre.bench.checkpoint_reading import CONTESTANTS, NOTHING, OURS
from nvrx_sre.bench.rows import Row, empty, summarize
from nvrx_sre.bench.subprocesses import run_to_end
from nvrx_sre.checkpoint import discover
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import InternalError, UserError
from nvrx_sre.events.journal import read_journal
from nvrx_sre.events.schema import Event, FaultDetected, Record, Role, SaveCommitted, StateRestored, WorkerStarted

BENCH = "checkpoint"
CASES = ("blocked", "efficiency", "restore", "memory")
TRAINING = "nvrx_sre.bench.checkpoint_training"
BYTES_PER_PARAMETER = 12
"""A parameter and AdamW's two moments, float32."""
NEVER = 1_000_000
PEER = "nvidia-resiliency-ext"

Say = Callable[[str], None]
OnRows = Callable[[list[Row]], None]
E = TypeVar("E", bound=Event)


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure. The defaults are the benchmark; `quick` is the same on a tiny state."""

    dim: int = 1024
    layers: int = 5
    batch: int = 16
    ranks: int = 2
    num_saves: int = 4
    """Saves of the case `blocked`, and throttled writes of each window of `efficiency`."""
    pause_s: float = 12.0
    """Steps without saving before a window of ours, in time: the standby must have started by then."""
    bandwidth_mb_s: float = 50.0
    saturations: tuple[float, ...] = (0.1, 0.98, 5.8)
    num_restores: int = 4
    """Faults of each kind, and restarts of the launcher."""
    contestants: tuple[str, ...] = CONTESTANTS
    cases: tuple[str, ...] = CASES

    def __post_init__(self) -> None:
        if self.num_saves < 1 or self.num_restores < 1 or self.ranks < 1:
            raise UserError("bench checkpoint needs at least 1 save, 1 restore and 1 rank")

    @property
    def state_bytes(self) -> int:
        """State of all ranks together."""
        parameters = self.layers * (8 * self.dim * self.dim + 3 * self.dim)
        return parameters * BYTES_PER_PARAMETER

    @property
    def write_s(self) -> float:
        """A throttled write, as planned."""
        return self.state_bytes / (self.bandwidth_mb_s * 1e6)


def quick(cases: Sequence[str] = CASES) -> BenchConfig:
    """A tiny state and few saves: shows that it works, not what it costs."""
    return BenchConfig(
        dim=256,
        layers=2,
        batch=4,
        num_saves=2,
        pause_s=4.0,
        bandwidth_mb_s=10.0,
        saturations=(1.0,),
        num_restores=1,
        contestants=CONTESTANTS[:2],
        cases=tuple(cases),
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended. `windows`: (first step, last step, interval)."""

    ranks: list[list[reading.Stamp]]
    windows: list[tuple[int, int, int]]
    out: Path
    records: list[Record] = field(default_factory=list)
    saves: list[reading.Save] = field(default_factory=list)
    base: reading.Base


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What one run is to do. `windows`: (interval, steps)."""

    windows: tuple[tuple[int, int], ...]
    pause_steps: int
    kill_step: int = 0
    copies: bool = False


class Benchmark:
    """One measurement. Makes and removes a scratch directory."""

    def __init__(self, config: BenchConfig, say: Say) -> None:
        self._config = config
        self._say = say
        self._clock = SystemClock()
        self._scratch = Path()

    def measure(self, on_rows: OnRows) -> None:
        """Measure part after part; `on_rows` gets the rows of each as soon as there are any. Blocks for minutes.

        A part that fails costs no other one: `InternalError` comes at the end and names all that failed.
        """
        failed: list[str] = []
        with tempfile.TemporaryDirectory(prefix="nvrx-sre-bench-", dir=Path.cwd()) as scratch:
            self._scratch = Path(scratch)
            step_s = self._calibrate()
            for name, part in self._parts(step_s):
                self._say(name)
                try:
                    on_rows(part())
                except InternalError as error:
                    self._say(f"{name} failed: {error}")
                    failed.append(f"{name}: {error}")
        if failed:
            raise InternalError(f"failed in the benchmark: {'; '.join(failed)}")

    def _parts(self, step_s: float) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
        """(name, what measures it) of everything that was asked for."""
        wanted = self._config.cases
        if "blocked" in wanted:
            yield f"blocked: {OURS}", lambda: self._ours_blocked(step_s)
            for contestant in (NOTHING, *self._config.contestants):
                yield f"blocked: {contestant}", functools.partial(self._peer_blocked, contestant)
            yield f"blocked: {PEER}", lambda: [absent_peer()]
        if "efficiency" in wanted:
            yield f"efficiency: {OURS}", lambda: self._efficiency(step_s)
        if "restore" in wanted:
            yield f"restore: {OURS}", lambda: self._restore(step_s)
        if "memory" in wanted:
            yield f"memory: {OURS}", self._memory

    # --- blocked ------------------------------------------------------------------------------------------

    def _calibrate(self) -> float:
        self._say("calibration: how long is a step here?")
        return self._train(NOTHING, _Plan(windows=((NEVER, 4),), pause_steps=6)).base.step_s

    def _blocked_plan(self, pause_steps: int) -> _Plan:
        """Saves to measure; then, when the last of them is done, one more whose rank is killed."""
        interval = reading.FOLLOWING + 1
        measured_steps = interval * self._config.num_saves + reading.FOLLOWING
        return _Plan(
            windows=((interval, measured_steps), (interval, interval + 3)),
            pause_steps=pause_steps,
            kill_step=measured_steps + interval,
        )

    def _ours_blocked(self, step_s: float) -> list[Row]:
        plan = self._blocked_plan(self._pause_steps(step_s))
        run = self._launch("blocked", plan, "--hot-every", "0")
        killed = [event for event in _events(run.records, SaveCommitted) if event.step == plan.kill_step]
        return self._blocked_rows(OURS, run, plan, bool(killed))

    def _peer_blocked(self, contestant: str) -> list[Row]:
        plan = self._blocked_plan(6)
        run = self._train(contestant, plan)
        checkpoints = run.out / "checkpoints"
        committed = (checkpoints / f"step-{plan.kill_step:08d}" / ".metadata").exists()
        shutil.rmtree(checkpoints, ignore_errors=True)  # half a gigabyte a save
        return self._blocked_rows(contestant, run, plan, committed)

    def _blocked_rows(self, contestant: str, run: Run, plan: _Plan, committed: bool) -> list[Row]:
        blocked, inflation = reading.blocked_and_inflation(run.ranks, run.base, plan.kill_step)
        survived = "yes" if committed else "no"
        note = (
            f"inflation {statistics.median(inflation):.3f} s over {reading.FOLLOWING} steps, "
            f"committed after SIGKILL: {survived}, step alone {run.base.step_s * 1000:.0f} ms"
        )
        if contestant == NOTHING:
            note = f"the noise of this measurement: inflation {statistics.median(inflation):.3f} s"
        rows = [self._row(blocked, contestant, "blocked", "s", note)]
        rows.append(self._row(inflation, contestant, "blocked inflation", "s", ""))
        if contestant != NOTHING:
            rows.append(
                self._row([float(committed)], contestant, "blocked committed", "share", f"after SIGKILL: {survived}")
            )
        return rows

    # --- efficiency ---------------------------------------------------------------------------------------

    def _efficiency(self, step_s: float) -> list[Row]:
        config = self._config
        windows = [self._window(saturation, step_s) for saturation in config.saturations]
        total_s = sum(steps for _, steps in windows) * step_s
        self._say(f"at {config.bandwidth_mb_s:g} MB/s, {total_s:.0f} s of steps")
        pause_steps = self._pause_steps(step_s, 1.5 * config.write_s + 2)
        run = self._launch(
            "efficiency",
            _Plan(windows=tuple(windows), pause_steps=pause_steps),
            *("--hot-every", "0", "--write-bandwidth", str(config.bandwidth_mb_s)),
        )
        rows: list[Row] = []
        for saturation, (first, last, interval) in zip(config.saturations, run.windows, strict=True):
            found = reading.efficiency(run.ranks[0], (first, last), interval, run.saves, run.base)
            note = (
                f"{found.num_steps} steps, a save each {interval}, write {found.write_s:.2f} s, "
                f"write / compute {found.saturation:.2f}, hot tier off, {config.bandwidth_mb_s:g} MB/s"
            )
            case = f"efficiency {saturation:g}"
            share = found.num_commits / found.num_possible
            rows.append(self._row([found.value], OURS, case, "share", note))
            rows.append(self._row(found.freshness, OURS, f"{case} freshness", "write times", "beyond the interval"))
            commits = f"{found.num_commits} of {found.num_possible} possible"
            rows.append(self._row([share], OURS, f"{case} commits", "share", commits))
        return rows

    def _window(self, saturation: float, step_s: float) -> tuple[int, int]:
        """(interval, steps): as many writes as asked for, but one where writes are far apart."""
        write_s = self._config.write_s
        interval = max(1, round(write_s / saturation / step_s))
        num_writes = 1 if saturation < 0.5 else self._config.num_saves
        total_s = num_writes * max(interval * step_s, write_s) + 1.5 * write_s + 1
        return interval, math.ceil(total_s / step_s) + interval * (saturation > 1)

    # --- restore ------------------------------------------------------------------------------------------

    def _restore(self, step_s: float) -> list[Row]:
        config = self._config
        gap, start = max(3, round(config.pause_s / step_s)), 4
        exceptions = [start + 3 * number for number in range(config.num_restores)]
        kills = [exceptions[-1] + gap * (number + 1) for number in range(config.num_restores)]
        specs = [
            *(f"exception@0:{step}" for step in exceptions),
            *(f"sigkill@{config.ranks - 1}:{step}" for step in kills),
        ]
        plan = _Plan(windows=((NEVER, kills[-1] + 4),), pause_steps=self._pause_steps(step_s), copies=True)
        faults = [argument for spec in specs for argument in ("--fault", spec)]
        run = self._launch("restore", plan, "--hot-every", "1", *faults)
        if len(_events(run.records, FaultDetected)) < len(specs):
            raise InternalError("the benchmark's run did not meet all of its faults")
        newest = discover.discover(self._scratch / "restore", []).restorable[0]
        reads, sums = [], []
        for number in range(config.num_restores):
            self._say(f"from the disk, {number + 1} of {config.num_restores}")
            reads.append(reference.disk_read_s(newest.path, config.ranks))
            sums.append(reference.checksum_s(newest.size_bytes, config.ranks))
            reference.forget(newest.path)
            run = self._launch("restore", plan, "--hot-every", "1", *faults)
        return self._restore_rows(run, reads, sums)

    def _restore_rows(self, run: Run, reads: list[float], sums: list[float]) -> list[Row]:
        found = reading.restores(run.ranks, [event.source for event in _events(run.records, StateRestored)])
        copies, num_bytes = reading.copies(run.ranks)
        copy_s, slower_s = statistics.median(copies), max(statistics.median(reads), statistics.median(sums))
        rows = [
            self._row(
                copies, "memcpy", "restore reference", "s", f"{num_bytes / 1e6:.0f} MB a rank, all ranks at once"
            ),
            self._row(reads, "disk read", "restore reference", "s", "cached pages dropped, a thread a rank"),
            self._row(sums, "xxh3_128", "restore reference", "s", "of memory, a thread a rank"),
        ]
        for kind, case in (("warm", "warm slot"), ("fresh", "fresh process"), ("durable", "durable")):
            if not found[kind]:
                raise InternalError(f"the benchmark's run restored nothing of kind {kind!r}")
            samples = [stamp.duration_s for stamp in found[kind]]
            took_s = statistics.median(samples)
            note = f"{copy_s / took_s:.0%} of memcpy bandwidth"
            if kind == "durable":
                note = f"{took_s / slower_s:.2f} x the slower of disk read and checksum"
            note += f": {reading.parts_note(found[kind])}"
            rows.append(self._row(samples, OURS, f"restore {case}", "s", note))
        return rows

    # --- memory -------------------------------------------------------------------------------------------

    def _memory(self) -> list[Row]:
        interval = reading.FOLLOWING + 1
        num_steps = interval * self._config.num_saves + reading.FOLLOWING
        saving, without = self._peaks("memory", interval, num_steps), self._peaks("memory-never", NEVER, num_steps)
        used, state_bytes = memory.taken_by_saving(saving, without), self._config.state_bytes
        note = (
            f"slots {used.slot_bytes / 1e6:.0f} MB, ranks +{used.rank_bytes / 1e6:.0f} MB, "
            f"writer +{used.writer_bytes / 1e6:.0f} MB over the same run without a save, whose ranks hold "
            f"{without.rank_bytes / 1e6:.0f} MB; state {state_bytes / 1e6:.0f} MB"
        )
        return [self._row([used.total_bytes / state_bytes], OURS, "memory", "states", note)]

    def _peaks(self, name: str, interval: int, num_steps: int) -> memory.Peaks:
        plan = _Plan(windows=((interval, num_steps),), pause_steps=6)
        with memory.MemorySampler() as sampler:
            run = self._launch(name, plan, "--hot-every", "0", "--standbys", "0", under=memory.HELD_ONLY)
        ranks = {stamp.pid for stamps in run.ranks for stamp in stamps if stamp.kind == "restored"}
        writers = {event.pid for event in _events(run.records, WorkerStarted) if event.role is Role.WRITER}
        return memory.peaks_of(sampler.samples, ranks, writers)

    # --- runs ---------------------------------------------------------------------------------------------

    def _pause_steps(self, step_s: float, at_least_s: float = 0.0) -> int:
        return math.ceil(max(self._config.pause_s, at_least_s) / step_s) + 4

    def _launch(self, name: str, plan: _Plan, *options: str, under: Sequence[str] = ()) -> Run:
        """Run ours under its launcher, which `under` (a command) starts if there is one."""
        run_dir = self._scratch / name
        out = self._scratch / f"{name}-stamps"
        out.mkdir(exist_ok=True)
        run_to_end(
            [
                *under,
                *(sys.executable, "-m", "nvrx_sre", "launch", "--nproc-per-node", str(self._config.ranks)),
                *("--run-dir", str(run_dir), "--save-every", str(NEVER), "--metrics-linger", "0", *options),
                *("--module", TRAINING, *self._training_arguments(OURS, out, plan)),
            ],
            self._scratch / f"{name}.log",
        )
        records = list(read_journal(run_dir / "journal"))
        offset_ns = self._clock.wall_ns() - self._clock.monotonic_ns()
        saves = reading.saves_of(records, offset_ns)
        return self._read(out, plan, records, saves, reading.busy_spans(records, saves, offset_ns))

    def _train(self, contestant: str, plan: _Plan) -> Run:
        """Run another contestant under torchrun. It ends with its planned kill."""
        out = self._scratch / f"{contestant}-{plan.kill_step}".replace(" ", "-")
        out.mkdir()
        run_to_end(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(self._config.ranks), "--module", TRAINING),
                *self._training_arguments(contestant, out, plan),
            ],
            out.with_suffix(".log"),
            may_fail=plan.kill_step > 0,
        )
        return self._read(out, plan, [], [], [])

    def _training_arguments(self, contestant: str, out: Path, plan: _Plan) -> list[str]:
        config = self._config
        windows = [argument for interval, steps in plan.windows for argument in ("--window", f"{interval}:{steps}")]
        return [
            *("--out", str(out), "--contestant", contestant, "--dim", str(config.dim), "--layers", str(config.layers)),
            *("--batch", str(config.batch), "--pause-steps", str(plan.pause_steps)),
            *("--kill-step", str(plan.kill_step), *windows, *(["--copies"] if plan.copies else [])),
        ]

    def _read(
        self, out: Path, plan: _Plan, records: list[Record], saves: list[reading.Save], busy: list[reading.Span]
    ) -> Run:
        ranks = reading.read_stamps(out, self._config.ranks)
        windows, last = [], 0
        for interval, steps in plan.windows:
            windows.append((last + 1, last + steps, interval))
            last += steps
        base = reading.base_of(ranks[0], busy)
        return Run(ranks=ranks, windows=windows, out=out, records=records, saves=saves, base=base)

    def _row(self, samples: Sequence[float], contestant: str, case: str, unit: str, note: str) -> Row:
        return summarize(
            samples, bench=BENCH, contestant=contestant, case=case, ranks=self._config.ranks, unit=unit, note=note
        )


def measure(config: BenchConfig, say: Say, on_rows: OnRows) -> None:
    """Run every case of `config`; `say` gets a line before each part, `on_rows` its rows after it.

    Raises `InternalError` at the end if a part failed.
    """
    Benchmark(config, say).measure(on_rows)


def absent_peer() -> Row:
    """The row of nvidia-resiliency-ext: which version, and why its asynchronous save is not among the contestants."""
    try:
        version = importlib.metadata.version(PEER)
    except importlib.metadata.PackageNotFoundError:
        reason = "is not installed"
    else:
        command = [sys.executable, "-c", _PEER_PROBE]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PEER_PROBE_TIMEOUT_S)
        said = done.stdout if done.returncode == 0 else "".join(done.stderr.splitlines()[-1:])
        reason = f"{version}: {said.strip() or 'gave no reason'}"
    return empty(f"does not run: {reason}", bench=BENCH, contestant=PEER, case="blocked", ranks=0)


PEER_PROBE_TIMEOUT_S = 300.0
"""Longest life of the probe (seconds)."""
_PEER_PROBE = """
import pathlib, tempfile
import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "state.pt"
    tensor, saver = torch.zeros(1 << 24), TorchAsyncCheckpoint()
    saver.async_save({"tensor": tensor}, str(path))
    tensor.fill_(1.0)
    saver.finalize_async_save(blocking=True)
    torn = bool(torch.load(path)["tensor"].any())
print("takes CPU tensors by reference, so the next step changes what it saves" if torn
      else "saves a CPU tensor, but this benchmark's sharded state only from a GPU")
"""
"""Saves one tensor and changes it right after the call."""


def _events(records: Sequence[Record], kind: type[E]) -> list[E]:
    return [record.event for record in records if isinstance(record.event, kind)]
