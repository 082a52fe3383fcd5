"""Devices of a node: what NVML's answers mean, which device is whose, and that a driver that hangs holds nobody up.

The answers have the form that `nvidia-ml-py` 12 and 13 give them, with the numbers of nvml.h.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.launcher import device_watch
from nvrx_sre.launcher.device_watch import DeviceWatch
from nvrx_sre.launcher.devices import RECOVERY_ACTIONS, UNFIT_XIDS, DeviceReading, sickness, visible_uuids
from nvrx_sre.launcher.nvml import MAX_XIDS, Nvml
from nvrx_sre.telemetry.boundary import Boundary
from nvrx_sre.telemetry.labels import Component
from tests.patience import PATIENCE_S

UUIDS = ("GPU-5f2e0c9a-0000-0000-0000-000000000000", "GPU-5f77d1b3-0000-0000-0000-000000000001")
NOT_SUPPORTED, TIMEOUT, GPU_IS_LOST = 3, 10, 15
HEALTHY = {"ecc": 0, "rows": (0, 0, 0, 0), "links": 18, "nvlink": 0, "reasons": 0x1, "action": 0}


class NVMLError(Exception):
    """Named like the library's."""

    def __init__(self, value: int) -> None:
        super().__init__(str(value))
        self.value = value


class Answers:
    """Answers like `pynvml`, from what was recorded; None for a question that the device does not know."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_GPU_IS_LOST = GPU_IS_LOST
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 38
    NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL = 45
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL = 52
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 59
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, num_devices: int = 2) -> None:
        self.devices: list[dict[str, Any]] = [dict(HEALTHY) for _ in range(num_devices)]
        self.events: list[tuple[int, int]] = []
        self.is_shut = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        return self._known(handle, "ecc")

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return self._known(handle, "rows")

    def nvmlDeviceGetRetiredPages(self, handle: int, cause: int) -> list[int]:
        assert cause == 1
        return self._known(handle, "pages")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self._known(handle, "reasons")

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return int(link < self._known(handle, "links"))

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:
        numbers = {38: self.devices[handle]["nvlink"], 45: 0, 52: 0, 59: 0, 230: self.devices[handle]["action"]}
        return [
            SimpleNamespace(
                fieldId=field,
                nvmlReturn=NOT_SUPPORTED if numbers[field] is None else 0,
                value=SimpleNamespace(ullVal=numbers[field]),
            )
            for field in fields
        ]

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert (kinds, events) == (8, "events")

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "nothing waits inside the driver"
        if not self.events:
            raise NVMLError(TIMEOUT)
        handle, xid = self.events.pop(0)
        return SimpleNamespace(device=handle, eventData=xid)

    def nvmlShutdown(self) -> None:
        self.is_shut = True

    def _known(self, handle: int, question: str) -> Any:
        answer = self.devices[handle].get(question)
        if answer is None:
            raise NVMLError(NOT_SUPPORTED)
        if isinstance(answer, NVMLError):
            raise answer
        return answer


def test_a_healthy_device_is_read_and_fit() -> None:
    """All fields are known; being idle is no throttling."""
    reading = Nvml(Answers()).read(UUIDS[0])
    assert reading == DeviceReading(
        uuid=UUIDS[0],
        num_ecc_uncorrected=0,
        num_rows_remapped=0,
        num_nvlink_errors=0,
        num_links=18,
        throttling=1,
        recovery_action=0,
    )
    assert not reading.is_throttled
    assert sickness(reading, reading) == ""


def test_what_a_device_does_not_know_is_unknown_not_zero() -> None:
    """An old card without links and row remapping says how many pages it retired; a driver may know nothing at all."""
    answers = Answers()
    answers.devices[0] = {"pages": [0x1000, 0x2000], "nvlink": None, "action": None}
    reading = Nvml(answers).read(UUIDS[0])
    assert (reading.num_rows_remapped, reading.num_ecc_uncorrected) == (2, None)
    assert (reading.num_links, reading.recovery_action) == (None, None)
    assert reading.num_nvlink_errors == 0, "three of the four counters are known"
    assert sickness(reading, reading) == ""


def ill(change: Callable[[Answers], None]) -> str:
    """What makes device 1 unfit after `change`, read through NVML."""
    answers = Answers()
    nvml = Nvml(answers)
    first = nvml.read(UUIDS[1])
    change(answers)
    nvml.take_xids()
    return sickness(nvml.read(UUIDS[1]), first)


def sets(**fields: Any) -> Callable[[Answers], None]:
    """Change answers of device 1."""
    return lambda answers: answers.devices[1].update(fields)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (sets(rows=(0, 3, 0, 1)), "a memory row could not be remapped"),
        (sets(action=1), "its driver asks for a reset of the device"),
        (sets(action=2), "its driver asks for a reboot of the node"),
        (sets(links=16), "2 of its 18 NVLinks went down"),
        (sets(ecc=NVMLError(GPU_IS_LOST)), "it has fallen off the bus"),
        (lambda answers: answers.events.extend([(1, 31), (1, 79), (1, 43)]), "Xid 79, it has fallen off the bus"),
    ],
)
def test_what_no_restart_cures_makes_a_device_unfit(change: Callable[[Answers], None], why: str) -> None:
    """The reason names the device, wherever its rank moves."""
    assert ill(change) == f"device {UUIDS[1]} is unfit: {why}"


@pytest.mark.parametrize(
    "change",
    [
        sets(ecc=2),
        sets(rows=(4, 1, 1, 0)),
        sets(nvlink=500),
        sets(reasons=0x40),
        sets(action=5),
        lambda answers: answers.events.extend((1, xid) for xid in (13, 31, 43, 45, 63, 94)),
        lambda answers: answers.events.append((0, 79)),
    ],
    ids=["contained-ecc", "remapped", "nvlink-retries", "hot", "other-domain", "programs-xids", "the-other-device"],
)
def test_what_a_program_causes_or_the_device_contained_does_not(change: Callable[[Answers], None]) -> None:
    """An illegal access or a killed process is no illness: otherwise a bug would use up the world's devices."""
    assert ill(change) == ""


def test_the_tables_hold_no_harmless_entries() -> None:
    """'Nothing to do' is not in the table of wishes, and no Xid that a program raises is in that of the unfit."""
    assert not {0, 5} & RECOVERY_ACTIONS.keys()
    assert not {8, 13, 31, 32, 43, 45, 63, 68, 69, 94} & UNFIT_XIDS.keys()


def test_xids_are_counted_and_bounded() -> None:
    """A driver that floods costs bounded memory."""
    answers = Answers()
    nvml = Nvml(answers)
    answers.events = [(0, 31)] * 100
    while nvml.take_xids():
        pass
    reading = nvml.read(UUIDS[0])
    assert (reading.num_xids, len(reading.xids)) == (100, MAX_XIDS)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, UUIDS),
        ("0,1", UUIDS),
        ("1", UUIDS[1:]),
        ("1, 0", UUIDS[::-1]),
        (UUIDS[1], UUIDS[1:]),
        ("GPU-5f2", UUIDS[:1]),
        ("GPU-5f", ()),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", UUIDS[:1]),
        ("0,7", UUIDS[:1]),
        ("0,0", ()),
        ("MIG-1234", ()),
    ],
)
def test_devices_are_those_that_cuda_shows(chosen: str | None, expected: tuple[str, ...]) -> None:
    """By index, UUID or unambiguous prefix; behind an invalid entry none is visible; nothing is guessed."""
    assert visible_uuids(UUIDS, chosen) == tuple(expected)


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeviceWatch]]:
    """Watches that have ended with the test, however busy the machine is."""
    monkeypatch.setattr(device_watch, "FIRST_S", PATIENCE_S)
    started: list[DeviceWatch] = []
    yield started
    for watch in started:
        watch.close()
        watch._thread.join(PATIENCE_S)
        assert not watch._thread.is_alive()


def boundary() -> Boundary:
    """A boundary of its own."""
    return Boundary(SystemClock())


def test_a_device_stays_unfit_for_its_first_reason(watches: list[DeviceWatch]) -> None:
    """By CUDA's index; the snapshot sums up errors since the start, and counts each device once."""
    answers = Answers()
    answers.devices[0].update(ecc=7, reasons=0x20)
    watch = DeviceWatch({"CUDA_VISIBLE_DEVICES": "1,0"}, boundary(), lambda: None)
    watches.append(watch)
    nvml = Nvml(answers)
    uuids = visible_uuids(nvml.uuids, "1,0")
    watch._read(nvml, uuids)
    assert watch.unfit() == {}
    answers.devices[0].update(ecc=9, action=1)
    watch._read(nvml, uuids)
    watch._read(nvml, uuids)
    answers.devices[0].update(action=0, links=1)
    watch._read(nvml, uuids)
    assert watch.unfit() == {1: f"device {UUIDS[0]} is unfit: its driver asks for a reset of the device"}
    snapshot = watch.snapshot()
    totals = snapshot.totals
    assert snapshot.uuids == UUIDS[::-1]
    assert (totals.num_seen, totals.num_unfit, totals.num_throttled) == (2, 1, 1)
    assert totals.errors["ecc_uncorrected"] == 2, "what was there before the launcher is not its runs'"


def test_a_watch_reads_in_its_thread_and_lets_go(watches: list[DeviceWatch], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reading is there when `first` returns; closing ends the thread and the library."""
    answers = Answers()
    watch = DeviceWatch({}, boundary(), lambda: Nvml(answers))
    watches.append(watch)
    assert watch.first() == UUIDS
    monkeypatch.setattr(device_watch, "XID_S", PATIENCE_S)
    watch.close()
    assert answers.is_shut
    assert not watch._thread.is_alive()


def test_a_driver_that_hangs_holds_nobody_up(watches: list[DeviceWatch], monkeypatch: pytest.MonkeyPatch) -> None:
    """The start goes on without UUIDs once its time is up, and so does the end."""
    monkeypatch.setattr(device_watch, "FIRST_S", 0.01)
    monkeypatch.setattr(device_watch, "XID_S", 0.01)
    well_again = threading.Event()
    watch = DeviceWatch({}, boundary(), lambda: Nvml(Answers()) if well_again.wait() else None)
    watches.append(watch)
    assert watch.first() == ()
    waits: list[float] = []
    monkeypatch.setattr(watch._is_read, "wait", waits.append)
    assert watch.first() == ()
    assert waits == [0.0], "it is waited for once"
    watch.close()
    assert watch.unfit() == {}
    well_again.set()


def test_a_library_that_fails_is_counted_and_ends_nothing(watches: list[DeviceWatch]) -> None:
    """An answer of another shape is a failure of telemetry, not of the run."""
    answers = Answers()
    answers.devices[1]["rows"] = "unexpected"
    ends = boundary()
    watch = DeviceWatch({}, ends, lambda: Nvml(answers))
    watches.append(watch)
    assert watch.first() == ()
    assert ends.num_errors()[Component.NODE] >= 1
