"""The launcher's side of `bench telemetry`: events of ranks, records in every view, a scrape, the exit.

`events` runs a real launcher in this process, with real ranks that only report steps (`bench.reporting_rank`), at
the target rate; what counts is how many events it takes in for each second of processor time of all its threads, so
that other load on the machine does not decide, and that no rank found its ring full. `scrape` asks a run of 64 ranks
with 500 faults behind it. `exit` ends processes whose collector is silent or gone, and ones that have none.

Must not: run beside a training; run outside the main thread.
"""

from __future__ import annotations

import functools
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from nvrx_sre.bench.fault_records import fault_records, quiet_record
from nvrx_sre.bench.rows import Row, empty, percentile, summarize, target
from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.events.schema import Record, StepsCommitted
from nvrx_sre.launcher import main as launcher
from nvrx_sre.launcher.config import RunConfig
from nvrx_sre.telemetry.hub import Telemetry, TelemetryConfig
from nvrx_sre.telemetry.node_board import RankReading

BENCH = "telemetry"
CONTESTANT = "nvrx-sre"
EVENTS_PER_S_MIN = 50_000
SCRAPE_MAX_MS = 10.0
EXIT_MAX_S = 2.0
EXIT_TIMEOUT_S = 120.0
"""Longest life of a process whose exit is measured (seconds)."""
NUM_SCRAPED_RANKS = 64
FEW_FAULTS, MANY_FAULTS = 5, 500
NUM_WARM_UP_SAMPLES = 2
SLICE_MIN_S = 0.001
"""Processor time (seconds) below which two readings were taken in one turn: the first stands for no work of its own."""
SCRAPE_PAUSE_S = 0.3
"""Longer than the endpoint rests after a rendering."""
_BATCH = 1_000


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """How much is measured."""

    ranks: int = 8
    events_per_s: int = EVENTS_PER_S_MIN
    """Offered by all ranks together."""
    duration_s: float = 15.0
    num_records: int = 20_000
    num_scrapes: int = 50
    num_exits: int = 5


def measure(config: LauncherConfig) -> list[Row]:
    """All cases of the launcher."""
    with tempfile.TemporaryDirectory(prefix="nvrx-sre-bench-") as name:
        folder = Path(name)
        return [
            _events_row(folder / "events", config),
            _records_row(folder / "records", config),
            _scrape_row(folder / "scrape", config),
            *(_exit_row(folder / kind, kind, config) for kind in ("silent", "gone")),
        ]


# --- events ---------------------------------------------------------------------------------------------------


Reading = tuple[int, float]
"""(events taken in, processor seconds of this process) so far."""


class _Meter:
    """Sink of the launcher: a reading at each aggregate of steps."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._readings: list[Reading] = []

    def __call__(self, record: Record) -> None:
        if isinstance(record.event, StepsCommitted):
            used = resource.getrusage(resource.RUSAGE_SELF)
            self._readings.append((record.event.last_step * self._ranks, used.ru_utime + used.ru_stime))

    def rates(self) -> list[float]:
        """Events for each second of processor time, without the warm-up."""
        return rates_between(self._readings[NUM_WARM_UP_SAMPLES:])


def rates_between(readings: Sequence[Reading]) -> list[float]:
    """Events for each second of processor time in the slices between readings.

    Of aggregates that were recorded in one turn only the last ends a slice: the events of all of them were taken in
    before the first, so that between them there are events and hardly any time.
    """
    ends: list[Reading] = []
    for reading in readings:
        if ends and reading[1] - ends[-1][1] < SLICE_MIN_S:
            ends.pop()
        ends.append(reading)
    return [(num_events - before) / (used_s - before_s) for (before, before_s), (num_events, used_s) in pairwise(ends)]


def _events_row(folder: Path, config: LauncherConfig) -> Row:
    counts = folder / "dropped"
    counts.mkdir(parents=True)
    steps_per_s = config.events_per_s / config.ranks
    num_steps = int(steps_per_s * config.duration_s)
    arguments = ("-m", "nvrx_sre.bench.reporting_rank", str(num_steps), str(steps_per_s), str(counts))
    meter = _Meter(config.ranks)
    launcher.run(
        RunConfig(
            run="bench",
            run_dir=folder / "run",
            command=arguments,
            nproc=config.ranks,
            min_world_size=config.ranks,
            num_standbys=0,
            hot_every=0,
        ),
        [meter],
    )
    num_dropped = sum(int((counts / str(rank)).read_text()) for rank in range(config.ranks))
    rates = meter.rates()
    if not rates:
        reason = f"the launcher recorded too seldom within {config.duration_s:g} s: other load, or too short a run"
        return empty(reason, bench=BENCH, contestant=CONTESTANT, case="launcher events", ranks=config.ranks)
    is_met = percentile(rates, 0.5) >= EVENTS_PER_S_MIN and num_dropped == 0
    wanted = f"at least {EVENTS_PER_S_MIN} for a second of one core, none of {num_steps * config.ranks} dropped"
    note = f"{target(wanted, is_met)}; {num_dropped} dropped at {config.events_per_s}/s over all ranks"
    return _row(rates, case="launcher events", ranks=config.ranks, unit="1/cpu s", note=note)


# --- records and scrapes --------------------------------------------------------------------------------------


def _records_row(run_dir: Path, config: LauncherConfig) -> Row:
    clock = SystemClock()
    telemetry = _started(run_dir)
    rates = []
    try:
        for begin in range(0, config.num_records, _BATCH):
            records = [quiet_record(begin + number + 1, clock.wall_ns()) for number in range(_BATCH)]
            rates.append(_BATCH / timed(clock, functools.partial(_record_all, telemetry, records)))
            telemetry.sync(5.0)
    finally:
        telemetry.close()
    note = f"batches of {_BATCH}: redact, journal, every fold, log queue; a run records one or two a second"
    return _row(rates, case="launcher records", ranks=0, unit="1/s", note=note)


def _scrape_row(run_dir: Path, config: LauncherConfig) -> Row:
    clock, pause = SystemClock(), threading.Event()
    telemetry = _started(run_dir)
    num_series = []
    try:
        telemetry.board.set_ranks(
            {
                rank: RankReading(pid=rank + 1, heard_ns=clock.wall_ns(), step=7, lateness_s=0.01)
                for rank in range(NUM_SCRAPED_RANKS)
            }
        )
        for records in _few_then_many(clock.wall_ns()):
            _record_all(telemetry, records)
            num_series.append(sum(not line.startswith(b"#") for line in _scrape(telemetry.metrics_url).splitlines()))
        samples_ms = []
        for _ in range(config.num_scrapes):
            pause.wait(SCRAPE_PAUSE_S)
            samples_ms.append(1000 * timed(clock, functools.partial(_scrape, telemetry.metrics_url)))
    finally:
        telemetry.close()
    is_met = percentile(samples_ms, 0.5) <= SCRAPE_MAX_MS and num_series[0] == num_series[1]
    wanted = f"median at most {SCRAPE_MAX_MS:.0f} ms, as many series after {MANY_FAULTS} faults as after {FEW_FAULTS}"
    note = f"{target(wanted, is_met)}; {num_series[0]} and {num_series[1]} series, HTTP over loopback"
    return _row(samples_ms, case="scrape", ranks=NUM_SCRAPED_RANKS, unit="ms", note=note)


def _few_then_many(now_ns: int) -> Iterator[list[Record]]:
    every = fault_records(MANY_FAULTS, NUM_SCRAPED_RANKS, now_ns)
    per_fault = len(every) // MANY_FAULTS
    yield every[: FEW_FAULTS * per_fault]
    yield every[FEW_FAULTS * per_fault :]


# --- the exit -------------------------------------------------------------------------------------------------


def _exit_row(run_dir: Path, kind: str, config: LauncherConfig) -> Row:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}/v1/traces"
        if kind == "gone":
            collector.close()
        delays_s = []
        for number in range(config.num_exits):
            without_s = _exit_s(run_dir / f"{number}-without")
            delays_s.append(_exit_s(run_dir / f"{number}-with", endpoint) - without_s)
    wanted = f"at most {EXIT_MAX_S:.0f} s"
    note = f"{target(wanted, max(delays_s) <= EXIT_MAX_S)}; end of recording to end of process, against no collector"
    return _row(delays_s, case=f"exit, collector {kind}", ranks=0, unit="s", note=note)


def _exit_s(run_dir: Path, endpoint: str = "") -> float:
    """Seconds from the end of recording until the process has ended."""
    run_dir.mkdir(parents=True)
    command = [sys.executable, "-m", "nvrx_sre.bench.telemetry_launcher", str(run_dir), endpoint]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=EXIT_TIMEOUT_S)
    return seconds(SystemClock().monotonic_ns() - int(ended.stdout))


def _record_and_exit(run_dir: Path, endpoint: str) -> None:
    """The other process: it has spans to send, and ends as a launcher does."""
    telemetry = _started(run_dir, endpoint or None)
    _record_all(telemetry, fault_records(FEW_FAULTS, 1, telemetry.clock.wall_ns()))
    telemetry.sync(10.0)
    sys.stdout.write(f"{telemetry.clock.monotonic_ns()}\n")
    telemetry.close()


# --- common ---------------------------------------------------------------------------------------------------


def _started(run_dir: Path, endpoint: str | None = None) -> Telemetry:
    telemetry = Telemetry(TelemetryConfig(run="bench", run_dir=run_dir, epoch=1, otlp_endpoint=endpoint))
    telemetry.replay(())
    return telemetry


def _record_all(telemetry: Telemetry, records: list[Record]) -> None:
    for record in records:
        telemetry.record(record)


def _row(samples: list[float], *, case: str, ranks: int, unit: str, note: str) -> Row:
    return summarize(samples, bench=BENCH, contestant=CONTESTANT, case=case, ranks=ranks, unit=unit, note=note)


def _scrape(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=10.0) as response:
        content: bytes = response.read()
    return content


def timed(clock: SystemClock, function: Callable[[], object]) -> float:
    """Seconds that `function` took."""
    started_ns = clock.monotonic_ns()
    function()
    return seconds(clock.monotonic_ns() - started_ns)


if __name__ == "__main__":
    _record_and_exit(Path(sys.argv[1]), sys.argv[2])
