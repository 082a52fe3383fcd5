"""Delivery of the interrupt: repeated until it arrives, never into another generation, never inside `atomic`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import Interrupted, RestartAborted
from nvrx_sre.events import messages as wire
from nvrx_sre.events.channel import Channel, create_pair
from nvrx_sre.events.schema import Phase
from nvrx_sre.restart.control import REDELIVERY_S, RankControl, keep_finalizers_quiet
from nvrx_sre.testing.clock import ManualClock

SIGNAL = signal.SIGRTMIN + 6


class Aborts:
    """Stands for process groups; counts aborts and remembers who called."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def abort(self) -> None:
        self.threads.append(threading.current_thread().name)


@pytest.fixture
def clock() -> ManualClock:
    """It stands: an interrupt that was raised is not raised again before the test lets time pass."""
    return ManualClock(start_ns=10**9)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[tuple[RankControl, Channel]]:
    """A control with its monitor running, and the launcher's end of its channel; by the test's clock, if it has one."""
    ours, theirs = create_pair()
    old = signal.getsignal(SIGNAL)
    clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else SystemClock()
    control = RankControl(theirs, clock, SIGNAL)
    control.install()
    yield control, ours
    ours.send(wire.Leave())
    with contextlib.suppress(RestartAborted):
        control.wait_assigned()
    control.stop()
    signal.signal(SIGNAL, old)
    ours.close()
    theirs.close()


def receive(channel: Channel, kind: type[wire.Message]) -> wire.Message:
    """Next message of a kind."""
    while True:
        received = channel.receive()
        assert received is not None
        if isinstance(received[0], kind):
            return received[0]


def test_interrupt_wakes_a_wait_in_the_main_thread(clock: ManualClock, rank: tuple[RankControl, Channel]) -> None:
    """A wait without a timeout ends with `Interrupted` of the armed generation; groups are aborted by the monitor."""
    control, launcher = rank
    control.groups = aborts = Aborts()
    launcher.send(wire.Interrupt(generation=3))
    with pytest.raises(Interrupted) as caught:
        control.arm(3)
        threading.Event().wait()
    control.armed = None
    assert caught.value.generation == 3
    assert set(aborts.threads) <= {"nvrx-monitor"}


def test_interrupt_of_another_generation_is_not_delivered(rank: tuple[RankControl, Channel]) -> None:
    """An interrupt of generation 3 does not reach generation 4."""
    control, launcher = rank
    launcher.send(wire.Interrupt(generation=3))
    control.wait_interrupted(3)
    control.arm(4)
    signal.pthread_kill(threading.get_ident(), SIGNAL)
    control.armed = None
    assert control.interrupted == 3


def test_interrupt_waits_for_the_end_of_atomic(clock: ManualClock, rank: tuple[RankControl, Channel]) -> None:
    """Inside `atomic` nothing is raised; the interrupt comes right after it."""
    control, launcher = rank
    done = []
    with pytest.raises(Interrupted):
        control.arm(5)
        with control.atomic():
            launcher.send(wire.Interrupt(generation=5))
            control.wait_interrupted(5)
            signal.pthread_kill(threading.get_ident(), SIGNAL)
            done.append(True)
        threading.Event().wait()
    control.armed = None
    assert done == [True]


def go_for(generation: int) -> wire.Go:
    """The launcher opens a generation."""
    return wire.Go(
        generation=generation,
        world_size=1,
        store_host="",
        store_port=0,
        candidates=[],
        require_restore=False,
        passes={},
        hot_every=1,
    )


@pytest.mark.parametrize("has_come", [True, False])
def test_a_swallowed_interrupt_comes_again(
    has_come: bool, clock: ManualClock, rank: tuple[RankControl, Channel]
) -> None:
    """Code that catches everything once does not lose the interrupt, and is not hit again while it does."""
    control, launcher = rank
    swallowed = 0
    launcher.send(wire.Interrupt(generation=1))
    if has_come:
        control.wait_interrupted(1)
    with pytest.raises(Interrupted):
        try:
            control.arm(1)
            threading.Event().wait()
        except BaseException:
            swallowed += 1
            signal.pthread_kill(threading.get_ident(), SIGNAL)
        clock.advance(REDELIVERY_S)
        threading.Event().wait()
    control.armed = None
    assert swallowed == 1


class Ending:
    """Does something when nobody has it any more, as a loader does that waits for its workers."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end

    def __del__(self) -> None:
        self._end()


def test_an_interrupt_in_a_finalizer_is_not_printed_and_comes_again(
    clock: ManualClock, rank: tuple[RankControl, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the finalizer's wait; what else a finalizer raises is printed as ever."""
    control, launcher = rank
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: printed.append(ignored.exc_type))
    keep_finalizers_quiet()
    with pytest.raises(Interrupted):
        control.arm(1)
        item = Ending(lambda: (launcher.send(wire.Interrupt(generation=1)), threading.Event().wait()))
        del item
        clock.advance(REDELIVERY_S)
        threading.Event().wait()
    control.armed = None
    item = Ending(lambda: 1 / 0)
    del item
    assert printed == [ZeroDivisionError]


def test_monitor_reports_liveness(rank: tuple[RankControl, Channel]) -> None:
    """The monitor reports progress while the main thread does nothing."""
    control, launcher = rank
    control.progress = 41
    alive = receive(launcher, wire.Alive)
    while alive.progress != 41:  # reports from before
        alive = receive(launcher, wire.Alive)
    assert isinstance(alive, wire.Alive)


def test_the_monitor_answers_at_once_how_far_the_rank_is(rank: tuple[RankControl, Channel]) -> None:
    """With the question's number and the age of the newest point; it rings, since a busy launcher looks seldom."""
    control, launcher = rank
    bell = os.eventfd(0)
    launcher.send(wire.Doorbell(), (bell,))
    passed_ns = control.pass_point()
    launcher.send(wire.Probe(number=7))
    alive = receive(launcher, wire.Alive)
    while alive.probe != 7:  # reports from before
        alive = receive(launcher, wire.Alive)
    assert (alive.progress, alive.mono_ns - alive.age_ns) == (1, passed_ns)
    assert os.eventfd_read(bell) == 1
    os.close(bell)


def test_the_age_is_that_of_the_newest_progress(rank: tuple[RankControl, Channel]) -> None:
    """A phase entered after a point was passed; the phase itself is told with its own age."""
    control, launcher = rank
    control.arm(1)
    control.pass_point()
    control.enter(Phase.DATA, tell=False)
    entered = receive(launcher, wire.Entered)
    while entered.phase != Phase.DATA:  # from before
        entered = receive(launcher, wire.Entered)
    alive = receive(launcher, wire.Alive)
    control.armed = None
    assert alive.mono_ns - alive.age_ns == entered.mono_ns == alive.mono_ns - entered.age_ns


class Turning(SystemClock):
    """Something else may happen whenever it is read, once."""

    def __init__(self) -> None:
        super().__init__()
        self.happens: Callable[[], object] | None = None
        self.monotonic_ns = self._read  # type: ignore[method-assign]  # the real one is no method

    def _read(self) -> int:
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()
        return SystemClock.monotonic_ns()


def test_what_is_told_of_a_generation_is_its_own() -> None:
    """The main thread goes into the next one while the monitor writes: steps of the last never count in it."""
    launcher, theirs = create_pair()
    clock = Turning()
    control = RankControl(theirs, clock, SIGNAL)
    for generation in (1, 2):
        go = {"world_size": 1, "store_host": "", "store_port": 0, "candidates": [], "require_restore": False}
        launcher.send(wire.Go(generation=generation, passes={}, hot_every=1, **go))  # type: ignore[arg-type]  # plain
    launcher.send(wire.Probe(number=1))
    control._receive()
    control.wait_go(1)
    control.step = 7
    control._receive()
    clock.happens = lambda: control.wait_go(2)
    control._receive()
    alive = receive(launcher, wire.Alive)
    assert isinstance(alive, wire.Alive)
    assert (alive.generation, alive.step) == (1, 7)
    launcher.close()
    theirs.close()


def test_a_lasting_phase_is_reported_by_the_monitor(rank: tuple[RankControl, Channel]) -> None:
    """A phase entered without telling is told when it lasts longer than a liveness period."""
    control, launcher = rank
    control.arm(1)
    control.enter(Phase.DATA, tell=False)
    entered = receive(launcher, wire.Entered)
    while entered.phase != Phase.DATA:  # from before
        entered = receive(launcher, wire.Entered)
    control.armed = None
    assert isinstance(entered, wire.Entered) and entered.phase == "data"


def test_a_phase_that_found_no_room_is_told_later() -> None:
    """The launcher takes nothing in for a while: the phase is not given up as told, and told once."""
    launcher, theirs = create_pair()
    launcher.socket.setblocking(False)
    control = RankControl(theirs, ManualClock(), SIGNAL)
    control.arm(1)
    control.enter(Phase.DATA, tell=False)
    num_filling = 0
    while theirs.send_nowait(wire.Hello(pid=1, start_ticks=1, mono_ns=0)):
        num_filling += 1
    control._tell_alive()
    for _ in range(num_filling):
        receive(launcher, wire.Hello)
    control._tell_alive()
    control._tell_alive()
    told = [received[0] for _ in range(3) if (received := launcher.receive()) is not None]
    launcher.close()
    theirs.close()
    assert [type(message) for message in told] == [wire.Entered, wire.Alive, wire.Alive]


def test_a_generation_does_not_begin_in_the_teardown_before(rank: tuple[RankControl, Channel]) -> None:
    """What lasts before the group is formed is init, under its deadline: a peer that waits for it is not to blame."""
    control, launcher = rank
    control.enter(Phase.TEARDOWN, tell=False)
    launcher.send(go_for(8))
    control.arm(control.wait_go(8).generation)
    entered = receive(launcher, wire.Entered)
    control.armed = None
    assert isinstance(entered, wire.Entered) and (entered.generation, entered.phase) == (8, "init")


def test_an_interrupt_while_waiting_for_go_moves_on(rank: tuple[RankControl, Channel]) -> None:
    """A second fault during recovery: the waiting rank reports ready for the generation after it."""
    control, launcher = rank
    launcher.send(wire.Interrupt(generation=7))
    launcher.send(go_for(8))
    go = control.wait_go(7)
    ready = receive(launcher, wire.Ready)
    assert go.generation == 8
    assert isinstance(ready, wire.Ready) and ready.generation == 8


def test_a_standby_rehearses_until_it_is_a_rank(rank: tuple[RankControl, Channel]) -> None:
    """Each request is heard once; a rank that was given away is never made to wait for one."""
    control, launcher = rank
    launcher.send(wire.Rehearse(world_size=4))
    assert control.wait_called() == wire.Rehearse(world_size=4)
    assign = wire.Assign(
        rank=1,
        local_rank=1,
        world_size=2,
        generation=3,
        slot_data_bytes=0,
        slot_blob_bytes=0,
        local_world_size=2,
        node_rank=0,
    )
    launcher.send(assign)
    assert control.wait_called() is None
    launcher.send(wire.Rehearse(world_size=2))
    assert control.wait_called() is None
    assert control.wait_assigned() == (assign, None)
