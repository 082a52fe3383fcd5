"""Budgets: which cap trips when, what refills it, and what a full one does not stop."""

from __future__ import annotations

import dataclasses

import pytest

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events.schema import Action, Cap, FaultClass, Layer
from nvrx_sre.policy.ladder import Decision
from nvrx_sre.policy.membership import members
from nvrx_sre.policy.rehearsal import Rehearsal, World

FOUR_DOWN_TO_TWO = World(num_ranks=4, min_world_size=2)
FIXED = World(num_ranks=2, min_world_size=2)


def started(world: World = FIXED, **caps: float) -> Rehearsal:
    """A run that has trained and saved 100 steps."""
    return Rehearsal(dataclasses.replace(CapLimits(), **caps), world)  # type: ignore[arg-type]  # caps by name


def faults(
    run: Rehearsal, kind: FaultClass, times: int, *, after_s: float = 1.0, rank: int | None = 0
) -> list[Decision]:
    """The same fault again and again, `after_s` after each restart."""
    decisions = []
    for _ in range(times):
        run.wait(after_s)
        decisions.append(run.fault(kind, rank=rank))
    return decisions


def test_world_is_made_of_whole_units_in_order() -> None:
    """Excluded devices are left out, what fills no unit stays idle, the order never changes."""
    devices = ("a", "b", "c", "d", "e", "f")
    assert members(devices, set(), 2) == devices
    assert members(devices, {"b"}, 1) == ("a", "c", "d", "e", "f")
    assert members(devices, {"b"}, 2) == ("a", "c", "d", "e")
    assert members(devices, {"b", "a"}, 2) == ("c", "d", "e", "f")
    assert members(devices, {"a", "b", "c"}, 4) == ()


@pytest.mark.parametrize(
    ("kind", "is_excluded"),
    [
        (FaultClass.KILLED, True),
        (FaultClass.HANG, True),
        (FaultClass.CUDA_ERROR, True),
        (FaultClass.STARTUP, True),
        (FaultClass.EXCEPTION, False),
        (FaultClass.OOM_KILL, False),
        (FaultClass.NONFINITE, False),
        (FaultClass.NODE_LOST, False),
        (FaultClass.SHM_EXHAUSTED, False),
    ],
)
def test_only_what_a_bad_device_does_excludes_it(kind: FaultClass, is_excluded: bool) -> None:
    """A program's own fault follows it to other hardware; a lost node is no device of it."""
    run = started(FOUR_DOWN_TO_TWO)
    third = faults(run, kind, 3)[-1]
    assert third.is_excluding is is_excluded
    assert run.history.excluded == (["node/0"] if is_excluded else [])


def test_unknown_root_excludes_nothing() -> None:
    """Nobody is provably guilty, nobody has to go."""
    run = started(FOUR_DOWN_TO_TWO)
    assert not any(item.is_excluding for item in faults(run, FaultClass.HANG, 3, rank=None))


def test_exclusion_comes_late_as_well() -> None:
    """Hangs of ten minutes each are past the transient grace: without the device is still better than not at all."""
    run = started(FOUR_DOWN_TO_TWO)
    *_, third = faults(run, FaultClass.HANG, 3, after_s=600.0)
    assert (third.action, third.is_excluding, third.layer) == (Action.RESTART, True, Layer.WORKER)


def test_exclusion_refills_nothing() -> None:
    """The attempt without the device is one more, not three more."""
    run = started(FOUR_DOWN_TO_TWO)
    faults(run, FaultClass.HANG, 3, after_s=600.0)
    (fourth,) = faults(run, FaultClass.HANG, 1, after_s=600.0)
    assert (fourth.action, fourth.exit_code, fourth.restarts_since_progress) == (Action.STOP, 93, 4)


def test_exclusions_end_at_the_least_world() -> None:
    """With progress between its faults each bad device costs one exclusion, until no more can go."""
    run = started(FOUR_DOWN_TO_TWO)
    for expected in (["node/0"], ["node/0", "node/1"], ["node/0", "node/1"]):
        faults(run, FaultClass.KILLED, 3)
        assert run.history.excluded == expected
        run.progress()
    assert run.devices == ("node/2", "node/3")


def test_faults_of_a_device_with_progress_between_them_do_not_add_up() -> None:
    """A device whose faults cost nothing is kept: the world would be smaller for ever."""
    run = started(FOUR_DOWN_TO_TWO)
    for _ in range(10):
        run.fault(FaultClass.KILLED)
        run.progress()
    assert run.history.excluded == []


def test_resume_takes_excluded_devices_in_again() -> None:
    """The operator has looked at them."""
    run = started(FOUR_DOWN_TO_TWO)
    faults(run, FaultClass.KILLED, 3)
    run.reset()
    assert len(run.devices) == 4


def test_c39_preemptions_have_a_budget_of_their_own() -> None:
    """Six recovered faults, then two without progress, then five preemptions: neither budget touches the other."""
    run = started()
    for _ in range(6):
        assert run.fault(FaultClass.EXCEPTION).action is Action.RESTART
        run.progress(50)
    faults(run, FaultClass.EXCEPTION, 2)
    preempted = faults(run, FaultClass.PREEMPTION, 5)
    assert {item.exit_code for item in preempted} == {ExitCode.PREEMPTED}
    last = preempted[-1]
    assert last.budget_used[Cap.PREEMPTION] == 5 < last.budget_limit[Cap.PREEMPTION]
    third = run.fault(FaultClass.EXCEPTION)
    assert (third.restarts_since_progress, third.exit_code) == (3, 93)


def test_preemptions_without_a_newer_checkpoint_end_at_their_cap() -> None:
    """A run that is taken away twenty times and never saves anything in between is told to stop."""
    run = started()
    decisions = faults(run, FaultClass.PREEMPTION, 20)
    assert [item.exit_code for item in decisions] == [143] * 19 + [93]
    assert decisions[-1].cap is Cap.PREEMPTION


def test_a_newer_checkpoint_refills_the_budget_of_preemptions() -> None:
    """A hundred preemptions with a save after each are nobody's worry; what is only in memory is none."""
    run = started()
    for _ in range(100):
        run.progress()
        assert run.fault(FaultClass.PREEMPTION).exit_code == 143
    run.progress(is_saved=False)
    assert run.fault(FaultClass.PREEMPTION).budget_used[Cap.PREEMPTION] == 2


def test_restarts_without_a_decision_on_disk_are_allowed_three_times() -> None:
    """The fourth would be the fourth that a lost launcher forgets: 75, at once, since another node may have a disk."""
    run = started()
    decisions = []
    for _ in range(4):
        decisions.append(run.fault(FaultClass.KILLED))
        run.lose_decision()
    assert [item.action for item in decisions] == [Action.RESTART] * 3 + [Action.STOP]
    assert (decisions[-1].cap, decisions[-1].exit_code) == (Cap.STORAGE, 75)


def test_progress_forgives_decisions_that_were_not_on_disk() -> None:
    """A slow disk never stops a run that trains."""
    run = started()
    for _ in range(10):
        assert run.fault(FaultClass.KILLED).action is Action.RESTART
        run.lose_decision()
        run.progress()


def test_storage_faults_end_retryable() -> None:
    """Another node may reach the storage: 75, not 93, whatever other caps are full."""
    decisions = faults(started(), FaultClass.STORAGE, 3, after_s=200.0)
    assert (decisions[-1].cap, decisions[-1].exit_code) == (Cap.STORAGE, 75)


def test_lifetime_cap_is_off_by_default_and_counts_every_fault() -> None:
    """It is the one cap that a run with progress can meet, so that nobody has it who did not ask."""
    healthy, capped = started(), started(lifetime_faults=5)
    for number in range(50):
        decision = healthy.fault(FaultClass.KILLED)
        assert decision.action is Action.RESTART, f"fault {number}"
        assert Cap.LIFETIME not in decision.budget_limit
        healthy.progress()
    decisions = []
    for _ in range(5):
        decisions.append(capped.fault(FaultClass.KILLED))
        capped.progress()
    assert [item.action for item in decisions] == [Action.RESTART] * 4 + [Action.STOP]
    assert (decisions[-1].cap, decisions[-1].exit_code) == (Cap.LIFETIME, 93)
    capped.reset()
    assert capped.fault(FaultClass.KILLED).action is Action.RESTART


def test_c40_collective_errors_without_a_death_end() -> None:
    """A control plane that is gone is retried with waits and then left: never for hours."""
    run = started()
    decisions = faults(run, FaultClass.COLLECTIVE_ERROR, 20, rank=None)
    num_restarts = next(number for number, item in enumerate(decisions) if item.action is Action.STOP)
    assert num_restarts <= 7
    assert sum(item.backoff_s for item in decisions[:num_restarts]) < 600.0


@pytest.mark.parametrize(
    ("kind", "times", "has_begun", "exit_code"),
    [
        (FaultClass.PREEMPTION, 1, True, 143),
        (FaultClass.USER_ERROR, 1, True, 78),
        (FaultClass.STARTUP, 3, False, 75),
        (FaultClass.STORAGE, 3, True, 75),
        (FaultClass.NONFINITE, 2, True, 93),
        (FaultClass.EXCEPTION, 3, True, 93),
        (FaultClass.HANG, 3, True, 93),
    ],
)
def test_c76_each_cause_has_its_exit_code(kind: FaultClass, times: int, has_begun: bool, exit_code: int) -> None:
    """An orchestrator tells from the code alone whether to start again, and whether to count it."""
    run = Rehearsal(CapLimits(), FIXED, has_begun=has_begun)
    decisions = faults(run, kind, times, after_s=200.0)
    assert [item.exit_code for item in decisions[:-1]] == [None] * (times - 1)
    assert decisions[-1].exit_code == exit_code
