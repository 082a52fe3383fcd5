"""What does a durable checkpoint cost, and what does it give? Ours and torch's own, one run, one state.

Cases
    blocked       seconds that the training loop waits for one durable save; beside it the inflation of the following
                  steps, and whether a save was committed although a rank was killed 50 ms after the next optimizer step
    efficiency R  steps x what they take without saving / wall, where a write takes R times the compute between saves,
                  throttled; beside it freshness and the share of possible commits, and the same with nothing saved
                  (`checkpoint_efficiency`). Ours alone: only it can throttle
    restore       from a warm slot, in a fresh process, from the disk; beside it plain copies, disk read, checksum
    memory        shared and private memory for saving, in units of the state: three slots are 3 (`checkpoint_memory`)

Ours is the real launcher with its standby and writer around the same loop (`checkpoint_training`) that the others run
under torchrun. Terms and formulas: `checkpoint_reading`. Blocking: about ten minutes; starts processes and waits.
Must not: run anything else beside a measurement.
"""

from __future__ import annotations

import functools
import importlib.metadata
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from nvrx_sre.bench import checkpoint_efficiency as efficiency
from nvrx_sre.bench import checkpoint_memory as memory
from nvrx_sre.bench import checkpoint_reading as reading
from nvrx_sre.bench import checkpoint_reference as reference
from nvrx_sre.bench.checkpoint_efficiency import WindowPlan
from nvrx_sre.bench.checkpoint_reading import CONTESTANTS, NOTHING, OURS
from nvrx_sre.bench.rows import Keep, Row, Say, empty, summarize
from nvrx_sre.bench.subprocesses import failed, run_to_end
from nvrx_sre.checkpoint import discover
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import ExitCode, InternalError, NvrxError, UserError
from nvrx_sre.events.journal import read_journal
from nvrx_sre.events.schema import (
    Event,
    FaultDetected,
    Record,
    Role,
    RunFinished,
    SaveCommitted,
    StateRestored,
    WorkerStarted,
)

BENCH = "checkpoint"
CASES = ("blocked", "efficiency", "restore", "memory")
TRAINING = "nvrx_sre.bench.checkpoint_training"
BYTES_PER_PARAMETER = 12
"""A parameter and AdamW's two moments, float32."""
NEVER = 1_000_000
PEER = "nvidia-resiliency-ext"

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure. The defaults are the benchmark; `quick` is the same on a tiny state."""

    dim: int = 1024
    layers: int = 5
    batch: int = 16
    ranks: int = 2
    num_saves: int = 4
    """Saves of the case `blocked`."""
    pause_s: float = 12.0
    """Steps without saving before a window of ours, in time: the standby must have started by then."""
    bandwidth_mb_s: float = 50.0
    saturations: tuple[float, ...] = (0.1, 0.98, 5.8)
    num_rounds: int = 3
    """Windows of each case `efficiency`."""
    saves_in_a_row: int = 2
    """Throttled writes of such a window, where one follows the other."""
    between_s: float = 8.0
    """Steps without saving between such windows, in time; the end of a write runs into them."""
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
        bandwidth_mb_s=20.0,
        saturations=(0.1, 1.0),
        num_rounds=1,
        num_restores=1,
        contestants=CONTESTANTS[:2],
        cases=tuple(cases),
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended. `starting`: when a standby was."""

    ranks: list[list[reading.Stamp]]
    out: Path
    records: list[Record] = field(default_factory=list)
    saves: list[reading.Save] = field(default_factory=list)
    starting: list[reading.Span] = field(default_factory=list)
    base: reading.Base


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What one run is to do."""

    windows: tuple[WindowPlan, ...]
    pause_s: float = 0.0
    kill_step: int = 0
    copies: bool = False


class Benchmark:
    """One measurement. `rows` and `failed` (one line each) grow as it goes on. Makes and removes a scratch folder."""

    def __init__(self, config: BenchConfig, say: Say, keep: Keep) -> None:
        """`say` gets a line before each part, `keep` all rows so far after it."""
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self._config = config
        self._say = say
        self._keep = keep
        self._clock = SystemClock()
        self._scratch = Path()

    def run(self) -> None:
        """Run all parts. Blocks for minutes; one that fails is a row with the reason, and the others go on."""
        with tempfile.TemporaryDirectory(prefix="nvrx-sre-bench-", dir=Path.cwd()) as scratch:
            self._scratch = Path(scratch)
            for name, part in self._parts():
                self._say(name)
                try:
                    self.rows += part()
                except NvrxError as error:
                    self._say(f"{name} failed: {error}")
                    self.failed.append(f"{name}: {error}")
                    self.rows.append(self._failed_row(name, error))
                self._keep(self.rows)

    def _failed_row(self, name: str, error: NvrxError) -> Row:
        case, _, contestant = name.partition(": ")
        return empty(f"failed: {error}", bench=BENCH, contestant=contestant, case=case, ranks=self._config.ranks)

    def _parts(self) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
        """(`CASE: CONTESTANT`, what measures it) of everything that was asked for."""
        wanted = self._config.cases
        if "blocked" in wanted:
            yield f"blocked: {OURS}", self._ours_blocked
            for contestant in (NOTHING, *self._config.contestants):
                yield f"blocked: {contestant}", functools.partial(self._peer_blocked, contestant)
            yield f"blocked: {PEER}", lambda: [absent_peer()]
        if "efficiency" in wanted:
            yield f"efficiency: {OURS}", self._efficiency
        if "restore" in wanted:
            yield f"restore: {OURS}", self._restore
        if "memory" in wanted:
            yield f"memory: {OURS}", self._memory

    # --- blocked ------------------------------------------------------------------------------------------

    def _blocked_plan(self, pause_s: float) -> _Plan:
        """Saves to measure; then, when the last of them is done, one more whose rank is killed."""
        interval = reading.FOLLOWING + 1
        measured_steps = interval * self._config.num_saves + reading.FOLLOWING
        return _Plan(
            windows=(_every(interval, measured_steps), _every(interval, interval + 3)),
            pause_s=pause_s,
            kill_step=measured_steps + interval,
        )

    def _ours_blocked(self) -> list[Row]:
        plan = self._blocked_plan(self._config.pause_s)
        run = self._launch("blocked", plan, "--hot-every", "0")
        killed = [event for event in _events(run.records, SaveCommitted) if event.step == plan.kill_step]
        return self._blocked_rows(OURS, run, plan, bool(killed))

    def _peer_blocked(self, contestant: str) -> list[Row]:
        plan = self._blocked_plan(0.0)
        run = self._train(f"blocked-{contestant}", contestant, plan)
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

    def _efficiency(self) -> list[Row]:
        config = self._config
        step_s = self._pace_s("efficiency", efficiency.KEEPS_FREED)
        plans = efficiency.plan_run(
            efficiency.RunConfig(
                saturations=config.saturations,
                num_rounds=config.num_rounds,
                saves_in_a_row=config.saves_in_a_row,
                write_s=config.write_s,
                step_s=step_s,
            )
        )
        total_s = sum(plan.num_steps for plan in plans) * step_s + (len(plans) + 1) * config.between_s
        self._say(f"at {config.bandwidth_mb_s:g} MB/s, {len(plans)} windows, {total_s:.0f} s of steps")
        run = self._launch(
            "efficiency",
            _Plan(windows=tuple(plans), pause_s=config.between_s),
            *("--hot-every", "0", "--write-bandwidth", str(config.bandwidth_mb_s)),
            under=efficiency.KEEPS_FREED,
        )
        windows = efficiency.read_windows(run.ranks[0], plans, run.saves, run.starting)
        rows: list[Row] = []
        for saturation in (efficiency.CONTROL, *config.saturations):
            of_this = [window for window, plan in zip(windows, plans[1:], strict=True) if plan.saturation == saturation]
            rows += self._efficiency_rows(saturation, of_this)
        return rows

    def _efficiency_rows(self, saturation: float, windows: list[efficiency.Window]) -> list[Row]:
        values, note = [window.efficiency for window in windows], efficiency.describe(windows)
        if saturation == efficiency.CONTROL:
            return [self._row(values, NOTHING, "efficiency", "share", f"the noise of this measurement: {note}")]
        case = f"efficiency {saturation:g}"
        freshness = [age for window in windows for age in window.freshness]
        num_commits = sum(window.num_commits for window in windows)
        num_possible = sum(window.num_possible for window in windows)
        commits = f"{num_commits} of {num_possible} possible"
        return [
            self._row(values, OURS, case, "share", f"{note}, hot tier off, {self._config.bandwidth_mb_s:g} MB/s"),
            self._row(freshness, OURS, f"{case} freshness", "write times", "beyond the interval"),
            self._row([num_commits / num_possible], OURS, f"{case} commits", "share", commits),
        ]

    # --- restore ------------------------------------------------------------------------------------------

    def _restore(self) -> list[Row]:
        config, step_s = self._config, self._pace_s("restore")
        gap, start = max(3, round(config.pause_s / step_s)), 4
        exceptions = [start + 3 * number for number in range(config.num_restores)]
        kills = [exceptions[-1] + gap * (number + 1) for number in range(config.num_restores)]
        specs = [
            *(f"exception@0:{step}" for step in exceptions),
            *(f"sigkill@{config.ranks - 1}:{step}" for step in kills),
        ]
        window = WindowPlan(num_steps=kills[-1] + 4)
        plan = _Plan(windows=(window,), pause_s=config.pause_s, copies=True)
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
        saving = self._peaks("memory", _every(interval, num_steps))
        without = self._peaks("memory-never", WindowPlan(num_steps=num_steps))
        used, state_bytes = memory.taken_by_saving(saving, without), self._config.state_bytes
        note = (
            f"slots {used.slot_bytes / 1e6:.0f} MB, ranks +{used.rank_bytes / 1e6:.0f} MB, "
            f"writer +{used.writer_bytes / 1e6:.0f} MB over the same run without a save, whose ranks hold "
            f"{without.rank_bytes / 1e6:.0f} MB; state {state_bytes / 1e6:.0f} MB"
        )
        return [self._row([used.total_bytes / state_bytes], OURS, "memory", "states", note)]

    def _peaks(self, name: str, window: WindowPlan) -> memory.Peaks:
        plan = _Plan(windows=(window,))
        with memory.MemorySampler() as sampler:
            run = self._launch(name, plan, "--hot-every", "0", "--standbys", "0", under=memory.HELD_ONLY)
        ranks = {stamp.pid for stamps in run.ranks for stamp in stamps if stamp.kind == "restored"}
        writers = {event.pid for event in _events(run.records, WorkerStarted) if event.role is Role.WRITER}
        return memory.peaks_of(sampler.samples, ranks, writers)

    def _pace_s(self, case: str, under: Sequence[str] = ()) -> float:
        """What a step takes here, for plans in steps. Blocks for some."""
        plan = _Plan(windows=(WindowPlan(num_steps=4),))
        return self._train(f"pace-{case}", NOTHING, plan, under=under).base.step_s

    # --- runs ---------------------------------------------------------------------------------------------

    def _launch(self, name: str, plan: _Plan, *options: str, under: Sequence[str] = ()) -> Run:
        """Run ours under its launcher, which `under` (a command) starts if there is one.

        The steps of its last pause change the state and commit nothing: without the hot tier the last step cannot be
        saved at the end, which is an end all the same.
        """
        run_dir, log = self._scratch / name, self._scratch / f"{name}.log"
        out = self._scratch / f"{name}-stamps"
        out.mkdir(exist_ok=True)
        exit_code = run_to_end(
            [
                *under,
                *(sys.executable, "-m", "nvrx_sre", "launch", "--nproc-per-node", str(self._config.ranks)),
                *("--run-dir", str(run_dir), "--save-every", str(NEVER), "--metrics-linger", "0", *options),
                *("--module", TRAINING, *self._training_arguments(OURS, out, plan)),
            ],
            log,
            may_fail=True,
        )
        journal = run_dir / "journal"
        records = list(read_journal(journal)) if journal.is_dir() else []
        reasons = [event.reason for event in _events(records, RunFinished)]
        is_through = exit_code == ExitCode.RETRYABLE and reasons and reasons[-1].startswith("finished")
        if exit_code != ExitCode.FINISHED and not is_through:
            raise failed(exit_code, log)
        offset_ns = self._clock.wall_ns() - self._clock.monotonic_ns()
        saves = reading.saves_of(records, offset_ns)
        return self._read(out, records, saves, reading.starting_spans(records, offset_ns))

    def _train(self, name: str, contestant: str, plan: _Plan, under: Sequence[str] = ()) -> Run:
        """Run another contestant under torchrun, started by `under` if there is one. It ends with its planned kill."""
        out = self._scratch / name.replace(" ", "-")
        out.mkdir()
        run_to_end(
            [
                *under,
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(self._config.ranks), "--module", TRAINING),
                *self._training_arguments(contestant, out, plan),
            ],
            out.with_suffix(".log"),
            may_fail=plan.kill_step > 0,
        )
        return self._read(out, [], [], [])

    def _training_arguments(self, contestant: str, out: Path, plan: _Plan) -> list[str]:
        config = self._config
        windows = [
            argument
            for window in plan.windows
            for argument in ("--window", f"{window.num_steps}:{','.join(map(str, window.due))}")
        ]
        return [
            *("--out", str(out), "--contestant", contestant, "--dim", str(config.dim), "--layers", str(config.layers)),
            *("--batch", str(config.batch), "--pause-s", str(plan.pause_s)),
            *("--kill-step", str(plan.kill_step), *windows, *(["--copies"] if plan.copies else [])),
        ]

    def _read(self, out: Path, records: list[Record], saves: list[reading.Save], starting: list[reading.Span]) -> Run:
        ranks = reading.read_stamps(out, self._config.ranks)
        base = reading.base_of(ranks[0], [*starting, *((save.captured_ns, save.ended_ns) for save in saves)])
        return Run(ranks=ranks, out=out, records=records, saves=saves, starting=starting, base=base)

    def _row(self, samples: Sequence[float], contestant: str, case: str, unit: str, note: str) -> Row:
        return summarize(
            samples, bench=BENCH, contestant=contestant, case=case, ranks=self._config.ranks, unit=unit, note=note
        )


def _every(interval: int, num_steps: int) -> WindowPlan:
    """A save each `interval` steps."""
    return WindowPlan(num_steps=num_steps, due=tuple(range(interval, num_steps + 1, interval)))


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
