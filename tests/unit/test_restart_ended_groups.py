"""Groups of a generation that is over: freed beside the main thread; a process that cannot free them is replaced."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from nvrx_sre.restart import ended_groups
from nvrx_sre.restart.abort import ProcessGroups
from nvrx_sre.restart.ended_groups import EndedGroups
from tests.patience import wait_until


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that are ending are waited for however busy the machine is."""
    monkeypatch.setattr(ended_groups, "JOIN_S", 60.0)
    monkeypatch.setattr(ended_groups, "JOIN_ABORTED_S", 60.0)


class SlowToEnd:
    """Stands for a group whose threads end when they are told to."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.has_ended = threading.Event()
        self.ended_in: list[threading.Thread] = []

    def group(self) -> Any:
        """The only reference to it is the caller's."""
        return _Group(self)


class _Group:
    def __init__(self, owner: SlowToEnd) -> None:
        self._owner = owner

    def __del__(self) -> None:
        self._owner.may_end.wait()
        self._owner.ended_in.append(threading.current_thread())
        self._owner.has_ended.set()


def test_groups_end_beside_the_main_thread(patient: None) -> None:
    """Who lets go of a group does not wait for its end, and the next to let go waits for it."""
    slow = SlowToEnd()
    ended = EndedGroups()
    ended.add([slow.group()])
    assert ended.let_go() == ""
    assert not slow.has_ended.is_set()
    slow.may_end.set()
    assert slow.has_ended.wait(60)
    assert slow.ended_in != [threading.current_thread()]
    assert ended.let_go() == ""


def test_a_process_whose_groups_do_not_end_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold threads, sockets and memory; the groups that came after them are not given up."""
    slow, later = SlowToEnd(), SlowToEnd()
    later.may_end.set()
    ended = EndedGroups()
    ended.add([slow.group()])
    ended.let_go()
    ended.add([later.group()])
    assert "do not end" in ended.let_go()
    assert not later.has_ended.is_set()
    slow.may_end.set()
    assert slow.has_ended.wait(60)
    monkeypatch.setattr(ended_groups, "JOIN_S", 60.0)
    assert ended.let_go() == ""
    assert later.has_ended.wait(60)


def test_a_gloo_group_that_was_let_go_leaves_no_thread() -> None:
    """The last reference is dropped here, so the group's own threads have ended when this one has."""
    before = native_threads()
    groups: list[Any] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1)]
    made = native_threads() - before
    ended = EndedGroups()
    ended.add(groups)
    del groups
    ended.let_go()
    while ended.let_go():
        continue
    assert made
    wait_until(lambda: not made & native_threads(), "a thread that was joined is gone")


def native_threads() -> set[str]:
    """Of this process."""
    return set(os.listdir("/proc/self/task"))


class SlowToAbort:
    """Stands for a group whose abort takes a while, as NCCL's does."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_aborted = 0

    def abort(self) -> None:
        self.num_aborted += 1
        assert self.may_end.wait(60)
        raise RuntimeError("it was half built")


def test_nobody_waits_for_an_abort_but_the_end_of_its_groups(patient: None) -> None:
    """Asked again meanwhile it is not begun twice; the groups are freed when it is over, whatever it raised."""
    slow, group, next_group = SlowToAbort(), SlowToEnd(), SlowToEnd()
    group.may_end.set()
    next_group.may_end.set()
    ended = EndedGroups()
    ended.abort([slow])  # type: ignore[list-item]  # stands for a group
    ended.abort([slow])  # type: ignore[list-item]  # stands for a group
    ended.add([group.group()])
    assert ended.let_go() == ""
    assert not group.has_ended.is_set()
    slow.may_end.set()
    assert group.has_ended.wait(60)
    assert slow.num_aborted == 1
    ended.abort([slow])  # type: ignore[list-item]  # stands for a group
    ended.add([next_group.group()])
    assert ended.let_go() == ""
    assert next_group.has_ended.wait(60)
    assert slow.num_aborted == 2


def test_a_group_that_was_formed_during_an_abort_is_aborted_too() -> None:
    """A rank that is blocked in it, or its kernels, would hold up the teardown; it is freed after its own abort."""
    slow, late, group = SlowToAbort(), SlowToAbort(), SlowToEnd()
    group.may_end.set()
    late.may_end.set()
    ended = EndedGroups()
    ended.abort([slow])  # type: ignore[list-item]  # stands for a group
    ended.abort([slow, late])  # type: ignore[list-item]  # stand for groups
    ended.add([group.group()])
    assert ended.let_go() == ""
    assert not group.has_ended.is_set()
    slow.may_end.set()
    assert group.has_ended.wait(60)
    assert (slow.num_aborted, late.num_aborted) == (1, 1)


@pytest.fixture
def torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test wraps in torch is taken off again: it would hold every group of the tests after it."""
    for owner, name in ((c10d, "_new_process_group_helper"), (DeviceMesh, "_setup_world_group_and_device")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def test_groups_are_forgotten_while_they_are_aborted(torch_as_it_was: None, patient: None) -> None:
    """The next generation forms its group at once, under the names of the first; nothing of the old one is left."""
    groups = ProcessGroups(aborts_beside=True)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.new_group([0])
        dist.all_reduce(torch.ones(1))
        groups.abort()
        groups.clear()
        world = dist.distributed_c10d._world
        assert not dist.is_initialized()
        assert not world.pg_map and not world.pg_names and not world.tags_to_pg
        assert world.group_count == 0
        assert groups.let_go() == ""
