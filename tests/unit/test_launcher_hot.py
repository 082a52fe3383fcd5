"""Seals that come late, and the measured interval of hot captures."""

from __future__ import annotations

import pytest

from nvrx_sre.events import schema
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.machine_interval import NUM_PROBES, PROBE_EVERY, interval
from nvrx_sre.testing.driven import DrivenMachine


class Late(DrivenMachine):
    """Two ranks in their step loop whose seals the test tells itself."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def report(self, step: int, **changes: object) -> None:
        """Every rank reports the step; the copies run."""
        for rank in range(self.num_ranks):
            self.step_report(rank, step, **changes)

    @property
    def published(self) -> list[int]:
        """Steps published as sealed everywhere."""
        return [item.step for item in self.all(c.PublishSealed)]

    @property
    def started(self) -> list[tuple[int, tuple[int, ...]]]:
        """(step, slots) of the saves handed over."""
        return [(item.step, item.slots) for item in self.all(c.StartSave)]


def test_a_step_is_sealed_when_every_rank_has_said_so() -> None:
    """Committed at the reports; published and handed over at the last seal."""
    driven = Late()
    driven.report(1, slot=2, durable=True)
    assert driven.machine.high_water == 1
    driven.seal(0, 1, 2)
    assert driven.published == [] and driven.started == []
    driven.seal(1, 1, 2)
    assert driven.published == [1] and driven.started == [(1, (2, 2))]


def test_a_seal_may_come_before_the_report() -> None:
    """The copy thread is faster than the main thread."""
    driven = Late()
    driven.seal(0, 1, 0)
    driven.seal(1, 1, 1)
    assert driven.published == []
    driven.step_report(0, 1, slot=0)
    driven.step_report(1, 1, slot=1)
    assert driven.published == [1]


def test_a_capture_that_was_given_up_is_never_sealed() -> None:
    """One rank voided its copy: the step is stranded, its due save counted as skipped, the next one is sealed."""
    driven = Late()
    driven.report(1, slot=0, durable=True)
    driven.seal(0, 1, 0)
    driven.seal(1, 1, -1)
    assert driven.published == [] and driven.started == []
    assert [item.step for item in driven.all(c.StrandSlots)] == [1]
    assert [item.reason for item in driven.events(schema.SaveSkipped)] == ["incomplete"]
    driven.report(2, slot=1)
    driven.seal(0, 2, 1)
    driven.seal(1, 2, 1)
    assert driven.published == [2]


def test_a_lost_seal_is_not_guessed() -> None:
    """Rank 1's seal of step 1 never arrives; that of step 2 settles step 1 as not sealed."""
    driven = Late()
    driven.report(1, slot=0)
    driven.seal(0, 1, 0)
    driven.report(2, slot=1)
    driven.seal(0, 2, 1)
    driven.seal(1, 2, 1)
    assert driven.published == [2]


def test_nothing_is_stranded_before_the_step_below_is_settled() -> None:
    """Step 2 reached one rank's slot only; the word that frees it would free step 1, which may be sealed yet."""
    driven = Late()
    driven.report(1, slot=0)
    driven.step_report(0, 2, slot=1)
    driven.step_report(1, 2, slot=-1)
    assert driven.all(c.StrandSlots) == []
    driven.seal(0, 1, 0)
    driven.seal(1, 1, 0)
    order = [type(item).__name__ for item in driven.commands if isinstance(item, c.PublishSealed | c.StrandSlots)]
    assert order == ["PublishSealed", "StrandSlots"]


def test_the_last_step_may_be_captured_after_its_report() -> None:
    """Training is over: ranks capture what they had only reported, and the end saves that."""
    driven = Late()
    driven.report(1, slot=0)
    driven.seal(0, 1, 0)
    driven.seal(1, 1, 0)
    driven.report(2, slot=-1)
    driven.seal(0, 2, 1)
    assert driven.published == [1]
    driven.seal(1, 2, 1)
    assert driven.published == [1, 2]
    assert driven.started == []


@pytest.mark.parametrize(
    ("cost_s", "step_s", "every"),
    [(0.0, 0.1, 1), (0.001, 0.1, 1), (0.00101, 0.1, 2), (0.01, 0.1, 10), (0.5, 0.1, 500), (0.1, 0.0, 10**10)],
)
def test_the_interval_is_the_smallest_within_one_percent(cost_s: float, step_s: float, every: int) -> None:
    """cost <= 1 % of the steps it is spread over; a step without length is no division by zero."""
    assert interval(cost_s, step_s) == every


def test_the_interval_is_told_ahead_and_kept_for_later_generations() -> None:
    """A capture costs 4 ms of 100 ms steps: every fourth step, from a step that no rank has reached yet."""
    driven = DrivenMachine(hot_every=None)
    driven.begin()
    assert [item.hot_every for item in driven.all(c.OpenGeneration)] == [PROBE_EVERY]
    spent_s, last = 0.0, 0
    for step in range(1, PROBE_EVERY * (NUM_PROBES + 3)):
        is_captured = step % PROBE_EVERY == 0
        spent_s += 0.1 + (0.003 if is_captured else 0.0) + (0.001 if step % PROBE_EVERY == 1 else 0.0)
        driven.step(step, slot=step // PROBE_EVERY % 3 if is_captured else -1, step_s=spent_s)
        if driven.all(c.SetHotInterval):
            last = step
            break
    (told,) = driven.all(c.SetHotInterval)
    assert told.every == 4 and told.from_step > last
    (chosen,) = driven.events(schema.HotIntervalChosen)
    assert chosen.every_steps == 4 and chosen.cost_s == pytest.approx(0.004) and chosen.step_s == pytest.approx(0.1)
    driven.raise_in(0, last + 1)
    driven.leave_generation(0, 1)
    assert [item.hot_every for item in driven.all(c.OpenGeneration)] == [PROBE_EVERY, 4]
