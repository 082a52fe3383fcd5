"""What telemetry costs: a step event in the rank, its share of a step, events in the launcher, a scrape, the exit.

The rank's side is measured as it is in training: read the clock, sum up the step's times, and store the report where
another process takes it in as a launcher does (`launcher.intake`). `back to back` is without a pause. In `paced`
the rank sleeps in between: its core has gone to sleep as well. In `after training` it trains a small model in between:
its core is busy, and its caches hold something else. Beside each stands its control, `no event`: after every other
pause nothing is called in the place of the report, which says what of a figure is the pause, the call and the clock.
The share of a step is in `bench.telemetry_share`, the launcher's side in `bench.telemetry_launcher`.

A row whose question has a target says in its note what the target is and whether it was met. Must not: run beside
a training.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_sre.bench import telemetry_launcher as launcher
from nvrx_sre.bench import telemetry_share as share
from nvrx_sre.bench.rows import Row, machine_row, percentile, summarize, target
from nvrx_sre.bench.step_reports import Reporter, training
from nvrx_sre.bench.telemetry_launcher import BENCH, CONTESTANT
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.events.channel import Channel, create_pair
from nvrx_sre.events.messages import Doorbell, Finished
from nvrx_sre.events.step_ring import StepRing

STEP_MEDIAN_MAX_US = 10.0
STEP_P99_MAX_US = 50.0
PACE_S = 0.002
"""Pause, or training, between paced steps: about a step of the fastest models a person would train."""
_NS_PER_US = 1_000


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """How much is measured; the defaults take about seven minutes."""

    num_steps: int = 20_000
    """Steps back to back."""
    num_paced_steps: int = 2_000
    share: share.ShareConfig = field(default_factory=share.ShareConfig)
    launcher: launcher.LauncherConfig = field(default_factory=launcher.LauncherConfig)


def measure(config: BenchConfig | None = None) -> list[Row]:
    """All cases. The machine's row is the last. Main thread only."""
    config = config or BenchConfig()
    with tempfile.TemporaryDirectory(prefix="nvrx-sre-bench-") as folder:
        return [
            *_rank_rows("back to back", config.num_steps, lambda: None),
            *_rank_rows("paced", config.num_paced_steps, _sleeping(), has_target=True),
            *_rank_rows("after training", config.num_paced_steps, training(SystemClock(), PACE_S), has_target=True),
            *share.measure(Path(folder) / "share", config.share),
            *launcher.measure(config.launcher),
            machine_row(),
        ]


@contextmanager
def _reporter() -> Iterator[Reporter]:
    """A rank that reports to another process, which takes in what comes as a launcher does."""
    ours, theirs = create_pair()
    command = [sys.executable, "-m", "nvrx_sre.bench.telemetry", "--take-in", str(ours.fileno())]
    with subprocess.Popen(command, pass_fds=[ours.fileno()], stdout=subprocess.PIPE) as launcher_process:
        ours.close()
        assert launcher_process.stdout is not None
        launcher_process.stdout.readline()  # it is up
        received = theirs.receive()
        assert received is not None and isinstance(received[0], Doorbell)
        theirs.take_over(received[1])
        assert theirs.doorbell is not None
        try:
            yield Reporter(theirs)
        finally:
            theirs.send(Finished(generation=1, step=0, result={}, mono_ns=0))
            theirs.close()
            os.close(theirs.doorbell)


def _rank_rows(case: str, num_steps: int, between: Callable[[], object], *, has_target: bool = False) -> list[Row]:
    """The step event and its control."""
    with _reporter() as reporter:
        samples_us, control_us = _report_steps(reporter, num_steps, between)
        note = f"clock, times, store; {reporter.channel.num_dropped} of {num_steps} dropped"
    if has_target:
        median_us, p99_us = percentile(samples_us, 0.5), percentile(samples_us, 0.99)
        is_met = median_us <= STEP_MEDIAN_MAX_US and p99_us <= STEP_P99_MAX_US
        wanted = f"median at most {STEP_MEDIAN_MAX_US:.0f} us, p99 ({p99_us:.1f}) at most {STEP_P99_MAX_US:.0f} us"
        note = f"{target(wanted, is_met)}; {note}"
    return [
        _rank_row(f"step event, {case}", samples_us, note),
        _rank_row(f"no event, {case}", control_us, "control: a call of nothing, in turn with the report"),
    ]


def _rank_row(case: str, samples_us: list[float], note: str) -> Row:
    return summarize(samples_us, bench=BENCH, contestant=CONTESTANT, case=case, ranks=1, unit="us", note=note)


def _report_steps(reporter: Reporter, num_steps: int, between: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Microseconds that each step event took, and nothing in its place."""
    now_ns = SystemClock().monotonic_ns
    samples_us: list[float] = []
    control_us: list[float] = []
    for step in range(1, num_steps + 1):
        for call, taken_us in ((reporter.report, samples_us), (reporter.report_nothing, control_us)):
            between()
            reporter.pass_boundary(step)
            started_ns = now_ns()
            call(step)
            taken_us.append((now_ns() - started_ns) / _NS_PER_US)
    return samples_us, control_us


def _sleeping() -> Callable[[], object]:
    pause = threading.Event()
    return lambda: pause.wait(PACE_S)


@dataclass
class _Rank:
    """The reporting rank, as the other process sees it."""

    number: int
    channel: Channel
    ring: StepRing | None


def _take_in(descriptor: int) -> None:
    """The other process: take in what comes until the rank has finished."""
    import selectors
    import socket

    from nvrx_sre.launcher import commands
    from nvrx_sre.launcher.intake import Intake

    rank = _Rank(0, Channel(socket.socket(fileno=descriptor)), StepRing.create())
    rank.channel.socket.setblocking(False)
    inputs: deque[commands.Input] = deque()
    intake = Intake(selectors.DefaultSelector(), inputs.append, lambda number: number, lambda: 1)
    intake.add(rank)
    sys.stdout.write("up\n")
    sys.stdout.flush()
    is_finished = False
    while not is_finished:
        intake.select(1.0)
        while inputs:
            item = inputs.popleft()
            is_finished = isinstance(item, commands.FromChild) and isinstance(item.message, Finished)
    rank.channel.close()


if __name__ == "__main__":
    _take_in(int(sys.argv[2]))
