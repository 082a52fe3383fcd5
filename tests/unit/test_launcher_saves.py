"""Which steps the writer gets: busy, starting, waited for, owed; pure, through the machine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.events import messages as wire
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record, Role, SaveFailure, Tier
from nvrx_sre.events.snapshot import take
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.started_saves import MAX_KNOWN, StartedSaves
from nvrx_sre.testing.driven import DrivenMachine


def begun(**options: Any) -> DrivenMachine:
    """A machine whose ranks are in their step loop, with a parked writer."""
    driven = DrivenMachine(**options)
    driven.begin()
    return driven


def saved(driven: DrivenMachine) -> list[int]:
    """Steps that were handed to the writer."""
    return [item.step for item in driven.all(c.StartSave)]


def skipped(driven: DrivenMachine) -> list[int]:
    """Steps whose save was skipped because the writer was busy."""
    return [item.step for item in driven.events(schema.SaveSkipped) if item.reason == "writer_busy"]


def released(driven: DrivenMachine) -> list[int]:
    """Steps at whose boundary ranks were told to go on."""
    return [item.step for item in driven.all(c.ReleaseBoundary)]


def test_a_free_writer_takes_the_newest_sealed_step_of_a_skipped_save() -> None:
    """A due save that found it busy is counted and made up for at once, with the freshest state there is."""
    driven = begun()
    for step in range(1, 26):
        driven.step(step, durable=step % 5 == 0)
    assert (saved(driven), skipped(driven)) == ([5], [10, 15, 20, 25])
    driven.step(26)
    driven.write(5, "written", "committed", "verified")
    assert saved(driven) == [5, 26]
    driven.write(26, "written", "committed", "verified")
    assert saved(driven) == [5, 26], "nothing is owed any more"
    driven.step(27)
    driven.step(30, durable=True)
    assert saved(driven) == [5, 26, 30]


def test_a_slow_save_that_says_so_is_not_hung() -> None:
    """A bound may make a save longer than its deadline; silence ends it."""
    driven = begun(limits=Limits(deadlines=Deadlines(save_s=20.0)))
    driven.step(10, durable=True)
    for _ in range(5):
        driven.wait(19.0)
        driven.write(10, "writing")
    assert not driven.events(schema.SaveFailed)
    driven.wait(21.0)
    assert [item.reason for item in driven.events(schema.SaveFailed)] == ["writer_died"]


def test_the_bound_of_the_writer_is_lifted_when_the_run_ends() -> None:
    """Before the last step is handed over: there is no training left that it could slow down."""
    driven = begun()
    driven.step(10)
    assert not driven.all(c.HurrySaves)
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    assert driven.order(c.HurrySaves, c.StartSave) == ["HurrySaves", "StartSave"]


def test_a_writer_that_comes_after_the_end_was_begun_hears_of_it() -> None:
    """The one before died in the last save: its successor must not be slower than the time that is left."""
    driven = begun()
    driven.step(10)
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    [writer] = [item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER]
    driven.kill(writer)
    driven.wait(1.0)
    *_, successor = [item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER]
    driven.start_child(successor)
    assert saved(driven) == [10, 10]
    assert driven.order(c.HurrySaves, c.StartSave) == ["HurrySaves", "StartSave"] * 2


def test_a_due_save_that_found_no_slot_is_skipped_once_and_owed() -> None:
    """Ranks that capture later say nothing of a due save again; what they seal is taken."""
    driven = begun()
    driven.step(10, durable=True, slot=-1)
    assert [(item.step, item.reason) for item in driven.events(schema.SaveSkipped)] == [(10, "no_free_slot")]
    driven.step(11, slot=-1)
    driven.step(12)
    assert saved(driven) == [12] and len(driven.events(schema.SaveSkipped)) == 1
    driven.write(12, "written", "committed", "verified")
    driven.step(13)
    assert saved(driven) == [12], "nothing is owed any more"


@pytest.mark.parametrize("write_steps", [11, 58])
def test_a_slow_writer_is_never_idle_and_its_commits_are_fresh(write_steps: int) -> None:
    """A write of 1.1 or 5.8 intervals: as many commits as fit, none older than two write times when replaced."""
    driven = begun()
    interval = 10
    verified: list[tuple[int, int]] = []
    started: int | None = None
    for step in range(1, 1001):
        driven.step(step, durable=step % interval == 0)
        if started is None and saved(driven):
            started = step
        if started is not None and step - started == write_steps:
            current = saved(driven)[-1]
            verified.append((current, step))
            driven.write(current, "written", "committed", "verified")
            started = step
    possible = (1000 - interval) // write_steps
    assert len(verified) >= 0.9 * possible
    ages = [now - before for (before, _), (_, now) in itertools.pairwise(verified)]
    assert max(ages) <= 2 * write_steps + 1


def test_the_first_due_save_waits_for_a_writer_that_starts_up() -> None:
    """Nothing is skipped: the newest sealed step goes to the writer as soon as it is parked."""
    driven = DrivenMachine()
    [writer] = [item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER]
    for spawn in driven.all(c.Spawn):
        if spawn.child != writer:
            driven.start_child(spawn.child)
    for rank in range(driven.num_ranks):
        driven.make_ready(driven.child_of(rank))
    driven.restore()
    driven.step(10, durable=True)
    driven.step(11)
    assert (saved(driven), skipped(driven)) == ([], [])
    driven.start_child(writer)
    assert (saved(driven), skipped(driven)) == ([11], [])


def test_a_failed_save_is_tried_again_when_the_next_is_due() -> None:
    """A full disk is not written to without pause: the next due step is the next attempt."""
    driven = begun()
    driven.step(10, durable=True)
    driven.write(10, "failed", reason="no_space")
    [failed] = driven.events(schema.SaveFailed)
    assert failed.reason is SaveFailure.NO_SPACE
    driven.step(11)
    assert saved(driven) == [10]
    driven.step(20, durable=True)
    assert saved(driven) == [10, 20]


def test_ranks_that_wait_are_released_when_the_writer_takes_their_step() -> None:
    """`wait`: no skip; the boundary is left when the save starts, and not before."""
    driven = begun(waits_for_writer=True)
    driven.step(10, durable=True)
    assert (saved(driven), released(driven)) == ([10], [10])
    driven.step(20, durable=True)
    assert (saved(driven), released(driven), skipped(driven)) == ([10], [10], [])
    driven.write(10, "written", "committed")
    assert released(driven) == [10]
    driven.write(10, "verified")
    assert (saved(driven), released(driven), skipped(driven)) == ([10, 20], [10, 20], [])


def test_ranks_that_wait_are_released_when_their_step_cannot_be_saved() -> None:
    """A capture that found no slot, and a writer that died, hold nobody up."""
    driven = begun(waits_for_writer=True)
    driven.step(10, durable=True, slot=-1)
    assert (saved(driven), released(driven)) == ([], [10])
    driven.step(20, durable=True)
    driven.step(30, durable=True)
    assert released(driven) == [10, 20]
    [writer] = [item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER]
    driven.kill(writer)
    assert released(driven) == [10, 20, 30]


@pytest.mark.parametrize("order", ["reports first", "one rank is through before the other has reported"])
@pytest.mark.parametrize("first_slot", [-1, 0], ids=["no rank had captured it", "one rank had"])
def test_the_last_step_is_saved_in_whatever_order_ranks_tell(order: str, first_slot: int) -> None:
    """Ranks capture the last step after their report of it, and a launcher hears one rank after the other."""
    driven = begun()
    driven.step(81)
    said = [
        lambda: driven.step(82, ranks=[0], slot=first_slot),
        lambda: driven.seal(0, 82, 0),
        lambda: driven.step(82, ranks=[1], slot=-1),
        lambda: driven.seal(1, 82, 1),
    ]
    for tell in said if order != "reports first" else [said[0], said[2], said[1], said[3]]:
        tell()
    for rank in range(2):
        driven.say(driven.child_of(rank), wire.Finished(generation=1, step=82, result={}, mono_ns=driven.now_ns))
    assert [(item.step, item.slots) for item in driven.all(c.StartSave)] == [(82, (0, 1))]


def test_what_is_owed_is_not_started_when_the_run_ends() -> None:
    """A run that stops for good finishes the save in flight and begins no other."""
    driven = begun()
    driven.step(10, durable=True)
    driven.step(20, durable=True)
    driven.raise_in(0, 21, fault="user_error")
    driven.write(10, "written", "committed", "verified")
    assert (saved(driven), skipped(driven)) == ([10], [20])


def test_c15_a_save_that_fails_does_not_hide_why_the_run_ended() -> None:
    """An error of the script stops the run while a save is in flight that fails as well: the error is the reason."""
    driven = begun()
    driven.step(10, durable=True)
    driven.raise_in(0, 11, fault="user_error")
    driven.write(10, "failed", reason="no_space")
    for child in {item.child for item in driven.all(c.Spawn)}:
        driven.kill(child, exit_code=0, signal=None)
    [finished] = driven.events(schema.RunFinished)
    assert finished.exit_code == 78
    assert "no_space" not in finished.reason and "save" not in finished.reason.partition(";")[0]
    assert [item.reason for item in driven.events(schema.SaveFailed)] == [SaveFailure.NO_SPACE]


def test_deletions_are_recorded() -> None:
    """What retention deleted, and how long that took, is an event."""
    driven = begun()
    [writer] = [item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER]
    driven.say(writer, wire.Retired(step=10, directory="step-00000010-g00001", seconds=2.5))
    [deleted] = driven.events(schema.CheckpointDeleted)
    assert (deleted.step, deleted.directory, deleted.seconds) == (10, "step-00000010-g00001", 2.5)


def record(event: schema.Event, generation: int = 1) -> Record:
    """A record of an event."""
    return Record(run="r", epoch=1, generation=generation, rank=None, seq=1, time_ns=1, event=event)


@pytest.mark.parametrize("is_committed", [False, True])
def test_c01_a_save_without_an_end_was_interrupted(is_committed: bool) -> None:
    """What the journal of a dead launcher leaves open has failed, or was not verified if it had committed."""
    saves = StartedSaves()
    saves.apply(record(schema.SaveStarted(step=8, tier=Tier.DURABLE, captured_ns=1)))
    saves.apply(record(schema.SaveVerified(step=8, directory="d", seconds=1.0, captured_ns=1)))
    saves.apply(record(schema.SaveStarted(step=16, tier=Tier.DURABLE, captured_ns=1), generation=2))
    if is_committed:
        saves.apply(
            record(schema.SaveCommitted(step=16, directory="d", size_bytes=1, seconds=1.0, captured_ns=1), generation=2)
        )
    [(ended, generation)] = saves.interrupted()
    assert type(ended) is (schema.SaveUnverified if is_committed else schema.SaveFailed)
    assert (ended.step, ended.reason, generation) == (16, "interrupted", 2)
    saves.apply(record(ended, generation))
    assert saves.interrupted() == []
    assert saves.is_known(8, 1) and not saves.is_known(24, 1)


def test_what_is_remembered_of_saves_does_not_grow_with_the_run() -> None:
    """Each segment of the journal begins with it: the newest saves are known, those of long ago are not."""
    saves = StartedSaves()
    for step in range(1, 2 * MAX_KNOWN + 1):
        saves.apply(record(schema.SaveStarted(step=step, tier=Tier.DURABLE, captured_ns=1)))
        saves.apply(record(schema.SaveVerified(step=step, directory="d", seconds=1.0, captured_ns=1)))
    asked = (1, MAX_KNOWN, MAX_KNOWN + 1, 2 * MAX_KNOWN)
    assert [saves.is_known(step, 1) for step in asked] == [False, False, True, True]
    assert len(json.dumps(take({"saves": saves}))) < 100 * MAX_KNOWN


def back_to(driven: DrivenMachine, step: int, source: str) -> None:
    """Rank 0 raises, and every rank restores `step` in the next generation."""
    driven.raise_in(0, driven.machine.high_water + 1)
    driven.leave_generation(*range(driven.num_ranks))
    driven.restore(step, source)


def test_a_preemption_does_not_wait_for_a_save_of_an_abandoned_line() -> None:
    """The run went back below what is being written: that writer is ended, the next one writes what counts."""
    driven = begun(num_standbys=0)
    driven.step(10, durable=True)
    back_to(driven, 0, "fresh")
    driven.step(1)
    assert (saved(driven), [item.child for item in driven.all(c.Kill)]) == ([10], [])
    [writer] = [item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER]
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    assert [item.child for item in driven.all(c.Kill)] == [writer]
    driven.kill(writer)
    next_writer = [item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER][-1]
    driven.start_child(next_writer)
    assert next_writer != writer and saved(driven) == [10, 1]
    assert [item.reason for item in driven.events(schema.SaveFailed)] == [SaveFailure.ABANDONED_LINE]
    driven.write(1, "written", "committed", "verified")
    assert [item.step for item in driven.events(schema.SaveVerified)] == [1]


def test_a_preemption_lets_a_save_of_the_present_line_end() -> None:
    """Nothing is killed whose work counts."""
    driven = begun(num_standbys=0)
    driven.step(10, durable=True)
    driven.step(12)
    driven.feed(c.SignalReceived(signal=15, by_person=False))
    assert driven.all(c.Kill) == []


def test_c13_nothing_is_deleted_while_ranks_go_back() -> None:
    """A save that is verified between a fault and the end of the restore may be of a line that is about to be left."""
    driven = begun(num_standbys=0)
    driven.step(10, durable=True)
    driven.write(10, "written", "committed", "verified")
    assert len(driven.all(c.RetainSaves)) == 1
    driven.step(20, durable=True)
    driven.raise_in(0, 21)
    driven.leave_generation(*range(driven.num_ranks))
    driven.write(20, "written", "committed", "verified")
    assert len(driven.all(c.RetainSaves)) == 1
    driven.restore(5, "durable")
    driven.step(6, durable=True)
    driven.write(6, "written", "committed", "verified")
    assert len(driven.all(c.RetainSaves)) == 2


def lose_the_node(driven: DrivenMachine) -> None:
    """A planned loss of the node, told by rank 0."""
    driven.say(driven.child_of(0), wire.NodeKill(generation=1, mono_ns=driven.now_ns))


def lose_the_writer(driven: DrivenMachine) -> None:
    """SIGKILL of the writer."""
    driven.kill(next(item.child for item in driven.all(c.Spawn) if item.role is Role.WRITER))


def miss_the_deadline(driven: DrivenMachine) -> None:
    """The writer stands still."""
    driven.wait(21.0)


def go_back(driven: DrivenMachine) -> None:
    """The run starts afresh, and its writer reads on."""
    back_to(driven, 0, "fresh")
    driven.write(10, "verified")


LOSSES: dict[Callable[[DrivenMachine], None], str] = {
    lose_the_node: "interrupted",
    lose_the_writer: "writer_died",
    miss_the_deadline: "writer_died",
    go_back: "abandoned_line",
}


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
def test_c01_a_commit_that_nobody_read_back_is_unverified(lose: Callable[[DrivenMachine], None]) -> None:
    """Whoever reads it is lost between commit and end: it was saved, so it has not failed, and is not written again."""
    driven = begun(limits=Limits(deadlines=Deadlines(save_s=20.0)))
    driven.step(10, durable=True)
    driven.write(10, "written", "committed")
    lose(driven)
    assert [(item.step, item.reason) for item in driven.events(schema.SaveUnverified)] == [(10, LOSSES[lose])]
    assert not driven.events(schema.SaveFailed) and not driven.events(schema.SaveVerified)
    assert saved(driven) == [10]


@pytest.mark.parametrize("reason", ["verify", "storage", "no_space"])
def test_c01_a_commit_that_could_not_be_read_back_has_failed(reason: str) -> None:
    """It was looked at, and is damaged or out of reach: no loss of the one who looked."""
    driven = begun()
    driven.step(10, durable=True)
    driven.write(10, "written", "committed", "failed", reason=reason)
    assert [(item.step, item.reason) for item in driven.events(schema.SaveFailed)] == [(10, reason)]
    assert not driven.events(schema.SaveUnverified)
