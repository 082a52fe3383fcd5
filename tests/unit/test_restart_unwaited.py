"""Collectives that were called and not waited for leave nothing behind when their generation ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _get_work_registry_size as num_unwaited

from nvrx_sre.core.errors import Interrupted
from nvrx_sre.restart.unwaited import wait_for_the_unwaited
from tests.patience import wait_until

GENERATION = 1


def descriptors() -> set[str]:
    """Of this process."""
    return set(os.listdir("/proc/self/fd"))


def native_threads() -> set[str]:
    """The same."""
    return set(os.listdir("/proc/self/task"))


def interrupted_in_between() -> None:
    """The result is in this frame alone when the interrupt comes."""
    result = torch.ops._c10d_functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD.group_name)
    assert result.numel() == 4
    raise Interrupted(GENERATION)


def generation() -> None:
    """Form a group, be interrupted, tear down."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with contextlib.suppress(Interrupted):
        interrupted_in_between()
    assert num_unwaited() == 1
    wait_for_the_unwaited()
    dist.destroy_process_group()


@pytest.fixture
def no_group() -> Iterator[None]:
    """Nothing of another test's is in the way, and nothing of this one's stays."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_what_an_interrupt_cut_off_is_let_go(no_group: None) -> None:
    """Ten interrupts between a collective and its wait: no descriptor and no thread more than after the first."""
    generation()
    first_descriptors, first_threads = descriptors(), native_threads()
    for _ in range(10):
        generation()
    assert num_unwaited() == 0
    assert not descriptors() - first_descriptors
    wait_until(lambda: not native_threads() - first_threads, "threads that were joined are gone")


def test_nothing_is_searched_where_everything_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery pays for a look at all objects only where something is left."""
    looks: list[None] = []
    monkeypatch.setattr("nvrx_sre.restart.unwaited.gc.get_objects", lambda: looks.append(None))
    assert num_unwaited() == 0
    wait_for_the_unwaited()
    assert looks == []
