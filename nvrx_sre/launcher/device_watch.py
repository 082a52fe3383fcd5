"""Watches the node's devices beside the loop: Xids once a second, everything else every `POLL_S`.

    thread: NVML -> readings -> `snapshot` (metrics), `unfit` (the loop, which tells the machine)

NVML may hang when a driver is ill, so nothing but this thread calls it, and nobody waits for the thread: the start of
the launcher does once, at most `FIRST_S`. Without NVML there are no devices, and ranks are known by their local index.

Thread safety: `snapshot` and `unfit` from any thread, all else from one. Must not: decide what becomes of a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nvrx_sre.launcher.devices import DeviceReading, errors_since, sickness, visible_uuids
from nvrx_sre.launcher.nvml import Nvml, open_nvml
from nvrx_sre.telemetry.boundary import Boundary
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.telemetry.node_board import DeviceTotals

POLL_S = 10.0
"""Between two readings of a device (seconds): counters move slowly, and each reading is several calls to the driver."""
XID_S = 1.0
FIRST_S = 5.0
"""Longest wait of the launcher's start for the first reading (seconds); beyond it the driver is taken to hang."""
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class DevicesSnapshot:
    """The devices that the node's ranks may have."""

    uuids: tuple[str, ...] = ()
    """By CUDA's index."""
    totals: DeviceTotals = field(default_factory=DeviceTotals)


class DeviceWatch:
    """Reads until it is closed."""

    def __init__(
        self, environment: Mapping[str, str], boundary: Boundary, open_library: Callable[[], Nvml | None] = open_nvml
    ) -> None:
        self.boundary = boundary
        """Where failures of the thread end."""
        self._chosen = environment.get(VISIBLE_VARIABLE)
        self._open = open_library
        self._lock = threading.Lock()
        self._snapshot = DevicesSnapshot()
        self._first: dict[str, DeviceReading] = {}
        self._unfit: Mapping[int, str] = {}
        """Replaced as a whole when one is found."""
        self._patience_s = FIRST_S
        self._is_read = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="nvrx-devices", daemon=True)
        self._thread.start()

    def first(self) -> tuple[str, ...]:
        """UUIDs by CUDA's index once they are known, () where they cannot be. Blocks, at most `FIRST_S` in all."""
        self._is_read.wait(self._patience_s)
        self._patience_s = 0.0
        return self.snapshot().uuids

    def snapshot(self) -> DevicesSnapshot:
        """The newest readings, summed up."""
        with self._lock:
            return self._snapshot

    def unfit(self) -> Mapping[int, str]:
        """Devices that were found unfit so far: CUDA's index -> why, with the UUID."""
        with self._lock:
            return self._unfit

    def close(self) -> None:
        """Take no further reading. Does not wait for one that hangs."""
        self._closing.set()
        self._thread.join(XID_S)

    def _main(self) -> None:
        nvml = self.boundary.call(Component.NODE, self._open)
        try:
            if nvml is not None:
                self._watch(nvml)
        finally:
            self._is_read.set()

    def _watch(self, nvml: Nvml) -> None:
        uuids = visible_uuids(nvml.uuids, self._chosen)
        turns_left = 0
        while not self._closing.is_set():
            has_xids = self.boundary.call(Component.NODE, nvml.take_xids)
            if has_xids or turns_left == 0:
                turns_left = round(POLL_S / XID_S)
                self.boundary.call(Component.NODE, self._read, nvml, uuids)
                self._is_read.set()
            turns_left -= 1
            self._closing.wait(XID_S)
        nvml.close()

    def _read(self, nvml: Nvml, uuids: tuple[str, ...]) -> None:
        readings = [nvml.read(uuid) for uuid in uuids]
        errors: dict[str, int] = {}
        found: dict[int, str] = {}
        for index, reading in enumerate(readings):
            first = self._first.setdefault(reading.uuid, reading)
            for kind, number in errors_since(reading, first).items():
                errors[kind] = errors.get(kind, 0) + number
            why = sickness(reading, first)
            if why:
                found[index] = why
        with self._lock:
            # It stays unfit, for its first reason: what was wrong needs a person, not another reading.
            self._unfit = found | dict(self._unfit)
            self._snapshot = DevicesSnapshot(
                uuids=uuids,
                totals=DeviceTotals(
                    num_seen=len(uuids),
                    num_unfit=len(self._unfit),
                    num_throttled=sum(reading.is_throttled for reading in readings),
                    errors=errors,
                ),
            )
