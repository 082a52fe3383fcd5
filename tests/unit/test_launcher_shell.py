"""The order in which the launcher's loop hands one turn's inputs to the machine; decisions that no disk took."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.core.limits import CapLimits
from nvrx_sre.core.signals import SignalPipe
from nvrx_sre.events import messages as wire
from nvrx_sre.events import schema
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.config import RunConfig
from nvrx_sre.launcher.past import LauncherFolds
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.launcher.shell import Recorder, Shell, faults_last, is_fault
from nvrx_sre.policy.rehearsal import Rehearsal, World
from nvrx_sre.telemetry.boundary import Boundary
from nvrx_sre.testing.clock import ManualClock


def _said(child: int, message: wire.Message) -> c.FromChild:
    return c.FromChild(child=child, message=message)


def _alive(child: int, progress: int) -> c.FromChild:
    return _said(child, wire.Alive(generation=1, step=1, progress=progress, mono_ns=progress))


def _fault(child: int) -> c.FromChild:
    message = wire.Fault(
        generation=1,
        fault="exception",
        communication=False,
        exception_type="ValueError",
        frame="train.py:1 main",
        message="",
        stack="",
        step=1,
        phase="step",
        mono_ns=1,
    )
    return _said(child, message)


def _death(child: int) -> c.Exited:
    return c.Exited(child=child, exit_code=None, signal=9, exited_ns=1, oom=False, last_line="")


def test_a_fault_waits_for_what_the_other_ranks_have_reported() -> None:
    """One rank's queue is read before the other's: its fault must not make the other's steps stale."""
    turn = [_alive(1, 1), _fault(1), _alive(1, 2), _alive(2, 1), _death(3), _alive(2, 2)]
    assert faults_last(turn) == [_alive(1, 1), _alive(2, 1), _alive(2, 2), _fault(1), _alive(1, 2), _death(3)]


def test_a_lost_node_and_a_death_are_faults_and_a_signal_is_none() -> None:
    """What ends a generation is told last; nothing else is moved."""
    lost = _said(1, wire.NodeKill(generation=1, mono_ns=1))
    signal = c.SignalReceived(signal=15, by_person=False)
    assert [is_fault(item) for item in (lost, _death(1), _fault(1), signal, _alive(1, 1))] == [True] * 3 + [False] * 2
    assert faults_last([lost, signal]) == [signal, lost]


_ANY = st.one_of(
    st.builds(_alive, st.integers(1, 3), st.integers(0, 9)), st.builds(_fault, st.integers(1, 3)), st.just(c.Tick())
)


@given(st.lists(_ANY, max_size=20))
def test_order_within_a_child_stays_and_nothing_is_lost(turn: list[c.Input]) -> None:
    """A rank's own messages are never reordered."""
    ordered = faults_last(turn)
    for child in (1, 2, 3):
        mine = [item for item in turn if isinstance(item, c.FromChild) and item.child == child]
        assert [item for item in ordered if isinstance(item, c.FromChild) and item.child == child] == mine
    assert len(ordered) == len(turn)
    first_fault = min((place for place, item in enumerate(ordered) if is_fault(item)), default=math.inf)
    innocent = {1, 2, 3} - {item.child for item in turn if isinstance(item, c.FromChild) and is_fault(item)}
    for place, item in enumerate(ordered):
        assert not (isinstance(item, c.FromChild) and item.child in innocent and place > first_fault)


class SlowJournal:
    """Telemetry whose journal takes `syncs` in time, in order; what was recorded."""

    traceparent = ""

    def __init__(self, *syncs: bool) -> None:
        self.syncs = list(syncs)
        self.recorded: list[schema.Event] = []
        self.companions: object = None
        self.boundary = Boundary(ManualClock())
        self.tracker = IncidentTracker("r")

    def record(self, record: schema.Record) -> list[tuple[schema.Event, int | None]]:
        self.recorded.append(record.event)
        return []

    def sync(self, timeout_s: float) -> bool:
        return self.syncs.pop(0)

    def num_dropped(self) -> dict[str, int]:
        return {}

    num_errors = num_dropped


def test_a_decision_that_the_disk_does_not_take_is_recorded_and_counted() -> None:
    """The restart goes on; the history counts it, and a decision that is on disk adds nothing."""
    journal = SlowJournal(False, True)
    folds = LauncherFolds()
    config = RunConfig(run="r", run_dir=Path("runs/r"), command=("x.py",), nproc=1, min_world_size=1)
    recorder = Recorder(config, 1, ManualClock(), folds, journal)  # type: ignore[arg-type]  # what it needs of telemetry
    decision = Rehearsal(CapLimits(), World(num_ranks=1, min_world_size=1)).fault(schema.FaultClass.KILLED)
    for _ in range(2):
        recorder.emit(decision.event(), 1)
        recorder.await_decision(1)
    recorder.await_decision(1)
    unrecorded = [item for item in journal.recorded if isinstance(item, schema.DecisionUnrecorded)]
    assert len(unrecorded) == folds.history.num_unrecorded == 1
    assert journal.syncs == [], "without a new decision nothing is waited for"


class BusyMachine:
    """A machine with one deadline, due at once, and a first input whose work takes `work_s`; the first tick ends it."""

    world_size = generation = 1

    def __init__(self, clock: ManualClock, work_s: float) -> None:
        self.heard: list[type[c.Input]] = []
        self._clock = clock
        self._work_s = work_s

    def start(self, now_ns: int) -> list[c.Command]:
        os.kill(os.getpid(), signal.SIGHUP)
        return []

    def handle(self, item: c.Input, now_ns: int) -> list[c.Command]:
        if not self.heard:
            self._clock.advance(self._work_s)
        self.heard.append(type(item))
        return [c.Stop(exit_code=0, reason="", result={})] if isinstance(item, c.Tick) else []

    def next_deadline_ns(self) -> int:
        return 0

    def ranks_on(self, node: int) -> int:
        return 1

    def seated(self) -> list[object]:
        return []


@pytest.fixture
def signals() -> Iterator[SignalPipe]:
    """Signals of the loop, given back afterwards."""
    with contextlib.closing(SignalPipe()) as pipe:
        yield pipe


def _shell(tmp_path: Path, clock: ManualClock, machine: Any, signals: SignalPipe) -> Shell:
    """The loop around `machine`, in a run directory of its own."""
    config = RunConfig(run="r", run_dir=tmp_path / "r", command=("x.py",), nproc=1, min_world_size=1)
    telemetry: Any = SlowJournal()
    directory = RunDirectory(config.run_dir)
    directory.prepare("r", {})
    epoch = directory.take_epoch().number
    recorder = Recorder(config, epoch, clock, LauncherFolds(), telemetry)
    return Shell(config, directory, clock, machine, recorder, signals)


def test_a_node_that_is_refused_is_said_once_for_each_reason(tmp_path: Path, signals: SignalPipe) -> None:
    """Its orchestrator starts it again and again; once it has joined, the next one is news. All reach the machine."""
    clock = ManualClock(start_ns=10**9)
    machine = BusyMachine(clock, 0.0)
    shell = _shell(tmp_path, clock, machine, signals)
    said: list[str] = []
    shell.say = said.append
    refused, other = c.NodeRefused(node=1, reason="--keep is 3 here and 5 there"), c.NodeRefused(node=1, reason="b")
    items: list[c.Input] = [refused, refused, other, c.NodeJoined(node=1, name="h"), other]
    for item in items:
        shell._take_remote(item)
    shell.run()
    keep, b = "node 1 was refused: --keep is 3 here and 5 there", "node 1 was refused: b"
    assert said == [keep, b, b]
    assert machine.heard[: len(items)] == [type(item) for item in items]


@pytest.mark.parametrize(("work_s", "excuses"), [(0.5, []), (5.0, [c.Stalled])])
def test_a_launcher_that_was_busy_excuses_its_ranks(
    work_s: float, excuses: list[type[c.Input]], tmp_path: Path, signals: SignalPipe
) -> None:
    """Work of its own beyond `loop_stall_s` is told before any deadline is judged; less is not."""
    clock = ManualClock(start_ns=10**9)
    machine = BusyMachine(clock, work_s)
    _shell(tmp_path, clock, machine, signals).run()
    assert machine.heard == [c.SignalReceived, *excuses, c.Tick]
