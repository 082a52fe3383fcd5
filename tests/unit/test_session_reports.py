"""Reports of steps: where the time went, and that a step's numbers arrive as they were told."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nvrx_sre.events.messages import Step
from nvrx_sre.events.schema import Phase
from nvrx_sre.events.step_record import UNKNOWN_LOSS, to_message
from nvrx_sre.events.step_ring import StepRing
from nvrx_sre.session.reports import StepReports
from nvrx_sre.testing.clock import ManualClock

S = 1_000_000_000
START_NS = 7 * S


class Rank:
    """A rank that reports into a ring of its own."""

    def __init__(self) -> None:
        self.clock = ManualClock(start_ns=START_NS)
        self.ring = StepRing.create()
        self.saver: Any = SimpleNamespace(num_captured=0, num_skipped=0)
        self.reports = StepReports(self.ring, self.clock, 3, self.saver)
        self.step = 0

    def spend(self, seconds: int) -> None:
        """Time passes."""
        self.clock.advance(seconds)

    def enter(self, phase: Phase) -> None:
        """A phase begins."""
        self.reports.enter(phase, self.clock.monotonic_ns())

    def commit(self, boundary_s: int = 0, **about: Any) -> Step:
        """A step's end and its boundary; the report as the launcher takes it."""
        self.step += 1
        began_ns = self.clock.monotonic_ns()
        self.spend(boundary_s)
        captured: Any = SimpleNamespace(slot=about.pop("slot", -1), durable=about.pop("durable", False))
        now_ns, loss = self.clock.monotonic_ns(), about.pop("loss", UNKNOWN_LOSS)
        assert not self.reports.tell(self.step, began_ns, now_ns, loss, captured)
        (record,) = self.ring.take(self.step)
        return to_message(record)


@pytest.fixture
def rank() -> Iterator[Rank]:
    """A rank at the begin of its step loop."""
    made = Rank()
    yield made
    made.ring.close()


def times(report: Step) -> tuple[float, float, float, float]:
    """(step, data, save, evaluate) in seconds."""
    return report.step_s, report.data_s, report.checkpoint_block_s, report.evaluate_s


def test_time_is_booked_to_the_phase_that_ends(rank: Rank) -> None:
    """1 s of step, 2 s of data, 4 s of evaluation, 8 s of a save, 16 s of boundary: nothing is lost, all is summed."""
    for sums in ((1, 2, 24, 4), (2, 4, 48, 8)):
        rank.spend(1)
        for phase, spent_s in ((Phase.DATA, 2), (Phase.EVALUATE, 4), (Phase.SAVE, 8)):
            rank.enter(phase)
            rank.spend(spent_s)
        rank.enter(Phase.STEP)
        report = rank.commit(boundary_s=16)
        assert times(report) == sums
        assert report.mono_ns == START_NS + sum(sums) * S
        assert rank.reports.step_s() == sums[0]


def test_a_commit_inside_a_phase_ends_it(rank: Rank) -> None:
    """No time is booked twice: what follows is a step's."""
    rank.enter(Phase.DATA)
    rank.spend(2)
    assert times(rank.commit(boundary_s=1)) == (0, 2, 1, 0)
    rank.spend(3)
    rank.enter(Phase.STEP)
    assert times(rank.commit()) == (3, 2, 1, 0)


def test_waiting_inside_the_step_is_moved(rank: Rank) -> None:
    """An optimizer that waited for a copy did so inside the step; it is time of the checkpoint."""
    rank.spend(3)
    rank.reports.save_ns += S
    assert times(rank.commit()) == (2, 0, 1, 0)


def test_waiting_inside_a_phase_is_not_booked_twice(rank: Rank) -> None:
    """The end of a loader's pass waits for a copy, usually inside the data phase."""
    rank.spend(1)
    rank.enter(Phase.DATA)
    rank.spend(5)
    rank.reports.waited(3 * S)
    rank.spend(1)
    rank.enter(Phase.STEP)
    assert times(rank.commit()) == (1, 3, 3, 0)


def test_what_is_told_arrives(rank: Rank) -> None:
    """Each number at its place; what belongs to one step alone is told once."""
    rank.saver.num_captured, rank.saver.num_skipped = 5, 6
    rank.reports.tokens += 1024
    rank.reports.arrived_ns, rank.reports.gpu_ns = 99, 77
    told = rank.commit(slot=2, durable=True, loss=0.5)
    assert told == Step(
        generation=3,
        step=1,
        mono_ns=START_NS,
        step_s=0.0,
        data_s=0.0,
        checkpoint_block_s=0.0,
        evaluate_s=0.0,
        tokens=1024,
        loss=0.5,
        has_loss=True,
        slot=2,
        durable=True,
        captured=5,
        skipped=6,
        arrived_ns=99,
        gpu_ns=77,
    )
    after = rank.commit()
    assert (after.arrived_ns, after.gpu_ns, after.has_loss, after.tokens) == (0, 0, False, 1024)
