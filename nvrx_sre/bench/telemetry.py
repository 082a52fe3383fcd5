"""What telemetry costs: a step event in the rank, a record in the launcher, a scrape.

The rank's side is measured as it is in training: pack the step report and send it without blocking over a
real socketpair to another process that receives and decodes. `back to back` has the receiver always
running; in `paced` it sleeps in between, so that each send also wakes it. Must not: run beside a training.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

from nvrx_sre.bench.rows import Row, machine_row, summarize, write_json
from nvrx_sre.core.clock import NS_PER_S, SystemClock, seconds
from nvrx_sre.events.channel import NO_LOSS, Channel, create_pair, pack_step
from nvrx_sre.events.schema import Event, Phase, PhaseEntered, Record, SaveVerified, StepKind, StepsCommitted
from nvrx_sre.telemetry import context
from nvrx_sre.telemetry.hub import Telemetry, TelemetryConfig

BENCH = "telemetry"
CONTESTANT = "nvrx-sre"
NUM_STEPS = 20_000
NUM_PACED_STEPS = 1_000
PACE_S = 0.002
"""Pause between paced steps: about that of the fastest models a person would train."""
NUM_RECORDS = 20_000
NUM_BATCHES = 20
NUM_SCRAPES = 50
_NS_PER_US = 1_000


def measure() -> list[Row]:
    """All cases; takes about ten seconds. The machine's row is the last."""
    return [
        _rank_row("step event, back to back", NUM_STEPS, 0.0),
        _rank_row("step event, paced", NUM_PACED_STEPS, PACE_S),
        *_launcher_rows(),
        machine_row(),
    ]


def run_bench(json_path: Path | None = None) -> list[Row]:
    """`measure`, and the rows as JSON where `json_path` says."""
    rows = measure()
    if json_path is not None:
        write_json(json_path, rows)
    return rows


def _rank_row(case: str, num_steps: int, pace_s: float) -> Row:
    ours, theirs = create_pair()
    command = [sys.executable, "-m", "nvrx_sre.bench.telemetry", "--drain", str(ours.fileno())]
    with subprocess.Popen(command, pass_fds=[ours.fileno()], stdout=subprocess.PIPE) as drain:
        ours.close()
        assert drain.stdout is not None
        drain.stdout.readline()  # it is up
        samples_us = _send_steps(theirs, num_steps, pace_s)
        theirs.close()
    note = f"build, encode, send; {theirs.num_dropped} of {num_steps} dropped"
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
    channel.send_packet_nowait(packet)


def _launcher_rows() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="nvrx-sre-bench-") as directory:
        clock = SystemClock()
        telemetry = Telemetry(TelemetryConfig(run="bench", run_dir=Path(directory), epoch=1), clock)
        try:
            telemetry.replay(())
            rates = _fold_rates(telemetry, clock)
            scrapes_ms = [_timed(clock, lambda: _scrape(telemetry.metrics_url)) * 1000 for _ in range(NUM_SCRAPES)]
        finally:
            telemetry.close()
    note = f"batches of {NUM_RECORDS // NUM_BATCHES}: redact, journal, every fold, log queue"
    return [
        summarize(rates, bench=BENCH, contestant=CONTESTANT, case="launcher records", ranks=0, unit="1/s", note=note),
        summarize(
            scrapes_ms,
            bench=BENCH,
            contestant=CONTESTANT,
            case="scrape",
            ranks=0,
            unit="ms",
            note="HTTP over loopback, journal synced before each",
        ),
    ]


def _fold_rates(telemetry: Telemetry, clock: SystemClock) -> list[float]:
    """Records a second of each batch."""
    size = NUM_RECORDS // NUM_BATCHES
    rates = []
    for batch in range(NUM_BATCHES):
        records = [_record(batch * size + number + 1, clock.wall_ns()) for number in range(size)]
        rates.append(size / _timed(clock, functools.partial(_record_all, telemetry, records)))
        telemetry.sync(5.0)
    return rates


def _record_all(telemetry: Telemetry, records: list[Record]) -> None:
    for record in records:
        telemetry.record(record)


def _record(number: int, now_ns: int) -> Record:
    """A mix of what a quiet run records: mostly steps, now and then a phase or a save."""
    event: Event
    if number % 10 == 1:
        event = PhaseEntered(phase=Phase.EVALUATE, entered_ns=now_ns)
    elif number % 10 == 2:
        event = SaveVerified(step=number, directory="step", seconds=0.1, captured_ns=now_ns)
    else:
        event = StepsCommitted(
            kind=StepKind.NEW,
            first_step=number,
            last_step=number,
            started_ns=now_ns - NS_PER_S,
            committed_ns=now_ns,
            step_s=0.9,
            data_s=0.1,
            checkpoint_block_s=0.0,
            evaluate_s=0.0,
            tokens=1024,
            loss=1.0,
            hot_sealed_step=number,
            hot_captured=1,
            hot_skipped=0,
        )
    return Record(run="bench", epoch=1, generation=1, rank=0, seq=number, time_ns=now_ns, event=event)


def _scrape(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=10.0) as response:
        content: bytes = response.read()
    return content


def _timed(clock: SystemClock, function: Callable[[], object]) -> float:
    """Seconds that `function` took."""
    started_ns = clock.monotonic_ns()
    function()
    return seconds(clock.monotonic_ns() - started_ns)


def _drain(descriptor: int) -> None:
    """The other process: receive and decode until the sender is gone."""
    import socket

    channel = Channel(socket.socket(fileno=descriptor))
    sys.stdout.write("up\n")
    sys.stdout.flush()
    while channel.receive() is not None:
        pass
    channel.close()


if __name__ == "__main__":
    _drain(int(sys.argv[2]))
