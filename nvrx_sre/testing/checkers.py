"""What must hold in every journal, recounted from the records alone.

`check_safety` names each rule that a list of records breaks; `check_liveness` what keeps a run from having ended
well. They share no code with the folds they check. Pure.

The design's invariants, and where each is judged: 1 disk and writer of the simulated world (torn slots, two good
checkpoints, damage found before the load); 2 final states and losses, in the world; 3 restores and fences here, offers
in the world; 4 `checkers_policy`; 5 and 6 `checkers_goodput` and `checkers_blame`; 7 stamps, generations and saves
here, epochs in the world; 9 children at the end, in the world. 8 and 10 are about processes and files, which a journal
does not show: integration tests judge them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import FaultClass, Record, RestoredFrom, StepKind
from nvrx_sre.testing.checkers_goodput import check_incidents, check_ledger
from nvrx_sre.testing.checkers_policy import check_policy

DRAIN_NS = to_ns(25.0)
"""What a preemption leaves for saving: a disk that is slower than this loses what was sealed."""

_ENDED = ("verified", "unverified", "failed")
"""Ends of a save."""


def check_safety(records: Sequence[Record], caps: CapLimits | None = None) -> list[str]:
    """Broken rules, each with the record's number; empty if all hold."""
    fold = _Safety()
    for record in records:
        fold.apply(record)
    return fold.problems + check_policy(records, caps or CapLimits()) + check_ledger(records)


def check_liveness(records: Sequence[Record]) -> list[str]:
    """Why these records are not those of a run that ended in order; empty if it did."""
    if not records:
        return ["no record at all"]
    ends = [record for record in records if isinstance(record.event, schema.RunFinished)]
    if not ends:
        return ["the run never finished"]
    if not isinstance(records[-1].event, schema.LauncherStopped):
        return [f"the last record is {type(records[-1].event).__name__}, not the end of a launcher"]
    return check_incidents(records, is_finished=_exit_code(ends[-1]) == ExitCode.FINISHED)


def _exit_code(record: Record) -> int:
    assert isinstance(record.event, schema.RunFinished)
    return record.event.exit_code


@dataclass(kw_only=True)
class _Safety:
    """Fold that recounts what matters."""

    problems: list[str] = field(default_factory=list)
    high_water: int = 0
    formed: int = 0
    restored: int = -1
    step: int = 0
    new_steps: set[int] = field(default_factory=set)
    seq: int = 0
    epoch: int = 0
    time_ns: int = 0
    faulted_generations: set[int] = field(default_factory=set)
    is_decided: bool = True
    has_finished: bool = False
    has_stopped: bool = False
    checkpoints_back: int = 0
    """How much further back the next restore must be than the newest checkpoint."""
    sealed: int = -1
    """Newest step that was sealed on every rank, as far as is recorded."""
    drain_ns: int | None = None
    """Since when the launcher ends for a preemption or a halt."""
    num_started: int = 0
    """Saves that were started since the drain began."""
    good: set[tuple[int, int]] = field(default_factory=set)
    """(generation, step) of verified checkpoints that nothing has rejected, deleted or abandoned."""
    newest_good: int = -1
    """Newest of them before the rollback that precedes a restore."""
    saves: dict[tuple[int, int], str] = field(default_factory=dict)
    """Stage of the save of (generation, step)."""
    fences: list[tuple[int, int]] = field(default_factory=list)

    def apply(self, record: Record) -> None:
        self._check_stamp(record)
        handler = _HANDLERS.get(type(record.event))
        if handler is not None:
            handler(self, record, record.event)

    def problem(self, record: Record, text: str) -> None:
        self.problems.append(f"record {record.seq} ({type(record.event).__name__}): {text}")

    def _check_stamp(self, record: Record) -> None:
        if record.epoch > self.epoch:
            self._enter_epoch(record)
        elif record.epoch < self.epoch or self.has_stopped:
            self.problem(record, "recorded after the end of its epoch")
        elif self.has_finished and not isinstance(record.event, schema.LauncherStopped | schema.IncidentClosed):
            self.problem(record, "recorded after the end of its run")
        if record.seq <= self.seq or record.time_ns < self.time_ns:
            self.problem(record, "sequence or time went back")
        self.seq, self.time_ns = record.seq, record.time_ns
        if not self.is_decided and not isinstance(record.event, schema.RestartDecided):
            self.problem(record, "follows a fault that nobody decided on")

    def _enter_epoch(self, record: Record) -> None:
        self.epoch, self.seq, self.has_finished, self.has_stopped = record.epoch, 0, False, False
        # A launcher that was killed may not have recorded its newest decision.
        self.is_decided = True
        self.sealed, self.drain_ns, self.checkpoints_back = -1, None, 0
        if isinstance(record.event, schema.LeaderLost):
            self.good = set()  # its fence may be on the disk and its record of the rollback lost

    def on_formed(self, record: Record, event: schema.GenerationFormed) -> None:
        if record.generation <= self.formed:
            self.problem(record, f"generation {record.generation} formed after {self.formed}")
        self.formed = record.generation

    def on_rolled_back(self, record: Record, event: schema.RolledBack) -> None:
        if event.high_water != self.high_water:
            self.problem(record, f"says H is {event.high_water}, it is {self.high_water}")
        self.fences.append((record.generation, event.step))
        self.newest_good = max((step for _, step in self.good), default=-1)
        abandoned = {key for key in self.saves if key[0] < record.generation and key[1] > event.step}
        self.good -= abandoned
        for key in abandoned & {key for key, stage in self.saves.items() if stage in _ENDED}:
            self.saves[key] = "abandoned"

    def on_restored(self, record: Record, event: schema.StateRestored) -> None:
        if record.generation != self.formed:
            self.problem(record, f"generation {record.generation} restored, {self.formed} is formed")
        if event.step < self.high_water and (record.generation, event.step) not in self.fences:
            self.problem(record, f"went back to {event.step} below {self.high_water} without a fence")
        if event.step > self.high_water:
            self.problem(record, f"restored step {event.step}, which was executed and never counted")
        newest, self.newest_good = max(self.newest_good, *(step for _, step in self.good), -1), -1
        if self.checkpoints_back and event.source is RestoredFrom.HOT:
            self.problem(record, "restored from the hot tier where an older checkpoint was decided on")
        if not self.checkpoints_back and event.step < newest:
            self.problem(record, f"restored {event.step} although {newest} is verified")
        self.checkpoints_back = 0
        self.sealed = self.sealed if self.sealed == event.step else -1
        self.restored = record.generation
        self.step = event.step

    def on_steps(self, record: Record, event: schema.StepsCommitted) -> None:
        if event.proven_by_restore:
            self._check_proven(record, event)
        elif record.generation != self.restored:
            self.problem(record, f"steps of generation {record.generation}, {self.restored} is restored")
        elif event.first_step != self.step + 1:
            self.problem(record, f"steps {event.first_step}..{event.last_step} follow {self.step}")
        if event.last_step < event.first_step:
            self.problem(record, f"steps {event.first_step}..{event.last_step}")
        is_new = event.first_step > self.high_water
        if is_new != (event.kind is StepKind.NEW) or (not is_new and event.last_step > self.high_water):
            self.problem(record, f"{event.kind} steps {event.first_step}..{event.last_step}, H is {self.high_water}")
        if event.committed_ns < event.started_ns:
            self.problem(record, "committed before it started")
        self.step = event.last_step
        self.high_water = max(self.high_water, event.last_step)
        if not event.proven_by_restore:
            self.sealed = event.hot_sealed_step
        if event.kind is StepKind.NEW:
            self.new_steps.update(range(event.first_step, event.last_step + 1))
        if len(self.new_steps) != self.high_water:
            self.problem(record, f"{len(self.new_steps)} new steps were counted, H is {self.high_water}")

    def _check_proven(self, record: Record, event: schema.StepsCommitted) -> None:
        if record.generation != self.formed or self.restored == self.formed:
            self.problem(record, "proven by a restore, but not just before one")
        if event.committed_ns != event.started_ns or event.tokens or event.hot_sealed_step >= 0:
            self.problem(record, "what a restore proves has no time, no tokens and no seal of its own")

    def on_fault(self, record: Record, event: schema.FaultDetected) -> None:
        if event.high_water != self.high_water:
            self.problem(record, f"says H is {event.high_water}, it is {self.high_water}")
        if record.generation == self.formed and record.generation in self.faulted_generations:
            self.problem(record, f"second root fault of generation {record.generation}")
        if record.generation == self.formed:
            self.faulted_generations.add(record.generation)
        if event.fault is FaultClass.NODE_LOST:
            self.sealed = -1
        self.is_decided = False

    def on_decided(self, record: Record, event: schema.RestartDecided) -> None:
        self.is_decided = True
        self.checkpoints_back = max(self.checkpoints_back, event.checkpoints_back)

    def on_excluded(self, record: Record, event: schema.RankExcluded) -> None:
        """What was sealed is of no use to another world; from how far back that begins is decided with it."""
        self.sealed = -1
        self.checkpoints_back = 0

    def on_node_lost(self, record: Record, event: schema.NodeLost) -> None:
        """What its ranks held in memory is gone, also where that is no fault any more."""
        if event.ranks:
            self.sealed = -1

    def on_draining(self, record: Record, event: schema.Event) -> None:
        self.drain_ns, self.num_started = record.time_ns, 0

    def on_finished(self, record: Record, event: schema.RunFinished) -> None:
        if self.has_finished:
            self.problem(record, "finished twice")
        self.has_finished = True
        busy = [key for key, stage in self.saves.items() if stage in ("started", "committed")]
        if busy:
            self.problem(record, f"the saves {busy} have neither ended nor failed")
        has_time = self.drain_ns is not None and record.time_ns - self.drain_ns < DRAIN_NS
        is_forgotten = event.exit_code == ExitCode.FINISHED or (has_time and not self.num_started)
        if is_forgotten and self.sealed > self._newest_attempt():
            self.problem(record, f"step {self.sealed} was sealed on every rank and not saved before the end")

    def on_stopped(self, record: Record, event: schema.LauncherStopped) -> None:
        self.has_stopped = True

    def on_save_started(self, record: Record, event: schema.SaveStarted) -> None:
        busy = [key for key, stage in self.saves.items() if stage in ("started", "committed")]
        if busy:
            self.problem(record, f"save of step {event.step} started while {busy} is in flight")
        self.saves[record.generation, event.step] = "started"
        self.num_started += 1

    def on_save_committed(self, record: Record, event: schema.SaveCommitted) -> None:
        if self.saves.get((record.generation, event.step)) != "started":
            self.problem(record, f"commit of step {event.step} that had not started")
        if any(record.generation < generation and event.step > step for generation, step in self.fences):
            self.problem(record, f"commit of step {event.step} of an abandoned line")
        self.saves[record.generation, event.step] = "committed"

    def on_save_verified(self, record: Record, event: schema.SaveVerified) -> None:
        if self.saves.get((record.generation, event.step)) != "committed":
            self.problem(record, f"verified step {event.step} that was not committed")
        self.saves[record.generation, event.step] = "verified"
        self.good.add((record.generation, event.step))

    def on_save_unverified(self, record: Record, event: schema.SaveUnverified) -> None:
        if self.saves.get((record.generation, event.step)) != "committed":
            self.problem(record, f"left step {event.step} unverified that was not committed")
        self.saves[record.generation, event.step] = "unverified"

    def on_save_failed(self, record: Record, event: schema.SaveFailed) -> None:
        is_committed = self.saves.get((record.generation, event.step)) == "committed"
        if is_committed and event.reason.value in [item.value for item in schema.Unverified]:
            self.problem(record, f"counts the committed save of step {event.step} as failed")
        self.saves[record.generation, event.step] = "failed"

    def on_checkpoint_gone(self, record: Record, event: schema.CheckpointRejected | schema.CheckpointDeleted) -> None:
        self.good = {key for key in self.good if key[1] != event.step}

    def _newest_attempt(self) -> int:
        """Newest step of the current line whose save was begun; that the storage refused it is no fault of ours."""
        return max((key[1] for key, stage in self.saves.items() if stage != "abandoned"), default=-1)


_HANDLERS: dict[type[schema.Event], Callable[[_Safety, Record, Any], None]] = {
    schema.GenerationFormed: _Safety.on_formed,
    schema.RolledBack: _Safety.on_rolled_back,
    schema.StateRestored: _Safety.on_restored,
    schema.StepsCommitted: _Safety.on_steps,
    schema.FaultDetected: _Safety.on_fault,
    schema.RestartDecided: _Safety.on_decided,
    schema.RankExcluded: _Safety.on_excluded,
    schema.NodeLost: _Safety.on_node_lost,
    schema.PreemptionReceived: _Safety.on_draining,
    schema.HaltRequested: _Safety.on_draining,
    schema.RunFinished: _Safety.on_finished,
    schema.LauncherStopped: _Safety.on_stopped,
    schema.SaveStarted: _Safety.on_save_started,
    schema.SaveCommitted: _Safety.on_save_committed,
    schema.SaveVerified: _Safety.on_save_verified,
    schema.SaveUnverified: _Safety.on_save_unverified,
    schema.SaveFailed: _Safety.on_save_failed,
    schema.CheckpointRejected: _Safety.on_checkpoint_gone,
    schema.CheckpointDeleted: _Safety.on_checkpoint_gone,
}
