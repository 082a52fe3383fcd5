"""Nodes and ranks as metrics: what is sampled, how ranks are exported, and that nothing of a dead process stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_sre.checkpoint.memory import memory_in_force
from nvrx_sre.events.schema import GenerationFormed, LauncherStarted
from nvrx_sre.launcher.gpu_times import FORGOTTEN_AFTER_STEPS, GpuTimes
from nvrx_sre.launcher.host import pod_name, resident_bytes, space_of
from nvrx_sre.launcher.lateness import MAX_STEPS, Lateness
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.labels import RankMetrics
from nvrx_sre.telemetry.metric import Scope
from nvrx_sre.telemetry.node_board import DeviceTotals, HostReading, NodeBoard, RankReading, rank_metrics_in_force
from nvrx_sre.telemetry.values import Values

GIB = 1 << 30


def reading(pid: int, step: int, heard_s: float = 1.0, lateness_s: float = 0.0) -> RankReading:
    """What was heard of one rank."""
    return RankReading(pid=pid, heard_ns=round(heard_s * 1e9), step=step, lateness_s=lateness_s)


def filled(board: NodeBoard) -> Values:
    """The node's series of a scrape."""
    values = Values()
    board.fill(values)
    return values


def num_series(board: NodeBoard, *, leader: bool) -> int:
    """Series that a launcher with this board exports."""
    values = filled(board)
    exported = [
        metric
        for metric in catalog.CATALOG.values()
        if board.exports(metric) and (leader or metric.scope is Scope.NODE)
    ]
    dynamic = sum(len(values.numbers[metric.name]) for metric in exported if metric.name in values.numbers)
    others = sum(metric.num_series for metric in exported if metric.name not in values.numbers)
    return dynamic + others


def board_of(num_ranks: int, mode: RankMetrics | None = None) -> NodeBoard:
    """A node with `num_ranks` live ranks whose place is known."""
    board = NodeBoard(rank_metrics_in_force(mode, num_ranks))
    board.apply(LauncherStarted(node="n1", pid=1, start_ticks=1, metrics_port=1, pod="trainer-0"))
    devices = [f"n1/{rank}" for rank in range(num_ranks)]
    board.apply(GenerationFormed(world_size=num_ranks, go_ns=0, pids=[], devices=devices))
    board.set_ranks({rank: reading(100 + rank, rank) for rank in range(num_ranks)})
    memory = {100 + rank: 1000 + rank for rank in range(num_ranks)}
    host = HostReading(
        memory_limit_bytes=8 * GIB,
        memory_used_bytes=GIB,
        hot_slots_bytes=7,
        storage=(100, 40),
        shm=None,
        clock_skew_s=-2.5,
    )
    board.set_host(host, memory)
    return board


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64, 512])
def test_the_number_of_series_has_a_budget(num_ranks: int) -> None:
    """A leader has at most 1,500 (and its ranks), another launcher 40 and 6 a rank, in every mode."""
    for mode in (None, *RankMetrics):
        board = board_of(num_ranks, mode)
        assert num_series(board, leader=False) <= 40 + 6 * num_ranks, mode
        assert num_series(board, leader=True) <= 1500 + (6 * num_ranks if mode is RankMetrics.ALL else 0), mode
    assert num_series(board_of(2, RankMetrics.SUMMARY), leader=True) == num_series(board_of(512), leader=True)


def test_ranks_are_exported_one_by_one_as_extremes_or_not_at_all() -> None:
    """`all` up to 64 ranks, `summary` above; whatever was asked for explicitly."""
    assert rank_metrics_in_force(None, 64) is RankMetrics.ALL
    assert rank_metrics_in_force(None, 65) is RankMetrics.SUMMARY
    assert rank_metrics_in_force(RankMetrics.OFF, 2) is RankMetrics.OFF
    assert rank_metrics_in_force(RankMetrics.SUMMARY, 2) is RankMetrics.SUMMARY
    assert rank_metrics_in_force(RankMetrics.SUMMARY, 1) is RankMetrics.ALL, "a summary of one rank is that rank"
    values = filled(board_of(3))
    assert values.numbers[catalog.RANK_STEP.name] == {("0",): 0.0, ("1",): 1.0, ("2",): 2.0}
    assert values.numbers[catalog.RANK_MEMORY.name][("2",)] == 1002.0
    least, most, least_rank, most_rank = catalog.RANK_SUMMARIES[catalog.RANK_STEP.name]
    assert [values.get(item) for item in (least, most, least_rank, most_rank)] == [0.0, 2.0, 0.0, 2.0]
    exported = {mode: board_of(3, mode).exports for mode in RankMetrics}
    assert [exported[mode](catalog.RANK_STEP) for mode in RankMetrics] == [True, False, False]
    assert [exported[mode](most) for mode in RankMetrics] == [False, True, False]
    assert all(exported[mode](catalog.STORAGE) for mode in RankMetrics)


def test_gpu_time_is_exported_where_it_is_measured() -> None:
    """A rank that has none has no series, and a node without any no summary either; with it the budget holds."""
    least, most, least_rank, most_rank = catalog.RANK_SUMMARIES[catalog.RANK_GPU_SECONDS.name]
    for mode, families in ((RankMetrics.ALL, [catalog.RANK_GPU_SECONDS]), (RankMetrics.SUMMARY, [most, most_rank])):
        board = board_of(4, mode)
        assert not any(map(board.exports, (catalog.RANK_GPU_SECONDS, least, most, least_rank, most_rank)))
        gpu_s = {1: 0.2, 2: 0.3}
        board.set_ranks({rank: RankReading(pid=rank, heard_ns=1, step=1, gpu_s=gpu_s.get(rank)) for rank in range(4)})
        assert all(map(board.exports, families)) and num_series(board, leader=False) <= 40 + 6 * 4
    values = filled(board)
    assert values.numbers[catalog.RANK_GPU_SECONDS.name] == {("1",): 0.2, ("2",): 0.3}
    assert [values.get(item) for item in (least, most, least_rank, most_rank)] == [0.2, 0.3, 1.0, 2.0]


def test_gpu_time_is_smoothed_per_generation() -> None:
    """One slow stretch is a tenth of itself; reports without a stretch change nothing; a generation begins anew."""
    times = GpuTimes()
    times.report(1, 0, 0)
    assert times.of(0) is None
    for gpu_ns in (20_000_000, 0, 120_000_000):
        times.report(1, 0, gpu_ns)
    assert times.of(0) == pytest.approx(0.03) and times.of(1) is None
    times.report(2, 1, 5_000_000)
    times.report(1, 0, 20_000_000)
    assert times.of(0) is None and times.of(1) == pytest.approx(0.005), "what comes late of the one before is nothing"


def test_gpu_time_is_forgotten_when_nothing_is_measured_any_more() -> None:
    """A rank whose host has stopped leading must not look as it did; one measurement in many steps is enough."""
    times = GpuTimes()
    for _ in range(3):
        times.report(1, 0, 20_000_000)
        for _ in range(FORGOTTEN_AFTER_STEPS - 1):
            times.report(1, 0, 0)
        assert times.of(0) == pytest.approx(0.02)
    times.report(1, 0, 0)
    assert times.of(0) is None


def test_c53_what_a_dead_process_reported_goes_with_it() -> None:
    """A rank without a process has no series; its successor begins with its own values."""
    board = board_of(2)
    board.set_ranks({0: reading(100, 5)})
    assert filled(board).numbers[catalog.RANK_STEP.name] == {("0",): 5.0}
    board.set_ranks({0: reading(100, 5), 1: reading(777, 4)})
    values = filled(board)
    assert values.numbers[catalog.RANK_STEP.name] == {("0",): 5.0, ("1",): 4.0}
    assert values.numbers[catalog.RANK_MEMORY.name] == {("0",): 1000.0}, "the memory of the dead process"
    board.set_ranks({})
    assert filled(board).numbers[catalog.RANK_HEARTBEAT.name] == {}


def test_a_rank_is_placed_by_node_gpu_and_pod() -> None:
    """Joins DCGM by UUID; ranks of other nodes are theirs to export."""
    board = NodeBoard()
    board.apply(LauncherStarted(node="n1", pid=1, start_ticks=1, metrics_port=1, pod="trainer-0"))
    board.apply(GenerationFormed(world_size=3, go_ns=0, pids=[], devices=["n1/GPU-ab", "n1/1", "n2/GPU-cd"]))
    assert set(filled(board).numbers[catalog.RANK_INFO.name]) == {
        ("0", "n1", "GPU-ab", "trainer-0"),
        ("1", "n1", "none", "trainer-0"),
    }
    assert pod_name({"POD_NAME": "a", "HOSTNAME": "b"}) == "a"
    assert pod_name({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "b"}) == "b"
    assert pod_name({"HOSTNAME": "workstation"}) == ""


def test_c51_a_skewed_clock_is_a_gauge_and_memory_and_disks_are() -> None:
    """Skew judges nobody: it is shown. What cannot be read is NaN, never 0."""
    values = filled(board_of(1))
    assert values.get(catalog.CLOCK_SKEW) == -2.5
    assert values.get(catalog.HOST_MEMORY, "limit") == 8 * GIB
    assert values.get(catalog.HOST_MEMORY, "hot_slots") == 7
    assert (values.get(catalog.STORAGE, "size"), values.get(catalog.STORAGE, "free")) == (100.0, 40.0)
    assert values.get(catalog.SHM, "free") != values.get(catalog.SHM, "free")


def test_devices_are_counted_and_their_errors_shown_where_there_are_any() -> None:
    """A node without NVML has zeros and no series of errors; one with it stays within a node's budget."""
    board = board_of(8)
    assert not board.exports(catalog.DEVICE_ERRORS)
    assert filled(board).get(catalog.DEVICES, "seen") == 0.0
    board.set_devices(DeviceTotals(num_seen=8, num_unfit=1, num_throttled=2, errors={"xid": 3}))
    values = filled(board)
    assert [values.get(catalog.DEVICES, state) for state in ("seen", "unfit", "throttled")] == [8.0, 1.0, 2.0]
    assert (values.get(catalog.DEVICE_ERRORS, "xid"), values.get(catalog.DEVICE_ERRORS, "nvlink")) == (3.0, 0.0)
    assert board.exports(catalog.DEVICE_ERRORS)
    assert num_series(board, leader=False) <= 40 + 6 * 8


def test_memory_is_that_of_the_tightest_cgroup_else_of_the_host(tmp_path: Path) -> None:
    """v2 with two levels, v1, and no limit at all."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n")
    inner = cgroups / "outer" / "inner"
    inner.mkdir(parents=True)
    for directory, limit, used in ((inner, "max", 5), (inner.parent, "900", 700)):
        (directory / "memory.max").write_text(limit)
        (directory / "memory.current").write_text(str(used))
    (inner.parent / "memory.stat").write_text("inactive_file 100\n")
    assert memory_in_force(proc=proc, cgroups=cgroups) == (900, 600)
    (inner.parent / "memory.max").write_text("max")
    assert memory_in_force(proc=proc, cgroups=cgroups) == (1000 * 1024, 600 * 1024)
    assert memory_in_force(proc=tmp_path, cgroups=cgroups) == (None, None)


def test_a_process_has_memory_while_it_lives(tmp_path: Path) -> None:
    """Ours is more than a mebibyte; one that has ended has none. A file system has a size, a missing one none."""
    own = resident_bytes(os.getpid())
    assert own is not None
    assert own > 1 << 20
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert resident_bytes(child.pid) is None
    size, free = space_of(tmp_path) or (0, 0)
    assert size >= free > 0
    assert space_of(tmp_path / "missing") is None


def test_the_late_rank_is_told_apart_from_those_that_wait_for_it() -> None:
    """Rank 1 comes 30 ms after rank 0 at every step: its lateness is 30 ms, that of rank 0 is 0."""
    lateness = Lateness()
    for step in range(1, 30):
        lateness.report(1, 2, 0, step, step * 10**9)
        lateness.report(1, 2, 1, step, step * 10**9 + 30_000_000)
    assert (lateness.of(0), lateness.of(1)) == pytest.approx((0.0, 0.03))
    lateness.report(1, 2, 0, 30, 30 * 10**9)
    lateness.report(1, 2, 1, 30, 31 * 10**9)
    assert lateness.of(1) == pytest.approx(0.03 + 0.1 * 0.97), "one slow step is smoothed"
    lateness.report(2, 2, 0, 1, 10**9)
    lateness.report(2, 2, 1, 1, 10**9 + 20_000_000)
    lateness.report(1, 2, 1, 30, 32 * 10**9)
    assert lateness.of(1) == pytest.approx(0.02), "begun anew; a late report of the old one is nothing"


def test_lateness_needs_marks_and_forgets_steps_that_nobody_finishes() -> None:
    """Without marks it is 0; a rank that lost its reports costs bounded memory."""
    lateness = Lateness()
    lateness.report(1, 2, 0, 1, 0)
    lateness.report(1, 2, 1, 1, 0)
    assert lateness.of(0) == lateness.of(1) == 0.0
    for step in range(1, 100):
        lateness.report(1, 2, 0, step, step)
    assert len(lateness._arrivals) <= MAX_STEPS
