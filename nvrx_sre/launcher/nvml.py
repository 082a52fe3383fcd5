"""Reads NVIDIA devices through NVML, by the optional package `nvidia-ml-py` (extra `gpu`).

Each question is asked by itself: a device or driver that does not know it leaves that field unknown. Any call may hang
when a driver is ill, so only a thread of its own calls this (`launcher.device_watch`).

Not thread-safe. Must not: change a device's settings, or reset one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from nvrx_sre.launcher.devices import DeviceReading

MAX_XIDS = 16
"""Newest Xids of a device that a reading holds."""
MAX_EVENTS = 64
"""Events taken at once."""


class Nvml:
    """The devices of this machine. `library` is the module `pynvml`, or what answers like it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles = {
            library.nvmlDeviceGetUUID(handle): handle
            for handle in map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
        }
        self._xids: dict[str, list[int]] = {uuid: [] for uuid in self._handles}
        self._num_xids = dict.fromkeys(self._handles, 0)
        self._events = self._register()

    @property
    def uuids(self) -> tuple[str, ...]:
        """All devices, in NVML's order."""
        return tuple(self._handles)

    def read(self, uuid: str) -> DeviceReading:
        """What the device says now. Blocks for the driver."""
        library, handle = self._library, self._handles[uuid]
        ecc, is_lost = None, False
        try:
            ecc = library.nvmlDeviceGetTotalEccErrors(
                handle, library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
            )
        except library.NVMLError as error:
            is_lost = error.value == library.NVML_ERROR_GPU_IS_LOST
        rows, is_remap_failed = self._rows(handle)
        nvlink, action = self._fields(handle)
        return DeviceReading(
            uuid=uuid,
            is_lost=is_lost,
            num_ecc_uncorrected=ecc,
            num_rows_remapped=rows,
            is_remap_failed=is_remap_failed,
            num_nvlink_errors=nvlink,
            num_links=self._links(handle),
            throttling=self._ask(library.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0,
            recovery_action=action,
            xids=tuple(self._xids[uuid]),
            num_xids=self._num_xids[uuid],
        )

    def take_xids(self) -> bool:
        """Take in the Xids that came since the last call; True if there were any. Does not wait."""
        library = self._library
        for taken in range(MAX_EVENTS):
            event = None if self._events is None else self._ask(library.nvmlEventSetWait_v2, self._events, 0)
            uuid = None if event is None else self._ask(library.nvmlDeviceGetUUID, event.device)
            if event is None or uuid not in self._xids:
                return taken > 0
            xids = self._xids[uuid]
            xids.append(int(event.eventData))
            del xids[:-MAX_XIDS]
            self._num_xids[uuid] += 1
        return True

    def close(self) -> None:
        """Let go of the library."""
        self._ask(self._library.nvmlShutdown)

    def _register(self) -> Any | None:
        """Events of all devices, None where the driver or the container has none."""
        library = self._library
        events = self._ask(library.nvmlEventSetCreate)
        if events is None:
            return None
        for handle in self._handles.values():
            self._ask(library.nvmlDeviceRegisterEvents, handle, library.nvmlEventTypeXidCriticalError, events)
        return events

    def _rows(self, handle: Any) -> tuple[int | None, bool]:
        """Rows remapped for uncorrected errors, and whether one could not be; pages retired on devices before A100."""
        rows = self._ask(self._library.nvmlDeviceGetRemappedRows, handle)
        if rows is not None:
            _, uncorrected, _, has_failed = rows
            return int(uncorrected), bool(has_failed)
        cause = self._library.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
        pages = self._ask(self._library.nvmlDeviceGetRetiredPages, handle, cause)
        return (None if pages is None else len(pages)), False

    def _fields(self, handle: Any) -> tuple[int | None, int | None]:
        """Errors of all NVLinks, and what the driver asks for."""
        library = self._library
        links = (
            library.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
            library.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
            library.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
            library.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
        )
        # The driver's wish is unknown to older packages.
        action = getattr(library, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        wanted = [*links, *([] if action is None else [action])]
        values: Sequence[Any] = self._ask(library.nvmlDeviceGetFieldValues, handle, wanted) or ()
        known = {item.fieldId: _number(item) for item in values if item.nvmlReturn == library.NVML_SUCCESS}
        errors = [known[field] for field in links if field in known]
        return (sum(errors) if errors else None), known.get(action)

    def _links(self, handle: Any) -> int | None:
        """NVLinks that are up, None on a device without any."""
        library = self._library
        states = [self._ask(library.nvmlDeviceGetNvLinkState, handle, link) for link in range(_max_links(library))]
        return None if all(state is None for state in states) else sum(state == 1 for state in states)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any | None:
        try:
            return function(*arguments)
        except self._library.NVMLError:
            return None


def open_nvml() -> Nvml | None:
    """NVML of this machine, None without the package, the library or a device. Blocks for the driver."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
        return Nvml(library)
    except library.NVMLError:
        return None


def _max_links(library: Any) -> int:
    return int(library.NVML_NVLINK_MAX_LINKS)


def _number(item: Any) -> int:
    """Value of a field: counters are unsigned, of 32 or 64 bits, and the union is zeroed beforehand."""
    return int(item.value.ullVal)
