"""When a rank's time began, and the question that comes before it is judged."""

from __future__ import annotations

import pytest

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import FaultClass, FaultDetected, Phase, Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.machine import MachineConfig, MachineStart
from nvrx_sre.launcher.machine_job import Job, Stage
from nvrx_sre.launcher.machine_probe import ANSWER_S, GRACE_S, grace_s
from nvrx_sre.launcher.machine_progress import Hang, Progress
from nvrx_sre.launcher.machine_roster import ChildState, Roster
from nvrx_sre.policy.history import History
from nvrx_sre.testing.driven import DrivenMachine

STEP_S = 5.0
LIMITS = Limits(deadlines=Deadlines(step_s=STEP_S, save_s=20.0))
MS = 10**6


def begun(**settings: object) -> DrivenMachine:
    """In the step loop of generation 1, with step 1 committed and told at once."""
    driven = DrivenMachine(num_standbys=0, limits=LIMITS, **settings)  # type: ignore[arg-type]  # of the driver
    driven.begin()
    driven.step(1)
    driven.forget()
    return driven


def say(driven: DrivenMachine, rank: int, progress: int, *, age_s: float = 0.0, step: int = 1, probe: int = 0) -> None:
    """A rank says how far it is, and since when."""
    message = wire.Alive(
        generation=driven.machine.generation,
        step=step,
        progress=progress,
        mono_ns=driven.now_ns,
        age_ns=round(age_s * 1e9),
        probe=probe,
    )
    driven.say(driven.child_of(rank), message)


def asked(driven: DrivenMachine) -> list[tuple[int, int]]:
    """(child, number) of all questions."""
    return [(item.child, item.number) for item in driven.all(c.SendProbe)]


def answer(driven: DrivenMachine, rank: int, progress: int, *, age_s: float) -> None:
    """A rank answers the newest question."""
    say(driven, rank, progress, age_s=age_s, probe=asked(driven)[-1][1])


def tick_if_due(driven: DrivenMachine) -> None:
    """What the launcher does after every turn."""
    due_ns = driven.machine.next_deadline_ns()
    if due_ns is not None and due_ns <= driven.now_ns:
        driven.feed(c.Tick())


def roots(driven: DrivenMachine) -> list[tuple[int | None, FaultClass]]:
    """(rank, class) of every fault."""
    return [(record.rank, record.event.fault) for record in driven.records if isinstance(record.event, FaultDetected)]


def test_time_runs_from_the_progress_and_not_from_the_word_of_it() -> None:
    """A point that was passed 200 ms before it was told: 4.8 s are left."""
    driven = begun()
    driven.wait(1.0)
    for rank in range(2):
        say(driven, rank, 3, age_s=0.2)
    driven.wait(STEP_S - 0.201)
    assert not asked(driven)
    driven.wait(0.001)
    assert len(asked(driven)) == 2


def test_a_later_word_on_the_same_progress_may_be_the_better_one() -> None:
    """A step that waited in its ring is older than it seemed; a word that was longer on its way puts nothing off."""
    driven = begun()
    driven.wait(1.0)
    driven.step(2)
    for rank in range(2):
        say(driven, rank, 2, step=2, age_s=0.15)
        say(driven, rank, 2, step=2, age_s=0.1)
    driven.wait(STEP_S - 0.151)
    assert not asked(driven)
    driven.wait(0.001)
    assert len(asked(driven)) == 2


def test_a_word_from_before_a_step_says_nothing_of_the_time_after_it() -> None:
    """It was written before the commit that is known already, whatever it counts."""
    driven = begun()
    driven.wait(4.0)
    driven.step(2)
    for rank in range(2):
        say(driven, rank, 9, step=1, age_s=4.0)
    driven.wait(STEP_S - 0.001)
    assert not asked(driven)


def test_a_phase_begins_when_it_was_entered_and_never_before() -> None:
    """The monitor told it 0.2 s late; what was passed before it, however long ago, does not shorten it."""
    driven = begun()
    driven.wait(4.0)
    for rank in range(2):
        entered = wire.Entered(generation=1, phase=Phase.SAVE, step=1, mono_ns=driven.now_ns, age_ns=200 * MS)
        driven.say(driven.child_of(rank), entered)
        say(driven, rank, 2, age_s=3.0)
    driven.wait(20.0 - 0.201)
    assert not asked(driven)
    driven.wait(0.001)
    assert len(asked(driven)) == 2


def test_progress_just_before_the_deadline_is_no_hang() -> None:
    """It was not told yet: the answers do, and the time runs from there."""
    driven = begun()
    driven.wait(STEP_S)
    for rank in range(2):
        answer(driven, rank, 2, age_s=0.01)
        tick_if_due(driven)
    driven.wait(STEP_S - 0.011)
    assert not roots(driven) and len(asked(driven)) == 2
    driven.wait(0.001)
    assert len(asked(driven)) == 4, "once more, and not before"


def test_progress_of_the_others_only_names_who_hangs() -> None:
    """Blame is of what the ranks answer, not of what they last said."""
    driven = begun()
    driven.wait(STEP_S)
    answer(driven, 0, 2, age_s=1.0)
    answer(driven, 1, 1, age_s=STEP_S)
    tick_if_due(driven)
    assert roots(driven) == [(1, FaultClass.HANG)]


def test_answers_without_progress_are_a_hang_at_once() -> None:
    """Nobody has to wait for the end of the grace."""
    driven = begun()
    driven.wait(STEP_S)
    answer(driven, 0, 0, age_s=STEP_S)
    tick_if_due(driven)
    assert not roots(driven)
    answer(driven, 1, 0, age_s=STEP_S)
    tick_if_due(driven)
    assert roots(driven) == [(None, FaultClass.HANG)]


def test_no_answer_is_a_hang_after_the_grace() -> None:
    """Of a rank that is stopped, or whose interpreter is held: ranks are asked once, and nothing is due in between."""
    driven = begun()
    driven.wait(STEP_S)
    answer(driven, 0, 0, age_s=STEP_S)
    driven.wait(GRACE_S - 0.001)
    assert not roots(driven) and len(asked(driven)) == 2
    driven.wait(0.001)
    assert [fault for _, fault in roots(driven)] == [FaultClass.HANG]


def test_no_answer_is_not_silence() -> None:
    """Rank 1 spoke within half its limit, as rank 0 did: it is not the root for being slow to answer."""
    driven = begun()
    driven.wait(STEP_S - 0.2)
    for rank in range(2):
        say(driven, rank, 0, age_s=STEP_S - 0.2)
    driven.wait(0.2)
    answer(driven, 0, 0, age_s=STEP_S)
    driven.wait(GRACE_S)
    assert roots(driven) == [(None, FaultClass.HANG)]


def test_an_ordinary_sign_of_life_is_no_answer() -> None:
    """It may have been on its way when the question was asked; nor does an answer to another question count."""
    driven = begun()
    driven.wait(STEP_S)
    for rank in range(2):
        say(driven, rank, 0, age_s=STEP_S)
        say(driven, rank, 0, age_s=STEP_S, probe=asked(driven)[-1][1] - 1)
    tick_if_due(driven)
    assert not roots(driven)


def test_what_runs_out_while_ranks_are_asked_is_asked_for_itself() -> None:
    """Rank 0 was in time when it answered, and may have gone on since."""
    driven = begun()
    driven.wait(0.05)
    say(driven, 0, 2)
    driven.wait(STEP_S - 0.05)
    answer(driven, 0, 2, age_s=STEP_S - 0.05)
    driven.wait(0.06)
    answer(driven, 1, 2, age_s=0.07)
    tick_if_due(driven)
    assert not roots(driven)
    assert [number for _, number in asked(driven)] == [1, 1, 2, 2]
    for rank in range(2):
        answer(driven, rank, 3, age_s=0.0)
        tick_if_due(driven)
    driven.wait(1.0)
    assert not roots(driven)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_launcher_that_stood_still_ends_nobody(is_asked: bool) -> None:
    """Whatever ranks say afterwards of the time before: they have their whole time again."""
    driven = begun()
    if is_asked:
        driven.wait(STEP_S)
    driven.clock.advance(30.0)
    driven.feed(c.Stalled(seconds=30.0))
    for rank in range(2):
        say(driven, rank, 2, age_s=29.0)
    driven.wait(STEP_S - 0.001)
    assert not roots(driven) and len(asked(driven)) == (2 if is_asked else 0)


def test_a_question_ends_with_its_generation() -> None:
    """A fault came before the answers: the next generation begins with none open, and can ask again."""
    driven = begun()
    driven.wait(STEP_S)
    driven.raise_in(1, 2)
    driven.leave_generation(0, 1)
    driven.forget()
    driven.restore(1, "hot")
    driven.step(2)
    driven.wait(STEP_S - 0.001)
    assert not roots(driven)
    driven.wait(0.001 + GRACE_S)
    assert [number for _, number in asked(driven)] == [2, 2] and len(roots(driven)) == 1


def test_ranks_of_other_nodes_are_asked_as_well() -> None:
    """An age needs no common clock; what its answer took on the way is to the benefit of a rank."""
    driven = DrivenMachine(num_standbys=0, num_nodes=2, limits=LIMITS)
    driven.join(1)
    driven.begin()
    driven.step(1)
    driven.wait(STEP_S)
    assert {child for child, _ in asked(driven)} == {driven.child_of(0), driven.child_of(1)}
    answer(driven, 0, 2, age_s=0.001)
    driven.wait(GRACE_S - 0.01)
    a_day_later_ns = driven.now_ns + 86_400 * 10**9
    driven.say(
        driven.child_of(1),
        wire.Alive(generation=1, step=1, progress=2, mono_ns=a_day_later_ns, age_ns=MS, probe=asked(driven)[-1][1]),
    )
    tick_if_due(driven)
    driven.wait(STEP_S - 0.2)
    assert not roots(driven) and len(asked(driven)) == 2


@pytest.mark.parametrize("is_heard", [False, True])
def test_of_ranks_that_fell_silent_together_none_is_to_blame(is_heard: bool) -> None:
    """Rank 2 was behind when its host and rank 1's went: of what came of either since then nobody knows."""
    driven = DrivenMachine(num_ranks=3, num_standbys=0, limits=LIMITS)
    driven.begin()
    driven.step(1)
    say(driven, 1, 2)
    driven.wait(STEP_S)
    answer(driven, 0, 2, age_s=STEP_S)
    if is_heard:
        answer(driven, 1, 2, age_s=STEP_S)
        answer(driven, 2, 1, age_s=STEP_S)
    driven.wait(GRACE_S)
    assert roots(driven) == [(2 if is_heard else None, FaultClass.HANG)]


class ManyRanks:
    """16,384 ranks in a step, each of which takes the launcher `ANSWER_S` to ask and to hear."""

    NUM = 16_384
    VICTIM = 12_345

    def __init__(self) -> None:
        start = MachineStart(generation=0, high_water=0, wall_offset_ns=0, commits_on_record=False)
        config = MachineConfig(world_size=self.NUM, num_standbys=0, limits=LIMITS)
        self.job = Job(config=config, start=start, history=History())
        self.roster = Roster(self.job)
        self.progress = Progress(self.job, self.roster)
        self.now_ns = 10**9
        self.job.stage = Stage.OPEN
        for rank in range(self.NUM):
            child = self.roster.spawn(Role.WORKER, rank, self.now_ns)
            child.state = ChildState.RUNNING
            self.progress.open(child, self.now_ns)
            entered = wire.Entered(generation=0, phase=Phase.STEP, step=0, mono_ns=self.now_ns)
            self.progress.on_entered(child, entered, self.now_ns)
        self.job.take()

    def ask(self) -> int:
        """The deadline of all runs out; the number of the question."""
        self.now_ns += to_ns(STEP_S)
        assert self.progress.judge(self.now_ns) is None
        numbers = [item.number for item in self.job.take() if isinstance(item, c.SendProbe)]
        assert len(numbers) == self.NUM
        return numbers[0]

    def hear(self, number: int, *, stuck: int | None = None, silent: int | None = None) -> Hang | None:
        """All answer, one after the other; `stuck` had no progress. The launcher judges whenever that is due."""
        for rank, child in enumerate(self.roster.seated()):
            self.now_ns += to_ns(ANSWER_S)
            if rank == silent:
                continue
            passed, age_ns = (0, to_ns(STEP_S)) if rank == stuck else (1, to_ns(0.01))
            alive = wire.Alive(generation=0, step=0, progress=passed, mono_ns=0, age_ns=age_ns, probe=number)
            self.progress.on_alive(child, alive, self.now_ns)
            due_ns, _ = self.progress.next_deadline_ns(self.now_ns)
            assert due_ns is not None
            if due_ns <= self.now_ns:
                return self.progress.judge(self.now_ns)
        return None


def test_many_ranks_that_are_just_in_time_are_all_heard() -> None:
    """It may take 1.6 s to ask 16,384 ranks and to hear them: nobody is judged before by what was known."""
    ranks = ManyRanks()
    assert ranks.hear(ranks.ask()) is None
    assert not ranks.job.take(), "nobody is asked again: all have their time from their progress on"
    due_ns, _ = ranks.progress.next_deadline_ns(ranks.now_ns)
    assert due_ns is not None and due_ns > ranks.now_ns + to_ns(STEP_S / 2)


@pytest.mark.parametrize("what", ["stuck", "silent"])
def test_a_hang_among_many_ranks_is_found(what: str) -> None:
    """With the last answer, or, of a rank that gives none, at the end of the grace; it is the one that is behind."""
    ranks = ManyRanks()
    number, asked_ns = ranks.ask(), ranks.now_ns
    hang = ranks.hear(number, **{what: ranks.VICTIM})
    assert hang is not None and hang.root is not None
    assert (hang.root.rank, hang.is_root_silent) == (ranks.VICTIM, what == "silent")
    assert ranks.now_ns == asked_ns + to_ns(grace_s(ranks.NUM)), "the last one has answered by then, and not before"
