"""The ledger against hand-written journals with known answers."""

from __future__ import annotations

from collections.abc import ValuesView
from dataclasses import replace
from typing import Any

import pytest

from nvrx_sre.events.schema import (
    BudgetReset,
    FaultClass,
    LedgerState,
    Phase,
    PreemptionReceived,
    Record,
    RestoredFrom,
)
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.goodput.ratios import GoodputKind, StepReference
from tests.stories import (
    STORIES,
    Story,
    begin,
    crash_loop_story,
    exception_story,
    fallback_story,
    lost_launcher_story,
    ns,
)


def fold(records: list[Record]) -> Ledger:
    """A ledger that has seen `records`."""
    ledger = Ledger()
    for record in records:
        ledger.apply(record)
    return ledger


class Counted(dict[int, Any]):
    """Counts how often all ranks were looked at."""

    num_looks = 0

    def values(self) -> ValuesView[Any]:
        """As any dictionary's."""
        self.num_looks += 1
        return super().values()


def booked(story: Story) -> dict[str, float]:
    """Booked seconds without the states that hold none."""
    return {state.value: spent for state, spent in fold(story.records).booked().items() if spent}


def test_exception_books_every_part_of_the_recovery() -> None:
    """Init, steps split by phase, the cut step up to the evidence, detection, teardown, the next generation."""
    assert booked(exception_story()) == pytest.approx(
        {
            "init": 2.0,
            "rendezvous": 0.2,
            "rebuild": 0.2,
            "load": 0.4,
            "data": 1.0,
            "checkpoint_block": 0.5 + 0.4,
            "new": 8.5 + 1.0,
            "lost_step": 0.5,
            "detect": 0.1,
            "teardown": 0.2,
        }
    )


@pytest.mark.parametrize("step_s", [0.5, 1.0, 2.0])
def test_effective_goodput_counts_steps_at_the_reference_speed(step_s: float) -> None:
    """Whatever ten steps take beside twenty of the median's second: slow ones count less, quick ones more."""
    story, begin_s = begin()
    story.steps(begin_s, begin_s + 1, 1, 1)  # of a generation that warms up: no reference
    story.steps(begin_s + 1, begin_s + 20, 2, 20)
    end_s = begin_s + 20 + 10 * step_s
    story.steps(begin_s + 20, end_s, 21, 30)
    ledger = fold(story.records)
    ratio = ledger.goodput(ns(end_s))
    assert ratio[GoodputKind.TRAINING] == pytest.approx((20 + 10 * step_s) / end_s)
    assert ratio[GoodputKind.EFFECTIVE] == pytest.approx(30 / end_s)


def test_fallback_books_redone_steps_apart_and_the_cold_start_as_init() -> None:
    """Steps at or below H are `redo`; the replacement's start-up is not the survivors' rendezvous."""
    answer = booked(fallback_story())
    assert answer["redo"] == pytest.approx(15.0)
    assert answer["new"] == pytest.approx(25.0 + 1.0)
    assert answer["init"] == pytest.approx(2.0 + 2.3)
    assert answer["lost_step"] == pytest.approx(0.1)
    assert answer["detect"] == pytest.approx(0.1)


def test_a_lost_launcher_leaves_a_cut_step_and_down_time() -> None:
    """From the last commit to the last record the step is lost, from there to the next launcher the job is down."""
    answer = booked(lost_launcher_story())
    assert answer["lost_step"] == pytest.approx(0.5)
    assert answer["down"] == pytest.approx(100.0)
    assert answer["init"] == pytest.approx(4.0)


def test_a_halted_run_is_halted_until_the_next_launcher_also_after_a_budget_reset() -> None:
    """An operator's reset has an epoch of its own, but nothing runs in it."""
    story = crash_loop_story()
    stopped_s = (story.records[-1].time_ns - ns(0)) / 1e9
    story.epoch += 1
    story.add(stopped_s + 50.0, BudgetReset(reason="fixed"))
    story.start(stopped_s + 60.0)
    assert booked(story)["halted"] == pytest.approx(60.0)
    assert fold(story.records).current_state() is LedgerState.INIT


def test_a_preempted_run_is_suspended_and_its_drain_is_teardown() -> None:
    """The step under way is lost at the notice; what follows until the exit drains; then the job waits."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.add(13.0, PreemptionReceived(signal=15, by_person=False))
    story.finish(15.0, exit_code=143)
    story.start(1015.0)
    answer = booked(story)
    assert answer["lost_step"] == pytest.approx(0.6)
    assert answer["teardown"] == pytest.approx(2.0)
    assert answer["suspended"] == pytest.approx(1000.0)


def test_a_hang_is_detected_from_the_last_progress_on() -> None:
    """The wait for the deadline is detection, not work."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 72.5, FaultClass.HANG, None)
    answer = booked(story)
    assert answer["detect"] == pytest.approx(60.0)
    assert answer["lost_step"] == pytest.approx(0.1)


def test_a_fault_while_loading_is_load_time_not_detection() -> None:
    """Load outranks detection: the other ranks are still loading."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.EXCEPTION, 1)
    story.torn_down(12.7)
    story.generation += 1
    story.phase(12.7, Phase.LOAD)
    story.fault(13.7, 13.9, FaultClass.EXCEPTION, 1)
    assert booked(story)["load"] == pytest.approx(0.2 + 1.2)
    assert booked(story)["detect"] == pytest.approx(0.1)


def test_the_job_is_in_the_highest_state_of_any_rank() -> None:
    """A fast rank that already steps does not hide a slow one that still loads."""
    story, _ = begin()
    story.fault(2.5, 2.6, FaultClass.EXCEPTION, 0)
    story.torn_down(2.6)
    story.phase(2.6, Phase.LOAD)
    story.phase(3.0, Phase.FIRST_STEP, (0,))
    story.phase(5.0, Phase.FIRST_STEP, (1,))
    assert booked(story)["load"] == pytest.approx(0.2 + 2.4)


def test_backoff_outranks_the_teardown_under_it() -> None:
    """While the policy waits the job is in back-off, whatever else happens."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.5, 12.6, FaultClass.COLLECTIVE_ERROR, None)
    story.records[-2] = replace(
        story.records[-2],
        event=replace(story.records[-2].event, backoff_s=5.0),  # type: ignore[type-var]  # it is a RestartDecided
    )
    story.torn_down(12.8)
    assert fold(story.records).current_state() is LedgerState.BACKOFF
    story.form(18.6, 10, RestoredFrom.HOT)
    answer = booked(story)
    assert answer["backoff"] == pytest.approx(5.0)
    assert answer["rendezvous"] == pytest.approx(0.1 + 1.0 + 0.1)


@pytest.mark.parametrize("name", sorted(STORIES))
def test_states_sum_to_wall_time_and_other_stays_small(name: str) -> None:
    """W = sum of the states + open, exactly; `other` below one percent."""
    story = STORIES[name]()
    ledger = fold(story.records)
    now_ns = story.records[-1].time_ns
    spent = ledger.booked()
    assert sum(spent.values()) + ledger.open_s(now_ns) == pytest.approx(ledger.wall_s(now_ns), abs=1e-6)
    assert spent[LedgerState.OTHER] < 0.01 * ledger.wall_s(now_ns)


def test_wall_time_of_a_finished_run_stands_still() -> None:
    """Nothing is owed while a finished run's endpoint lingers."""
    story = exception_story()
    ledger = fold(story.records)
    assert ledger.wall_s(ns(1000.0)) == pytest.approx(15.0)
    assert ledger.open_s(ns(1000.0)) == 0.0


def test_open_time_grows_during_a_hang() -> None:
    """The denominator does not wait for the next record."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    ledger = fold(story.records)
    assert ledger.open_s(ns(42.4)) == pytest.approx(30.0)
    assert ledger.wall_s(ns(42.4)) == pytest.approx(42.4)
    assert ledger.goodput(ns(42.4))[GoodputKind.TRAINING] == pytest.approx(10.0 / 42.4)


def test_goodput_ratios_follow_their_definitions() -> None:
    """Training, durable, infrastructure and checkpoint efficiency of the fallback run, by hand."""
    story = fallback_story()
    now_ns = story.records[-1].time_ns
    ledger = fold(story.records)
    spent, ratio = ledger.booked(), ledger.goodput(now_ns)
    assert ratio[GoodputKind.TRAINING] == pytest.approx(26.0 / 47.0)
    assert ratio[GoodputKind.DURABLE] == pytest.approx(10.0 / 47.0), "20 was rejected, 10 is what is left"
    lost = sum(spent[state] for state in (LedgerState.DETECT, LedgerState.TEARDOWN, LedgerState.RENDEZVOUS))
    lost += sum(spent[state] for state in (LedgerState.REBUILD, LedgerState.LOAD, LedgerState.OTHER))
    assert ratio[GoodputKind.INFRASTRUCTURE] == pytest.approx(1 - lost / 47.0)
    stepping = spent[LedgerState.NEW] + spent[LedgerState.REDO]
    assert ratio[GoodputKind.CHECKPOINT_EFFICIENCY] == pytest.approx(
        stepping / (stepping + spent[LedgerState.CHECKPOINT_BLOCK])
    )


def test_token_reference_leaves_the_warm_up_out() -> None:
    """The first aggregate of a generation is no reference; the median counts steps, not aggregates."""
    reference = StepReference()
    reference.generation_formed()
    reference.add(100.0, 10, 1)
    assert reference.seconds_per_token is None
    reference.add(10.0, 10, 10)
    reference.add(30.0, 10, 1)
    assert reference.seconds_per_token == pytest.approx(1.0)


def test_a_phase_of_one_rank_costs_no_look_at_the_others() -> None:
    """With 16,384 ranks a look at all of them for each phase of each cost a minute in every recovery."""
    story = Story()
    story.start(0.0, world=64)
    story.form(1.0, 0, RestoredFrom.FRESH, world=64)
    ledger = fold(story.records)
    ledger._activities = counted = Counted(ledger._activities)
    num_before = len(story.records)
    for at_s, phase in ((2.0, Phase.REBUILD), (3.0, Phase.LOAD), (4.0, Phase.FIRST_STEP)):
        story.phase(at_s, phase, tuple(range(64)))
    for record in story.records[num_before:]:
        ledger.apply(record)
    assert len(counted) == 64 and counted.num_looks == 1
    assert ledger.booked()[LedgerState.LOAD] == pytest.approx(0.2 + 1.0), "until the last rank was through"
