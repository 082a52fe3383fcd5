"""What is known of a node's NVIDIA devices, which of them are the ranks', and which of them are fit.

Model: a device is named by its UUID. A *reading* is what NVML (`launcher.nvml`) said of it at one moment; `sickness`
compares it with the first reading of this launcher and says why the device should have no rank, '' if nothing speaks
against it. Only what a restart of a process cannot cure makes a device unfit; what a program can cause (an illegal
access is Xid 31 or 13, a killed process Xid 45) and what the device has contained (a remapped row, Xid 94) does not: it
shows as a fault of the rank, and is counted against the device by the policy.

Pure. Thread safety: constants and functions only. Must not: import torch or NVML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UNFIT_XIDS: Mapping[int, str] = {
    48: "uncorrected ECC error",
    62: "internal micro-controller halted",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "it has fallen off the bus",
    95: "uncontained ECC error",
    109: "context switch timed out",
    110: "security fault",
    119: "GSP does not answer",
    120: "GSP failed",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU initialisation failed",
    155: "NVLink software error",
    158: "GPU fatal timeout",
}
"""Xids after which NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors) asks for a reset, or for another device."""
RECOVERY_ACTIONS: Mapping[int, str] = {
    1: "a reset of the device",
    2: "a reboot of the node",
    3: "the peers to be drained",
    4: "a drain and a reset of the device",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
"""What the driver asks for (nvml.h, nvmlDeviceGpuRecoveryAction_t); 0 is nothing, 5 concerns a domain of nodes."""
THROTTLING_BITS = 0x08 | 0x20 | 0x40 | 0x80
"""Reasons for lower clocks that are none of the user's: slowdown by hardware, heat (both kinds) or the power brake."""


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """One device at one moment. None where the device or the driver does not say."""

    uuid: str
    is_lost: bool = False
    """The driver no longer reaches it."""
    num_ecc_uncorrected: int | None = None
    """Since the driver was loaded."""
    num_rows_remapped: int | None = None
    """Rows remapped, on older devices pages retired, for uncorrected errors, ever."""
    is_remap_failed: bool = False
    num_nvlink_errors: int | None = None
    """Replays, recoveries and CRC errors of all links."""
    num_links: int | None = None
    """NVLinks that are up."""
    throttling: int = 0
    """Reasons for lower clocks (bits of nvml.h)."""
    recovery_action: int | None = None
    xids: tuple[int, ...] = ()
    """Newest Xids since the launcher's start, the last at the end."""
    num_xids: int = 0
    """All of them."""

    @property
    def is_throttled(self) -> bool:
        """It runs slower than it was set to."""
        return bool(self.throttling & THROTTLING_BITS)


def sickness(reading: DeviceReading, first: DeviceReading) -> str:
    """Why this device should have no rank, with its UUID; '' if nothing speaks against it."""
    why = _why(reading, first)
    return f"device {reading.uuid} is unfit: {why}" if why else ""


def _why(reading: DeviceReading, first: DeviceReading) -> str:
    if reading.is_lost:
        return UNFIT_XIDS[79]
    if reading.recovery_action is not None and reading.recovery_action in RECOVERY_ACTIONS:
        return f"its driver asks for {RECOVERY_ACTIONS[reading.recovery_action]}"
    if reading.is_remap_failed:
        return UNFIT_XIDS[64]
    for xid in reading.xids:
        if xid in UNFIT_XIDS:
            return f"Xid {xid}, {UNFIT_XIDS[xid]}"
    if reading.num_links is not None and first.num_links is not None and reading.num_links < first.num_links:
        return f"{first.num_links - reading.num_links} of its {first.num_links} NVLinks went down"
    return ""


def errors_since(reading: DeviceReading, first: DeviceReading) -> dict[str, int]:
    """Errors of each kind (`telemetry.labels.DeviceErrorKind`) since the first reading; never negative."""

    def grown(now: int | None, before: int | None) -> int:
        return 0 if now is None or before is None else max(0, now - before)

    return {
        "ecc_uncorrected": grown(reading.num_ecc_uncorrected, first.num_ecc_uncorrected),
        "rows_remapped": grown(reading.num_rows_remapped, first.num_rows_remapped),
        "nvlink": grown(reading.num_nvlink_errors, first.num_nvlink_errors),
        "xid": reading.num_xids,
    }


def visible_uuids(uuids: Sequence[str], chosen: str | None) -> tuple[str, ...]:
    """UUIDs of the devices that CUDA shows to a process, in CUDA's order; () if that cannot be told.

    `uuids`: all of the machine, in NVML's order, which is that of the bus. `chosen`: CUDA_VISIBLE_DEVICES, None if it
    is not set. CUDA's own order puts the fastest first, which among equal devices is the bus' order as well. Unknown:
    parts of a device (MIG), and names that match none or several.
    """
    if chosen is None:
        return tuple(uuids)
    found: list[str] = []
    for item in (part.strip() for part in chosen.split(",")):
        if item.isdecimal():
            matches = [uuids[int(item)]] if int(item) < len(uuids) else []
        else:
            matches = [uuid for uuid in uuids if item and uuid.startswith(item)]
        if len(matches) != 1:
            # As for CUDA: what comes behind an invalid entry is invisible.
            break
        found.append(matches[0])
    return () if len(set(found)) != len(found) else tuple(found)
