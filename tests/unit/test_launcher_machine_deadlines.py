"""`--deadlines auto`: observed, tightened, never too far; and what no deadline may do."""

from __future__ import annotations

import pytest

from nvrx_sre.core.errors import UserError
from nvrx_sre.core.limits import Deadlines, DeadlineTuning, Limits
from nvrx_sre.events import messages as wire
from nvrx_sre.events import schema
from nvrx_sre.events.schema import DeadlineChosen, FaultDetected, Phase
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.machine_probe import GRACE_S
from nvrx_sre.testing.driven import DrivenMachine

TUNING = DeadlineTuning(multiple=10.0, floor_s=5.0, num_samples=20)
LIMITS = Limits(tuning=TUNING)


def begun(*, tunes: bool = True, limits: Limits = LIMITS) -> DrivenMachine:
    """In the step loop of generation 1, with step 1 committed."""
    driven = DrivenMachine(num_standbys=0, limits=limits, tunes_deadlines=tunes)
    driven.begin()
    driven.step(1)
    return driven


def train(driven: DrivenMachine, num_steps: int, step_s: float, *, first: int = 2) -> int:
    """Steps of `step_s` on both ranks; the next step's number."""
    for step in range(first, first + num_steps):
        driven.wait(step_s)
        driven.step(step)
    return first + num_steps


def chosen(driven: DrivenMachine) -> list[tuple[Phase, float]]:
    """Deadlines that were told, in order."""
    return [(item.phase, item.limit_s) for item in driven.events(DeadlineChosen)]


def hung_after_s(driven: DrivenMachine) -> float:
    """How long no progress goes on before somebody says so, less the time for answers that do not come."""
    start_ns, num_before = driven.now_ns, len(driven.events(FaultDetected))
    driven.wait(100.0)
    fault = driven.records_of(FaultDetected)[num_before]
    return (fault.time_ns - driven.clock.wall_offset_ns - start_ns) / 1e9 - GRACE_S


def test_deadline_starts_as_configured() -> None:
    """Before there are enough rounds nothing changes."""
    driven = begun()
    train(driven, TUNING.num_samples - 2, 1.0)
    assert chosen(driven) == []
    assert hung_after_s(driven) == pytest.approx(LIMITS.deadlines.step_s)


def test_deadline_tightens_to_a_multiple_of_what_steps_take() -> None:
    """Ten times the second that a step takes; told once, and in force."""
    driven = begun()
    train(driven, 60, 1.0)
    assert chosen(driven) == [(Phase.STEP, pytest.approx(10.0))]
    (event,) = driven.events(DeadlineChosen)
    assert event.p99_s == pytest.approx(1.0)
    assert "10 x p99 of 20 rounds" in event.reason
    assert hung_after_s(driven) == pytest.approx(10.0)


def test_deadline_never_falls_below_its_floor() -> None:
    """Steps of ten milliseconds do not make a hang of a tenth of a second."""
    driven = begun()
    train(driven, 60, 0.01)
    assert chosen(driven) == [(Phase.STEP, TUNING.floor_s)]


def test_deadline_never_rises_above_the_configured_one() -> None:
    """Steps of twenty seconds would need 200 s; what was configured stays."""
    driven = begun()
    train(driven, 60, 20.0)
    assert chosen(driven) == []


def test_rare_slow_steps_count() -> None:
    """One step in twenty is slow, as with a periodic flush: it sets the deadline, not the median."""
    driven = begun()
    step = 2
    for _ in range(4):
        step = train(driven, 19, 0.5, first=step)
        step = train(driven, 1, 4.0, first=step)
    assert chosen(driven)[-1] == (Phase.STEP, pytest.approx(40.0))
    assert not driven.events(FaultDetected)


def test_slow_but_healthy_rank_is_never_judged() -> None:
    """A job that becomes five times slower is followed upward before its deadline is met."""
    driven = begun()
    step = train(driven, 40, 1.0)
    train(driven, 40, 5.0, first=step)
    assert not driven.events(FaultDetected)
    assert chosen(driven)[-1] == (Phase.STEP, pytest.approx(50.0))


def test_points_inside_a_step_are_what_is_observed() -> None:
    """A deadline bounds the time between two signs of progress, so that is what it is made of."""
    driven = begun()
    progress = 0
    for step in range(2, 60):
        for _ in range(4):
            driven.wait(0.75)
            progress += 1
            for rank in range(2):
                driven.say(
                    driven.child_of(rank),
                    wire.Alive(generation=1, step=step - 1, progress=progress, mono_ns=driven.now_ns),
                )
        driven.step(step)
    assert chosen(driven) == [(Phase.STEP, pytest.approx(7.5))]


def test_tightened_deadline_that_runs_out_is_given_up() -> None:
    """It may have been the mistake: the configured one is back, until enough was observed anew."""
    driven = begun()
    step = train(driven, 60, 1.0)
    driven.wait(10.0 + GRACE_S)
    assert len(driven.events(FaultDetected)) == 1
    assert chosen(driven)[-1] == (Phase.STEP, LIMITS.deadlines.step_s)
    driven.leave_generation(0, 1)
    driven.restore(step - 1, "hot")
    driven.step(step)
    driven.wait(30.0)
    assert len(driven.events(FaultDetected)) == 1


def test_launcher_that_stood_still_observes_nothing() -> None:
    """The minute in which it was stopped was no step's."""
    driven = begun()
    step = train(driven, 30, 1.0)
    driven.clock.advance(50.0)
    driven.feed(c.Stalled(seconds=50.0))
    train(driven, 30, 1.0, first=step)
    assert chosen(driven) == [(Phase.STEP, pytest.approx(10.0))]


def test_without_tuning_nothing_changes() -> None:
    """The default: deadlines as configured."""
    driven = begun(tunes=False)
    train(driven, 100, 1.0)
    assert chosen(driven) == []


def test_next_generation_begins_with_what_is_known() -> None:
    """A restart does not forget what steps take."""
    driven = begun()
    step = train(driven, 60, 1.0)
    driven.raise_in(1, step)
    driven.leave_generation(0, 1)
    driven.restore(step - 1, "hot")
    driven.step(step)
    assert hung_after_s(driven) == pytest.approx(10.0)


@pytest.mark.parametrize("wrong", [{"multiple": 1.0}, {"floor_s": 0.1}, {"num_samples": 3}])
def test_tuning_that_would_end_healthy_ranks_is_refused(wrong: dict[str, float]) -> None:
    """The message says what to use."""
    with pytest.raises(UserError, match="use a multiple of 2, a floor of 1 s and 10 samples at least"):
        DeadlineTuning(**wrong)  # type: ignore[arg-type]  # one field by name


def test_c29_silent_rank_in_a_declared_region_has_its_whole_deadline() -> None:
    """Native code that holds the interpreter's lock lets no heartbeat out: only the phase's own limit counts."""
    limits = Deadlines(step_s=5.0, save_s=60.0)
    driven = begun(tunes=False, limits=Limits(deadlines=limits))
    driven.enter(1, Phase.SAVE, 1)
    for second in range(62):
        assert bool(driven.events(FaultDetected)) == (second > 60)
        driven.wait(1.0)
        driven.say(driven.child_of(0), wire.Alive(generation=1, step=1, progress=0, mono_ns=driven.now_ns))
    (fault,) = driven.records_of(FaultDetected)
    assert fault.rank == 1, "the region is bounded, and the silent rank is the root"


def test_c29_stacks_come_before_anything_is_ended() -> None:
    """A hang is first looked at, then interrupted; only what does not answer is killed."""
    driven = begun(tunes=False)
    driven.forget()
    driven.wait(LIMITS.deadlines.step_s + GRACE_S)
    order = driven.order(c.RequestStacks, c.SendInterrupt, c.Kill)
    assert order[:2] == ["RequestStacks", "RequestStacks"]
    assert "Kill" not in order
    assert {item.is_traced for item in driven.all(c.SendInterrupt)} == {True}
    driven.forget()
    driven.wait(LIMITS.deadlines.interrupt_grace_s)
    assert {item.reason for item in driven.all(c.Kill)} == {"did not leave its generation in time"}
    assert driven.order(c.RequestStacks, c.Kill) == ["RequestStacks", "Kill"] * 2, "looked at again before it goes"


def test_c29_recovery_from_an_exception_asks_nobody_to_look() -> None:
    """Ranks say by themselves where the interrupt found them; reading the flight recorder would cost a millisecond."""
    driven = begun(tunes=False)
    driven.forget()
    driven.raise_in(1, 2)
    assert not driven.all(c.RequestStacks)
    assert {item.is_traced for item in driven.all(c.SendInterrupt)} == {False}


def test_stacks_are_asked_for_before_the_run_stops_for_good() -> None:
    """Nobody waits for a recovery then, and there will be no other chance."""
    driven = begun(tunes=False)
    driven.forget()
    driven.raise_in(1, 2, fault=schema.FaultClass.USER_ERROR)
    assert driven.order(c.RequestStacks, c.LeaveChild)[:2] == ["RequestStacks", "RequestStacks"]


def test_c28_each_phase_has_its_own_limit() -> None:
    """A step limit of 5 s ends no first step, restore or save of 15 s."""
    limits = Limits(deadlines=Deadlines(step_s=5.0))
    driven = DrivenMachine(num_standbys=0, limits=limits)
    for spawn in driven.all(c.Spawn):
        driven.start_child(spawn.child)
    for rank in range(2):
        driven.make_ready(driven.child_of(rank))
    for phase in (Phase.RENDEZVOUS, Phase.REBUILD, Phase.LOAD):
        for rank in range(2):
            driven.enter(rank, phase, 0)
        driven.wait(15.0)
    driven.restore()
    driven.wait(15.0)
    driven.step(1)
    for rank in range(2):
        driven.enter(rank, Phase.SAVE, 1)
    driven.wait(15.0)
    assert not driven.events(FaultDetected)
    driven.step(2)
    driven.wait(5.0 + GRACE_S)
    assert [item.phase for item in driven.events(FaultDetected)] == [schema.Phase.STEP]


@pytest.mark.parametrize("skew_s", [-300, 300])
def test_c51_a_skewed_stamp_neither_ends_a_healthy_rank_nor_hides_a_hang(skew_s: int) -> None:
    """Rank 1's clock is minutes off: age is when the launcher heard of progress, not what the sender wrote."""
    driven = begun(tunes=False, limits=Limits(deadlines=Deadlines(step_s=5.0)))

    def beat(rank: int, progress: int) -> None:
        stamp_ns = driven.now_ns + rank * skew_s * 10**9
        driven.say(driven.child_of(rank), wire.Alive(generation=1, step=1, progress=progress, mono_ns=stamp_ns))

    for second in range(1, 31):
        driven.wait(1.0)
        beat(0, second)
        beat(1, second)
    assert driven.events(FaultDetected) == [], "thirty seconds of progress in small parts"
    for second in range(31, 34):
        driven.wait(1.0)
        beat(0, second)
        beat(1, 30)
    assert driven.events(FaultDetected) == []
    driven.wait(2.5)
    beat(0, 34)
    (fault,) = driven.records_of(FaultDetected)
    assert fault.rank == 1, "it beats, but does not progress"
