"""GPU time of a rank's own stretch: what is recorded when, what is asked, and that nothing of it reaches the script."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nvrx_sre.session.gpu_time import MAX_WAITING, GpuTimer, is_recordable, last_unit

MS = 1_000_000


class Device:
    """A device whose stream runs what it is given when it is told to; events are made, recorded and asked here."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_queued = self.num_passed = 0
        self.num_calls = 0
        self.num_events = 0
        self.is_capturing = False
        self.is_lost = False

    def event(self) -> _Event:
        self.num_events += 1
        return _Event(self)

    def may_record(self) -> bool:
        return not self.is_capturing

    def work(self, ms: float) -> None:
        """The script's kernels take so long."""
        self.now_ms += ms

    def run(self) -> None:
        """All that was queued is over."""
        self.num_passed = self.num_queued

    def called(self) -> None:
        """A call of CUDA."""
        self.num_calls += 1
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class _Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._number, self._at_ms = 0, 0.0

    def record(self) -> None:
        self._device.called()
        self._device.num_queued += 1
        self._number, self._at_ms = self._device.num_queued, self._device.now_ms

    def query(self) -> bool:
        self._device.called()
        return self._device.num_passed >= self._number

    def elapsed_time(self, other: _Event) -> float:
        self._device.called()
        assert self.query() and other.query(), "asked for the time between events that are not over"
        return other._at_ms - self._at_ms


@pytest.fixture
def device() -> Device:
    """A device that has nothing to do."""
    return Device()


def timer_of(device: Device) -> GpuTimer:
    """A timer of its events."""
    return GpuTimer(new_event=device.event, may_record=device.may_record)


def marked_step(timer: GpuTimer, device: Device, ms: float) -> int:
    """A step with a batch, `ms` of compute, a mark, and a collective that waits for a slow peer; what is known."""
    device.work(500)
    timer.batch()
    device.work(ms)
    timer.mark()
    device.work(1000)
    return timer.boundary()


def test_a_stretch_ends_at_the_mark_and_begins_at_the_batch(device: Device) -> None:
    """Neither the wait for data nor that for a peer in the collective is the rank's own compute."""
    timer = timer_of(device)
    assert marked_step(timer, device, 7) == 0, "nobody knew that there would be a mark"
    assert marked_step(timer, device, 20) == 0, "the device has not come so far"
    device.run()
    assert marked_step(timer, device, 30) == 20 * MS
    device.run()
    assert [marked_step(timer, device, 40), timer.boundary()] == [30 * MS, 0]


def test_without_a_batch_a_stretch_begins_with_the_step(device: Device) -> None:
    """Scripts that say nothing of their data; a later batch and a later mark of the same step change nothing."""
    timer = timer_of(device)
    timer.mark()
    timer.boundary()
    device.work(20)
    timer.mark()
    device.work(5)
    timer.batch()
    timer.mark()
    device.run()
    assert timer.boundary() == 20 * MS


def test_a_wait_at_the_boundary_is_not_in_the_stretch(device: Device) -> None:
    """A save that the script stands still for, say; nor does it cost another event."""
    timer = timer_of(device)
    timer.mark()
    timer.boundary()
    device.work(500)
    timer.begin_step()
    device.work(20)
    timer.mark()
    device.run()
    assert (timer.boundary(), device.num_events) == (20 * MS, 2)


def test_of_many_micro_batches_the_first_begins_the_stretch(device: Device) -> None:
    """What the host takes to fetch the others is inside."""
    timer = timer_of(device)
    timer.mark()
    timer.boundary()
    for _ in range(3):
        timer.batch()
        device.work(10)
    timer.mark()
    device.run()
    assert timer.boundary() == 30 * MS


def test_a_script_without_marks_costs_no_call(device: Device) -> None:
    """What has no end is not begun."""
    timer = timer_of(device)
    for _ in range(3):
        timer.batch()
        timer.boundary()
    assert (device.num_calls, device.num_events) == (0, 0)


def test_events_are_used_again_and_bounded(device: Device) -> None:
    """A device that falls behind costs steps their figure, not memory; when it is back the newest is told."""
    timer = timer_of(device)
    for step in range(100):
        marked_step(timer, device, step)
    assert device.num_events == timer.num_events == 2 * MAX_WAITING
    device.run()
    assert timer.boundary() == MAX_WAITING * MS, "step 0 taught the mark; the eight after it were measured"
    for step in range(100):
        marked_step(timer, device, step)
        device.run()
    assert device.num_events == 2 * MAX_WAITING


def test_nothing_is_asked_or_recorded_while_a_graph_is_captured(device: Device) -> None:
    """An event that is recorded then would belong to the graph, and one that is asked would spoil it."""
    timer = timer_of(device)
    for step in range(2):
        marked_step(timer, device, step)
    num_calls, device.is_capturing = device.num_calls, True
    assert marked_step(timer, device, 5) == 0
    assert device.num_calls == num_calls
    device.is_capturing = False
    marked_step(timer, device, 9)
    device.run()
    assert timer.boundary() == 9 * MS


def test_a_capture_that_begins_within_a_stretch_costs_it(device: Device) -> None:
    """The other way round as well: each end must be outside."""
    timer = timer_of(device)
    marked_step(timer, device, 1)
    timer.batch()
    device.is_capturing = True
    timer.mark()
    device.is_capturing = False
    device.run()
    assert [timer.boundary(), timer.boundary()] == [0, 0]


@pytest.mark.parametrize("lost_at", ["batch", "mark", "boundary"])
def test_an_error_of_the_device_ends_it_and_reaches_nobody(device: Device, lost_at: str) -> None:
    """The script hears of it at its own next call; no call is made after the one that failed."""
    timer = timer_of(device)
    for step in range(2):
        marked_step(timer, device, step)
    calls: dict[str, Any] = {"batch": timer.batch, "mark": timer.mark, "boundary": timer.boundary}
    for name, call in calls.items():
        device.is_lost = device.is_lost or name == lost_at
        call()
    num_calls = device.num_calls
    marked_step(timer, device, 3)
    assert (timer.is_on, device.num_calls) == (False, num_calls)


def test_a_closed_timer_calls_no_device(device: Device) -> None:
    """Between generations, and in a process whose device is lost."""
    timer = timer_of(device)
    for step in range(3):
        marked_step(timer, device, step)
    num_calls = device.num_calls
    timer.close()
    device.run()
    assert marked_step(timer, device, 3) == 0
    assert device.num_calls == num_calls


def unit_step(model: nn.Module, timer: GpuTimer) -> int:
    """A forward, and the commit."""
    model(torch.zeros(1))
    return timer.boundary()


class Unit(nn.Module):
    """Queues work and, if asked to, has the device run it at once."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.ms, self.is_run_at_once = device, 10.0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As it is."""
        if self.is_run_at_once:
            self.device.run()
        self.device.work(self.ms)
        return x


def test_of_a_unit_the_first_forward_of_a_step_is_measured(device: Device) -> None:
    """Not its evaluation, not what checkpointing of activations runs again, and no mark changes it."""
    timer, unit = timer_of(device), Unit(device)
    timer.follow_unit(unit)
    timer.batch()
    with torch.no_grad():
        unit(torch.zeros(1))
    unit(torch.zeros(1))
    timer.mark()
    unit.ms = 99
    unit(torch.zeros(1))
    device.run()
    assert [timer.boundary(), device.num_events] == [10 * MS, 2]


def test_a_stretch_that_the_host_did_not_lead_does_not_count(device: Device) -> None:
    """The device was there before the host had queued it all: it may have waited for the host."""
    timer, unit = timer_of(device), Unit(device)
    timer.follow_unit(unit)
    unit.is_run_at_once = True
    assert [unit_step(unit, timer) for _ in range(3)] == [0, 0, 0]
    unit.is_run_at_once = False
    unit_step(unit, timer)
    device.run()
    assert [timer.boundary(), device.num_events] == [10 * MS, 2]


@pytest.mark.parametrize("is_lost_inside", [False, True], ids=["before", "inside"])
def test_a_forward_that_meets_an_error_of_the_device_is_through(device: Device, is_lost_inside: bool) -> None:
    """Found by an event that is recorded or asked within it: the forward returns, and is followed no more."""
    timer, unit = timer_of(device), Unit(device)
    timer.follow_unit(unit)
    unit_step(unit, timer)
    if is_lost_inside:
        unit.register_forward_pre_hook(lambda *_: setattr(device, "is_lost", True))
    device.is_lost = not is_lost_inside
    assert torch.equal(unit(torch.ones(1)), torch.ones(1))
    num_calls = device.num_calls
    assert (timer.boundary(), timer.is_on, len(unit._forward_hooks)) == (0, False, 0)
    unit(torch.zeros(1))
    assert device.num_calls == num_calls


def test_hooks_go_with_the_timer(device: Device) -> None:
    """A model that outlives its generation is not followed by two; one whose timer is gone is followed by none."""
    timer, unit = timer_of(device), Unit(device)
    timer.follow_unit(unit)
    timer.close()
    assert not unit._forward_pre_hooks and not unit._forward_hooks
    timer = timer_of(device)
    timer.follow_unit(unit)
    del timer
    unit(torch.zeros(1))
    assert device.num_calls == 0


def test_a_process_without_cuda_stays_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking whether to record is no use of it, whatever else this process has used."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", pytest.fail)
    assert not is_recordable()


def test_a_model_that_is_not_sharded_has_no_unit() -> None:
    """Its marks are what is measured."""
    assert last_unit([nn.Sequential(nn.Linear(2, 2)), {"step": 1}]) is None
