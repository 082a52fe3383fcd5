"""Samples the node for the metrics: memory, disks, clock, and what the ranks' processes hold. A thread of its own.

Once a second at most; a read that fails leaves its series at NaN, one that hangs costs this thread and nothing else.
What is sampled goes to the telemetry's board. Must not: decide anything, touch the launcher's state.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from nvrx_sre.checkpoint.memory import memory_in_force
from nvrx_sre.core.clock import Clock, SystemClock, seconds
from nvrx_sre.launcher.device_watch import DeviceWatch
from nvrx_sre.telemetry.boundary import Boundary
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.telemetry.node_board import HostReading, NodeBoard, RankReading

SAMPLE_S = 1.0
SHM = Path("/dev/shm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def space_of(path: Path) -> tuple[int, int] | None:
    """(size, free to us) in bytes of the file system at `path`, None if it cannot be read."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process, shared pages included; None if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def node_name() -> str:
    """What this node is called: its host's name."""
    return socket.gethostname()


def pod_name(environment: Mapping[str, str]) -> str:
    """Name of the pod: `POD_NAME` (downward API), else the host's name inside Kubernetes; '' elsewhere."""
    inside = "KUBERNETES_SERVICE_HOST" in environment
    return environment.get("POD_NAME") or (environment.get("HOSTNAME", "") if inside else "")


class Sampled(Protocol):
    """Telemetry that takes samples of the node."""

    board: NodeBoard
    boundary: Boundary


class HostSampler:
    """Feeds the board of `telemetry` until it is closed."""

    def __init__(self, telemetry: Sampled, run_dir: Path, clock: Clock, devices: DeviceWatch) -> None:
        self._hot_slots_bytes = 0
        self._telemetry = telemetry
        self._run_dir = run_dir
        self._clock = clock
        self._devices = devices
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="nvrx-host", daemon=True)
        self._thread.start()

    def tell_ranks(self, readings: Mapping[int, RankReading], hot_slots_bytes: int) -> None:
        """What the loop knows of the ranks. Never blocks."""
        self._hot_slots_bytes = hot_slots_bytes
        self._telemetry.board.set_ranks(readings)

    def close(self) -> None:
        """Take no further sample. Does not wait for a read that hangs."""
        self._closing.set()
        self._thread.join(SAMPLE_S)

    def sample(self) -> None:
        """Take one sample. Blocks for the reads."""
        limit_bytes, used_bytes = memory_in_force()
        board = self._telemetry.board
        reading = HostReading(
            memory_limit_bytes=limit_bytes,
            memory_used_bytes=used_bytes,
            hot_slots_bytes=self._hot_slots_bytes,
            storage=space_of(self._run_dir),
            shm=space_of(SHM),
            clock_skew_s=seconds(SystemClock().wall_ns() - self._clock.wall_ns()),
        )
        memory = {pid: resident_bytes(pid) for pid in board.pids()}
        board.set_devices(self._devices.snapshot().totals)
        board.set_host(reading, {pid: size for pid, size in memory.items() if size is not None})

    def _main(self) -> None:
        while True:
            self._telemetry.boundary.call(Component.NODE, self.sample)
            if self._closing.wait(SAMPLE_S):
                return
