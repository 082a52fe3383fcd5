"""Where a failure of telemetry ends: counted, dropped and noted, rarely."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from nvrx_sre.telemetry.boundary import NOTE_INTERVAL_S, Boundary, SinkThread
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.testing.clock import ManualClock
from tests.patience import PATIENCE_S


def refuse(_: Sequence[int]) -> None:
    """A collector that is down."""
    raise ConnectionError("refused")


def accept(_: Sequence[int]) -> None:
    """One that is not."""


def test_c62_two_hundred_failures_in_ten_minutes_are_ten_lines() -> None:
    """The first at once, then one a minute, with counts; every failure and every item is counted."""
    clock, notes = ManualClock(), list[str]()
    boundary = Boundary(clock, notes.append)
    for _ in range(200):
        boundary.handle(Component.OTLP, refuse, [1, 2])
        clock.advance(10 * NOTE_INTERVAL_S / 200)
    assert len(notes) == 10
    assert notes[0] == "telemetry: otlp failed, training goes on: ConnectionError: refused (1 failed so far)"
    assert boundary.num_errors()[Component.OTLP] == 200
    assert boundary.num_dropped()[Component.OTLP] == 400


def test_c62_a_part_that_works_again_says_so_once() -> None:
    """Lost and back are two lines, also within one minute; nothing more while it works."""
    notes = list[str]()
    boundary = Boundary(ManualClock(), notes.append)
    for handler in (accept, refuse, refuse, accept, accept):
        boundary.handle(Component.OTLP, handler, [1])
    assert [note.split(" (")[0] for note in notes] == [
        "telemetry: otlp failed, training goes on: ConnectionError: refused",
        "telemetry: otlp works again",
    ]


def test_parts_are_noted_apart() -> None:
    """One that fails does not silence another."""
    notes = list[str]()
    boundary = Boundary(ManualClock(), notes.append)
    for component in (Component.OTLP, Component.SPANS, Component.OTLP):
        boundary.handle(component, refuse, [1])
    assert [note.split()[1] for note in notes] == ["otlp", "spans"]


def test_what_a_sink_could_not_do_is_counted_once_and_waited_for_once() -> None:
    """Closed again it says so at once: nobody works on what was dropped."""
    boundary, begun, may_end = Boundary(ManualClock()), threading.Event(), threading.Event()

    def work(_: Sequence[int]) -> None:
        begun.set()
        may_end.wait()

    sink = SinkThread(Component.LOG, work, boundary)
    sink.submit(1)
    sink.hurry()
    assert begun.wait(PATIENCE_S)
    sink.submit(2)
    assert not sink.close(0.0)
    assert not sink.close(float("inf"))
    assert boundary.num_dropped()[Component.LOG] == 2
    may_end.set()
