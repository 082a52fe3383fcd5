"""Seals that come late, and the measured interval of hot captures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nvrx_sre.events import schema
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.machine_interval import (
    EARLY_EVERY_MAX,
    NUM_EARLY,
    NUM_PROBES,
    NUM_WARM_UP_STEPS,
    NUM_WATCHED,
    PROBE_EVERY,
    interval,
)
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


def test_what_one_rank_captured_after_its_report_is_freed_by_the_next_step() -> None:
    """Rank 0 alone evaluates, and captures step 2 before: it would hold that slot for ever."""
    driven = Late()
    driven.report(1, slot=0)
    driven.seal(0, 1, 0)
    driven.seal(1, 1, 0)
    driven.report(2, slot=-1)
    driven.seal(0, 2, 1)
    assert driven.all(c.StrandSlots) == []
    driven.report(3, slot=-1)
    assert [item.step for item in driven.all(c.StrandSlots)] == [3]
    assert driven.published == [1]


@pytest.mark.parametrize(
    ("cost_s", "step_s", "every"),
    [(0.0, 0.1, 1), (0.001, 0.1, 1), (0.00101, 0.1, 2), (0.01, 0.1, 10), (0.5, 0.1, 500), (0.1, 0.0, 10**10)],
)
def test_the_interval_is_the_smallest_within_one_percent(cost_s: float, step_s: float, every: int) -> None:
    """cost <= 1 % of the steps it is spread over; a step without length is no division by zero."""
    assert interval(cost_s, step_s) == every


class Paced:
    """Two ranks whose captures cost what the test says, at the interval that the launcher told them."""

    def __init__(self, *, step_s: float = 0.1, cost_s: float = 0.0) -> None:
        self.driven = DrivenMachine(hot_every=None)
        self.driven.begin()
        self.step_s, self.cost_s = step_s, cost_s
        self.spent_s = 0.0
        self.step = 0
        self._plan = (PROBE_EVERY, 0, PROBE_EVERY)
        self._is_after = False

    def run(self, num_steps: int, jitter: Callable[[int], float] = lambda step: 0.0) -> None:
        """Steps; three quarters of a capture's cost fall on its own step, the rest on the next. `jitter` on any."""
        for _ in range(num_steps):
            self.step += 1
            before, from_step, after = self._plan
            is_captured = self.step % (after if self.step >= from_step else before) == 0
            cost_s = self.cost_s * (0.75 * is_captured + 0.25 * self._is_after)
            self.spent_s += self.step_s + cost_s + jitter(self.step)
            self._is_after = is_captured
            num_told = len(self.driven.all(c.SetHotInterval))
            self.driven.step(self.step, slot=self.step % 3 if is_captured else -1, step_s=self.spent_s)
            for told in self.driven.all(c.SetHotInterval)[num_told:]:
                assert told.from_step > self.step
                self._plan = (self._plan[2], told.from_step, told.every)

    @property
    def chosen(self) -> list[int]:
        """Every interval that was recorded, in order."""
        return [event.every_steps for event in self.driven.events(schema.HotIntervalChosen)]


WARM = NUM_WARM_UP_STEPS + PROBE_EVERY
EARLY = WARM + PROBE_EVERY * NUM_EARLY
"""Steps by which the careful choice is made."""
MEASURED = WARM + PROBE_EVERY * (NUM_PROBES + 1)
"""Steps by which the measurement is done if the careful choice changes nothing."""


def test_the_interval_is_told_ahead_and_kept_for_later_generations() -> None:
    """A capture costs 2 ms of 100 ms steps: every second step, from a step that no rank has reached yet."""
    ranks = Paced(cost_s=0.002)
    assert [item.hot_every for item in ranks.driven.all(c.OpenGeneration)] == [PROBE_EVERY]
    ranks.run(MEASURED)
    assert ranks.chosen == [4, 2]
    chosen = ranks.driven.events(schema.HotIntervalChosen)[-1]
    assert chosen.cost_s == pytest.approx(0.002) and chosen.step_s == pytest.approx(0.1)
    assert [told.every for told in ranks.driven.all(c.SetHotInterval)] == [2]
    ranks.driven.raise_in(0, ranks.step + 1)
    ranks.driven.leave_generation(0, 1)
    assert [item.hot_every for item in ranks.driven.all(c.OpenGeneration)] == [PROBE_EVERY, 2]


@pytest.mark.parametrize(("cost_s", "early"), [(0.0, 4), (0.0035, 4), (0.02, 20), (0.2, EARLY_EVERY_MAX)])
def test_a_short_run_gets_a_careful_choice(cost_s: float, early: int) -> None:
    """Some 25 steps are enough to leave what is dear; never more often than it was probed, never out of sight."""
    ranks = Paced(cost_s=cost_s)
    ranks.run(EARLY)
    assert ranks.chosen == [early]


def test_the_careful_choice_is_measured_on_and_corrected() -> None:
    """Two of four captures met a disturbance: 20 times too dear at first, right after enough of them."""
    ranks = Paced(cost_s=0.001)
    ranks.run(EARLY, lambda step: 0.02 if step in (12, 16) else 0.0)
    assert ranks.chosen == [21]
    ranks.run(21 * NUM_PROBES + 40)
    assert ranks.chosen == [21, 1]


def test_outliers_move_neither_choice_nor_step() -> None:
    """A tenth of all steps takes three times as long, captured or not: the medians do not see it."""
    ranks = Paced(cost_s=0.005)
    ranks.run(20 * EARLY_EVERY_MAX, lambda step: 0.2 if step % 10 == 3 else 0.0)
    assert ranks.chosen[-1] == 5
    assert not any("again" in event.reason for event in ranks.driven.events(schema.HotIntervalChosen))


@pytest.mark.parametrize(("step_s", "cost_s", "every"), [(0.25, 0.01, 4), (0.04, 0.01, 25)])
def test_it_is_measured_again_when_steps_have_changed(step_s: float, cost_s: float, every: int) -> None:
    """Other data, another batch: a step takes 2.5 times as long, or less than half, and the share follows."""
    ranks = Paced(cost_s=0.01)
    ranks.run(10 * NUM_PROBES + MEASURED)
    assert ranks.chosen == [10, 10]
    ranks.step_s, ranks.cost_s = step_s, cost_s
    ranks.run(NUM_WATCHED + 40 * NUM_PROBES)
    reasons = [event.reason for event in ranks.driven.events(schema.HotIntervalChosen)]
    assert [("again" in reason) for reason in reasons] == [False, False, True, False, False]
    assert ranks.chosen[-1] == every


def test_another_interval_must_be_another_by_much() -> None:
    """Steps and captures both take 2.5 times as long, captures a little more: what was measured stays."""
    ranks = Paced(cost_s=0.01)
    ranks.run(10 * NUM_PROBES + MEASURED)
    ranks.step_s, ranks.cost_s = 0.25, 0.03
    ranks.run(NUM_WATCHED + 40 * NUM_PROBES)
    assert len(ranks.chosen) == 5 and ranks.chosen[-1] == 10


def test_skewed_step_times_are_not_taken_for_a_cost() -> None:
    """Four of ten steps take half as long again, whatever is captured: two together do so more often than one."""
    ranks = Paced()
    ranks.run(MEASURED + 4 * PROBE_EVERY, lambda step: 0.05 if (step * 7 + step // 3) % 10 < 4 else 0.0)
    assert ranks.chosen[-1] == 1


def test_ranks_that_capture_nothing_have_no_cost_to_choose_by() -> None:
    """As where the state fits no slot."""
    ranks = Paced()
    for step in range(1, 200):
        ranks.driven.step(step, slot=-1, step_s=0.1 * step)
    assert not ranks.chosen
