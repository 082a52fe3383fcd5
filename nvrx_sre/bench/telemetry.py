"""What telemetry costs: a step event in the rank, its share of a step, events in the launcher, a scrape, the exit.

The rank's side is measured as it is in training: pack the step report and send it without blocking over a
real socketpair to another process that receives and decodes. `back to back` has the receiver always
running; in `paced` it sleeps in between, so that each send also wakes it. `share of a step` alternates steps of
10 ms of work with and without a report, and compares them in pairs. The launcher's side is in
`bench.telemetry_launcher`.

A row whose question has a target says in its note what the target is and whether it was met. Must not: run beside
a training.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_sre.bench import telemetry_launcher as launcher
from nvrx_sre.bench.rows import Row, machine_row, percentile, summarize, write_json
from nvrx_sre.bench.telemetry_launcher import BENCH, CONTESTANT, target
from nvrx_sre.core.clock import SystemClock, seconds, to_ns
from nvrx_sre.events.channel import NO_LOSS, Channel, create_pair, pack_step
from nvrx_sre.telemetry import context

STEP_MEDIAN_MAX_US = 10.0
STEP_P99_MAX_US = 50.0
SHARE_MAX_PERCENT = 0.1
STEP_S = 0.01
"""Length of a step whose share telemetry takes."""
PACE_S = 0.002
"""Pause between paced steps: about that of the fastest models a person would train."""
_NS_PER_US = 1_000
_CHUNK = bytes(64 * 1024)


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """How much is measured; the defaults take about two minutes."""

    num_steps: int = 20_000
    """Steps back to back."""
    num_paced_steps: int = 2_000
    num_pairs: int = 1_500
    """Steps of 10 ms with telemetry, and as many without."""
    launcher: launcher.LauncherConfig = field(default_factory=launcher.LauncherConfig)


def measure(config: BenchConfig | None = None) -> list[Row]:
    """All cases. The machine's row is the last. Main thread only."""
    config = config or BenchConfig()
    return [
        _rank_row("step event, back to back", config.num_steps, 0.0),
        _rank_row("step event, paced", config.num_paced_steps, PACE_S),
        _share_row(config.num_pairs),
        *launcher.measure(config.launcher),
        machine_row(),
    ]


def run_bench(json_path: Path | None = None) -> list[Row]:
    """`measure`, and the rows as JSON where `json_path` says."""
    rows = measure()
    if json_path is not None:
        write_json(json_path, rows)
    return rows


@contextmanager
def _receiver() -> Iterator[Channel]:
    """A rank's end of a channel to another process that receives and decodes."""
    ours, theirs = create_pair()
    command = [sys.executable, "-m", "nvrx_sre.bench.telemetry", "--drain", str(ours.fileno())]
    with subprocess.Popen(command, pass_fds=[ours.fileno()], stdout=subprocess.PIPE) as drain:
        ours.close()
        assert drain.stdout is not None
        drain.stdout.readline()  # it is up
        try:
            yield theirs
        finally:
            theirs.close()


def _rank_row(case: str, num_steps: int, pace_s: float) -> Row:
    with _receiver() as channel:
        samples_us = _send_steps(channel, num_steps, pace_s)
        note = f"build, encode, send; {channel.num_dropped} of {num_steps} dropped"
    if pace_s:
        median_us, p99_us = percentile(samples_us, 0.5), percentile(samples_us, 0.99)
        is_met = median_us <= STEP_MEDIAN_MAX_US and p99_us <= STEP_P99_MAX_US
        wanted = f"median at most {STEP_MEDIAN_MAX_US:.0f} us, p99 ({p99_us:.1f}) at most {STEP_P99_MAX_US:.0f} us"
        note = f"{target(wanted, is_met)}; {note}"
    return summarize(samples_us, bench=BENCH, contestant=CONTESTANT, case=case, ranks=1, unit="us", note=note)


def _send_steps(channel: Channel, num_steps: int, pace_s: float) -> list[float]:
    """Microseconds that each step event took."""
    clock, pause = SystemClock(), threading.Event()
    samples_us = []
    for step in range(1, num_steps + 1):
        started_ns = clock.monotonic_ns()
        _report_step(channel, step, started_ns)
        samples_us.append((clock.monotonic_ns() - started_ns) / _NS_PER_US)
        if pace_s:
            pause.wait(pace_s)
    return samples_us


def _report_step(channel: Channel, step: int, mono_ns: int) -> None:
    """What a rank does for telemetry at a step boundary."""
    context.set_step(step)
    packet = pack_step(1, step, mono_ns, 0.1 * step, 0.0, 0.0, 0.0, 1024 * step, NO_LOSS, False, -1, False, 0, 0, 0)
    channel.send_step_nowait(packet, is_urgent=False)


def _share_row(num_pairs: int) -> Row:
    """What a report adds to a step of 10 ms, in percent of the step."""
    clock = SystemClock()
    num_chunks = _chunks_for(clock, STEP_S)
    with _receiver() as channel:

        def step_s(number: int) -> float:
            started_ns = clock.monotonic_ns()
            _work(num_chunks)
            _report_step(channel, number, clock.monotonic_ns())
            return seconds(clock.monotonic_ns() - started_ns)

        def bare_s() -> float:
            started_ns = clock.monotonic_ns()
            _work(num_chunks)
            return seconds(clock.monotonic_ns() - started_ns)

        shares = []
        for number in range(1, num_pairs + 1):
            # The order turns around in each pair, so that a machine that slows down favours neither.
            if number % 2:
                with_s, without_s = step_s(number), bare_s()
            else:
                without_s, with_s = bare_s(), step_s(number)
            shares.append(100 * (with_s - without_s) / without_s)
    is_met = percentile(shares, 0.5) <= SHARE_MAX_PERCENT
    note = f"{target(f'median at most {SHARE_MAX_PERCENT} % of a step of 10 ms', is_met)}; steps on and off in turn"
    return summarize(shares, bench=BENCH, contestant=CONTESTANT, case="share of a step", ranks=1, unit="%", note=note)


def _work(num_chunks: int) -> None:
    digest = hashlib.sha256()
    for _ in range(num_chunks):
        digest.update(_CHUNK)


def _chunks_for(clock: SystemClock, wanted_s: float) -> int:
    """How much work takes `wanted_s` here."""
    num_chunks = 0
    until_ns = clock.monotonic_ns() + to_ns(10 * wanted_s)
    while clock.monotonic_ns() < until_ns:
        _work(1)
        num_chunks += 1
    return max(1, num_chunks // 10)


def _drain(descriptor: int) -> None:
    """The other process: receive and decode until the sender is gone."""
    import socket

    channel = Channel(socket.socket(fileno=descriptor))
    sys.stdout.write("up\n")
    sys.stdout.flush()
    while channel.receive_plain() is not None:
        pass
    channel.socket.close()


if __name__ == "__main__":
    _drain(int(sys.argv[2]))
