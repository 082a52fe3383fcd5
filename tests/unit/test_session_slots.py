"""Slots that a rank asks for ahead: who waits, what becomes of answers that nobody wants any more."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvrx_sre.checkpoint.ring import Ring
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.core.errors import UserError
from nvrx_sre.events import messages as wire
from nvrx_sre.session.mapping import Mapper
from nvrx_sre.session.process import RankProcess

LIMIT_S = 60.0
SMALL, LARGE = (8192, 4096), (65536, 4096)

NEXT_RANK = SimpleNamespace(rank=1, local_rank=1)


class Launcher:
    """Makes slots when a test says so. `asked`: the requests, in order."""

    def __init__(self) -> None:
        self.asked: list[wire.SlotsWanted] = []
        self.made: list[SlotFile] = []
        self.heard = threading.Event()
        control: Any = SimpleNamespace(send=self._send)
        self.process = RankProcess(SimpleNamespace(), control)  # type: ignore[arg-type]  # settings are not looked at
        self._grant = control.on_slots

    def _send(self, message: wire.SlotsWanted) -> None:
        self.asked.append(message)
        self.heard.set()

    def grant(self, sizes: tuple[int, int]) -> SlotFile:
        """Answer as the monitor thread would hear it, and wait until that is mapped."""
        made = SlotFile.create(*sizes, name="nvrx-test")
        self.made.append(made)
        self._grant(wire.SlotsGranted(data_bytes=sizes[0], blob_bytes=sizes[1]), os.dup(made.fd))
        self.process.settle_slots()
        return made


def descriptors() -> set[str]:
    """Numbers of the open ones that lead to slots: other threads of the process may open and close what they like."""
    found: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if "nvrx-test" in os.readlink(f"/proc/self/fd/{number}"):
                found.add(number)
    return found


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """A launcher with one rank's process; descriptors are counted."""
    before = descriptors()
    made = Launcher()
    yield made
    for slots in [*made.made, *filter(None, [made.process.slots])]:
        slots.close()
    assert not descriptors() - before


def is_same(slots: SlotFile, made: SlotFile) -> bool:
    """Both are over the same memory."""
    return os.path.samestat(os.fstat(slots.fd), os.fstat(made.fd))


def test_slots_that_are_there_when_they_are_needed_cost_no_wait(launcher: Launcher) -> None:
    """Asked for once, mapped when they were made, taken without another word."""
    launcher.process.ask_slots(1, "h", *SMALL)
    launcher.process.ask_slots(1, "h", *SMALL)
    made = launcher.grant(SMALL)
    assert is_same(launcher.process.slots_for(1, "h", *SMALL), made)
    assert [(item.data_bytes, item.generation) for item in launcher.asked] == [(SMALL[0], 1)]
    launcher.process.ask_slots(2, "h", *SMALL)
    assert len(launcher.asked) == 1


def test_whoever_comes_too_early_waits_for_the_answer(launcher: Launcher) -> None:
    """The request that is on its way is not repeated."""
    taken: list[SlotFile] = []
    launcher.process.ask_slots(1, "h", *SMALL)
    waiting = threading.Thread(target=lambda: taken.append(launcher.process.slots_for(1, "h", *SMALL)))
    waiting.start()
    made = launcher.grant(SMALL)
    waiting.join(LIMIT_S)
    assert is_same(taken[0], made) and len(launcher.asked) == 1


def test_slots_for_less_are_given_back_when_the_state_has_grown(launcher: Launcher) -> None:
    """State that came into being after the request: another request, and the answer to the first is not taken."""
    launcher.process.ask_slots(1, "h", *SMALL)
    launcher.grant(SMALL)
    launcher.heard.clear()
    taken: list[SlotFile] = []
    waiting = threading.Thread(target=lambda: taken.append(launcher.process.slots_for(1, "h", *LARGE)))
    waiting.start()
    assert launcher.heard.wait(LIMIT_S)
    launcher.grant(SMALL)  # the launcher's answer to the first request may even come twice
    made = launcher.grant(LARGE)
    waiting.join(LIMIT_S)
    assert is_same(taken[0], made) and [item.data_bytes for item in launcher.asked] == [SMALL[0], LARGE[0]]


def test_the_next_generation_asks_anew(launcher: Launcher) -> None:
    """A request whose generation ended may never have been answered."""
    launcher.process.ask_slots(1, "h", *SMALL)
    launcher.process.ask_slots(2, "h", *SMALL)
    assert [item.generation for item in launcher.asked] == [1, 2]
    launcher.grant(SMALL)
    made = launcher.grant(SMALL)
    assert is_same(launcher.process.slots_for(2, "h", *SMALL), made)


def test_slots_of_the_old_rank_are_not_taken_by_the_new_one(launcher: Launcher) -> None:
    """Another world, another rank: what was granted before belongs to somebody else now."""
    launcher.process.ask_slots(1, "h", *SMALL)
    launcher.grant(SMALL)
    launcher.process.take_slots(NEXT_RANK, None)  # type: ignore[arg-type]  # nothing else is looked at
    launcher.process.ask_slots(1, "h", *SMALL)
    made = launcher.grant(SMALL)
    assert len(launcher.asked) == 2 and is_same(launcher.process.slots_for(1, "h", *SMALL), made)


def test_slots_that_cannot_be_mapped_are_reported_where_they_are_needed(launcher: Launcher) -> None:
    """The monitor thread goes on; the training thread gets the reason."""
    launcher.process.ask_slots(1, "h", *LARGE)
    made = SlotFile.create(*SMALL, name="nvrx-test")
    launcher.made.append(made)
    launcher._grant(wire.SlotsGranted(data_bytes=LARGE[0], blob_bytes=LARGE[1]), os.dup(made.fd))
    with pytest.raises(UserError, match="were announced"):
        launcher.process.slots_for(1, "h", *LARGE)


def test_slots_are_mapped_although_no_device_can_be_had(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that is another process's alone: said once, and copied the slow way; nobody waits for ever."""

    def refuse(_: int) -> Any:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device", refuse)
    launcher.process.ask_slots(1, "h", *SMALL)
    launcher.grant(SMALL)
    slots = launcher.process.slots_for(1, "h", *SMALL)
    assert slots.lock_piece_bytes == 0
    launcher.process.ask_slots(1, "h", *LARGE)
    made = launcher.grant(LARGE)
    assert is_same(launcher.process.slots_for(1, "h", *LARGE), made)
    said = capsys.readouterr().err
    assert said.count("busy or unavailable") == 1 and "several times as long" in said and "more" not in said


def test_the_launcher_is_told_of_snapshots(launcher: Launcher) -> None:
    """With the request for slots: whether the device has room for a snapshot; without a device there is none."""
    launcher.process.ask_slots(1, "h", *SMALL)
    launcher.process.ring = Ring(torch.device("cpu"))
    launcher.process.ring.choose(SMALL[0])
    launcher.process.ask_slots(2, "h", *SMALL)
    assert [item.takes_snapshots for item in launcher.asked] == [False, True]


def test_whoever_waits_for_slots_lets_the_lock_hurry() -> None:
    """The rests between pieces are for the training; a process that is about to be a rank has no time for them."""
    mapper = Mapper()
    rests: list[bool] = []
    begun = threading.Event()

    def lock() -> None:
        begun.set()
        rests.append(mapper._hurries.wait(LIMIT_S))

    mapper.put(lock)
    assert begun.wait(LIMIT_S)
    mapper.settle()
    assert rests == [True]


def test_a_rank_locks_its_slots_in_the_thread_without_rests(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement with none ahead: all ranks wait for it, and what CUDA refuses must not come up in its launches."""
    process, seen = launcher.process, []

    def lock(_: SlotFile) -> str:
        seen.append((threading.current_thread().name.partition("_")[0], process._mapper._hurries.is_set()))
        return ""

    monkeypatch.setattr(process._mapper, "_lock", lock)
    made = SlotFile.create(*SMALL, name="nvrx-test")
    launcher.made.append(made)
    assign: Any = SimpleNamespace(rank=1, local_rank=1, slot_data_bytes=SMALL[0], slot_blob_bytes=SMALL[1])
    process.take_slots(assign, os.dup(made.fd))
    assert process.slots is not None and is_same(process.slots, made)
    assert seen == [("nvrx-slots", True)]


def test_a_capture_that_waits_for_its_slots_lets_the_lock_hurry(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A due save stands still until they are there: there is no training to rest for."""
    process, rests = launcher.process, []

    def lock(_: SlotFile) -> str:
        rests.append(process._mapper._hurries.wait(LIMIT_S))
        return ""

    monkeypatch.setattr(process._mapper, "_lock", lock)
    made = SlotFile.create(*SMALL, name="nvrx-test")
    launcher.made.append(made)
    launcher._grant(wire.SlotsGranted(data_bytes=SMALL[0], blob_bytes=SMALL[1]), os.dup(made.fd))
    assert is_same(process.slots_for(1, "h", *SMALL), made)
    assert rests == [True]
