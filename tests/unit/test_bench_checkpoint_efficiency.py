"""Windows with saves against the steps beside them, on runs made by hand."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from nvrx_sre.bench import checkpoint_efficiency as efficiency
from nvrx_sre.bench.checkpoint_efficiency import CONTROL, RunConfig, WindowPlan
from nvrx_sre.bench.checkpoint_reading import Save, Stamp
from nvrx_sre.core.errors import InternalError

S = 1_000_000_000
CONFIG = RunConfig(saturations=(0.1, 0.98, 5.8), num_rounds=3, saves_in_a_row=2, write_s=10.0, step_s=0.5)


class Loop:
    """A run's stamps, made step by step."""

    def __init__(self) -> None:
        self.stamps: list[Stamp] = []
        self.saves: list[Save] = []
        self._now_ns = 0
        self._step = 0

    def pause(self, *durations_s: float) -> None:
        """Steps alone."""
        for duration_s in durations_s:
            self._add("pause", duration_s, due=0)

    def window(self, plan: WindowPlan, durations_s: Sequence[float], *writes_s: tuple[float, float]) -> None:
        """Committed steps; saves begin so many seconds after the window and take so long, a tenth of it to verify."""
        begin_ns = self._now_ns
        for number, duration_s in enumerate(durations_s, 1):
            self._add("step", duration_s, due=int(number in plan.due))
        for begin_s, write_s in writes_s:
            at_ns = begin_ns + round(begin_s * S)
            self.saves.append(
                Save(
                    step=self._step,
                    captured_ns=at_ns,
                    started_ns=at_ns,
                    committed_ns=at_ns + round(0.9 * write_s * S),
                    ended_ns=at_ns + round(write_s * S),
                )
            )

    def read(self, *plans: WindowPlan) -> list[efficiency.Window]:
        """Figures of all windows but the first."""
        return efficiency.read_windows(self.stamps, plans, self.saves, [])

    def _add(self, kind: str, duration_s: float, due: int) -> None:
        self._step += kind == "step"
        start_ns, self._now_ns = self._now_ns, self._now_ns + round(duration_s * S)
        self.stamps.append(Stamp(kind=kind, step=self._step, start_ns=start_ns, end_ns=self._now_ns, due=due))


FIRST = WindowPlan(num_steps=1, due=(1,))


def loop() -> Loop:
    """A run up to the pause behind its first save."""
    made = Loop()
    made.pause(1.0)
    made.window(FIRST, [9.0], (0.5, 1.0))
    return made


def test_a_machine_that_gets_slower_costs_no_efficiency() -> None:
    """With nothing saved the figure is 1 although every step is slower than the one before."""
    plan = WindowPlan(num_steps=10)
    made = loop()
    durations_s = [1.0 + 0.02 * number for number in range(50)]
    made.pause(*durations_s[:10])
    made.window(plan, durations_s[10:20])
    made.pause(*durations_s[20:30])
    made.window(plan, durations_s[30:40])
    made.pause(*durations_s[40:])
    for window in made.read(FIRST, plan, plan):
        assert window.efficiency == pytest.approx(1.0)
        assert (window.num_steps, window.freshness, window.num_possible) == (10, (), 0)


def test_skewed_steps_cost_no_efficiency() -> None:
    """One step of five is three times as long, in the window and beside it; by their median it would be 0.71."""
    plan = WindowPlan(num_steps=50)
    made = loop()
    for number in range(2):
        made.pause(*[1.0, 1.0, 3.0, 1.0, 1.0] * 5)
        if number == 0:
            made.window(plan, [1.0, 1.0, 3.0, 1.0, 1.0] * 10)
    assert made.read(FIRST, plan)[0].efficiency == pytest.approx(1.0)


def test_the_whole_cost_of_a_save_is_in_its_window() -> None:
    """Steps beside the end of a write count, and those just after it; the pause that is left is the base."""
    plan = WindowPlan(num_steps=5, due=(1,), saturation=1.0, interval=5)
    made = loop()
    made.pause(*[1.0] * 10)
    made.window(plan, [1.5] * 5, (1.5, 8.0))  # ends at 9.5, settled at 11.5
    made.pause(*[1.5] * 3, *[1.0] * 6)
    (window,) = made.read(FIRST, plan)
    assert window.num_steps == 8 and window.base_s == pytest.approx(1.0)
    assert window.efficiency == pytest.approx(8 / 12)
    assert window.write_s == pytest.approx(8.0)


def test_saves_far_apart_are_told_for_their_interval() -> None:
    """A save that costs 2 s each 100 s costs two percent, however short the window."""
    plan = WindowPlan(num_steps=10, due=(1,), saturation=0.1, interval=100)
    made = loop()
    made.pause(*[1.0] * 5)
    made.window(plan, [1.2] * 10, (1.2, 8.0))
    made.pause(*[1.0] * 8)
    (window,) = made.read(FIRST, plan)
    assert window.efficiency == pytest.approx(100 / 102)
    assert window.freshness == (pytest.approx(0.9),)
    assert (window.num_commits, window.num_possible) == (1, 1)


def test_freshness_and_commits_of_saves_in_a_row() -> None:
    """The second one is as old as the interval and both waits say; a third one was possible and did not come."""
    plan = WindowPlan(num_steps=30, due=(1, 5, 9, 13, 17, 21), saturation=1.0, interval=4)
    made = loop()
    made.pause(*[1.0] * 5)
    made.window(plan, [1.0] * 30, (1.0, 10.0), (16.0, 10.0))
    made.pause(*[1.0] * 8)
    (window,) = made.read(FIRST, plan)
    assert window.freshness == (pytest.approx(0.9), pytest.approx((25.0 - 1.0 - 4.0) / 10.0))
    assert (window.num_commits, window.num_possible) == (2, 3)


def test_a_window_without_a_commit_is_told_by_the_age_at_its_end() -> None:
    """A write that fails is no success, and no figure is left out for it; none begun at all is an error."""
    plan = WindowPlan(num_steps=6, due=(1,), saturation=1.0, interval=6)
    made = loop()
    made.pause(*[1.0] * 5)
    made.window(plan, [1.0] * 6, (1.0, 5.0))
    made.pause(*[1.0] * 8)
    made.saves[-1] = dataclasses.replace(made.saves[-1], committed_ns=0)
    (window,) = made.read(FIRST, plan)
    assert (window.num_commits, window.num_possible) == (0, 1)
    assert window.freshness == (pytest.approx((8.0 - 1.0) / 5.0),)
    made.saves.pop()
    with pytest.raises(InternalError, match="no save was begun"):
        made.read(FIRST, plan)


def test_the_save_at_the_end_of_a_run_takes_no_step_from_the_last_pause() -> None:
    """It is of the last step, whose boundary was long before."""
    plan = WindowPlan(num_steps=4)
    made = loop()
    made.pause(*[1.0] * 5)
    made.window(plan, [1.0] * 4)
    made.pause(*[1.0] * 5)
    end_ns, last_ns = made.stamps[-1].end_ns, made.stamps[-6].end_ns
    made.saves.append(Save(step=5, captured_ns=last_ns, started_ns=end_ns + S, ended_ns=end_ns + 9 * S))
    assert made.read(FIRST, plan)[0].efficiency == pytest.approx(1.0)


def test_steps_beside_a_start_are_no_base() -> None:
    """One side is enough; without any the window says nothing."""
    plan = WindowPlan(num_steps=4)
    made = loop()
    made.pause(*[2.0] * 5)
    made.window(plan, [1.0] * 4)
    made.pause(*[1.0] * 5)
    slow = (0, made.stamps[6].end_ns)
    (window,) = efficiency.read_windows(made.stamps, [FIRST, plan], made.saves, [slow])
    assert window.efficiency == pytest.approx(1.0)
    with pytest.raises(InternalError, match="stood alone"):
        efficiency.read_windows(made.stamps, [FIRST, plan], made.saves, [(0, made.stamps[-1].end_ns)])
    with pytest.raises(InternalError, match="blocks of steps"):
        efficiency.read_windows(made.stamps, [FIRST, plan, plan], made.saves, [])


def test_a_run_has_its_control_and_takes_six_minutes() -> None:
    """Each saturation in turn, so that none has a part of the run for itself; saves as far apart as was asked for."""
    plans = efficiency.plan_run(CONFIG)
    assert [plan.saturation for plan in plans] == [CONTROL, *(CONTROL, 0.1, 0.98, 5.8) * 3]
    first, control, rare, even, dense = plans[:5]
    assert len(first.due) == 1 and first.num_steps * 0.5 > 10 and not control.due
    for plan, num_due in ((rare, 1), (even, 2), (dense, 5)):
        assert 10 / (plan.interval * 0.5) == pytest.approx(plan.saturation, rel=0.2)  # whole steps
        assert len(plan.due) == num_due and plan.due[0] == 1
    assert dense.due[-1] * 0.5 < 10, "the last save is asked for while the first one is being written"
    assert sum(plan.num_steps for plan in plans) * 0.5 + (len(plans) + 1) * 8 < 360


def test_what_was_possible_is_what_a_writer_without_pauses_would_have_done() -> None:
    """Requests while it writes are one save, at its end."""
    cases = [([], 0), ([1], 1), ([1, 11], 2), ([1, 3, 5, 7], 2), ([1, 3, 12], 3), ([1, 30, 60], 3)]
    for due, expected in cases:
        assert efficiency.num_possible([each * S for each in due], 10.0) == expected, due
    numbers = random.Random(1)
    for _ in range(50):
        due = sorted(numbers.sample(range(1, 1000), 20))
        count = efficiency.num_possible([each * S for each in due], 10.0)
        assert 1 <= count <= 2 + (due[-1] - due[0]) / 10.0


def test_the_note_says_what_the_figures_rest_on() -> None:
    """Spread of windows and bases, and of a step."""
    made = efficiency.Window(
        efficiency=0.98,
        num_steps=25,
        interval=10,
        base_s=0.5,
        step_sd_s=0.02,
        write_s=12.5,
        freshness=(),
        num_commits=2,
        num_possible=2,
    )
    other = dataclasses.replace(made, efficiency=0.99, num_steps=26, base_s=0.52)
    assert efficiency.describe([made, other]) == (
        "0.980 to 0.990 in 2 windows of 25 to 26 steps, base 500 to 520 ms, deviation of a step alone 20 ms, "
        "a save each 10, write 12.50 s, write / compute 2.45"
    )
    assert "a save" not in efficiency.describe([dataclasses.replace(made, interval=0)])
