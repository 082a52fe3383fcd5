"""Planted bugs: one small, plausible mistake in a machine each, which the simulation must find.

`plant` makes the mistake for as long as the test runs. The list is shown in docs/guides/simulation.md; a test compares
the two. `is_quick` marks the few of the default suite: one of each machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from nvrx_sre.checkpoint import agree
from nvrx_sre.events import messages as wire
from nvrx_sre.events import schema
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher import machine_commits
from nvrx_sre.launcher.machine import Machine
from nvrx_sre.launcher.machine_commits import Commits
from nvrx_sre.launcher.machine_faults import Faults
from nvrx_sre.launcher.machine_job import Job
from nvrx_sre.launcher.machine_nodes import Nodes
from nvrx_sre.launcher.machine_progress import Progress
from nvrx_sre.launcher.machine_recovery import Recovery
from nvrx_sre.launcher.machine_roster import ChildState, Roster
from nvrx_sre.launcher.machine_saves import Saves
from nvrx_sre.launcher.machine_seals import Seals
from nvrx_sre.policy import caps, ladder
from nvrx_sre.policy.history import History
from nvrx_sre.testing import world_disk
from nvrx_sre.testing.world_disk import Disk
from nvrx_sre.testing.world_launcher import SimLauncher
from nvrx_sre.testing.world_ranks import SimWorker

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A bug: the machine it sits in, what is wrong, and how it is made."""

    machine: str
    bug: str
    plant: Plant
    is_quick: bool = False
    num_hosts: int = 1
    """Most hosts of the jobs that must find it."""


def instead(owner: Any, name: str, replacement: Any) -> Plant:
    """`owner.name` is something else."""
    return lambda patch: patch.setattr(owner, name, replacement)


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Plant:
    """`wrapper(original, *arguments)` runs in place of `owner.name`."""
    original = getattr(owner, name)
    return instead(owner, name, lambda *arguments, **named: wrapper(original, *arguments, **named))


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


def after(owner: Any, name: str, addition: Callable[[Any], None]) -> Plant:
    """`addition(self)` runs after a method."""

    def wrapper(original: Callable[..., Any], self: Any, *arguments: Any, **named: Any) -> Any:
        result = original(self, *arguments, **named)
        addition(self)
        return result

    return around(owner, name, wrapper)


def without_command(kind: type[c.Command]) -> Plant:
    """Commands of a kind are never given."""
    return around(Job, "command", lambda original, self, item: None if isinstance(item, kind) else original(self, item))


def restored_keeps_seals(original: Callable[..., Any], self: Commits, *arguments: Any) -> None:
    """What was sealed above the restored step still counts."""
    sealed = self.sealed
    original(self, *arguments)
    self._seals.sealed = sealed


def believed_at_once(original: Callable[..., Any], self: Faults, child: Any, message: Any, now_ns: int) -> Any:
    """A communication error is its sender's fault."""
    return original(self, child, replace(message, communication=False), now_ns)


def one_ready_is_enough(self: Roster) -> bool:
    """The generation opens when some rank is ready."""
    seated = self.seated()
    return len(seated) == self._job.world_size and any(child.state is ChildState.READY for child in seated)


def alive_is_progress(original: Callable[..., Any], self: Progress, child: Any, message: Any, now_ns: int) -> None:
    """Whoever speaks gets its time again."""
    original(self, child, message, now_ns)
    child.arm(now_ns, child.limit_s)


def first_rank_hangs(self: Progress) -> Any:
    """Blame without proof."""
    return self._running()[0]


def judges_unasked(original: Callable[..., Any], self: Progress, now_ns: int) -> Any:
    """What was last said is taken for how far a rank is."""
    return self._hang(now_ns, now_ns)


def no_backoff(original: Callable[..., Any], self: Recovery, decision: Any, fault: Any, now_ns: int) -> None:
    """The wait is forgotten."""
    original(self, replace(decision, backoff_s=0.0), fault, now_ns)


def never_trips(original: Callable[..., Any], *arguments: Any) -> Any:
    """No cap ever stops the run."""
    return replace(original(*arguments), tripped=None)


def trips_early(original: Callable[..., Any], *arguments: Any) -> Any:
    """The second attempt is the last."""
    budgets = original(*arguments)
    return replace(budgets, tripped=schema.Cap.CONSECUTIVE) if budgets.num_attempts > 1 else budgets


def counts_one_less(original: Callable[..., Any], *arguments: Any) -> Any:
    """Attempts are counted from zero."""
    budgets = original(*arguments)
    return replace(budgets, num_attempts=max(1, budgets.num_attempts - 1))


def launcher_refills(original: Callable[..., Any], self: History, record: Any) -> None:
    """A new launcher begins with full budgets."""
    original(self, record)
    if isinstance(record.event, schema.LauncherStarted):
        self.attempts.clear()


def h_is_progress(self: History, step: int) -> bool:
    """The step at H is taken for one above it."""
    return bool(self.attempts) and step >= self.attempts[-1].high_water


def booked_twice(original: Callable[..., Any], self: Ledger, state: Any, until_ns: int) -> None:
    """Time is added to two states."""
    before_ns = self._cursor_ns
    original(self, state, until_ns)
    self._booked_ns[schema.LedgerState.OTHER] += max(0, self._cursor_ns - before_ns) // 50


def gap_is_lost(original: Callable[..., Any], self: Ledger, record: Any) -> None:
    """The time without a launcher is booked as whatever came before."""
    self._ended = schema.LedgerState.INIT
    original(self, record)


def closes_at_once(original: Callable[..., Any], self: IncidentTracker, safe_step: int, now_ns: int) -> Any:
    """An incident ends with its first step, safe or not."""
    return original(self, 10**9, now_ns)


def forgets_attempts(original: Callable[..., Any], self: IncidentTracker, record: Any, event: Any) -> Any:
    """Each fault opens an incident of its own."""
    self.open = None
    return original(self, record, event)


def one_rank_is_enough(original: Callable[..., Any], headers: Any, fences: Any) -> Any:
    """What the first rank holds is offered to all."""
    return original([headers[0]] * len(headers), fences)


def oldest_first(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The worst candidate is tried first."""
    return original(*arguments, **named)[::-1]


def never_further_back(original: Callable[..., Any], hot: Any, durable: Any, **named: Any) -> Any:
    """`checkpoints_back` is ignored."""
    return original(hot, durable, **{**named, "checkpoints_back": 0})


def seal_told_early(original: Callable[..., Any], self: SimWorker, mine: Any, slot: int) -> None:
    """A rank says that its slot is sealed while it still copies."""
    self._tell_sealed(world_disk.content(self.generation, self.step, self.state), slot)
    original(self, mine, slot)


def held_is_free(original: Callable[..., Any], contents: Any, **named: Any) -> Any:
    """The slot that the writer reads may be overwritten."""
    return original(contents, **{**named, "held_slot": -1, "sealed_step": named["sealed_step"] + 1})


def generation_does_not_rise(original: Callable[..., Any], self: Recovery, seated: Any, now_ns: int) -> None:
    """The number is used again."""
    self._job.generation -= 1 if self._job.generation > 0 else 0
    original(self, seated, now_ns)


def taken_while_held(self: Saves, sealed: Any, now_ns: int) -> None:
    """A due save is handed over although another one is held."""
    if self._roster.parked(schema.Role.WRITER, 0) is not None:
        self._take(sealed, now_ns)


def kills_are_forgotten(original: Callable[..., Any], self: Roster, child: Any, *arguments: Any) -> None:
    """A process that was killed is not marked, so its death is a surprise."""
    original(self, child, *arguments)
    child.state, child.serial = ChildState.STARTING, self._job.fault_serial


def late_reports_count(original: Callable[..., Any], self: Machine, child: Any, message: Any) -> bool:
    """What ranks say of their faults counts although the generation is over."""
    is_late = child.rank is not None and child.is_leaving and isinstance(message, wire.Fault)
    return original(self, child, message) or is_late


def reports_are_seals(original: Callable[..., Any], self: Seals, item: Any) -> None:
    """The report of a step is taken for its seal."""
    for state, report in zip(self._ranks, item.reports, strict=False):
        state.slots[item.step], state.over_step = report.slot, item.step
    original(self, item)


def same_epoch(self: Disk) -> int:
    """The exclusive creation is not exclusive."""
    self.epoch = max(1, self.epoch)
    return self.epoch


def lost_is_there(original: Callable[..., Any], self: Nodes, node: int, reason: str, now_ns: int) -> Any:
    """A lost node is still counted as there."""
    lost = original(self, node, reason, now_ns)
    self._job.absent.discard(node)
    return lost


def loss_is_not_told(original: Callable[..., Any], self: Machine, item: Any, now_ns: int) -> None:
    """The loss of a node is noted, and its ranks are not replaced."""
    self._nodes.lose(item.node, item.reason, now_ns)


def returned_late(original: Callable[..., Any], self: Recovery, now_ns: int) -> None:
    """A node that is back takes part only once another one is lost."""
    if self._job.absent:
        original(self, now_ns)


def enough_is_all(self: Nodes) -> bool:
    """The others are always enough."""
    return True


def one_share_is_all(original: Callable[..., Any], self: Saves, save: Any, now_ns: int) -> None:
    """Only the writer of rank 0's node has to be there."""
    original(self, replace(save, nodes=save.nodes[:1] * len(save.nodes)), now_ns)


PLANTED: tuple[Planted, ...] = (
    Planted(
        machine="commits",
        bug="a step is committed when the fastest rank has reported it",
        plant=lambda patch: patch.setattr(machine_commits, "min", max, raising=False),
        is_quick=True,
    ),
    Planted(
        machine="commits",
        bug="H falls when an older state is restored",
        plant=after(Commits, "restored", lambda self: setattr(self, "high_water", self.step)),
    ),
    Planted(
        machine="commits",
        bug="what was sealed above the restored step still counts",
        plant=around(Commits, "restored", restored_keeps_seals),
    ),
    Planted(
        machine="seals",
        bug="the report of a step is taken for its seal",
        plant=around(Seals, "committed", reports_are_seals),
    ),
    Planted(
        machine="seals",
        bug="a rank says that its slot is sealed before the copy is done",
        plant=around(SimWorker, "_begin_copy", seal_told_early),
        is_quick=True,
    ),
    Planted(
        machine="saves",
        bug="a rollback does not abandon the save in flight",
        plant=instead(Saves, "fence", nothing),
    ),
    Planted(
        machine="saves",
        bug="the slots of a save are released as soon as the writer begins",
        plant=around(
            Saves,
            "_hand_over",
            lambda original, self, save, now_ns: (original(self, save, now_ns), self._release(save)),
        ),
        is_quick=True,
    ),
    Planted(
        machine="saves",
        bug="a due save is handed over although another one is held",
        plant=instead(Saves, "_on_due", taken_while_held),
    ),
    Planted(machine="saves", bug="a dead writer is not replaced", plant=instead(Saves, "on_writer_death", nothing)),
    Planted(
        machine="saves",
        bug="a preemption saves nothing",
        plant=instead(Saves, "flush", nothing),
    ),
    Planted(
        machine="faults",
        bug="a communication error is believed at once",
        plant=around(Faults, "on_report", believed_at_once),
    ),
    Planted(
        machine="faults",
        bug="a death that the launcher caused is a fault",
        plant=around(Roster, "kill", kills_are_forgotten),
        is_quick=True,
    ),
    Planted(
        machine="progress",
        bug="whoever is alive is never hung",
        plant=around(Progress, "on_alive", alive_is_progress),
    ),
    Planted(
        machine="progress",
        bug="a hang is blamed on the first rank",
        plant=instead(Progress, "_only_behind", first_rank_hangs),
        is_quick=True,
    ),
    Planted(
        machine="progress",
        bug="a launcher that stood still blames its ranks",
        plant=instead(Progress, "rearm", nothing),
    ),
    Planted(
        machine="progress",
        bug="an expired deadline is judged without asking",
        plant=around(Progress, "judge", judges_unasked),
    ),
    Planted(
        machine="recovery",
        bug="a generation opens before all ranks are ready",
        plant=instead(Roster, "is_every_rank_ready", one_ready_is_enough),
        is_quick=True,
    ),
    Planted(machine="recovery", bug="the back-off is not waited for", plant=around(Recovery, "begin", no_backoff)),
    Planted(
        machine="recovery",
        bug="a rank past its grace is left alone",
        plant=instead(Recovery, "on_tick", nothing),
    ),
    Planted(
        machine="recovery",
        bug="the seat of a rank that died in the teardown stays empty",
        plant=instead(Recovery, "on_gone", nothing),
    ),
    Planted(
        machine="recovery",
        bug="what is excluded comes back with the next launcher",
        plant=after(History, "apply", lambda self: self.excluded.clear()),
    ),
    Planted(
        machine="generation",
        bug="the run goes back without a fence",
        plant=without_command(c.Fence),
        is_quick=True,
    ),
    Planted(
        machine="generation",
        bug="the number of a generation is used twice",
        plant=around(Recovery, "_open", generation_does_not_rise),
    ),
    Planted(
        machine="generation",
        bug="a report of a generation that is over counts",
        plant=around(Machine, "_counts", late_reports_count),
    ),
    Planted(machine="ladder", bug="no cap stops a run", plant=around(ladder, "evaluate", never_trips), is_quick=True),
    Planted(
        machine="ladder",
        bug="a third attempt begins where the second did",
        plant=instead(ladder, "_LAST_ATTEMPT", 99),
    ),
    Planted(machine="caps", bug="a cap trips at the second attempt", plant=around(ladder, "evaluate", trips_early)),
    Planted(machine="caps", bug="attempts are counted from zero", plant=around(ladder, "evaluate", counts_one_less)),
    Planted(
        machine="caps",
        bug="transient faults get no time to pass",
        plant=instead(caps, "_may_trip", lambda *_: True),
        is_quick=True,
    ),
    Planted(
        machine="caps",
        bug="a new launcher begins with full budgets",
        plant=around(History, "apply", launcher_refills),
    ),
    Planted(machine="caps", bug="the step at H is progress", plant=instead(History, "_beyond_fault", h_is_progress)),
    Planted(
        machine="caps",
        bug="hot slots of a lost node are progress",
        plant=instead(History, "_hot_counts", lambda self: True),
    ),
    Planted(machine="ledger", bug="time is booked twice", plant=around(Ledger, "_book", booked_twice), is_quick=True),
    Planted(
        machine="ledger",
        bug="the back-off is booked as something else",
        plant=instead(Ledger, "_on_restart_decided", nothing),
    ),
    Planted(
        machine="ledger",
        bug="the time without a launcher is booked as start-up",
        plant=around(Ledger, "_enter_epoch", gap_is_lost),
    ),
    Planted(
        machine="incidents",
        bug="an incident ends before its progress is safe",
        plant=around(IncidentTracker, "_confirm", closes_at_once),
    ),
    Planted(
        machine="incidents",
        bug="each attempt is an incident of its own",
        plant=around(IncidentTracker, "_on_fault_detected", forgets_attempts),
        is_quick=True,
    ),
    Planted(
        machine="epochs",
        bug="a superseded launcher goes on",
        plant=instead(SimLauncher, "leads", lambda self: True),
        is_quick=True,
    ),
    Planted(machine="epochs", bug="two launchers take the same epoch", plant=instead(Disk, "take_epoch", same_epoch)),
    Planted(
        machine="agreement",
        bug="what one rank holds is offered to all",
        plant=around(agree, "common_hot", one_rank_is_enough),
    ),
    Planted(machine="agreement", bug="the oldest candidate is tried first", plant=around(agree, "order", oldest_first)),
    Planted(
        machine="agreement",
        bug="a decision to begin further back is ignored",
        plant=around(agree, "order", never_further_back),
    ),
    Planted(
        machine="agreement",
        bug="fences do not hold",
        plant=instead(agree, "is_abandoned", lambda *_: False),
        is_quick=True,
    ),
    Planted(
        machine="agreement",
        bug="the slot that the writer reads may be overwritten",
        plant=around(world_disk, "choose_slot", held_is_free),
    ),
    Planted(
        machine="nodes",
        bug="a lost node is counted as there",
        plant=around(Nodes, "lose", lost_is_there),
        num_hosts=4,
        is_quick=True,
    ),
    Planted(
        machine="nodes",
        bug="the loss of a node replaces nobody",
        plant=around(Machine, "_on_node_lost", loss_is_not_told),
        num_hosts=4,
    ),
    Planted(
        machine="nodes",
        bug="a node gets no time to come back",
        plant=instead(Nodes, "_patience_s", lambda self: 0.0),
        num_hosts=4,
    ),
    Planted(
        machine="nodes",
        bug="the others go on, however few they are",
        plant=instead(Nodes, "_is_enough_there", enough_is_all),
        num_hosts=4,
    ),
    Planted(
        machine="nodes",
        bug="a node that is back stays out of the world",
        plant=around(Recovery, "take_back_nodes", returned_late),
        num_hosts=4,
    ),
    Planted(
        machine="nodes",
        bug="hot slots of a lost node are still offered",
        plant=instead(Machine, "_lose_slots", nothing),
        num_hosts=4,
    ),
    Planted(
        machine="nodes",
        bug="a node that is waited for is waited for without end",
        plant=instead(Nodes, "deadline_ns", nothing),
        num_hosts=4,
    ),
    Planted(
        machine="saves",
        bug="a save leaves out the shares of other nodes",
        plant=around(Saves, "_hand_over", one_share_is_all),
        num_hosts=4,
    ),
)
