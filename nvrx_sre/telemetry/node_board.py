"""What a launcher knows of its node and its ranks right now: live readings that no journal holds.

    loop: ranks' messages ─┐
    sampler: memory, disks ─┴> NodeBoard -> values of the scope `node` at scrape

Under `--rank-metrics all` each rank has its series; under `summary` the least and the greatest value and the ranks
that have them (the default above `SUMMARY_ABOVE_RANKS` ranks); under `off` none. The series of a rank are those of
its present process: what a dead process reported last is dropped with it (failure case C53).

Thread safety: all methods from any thread. Must not: block, read a clock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from nvrx_sre.core.clock import seconds
from nvrx_sre.core.ids import node_of
from nvrx_sre.events.schema import Event, GenerationFormed, LauncherStarted
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.labels import DeviceCount, DeviceErrorKind, MemoryKind, RankMetrics, SpaceKind
from nvrx_sre.telemetry.metric import Bound, Metric
from nvrx_sre.telemetry.series_recovery import gpu_of
from nvrx_sre.telemetry.values import Values

SUMMARY_ABOVE_RANKS = 64
"""Ranks beyond which each one's series cost more than they tell."""
UNKNOWN = "none"


@dataclass(frozen=True, kw_only=True)
class HostReading:
    """One sample of the node. Bytes; None where it could not be read."""

    memory_limit_bytes: int | None
    memory_used_bytes: int | None
    hot_slots_bytes: int
    storage: tuple[int, int] | None
    """(size, free) of the run directory's file system."""
    shm: tuple[int, int] | None
    """(size, free) of /dev/shm."""
    clock_skew_s: float


@dataclass(frozen=True, kw_only=True)
class DeviceTotals:
    """NVIDIA devices that the node's ranks may have."""

    num_seen: int = 0
    num_unfit: int = 0
    num_throttled: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    """Of all of them since the launcher's start, by `DeviceErrorKind`."""


@dataclass(frozen=True, kw_only=True)
class RankReading:
    """What was last heard of a rank's process. `heard_ns` is wall time."""

    pid: int
    heard_ns: int
    step: int
    lateness_s: float = 0.0
    gpu_s: float | None = None
    """None where it is not known."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank runs; `UNKNOWN` where that is not known."""

    node: str
    gpu_uuid: str = UNKNOWN
    pod: str = UNKNOWN


def rank_metrics_in_force(wanted: RankMetrics | None, world_size: int) -> RankMetrics:
    """The mode for a run of `world_size` ranks; None leaves it to their number.

    One rank has no extremes: it is exported as it is, in fewer series than its summary.
    """
    if wanted is RankMetrics.SUMMARY and world_size == 1:
        return RankMetrics.ALL
    if wanted is not None:
        return wanted
    return RankMetrics.SUMMARY if world_size > SUMMARY_ABOVE_RANKS else RankMetrics.ALL


class NodeBoard:
    """Newest readings of one node. `mode` decides how ranks are exported."""

    def __init__(self, mode: RankMetrics = RankMetrics.ALL) -> None:
        self.mode = mode
        self._lock = threading.Lock()
        self._host: HostReading | None = None
        self._ranks: Mapping[int, RankReading] = {}
        self._memory: Mapping[int, int] = {}
        self._devices = DeviceTotals()
        self._places: dict[int, RankPlace] = {}
        self._num_leftovers = 0
        self._node = ""
        self._pod = UNKNOWN

    def set_host(self, reading: HostReading, memory_bytes: Mapping[int, int]) -> None:
        """A new sample of the node; `memory_bytes` by pid."""
        with self._lock:
            self._host = reading
            self._memory = dict(memory_bytes)

    def set_devices(self, totals: DeviceTotals) -> None:
        """What is known of the node's devices now."""
        with self._lock:
            self._devices = totals

    def set_ranks(self, readings: Mapping[int, RankReading]) -> None:
        """What is known of all live ranks of this node now; a rank that is missing has no process."""
        with self._lock:
            self._ranks = dict(readings)

    def apply(self, event: Event) -> None:
        """A live event: who this node is, and where the ranks of the newest generation run."""
        if isinstance(event, LauncherStarted):
            self._node, self._pod = event.node, event.pod or UNKNOWN
        elif isinstance(event, GenerationFormed):
            places = {
                rank: RankPlace(node=node_of(device), gpu_uuid=gpu_of(device) or UNKNOWN, pod=self._pod)
                for rank, device in enumerate(event.devices)
                if node_of(device) == self._node
            }
            with self._lock:
                self._places = places

    def set_places(self, node: str, devices: Mapping[int, str], pod: str) -> None:
        """Where this node's ranks run, told by a launcher that sees no event: device's identity by rank."""
        with self._lock:
            self._places = {
                rank: RankPlace(node=node, gpu_uuid=gpu_of(device) or UNKNOWN, pod=pod or UNKNOWN)
                for rank, device in devices.items()
            }

    def set_leftovers(self, count: int) -> None:
        """Processes of a killed predecessor that were ended at the start."""
        with self._lock:
            self._num_leftovers = count

    def pids(self) -> tuple[int, ...]:
        """Processes whose memory is wanted."""
        with self._lock:
            return tuple(reading.pid for reading in self._ranks.values())

    def exports(self, metric: Metric) -> bool:
        """False for the families of ranks that the mode leaves out, and for what is of devices where there is none."""
        if metric is catalog.DEVICE_ERRORS:
            return self._devices.num_seen > 0
        if metric in _GPU_FAMILIES and all(reading.gpu_s is None for reading in self._ranks.values()):
            return False
        if metric.bound is Bound.RANKS:
            return self.mode is RankMetrics.ALL
        return self.mode is RankMetrics.SUMMARY or metric.name not in _SUMMARY_NAMES

    def fill(self, values: Values) -> None:
        """Write the node's series into `values`."""
        with self._lock:
            host, ranks, memory, places = self._host, self._ranks, self._memory, self._places
            devices = self._devices
            values.set(catalog.LEFTOVER_PROCESSES, self._num_leftovers)
        if host is not None:
            _fill_host(values, host)
        _fill_devices(values, devices)
        columns = _columns(ranks, memory)
        for metric in catalog.RANK_FAMILIES:
            series = columns[metric.name]
            values.numbers[metric.name] = {(str(rank),): value for rank, value in series.items()}
            _fill_extremes(values, metric, series)
        values.numbers[catalog.RANK_INFO.name] = {
            (str(rank), place.node, place.gpu_uuid, place.pod): 1.0 for rank, place in sorted(places.items())
        }


_GPU_FAMILIES = (catalog.RANK_GPU_SECONDS, *catalog.RANK_SUMMARIES[catalog.RANK_GPU_SECONDS.name])
_SUMMARY_NAMES = frozenset(metric.name for summary in catalog.RANK_SUMMARIES.values() for metric in summary)


def _fill_host(values: Values, host: HostReading) -> None:
    memory = {
        MemoryKind.LIMIT: host.memory_limit_bytes,
        MemoryKind.USED: host.memory_used_bytes,
        MemoryKind.HOT_SLOTS: host.hot_slots_bytes,
    }
    for kind, size_bytes in memory.items():
        values.set(catalog.HOST_MEMORY, float("nan") if size_bytes is None else size_bytes, kind)
    for metric, space in ((catalog.STORAGE, host.storage), (catalog.SHM, host.shm)):
        size, free = (float("nan"), float("nan")) if space is None else space
        values.set(metric, size, SpaceKind.SIZE)
        values.set(metric, free, SpaceKind.FREE)
    values.set(catalog.CLOCK_SKEW, host.clock_skew_s)


def _fill_devices(values: Values, devices: DeviceTotals) -> None:
    values.set(catalog.DEVICES, devices.num_seen, DeviceCount.SEEN)
    values.set(catalog.DEVICES, devices.num_unfit, DeviceCount.UNFIT)
    values.set(catalog.DEVICES, devices.num_throttled, DeviceCount.THROTTLED)
    for kind in DeviceErrorKind:
        values.set(catalog.DEVICE_ERRORS, devices.errors.get(kind, 0), kind)


def _columns(ranks: Mapping[int, RankReading], memory: Mapping[int, int]) -> dict[str, dict[int, float]]:
    """Family of ranks -> rank -> value."""
    ordered = sorted(ranks.items())
    return {
        catalog.RANK_GPU_SECONDS.name: {rank: item.gpu_s for rank, item in ordered if item.gpu_s is not None},
        catalog.RANK_HEARTBEAT.name: {rank: seconds(item.heard_ns) for rank, item in ordered},
        catalog.RANK_LATENESS.name: {rank: item.lateness_s for rank, item in ordered},
        catalog.RANK_MEMORY.name: {rank: float(memory[item.pid]) for rank, item in ordered if item.pid in memory},
        catalog.RANK_STEP.name: {rank: float(item.step) for rank, item in ordered},
    }


def _fill_extremes(values: Values, metric: Metric, series: Mapping[int, float]) -> None:
    if not series:
        return
    least, most = min(series, key=series.__getitem__), max(series, key=series.__getitem__)
    for summary, value in zip(
        catalog.RANK_SUMMARIES[metric.name], (series[least], series[most], least, most), strict=True
    ):
        values.set(summary, value)
