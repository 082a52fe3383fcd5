"""Runs whose events are written by hand: real folds behind a real endpoint, and what no run on this machine exports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from nvrx_sre.core.clock import NS_PER_S, SystemClock
from nvrx_sre.events.schema import (
    CheckpointDeleted,
    FaultClass,
    RestoredFrom,
    SaveFailed,
    SaveFailure,
    SaveSkipped,
    SaveStarted,
    SaveUnverified,
    SkipReason,
    Tier,
    Unverified,
)
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.catalog import RankMetrics
from nvrx_sre.telemetry.endpoint import MetricsServer
from nvrx_sre.telemetry.metrics import MetricsFold, MetricSources
from nvrx_sre.telemetry.node_board import HostReading, NodeBoard, RankReading
from nvrx_sre.telemetry.values import Values as SeriesValues
from tests import stories

CLOCK = SystemClock()
UUID = "GPU-6a1f"
DCGM = "\n".join(
    f'# TYPE {name} gauge\n{name}{{gpu="0",UUID="{UUID}"}} {value}'
    for name, value in (
        ("DCGM_FI_DEV_GPU_UTIL", 97),
        ("DCGM_FI_DEV_FB_USED", 60_000),
        ("DCGM_FI_DEV_GPU_TEMP", 61),
        ("DCGM_FI_DEV_XID_ERRORS", 0),
    )
)
"""What dcgm-exporter serves for one GPU, its other labels left out."""
GIB = 1 << 30
RANKS = (0, 1)


def node_board(mode: RankMetrics) -> NodeBoard:
    """What was read of a node with two ranks."""
    found = NodeBoard(mode)
    heard_ns = CLOCK.wall_ns()
    found.set_ranks(
        {
            rank: RankReading(pid=rank, heard_ns=heard_ns, step=rank, lateness_s=0.1 * rank, gpu_s=0.1 + 0.1 * rank)
            for rank in RANKS
        }
    )
    reading = HostReading(
        memory_limit_bytes=8 * GIB, memory_used_bytes=2 * GIB, hot_slots_bytes=GIB, storage=(9 * GIB, GIB),
        shm=(GIB, GIB), clock_skew_s=0.0,
    )  # fmt: skip
    found.set_host(reading, dict.fromkeys(RANKS, GIB))
    return found


def fill(board: NodeBoard, values: SeriesValues) -> None:
    """The node's series; rank 0 holds the GPU that DCGM tells of."""
    board.fill(values)
    values.numbers[catalog.RANK_INFO.name] = {
        (str(rank), "n1", UUID if rank == 0 else "none", "p0"): 1.0 for rank in RANKS
    }


def troubled_story(num_incidents: int) -> stories.Story:
    """So many recovered incidents, saves and deletions, then a save that failed, one that was not read back, one
    that was skipped, and a checkpoint that was rejected."""
    story, at_s = stories.begin()
    for step in range(1, num_incidents + 1):
        story.steps(at_s, at_s + 0.2, step, step)
        story.fault(at_s + 0.3, at_s + 0.4, FaultClass.EXCEPTION, 1)
        story.torn_down(at_s + 0.5)
        at_s = story.form(at_s + 0.5, step, RestoredFrom.HOT)
    story.steps(at_s, at_s + 0.2, num_incidents + 1, num_incidents + 1)
    for number in range(num_incidents):
        story.save(at_s + 0.5 + number / 10, num_incidents + 1)
        story.add(at_s + 0.6 + number / 10, CheckpointDeleted(step=number, directory="d", seconds=0.1))
    story.add(at_s + 4, SaveFailed(step=9, tier=Tier.DURABLE, reason=SaveFailure.STORAGE, message="disk full"))
    story.add(at_s + 4, SaveUnverified(step=9, reason=Unverified.WRITER_DIED, message=""))
    story.add(at_s + 4, SaveSkipped(step=10, tier=Tier.DURABLE, reason=SkipReason.WRITER_BUSY))
    story.reject(at_s + 4, 9)
    return story


def open_story() -> stories.Story:
    """An incident that is still open after two attempts, while a save is in flight."""
    story, begin_s = stories.begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.add(12.5, SaveStarted(step=10, tier=Tier.DURABLE, captured_ns=stories.ns(12.4)))
    story.fault(12.6, 12.7, FaultClass.EXCEPTION, 1)
    story.torn_down(12.8)
    story.fault(story.form(12.8, 10, RestoredFrom.HOT) + 0.2, 14.0, FaultClass.EXCEPTION, 1)
    return story


@contextmanager
def told(run: str, story: stories.Story, mode: RankMetrics) -> Iterator[MetricsServer]:
    """An endpoint that serves what the folds make of `story`: half of it at first, the rest after two scrapes."""
    ledger, tracker, board = Ledger(), IncidentTracker(run), node_board(mode)
    sources = MetricSources(fill=partial(fill, board), exports=board.exports)
    fold = MetricsFold(run, ledger, tracker, CLOCK, sources=sources)
    server = MetricsServer(fold.registry, "127.0.0.1", None, lambda: True, lambda: True)
    records = iter(story.records)

    def tell(count: int) -> None:
        for _, record in zip(range(count), records, strict=False):
            ledger.apply(record)
            tracker.apply(record)
            fold.apply(record)
        fold.loop_turned(CLOCK.wall_ns())

    def tell_the_rest() -> None:
        server.wait_for_scrapes(2, 120.0)
        tell(len(story.records))

    tell(5)
    server.start()
    rest = threading.Thread(target=tell_the_rest)
    rest.start()
    try:
        yield server
    finally:
        rest.join()
        server.close()


@contextmanager
def dcgm_exporter() -> Iterator[str]:
    """Address of an endpoint that serves `DCGM`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (DCGM + "\n").encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def start_s(ago_s: float) -> float:
    """Begin of a story that began `ago_s` seconds ago (seconds since the Unix epoch)."""
    return CLOCK.wall_ns() / NS_PER_S - ago_s
