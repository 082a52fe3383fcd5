"""Durable saves: one in flight, handed to the writer process, which outlives the workers.

Model: a step that all ranks have sealed and whose save is due is handed over at once if the writer is
parked and idle. A due save that finds it busy, or that not every rank could capture, is skipped and counted, once,
and a save is owed: as soon as the writer is free it takes the newest step sealed on all ranks, so that it never idles
while a save is due. With
`waits_for_writer` nothing is skipped: the ranks stand at their boundary until the writer takes the step. A writer
that still starts up owes the save without a skip. The slots stay held until the save is committed or has failed, so
a writer that dies is replaced and the same save is written again; one that fails is tried again when the next is due.
A commit above a fence of a newer generation belongs to an abandoned line and counts as failed. One that is on record
stays a commit: where it could not be read back, since its writer, its node or its line was lost, it is unverified.

Over several nodes the writer of each node that has ranks takes part (`checkpoint.parts`), and all must be free; the one
of rank 0's node commits. One that fails, or dies, ends the attempt for all of them.

Invariants: at most one save is held; its slots are released exactly once. A writer that keeps dying is
respawned with the caps' back-off; at the end of the run only while something is still to be written by it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nvrx_sre.core.clock import to_ns
from nvrx_sre.events.messages import WriterProgress
from nvrx_sre.events.schema import (
    Event,
    Role,
    SaveCommitted,
    SaveFailed,
    SaveFailure,
    SaveSealed,
    SaveSkipped,
    SaveStarted,
    SaveVerified,
    SaveWritten,
    SkipReason,
    Tier,
)
from nvrx_sre.launcher.commands import EndAttempt, HurrySaves, ReleaseBoundary, ReleaseSlots, RetainSaves, StartSave
from nvrx_sre.launcher.machine_commits import Commits
from nvrx_sre.launcher.machine_job import Job, Stage
from nvrx_sre.launcher.machine_roster import Child, Roster
from nvrx_sre.launcher.machine_seals import Committed, Sealed
from nvrx_sre.launcher.save_endings import failure, given_up

MAX_REDONE = 2
"""Times a held save is handed to a new writer before it is given up."""


@dataclass(kw_only=True)
class _Save:
    """The save whose slots are held."""

    sealed: Sealed
    nodes: tuple[int, ...]
    """Node of each rank."""
    attempt: str = ""
    """What its writers agreed on, '' for one writer."""
    written: dict[int, WriterProgress] = field(default_factory=dict)
    """What is on the disk of each writer's share."""
    is_committed: bool = False
    committed_before: int = -1
    """`Saves.committed_step` when it was."""
    is_abandoned: bool = False
    is_on_record: bool = False
    """Its commit was recorded."""
    is_reported: bool = False
    """How it ended was recorded; it is held only until the writer is done with it."""
    num_redone: int = 0
    deadline_ns: int | None = None
    """None while it waits for a new writer."""


class Saves:
    """The writer and the save it works on."""

    def __init__(self, job: Job, roster: Roster, commits: Commits) -> None:
        self._job = job
        self._roster = roster
        self._commits = commits
        self._held: _Save | None = None
        self._flush: Sealed | None = None
        self._is_owed = False
        """A due save was not taken: the newest sealed step is, as soon as the writer is free."""
        self._num_deaths = 0
        self._is_closing = False
        self._respawn_ns: dict[int, int] = {}
        """When the writer of a node is to be started again."""
        self.committed_step = job.history.durable_step
        """Newest committed step of the run's current line, -1 if none."""
        self.last_failure = ""
        """Why the newest save failed, '' after a commit."""
        self.keeps_all = False
        """Nothing is given up for a newer save any more."""

    @property
    def is_idle(self) -> bool:
        """No save is held or waiting."""
        return self._held is None and self._flush is None

    def on_commit_of(self, step: int) -> None:
        """The state of `step` is on the disk, whoever wrote it."""
        self.committed_step = max(self.committed_step, step)
        self.last_failure = ""

    def on_nothing_restorable(self) -> None:
        """No commit on record can be loaded."""
        self.committed_step = -1

    def start_writer(self, now_ns: int, node: int = 0) -> None:
        """Spawn the writer of a node; one that comes after the end was begun has not heard of it."""
        self._respawn_ns.pop(node, None)
        self._roster.spawn(Role.WRITER, None, now_ns, node)
        if self._job.stage is Stage.STOPPING:
            self._job.command(HurrySaves())

    def on_commit(self, committed: Committed, now_ns: int) -> None:
        """A step was committed: hand it over if its durable save is due, or one is owed."""
        sealed = committed.sealed
        if not committed.is_durable_due:
            self.poll(now_ns)
        elif sealed is None:
            reason = SkipReason.INCOMPLETE if committed.is_captured_partly else SkipReason.NO_FREE_SLOT
            self._is_owed = True
            self._skip(committed.step, reason)
        else:
            self._on_due(sealed, now_ns)

    def _on_due(self, sealed: Sealed, now_ns: int) -> None:
        if self._held is None and self._are_writers_parked():
            self._take(sealed, now_ns)
            return
        self._is_owed = True
        if self._held is not None and not self._job.config.waits_for_writer:
            self._emit_sealed(sealed)
            self._skip(sealed.step, SkipReason.WRITER_BUSY)

    def flush(self, sealed: Sealed | None, now_ns: int) -> None:
        """Save the newest sealed step before the end, now or when the writer is free, unless it is saved already."""
        in_flight = -1 if self._held is None or self._held.is_abandoned else self._held.sealed.step
        if sealed is None or sealed.step <= max(self.committed_step, in_flight):
            return
        self._flush = sealed
        self._end_abandoned(now_ns)
        self.poll(now_ns)

    def _end_abandoned(self, now_ns: int) -> None:
        """Something waits for a writer that works for nobody: another one is there sooner than this one is done."""
        save = self._held
        if save is None or not save.is_abandoned or save.deadline_ns is None:
            return
        self._report_failure(save, SaveFailure.ABANDONED_LINE, "the run went back before this step")
        for child in self._roster.spares(Role.WRITER):
            self._roster.kill(child, "its save is of an abandoned line, and another one waits", now_ns)

    def poll(self, now_ns: int) -> None:
        """Hand over what waits, if a writer is parked."""
        if not self._is_waiting() or not self._are_writers_parked():
            return
        if self._held is not None:
            self._hand_over(self._held, now_ns)
        elif self._flush is not None:
            sealed, self._flush = self._flush, None
            self._take(sealed, now_ns)
        else:
            newest = self._commits.sealed
            if newest is not None and newest.step > self.committed_step:
                self._take(newest, now_ns)

    def _is_waiting(self) -> bool:
        """Something is to be handed over. Asked first: whether all writers are parked takes a look at each."""
        if self._held is not None:
            return self._held.deadline_ns is None
        return self._flush is not None or (self._is_owed and self._job.stage is not Stage.STOPPING)

    def fence(self, step: int) -> None:
        """The run went back to `step`: whatever is saved above it is abandoned."""
        self.committed_step = min(self.committed_step, step)
        save = self._held
        if save is None or save.sealed.step <= step:
            return
        save.is_abandoned = True
        if save.deadline_ns is None:  # told as failed when its writer died; the next one need not begin
            self._held = None
            self._release(save)

    def on_progress(self, writer: Child, message: WriterProgress, now_ns: int) -> None:
        """A writer's report on a stage of the held save; reports on any other are stale."""
        save = self._held
        if save is None or (message.step, message.attempt) != (save.sealed.step, save.attempt):
            return
        if save.deadline_ns is None:
            return
        save.deadline_ns = now_ns + to_ns(self._job.config.limits.deadlines.save_s)
        if message.stage == "written":
            self._on_written(save, writer, message)
        elif message.stage == "committed":
            self._on_committed(save, message)
        elif message.stage == "verified":
            self._on_verified(save, message)
        elif message.stage == "failed":
            self._fail(save, failure(message.reason), message.message)
        self.poll(now_ns)

    def on_writer_death(self, writer: Child, now_ns: int) -> None:
        """A writer is dead: replace it, and let the new one redo what is held."""
        self._num_deaths += 1
        self._release_boundary(self._commits.step)
        save = self._held
        if save is not None and save.is_committed and writer.node != save.nodes[0]:
            save = None  # its share is in the commit, which is read back on rank 0's node
        if self._is_closing:
            if save is not None:
                self._fail(save, SaveFailure.INTERRUPTED, "the run ended before the save was done")
            return
        if save is not None and save.deadline_ns is not None and writer.node in save.nodes:
            self._on_interrupted_save(save)
        backoff = self._job.config.limits.caps.backoff_s
        wait_s = backoff[min(self._num_deaths, len(backoff)) - 1] if backoff else 0.0
        self._respawn_ns[writer.node] = now_ns + to_ns(wait_s)
        self.on_tick(now_ns)

    def lose(self, reason: str) -> None:
        """Every slot is lost: with the node and the writer, or with the world."""
        self._flush = None
        self._is_owed = False
        if self._held is not None:
            self._fail(self._held, SaveFailure.INTERRUPTED, reason)

    def close(self) -> None:
        """The end is near: what is held may finish, nothing is started any more."""
        self._is_closing = True
        self._is_owed = False
        self._flush = None
        self._respawn_ns.clear()

    def deadline_ns(self) -> int | None:
        """When the writer is overdue, or is to be respawned."""
        waits = [*self._respawn_ns.values(), self._held.deadline_ns if self._held is not None else None]
        return min((item for item in waits if item is not None), default=None)

    def rearm(self, now_ns: int) -> None:
        """The launcher stood still: the writer gets its time again."""
        if self._held is not None and self._held.deadline_ns is not None:
            self._held.deadline_ns = now_ns + to_ns(self._job.config.limits.deadlines.save_s)

    def on_tick(self, now_ns: int) -> None:
        """Respawn a dead writer, kill one that is overdue."""
        for node in [node for node, due_ns in self._respawn_ns.items() if now_ns >= due_ns]:
            del self._respawn_ns[node]
            if self._needs_writer(node):
                self.start_writer(now_ns, node)
        save = self._held
        if save is not None and save.deadline_ns is not None and now_ns >= save.deadline_ns:
            self._on_interrupted_save(save)
            for child in self._roster.spares(Role.WRITER):
                self._roster.kill(child, "the save is overdue", now_ns)

    def _needs_writer(self, node: int) -> bool:
        """A dead one is replaced: at the end, which waits for every process, only for what is still to be written."""
        if node in self._job.absent:
            return False  # it gets another one when it comes back
        if self._job.stage is not Stage.STOPPING:
            return True
        save = self._held
        is_redone = save is not None and save.deadline_ns is None and node in save.nodes
        return is_redone or (self._flush is not None and node in self._job.nodes)

    def _on_interrupted_save(self, save: _Save) -> None:
        text = "" if save.is_committed else "not committed"
        if save.is_committed or save.is_abandoned or save.num_redone >= MAX_REDONE:
            self._fail(save, SaveFailure.WRITER_DIED, text)
            return
        self._emit(save, given_up(save.sealed.step, SaveFailure.WRITER_DIED, text, is_committed=False))
        self._end_attempt(save)
        save.num_redone += 1
        save.deadline_ns = None

    def _end_attempt(self, save: _Save) -> None:
        if save.attempt:
            step, generation = save.sealed.step, save.sealed.generation
            self._job.command(EndAttempt(step=step, generation=generation, attempt=save.attempt))

    def _take(self, sealed: Sealed, now_ns: int) -> None:
        self._is_owed = False
        self._emit_sealed(sealed)
        self._hand_over(_Save(sealed=sealed, nodes=self._job.nodes), now_ns)
        self._release_boundary(sealed.step)

    def _release_boundary(self, step: int) -> None:
        """Ranks that wait for the save of `step`, or of an earlier one, may go on."""
        if self._job.config.waits_for_writer:
            self._job.command(ReleaseBoundary(generation=self._job.generation, step=step))

    def _hand_over(self, save: _Save, now_ns: int) -> None:
        sealed = save.sealed
        save.deadline_ns = now_ns + to_ns(self._job.config.limits.deadlines.save_s)
        save.written.clear()
        self._held = save
        if len(set(save.nodes)) > 1:
            # Never that of another hand-over, nor of another launcher: it names a directory that all of them write to.
            save.attempt = f"{self._job.wall_ns(now_ns):x}"
        self._job.command(
            StartSave(
                step=sealed.step,
                generation=sealed.generation,
                world_size=len(save.nodes),
                slots=sealed.slots,
                captured_mono_ns=sealed.captured_mono_ns,
                nodes=save.nodes,
                attempt=save.attempt,
            )
        )
        captured_ns = self._job.wall_ns(sealed.captured_mono_ns)
        self._emit(save, SaveStarted(step=sealed.step, tier=Tier.DURABLE, captured_ns=captured_ns))

    def _on_written(self, save: _Save, writer: Child, message: WriterProgress) -> None:
        """A writer's share is on the disk; the last one's makes the save written."""
        save.written[writer.node] = message
        if len(save.written) == len(set(save.nodes)):
            size_bytes = sum(item.size_bytes for item in save.written.values())
            slowest_s = max(item.seconds for item in save.written.values())
            self._emit(save, SaveWritten(step=message.step, size_bytes=size_bytes, seconds=slowest_s))

    def _on_committed(self, save: _Save, message: WriterProgress) -> None:
        self._num_deaths = 0
        save.is_committed = True
        self._release(save)
        if save.is_abandoned:
            # Held on until the writer is idle: its 'verified' must not be taken for that of a later save.
            self._report_failure(save, SaveFailure.ABANDONED_LINE, "the run went back before this step")
            return
        save.is_on_record, save.committed_before = True, self.committed_step
        self.on_commit_of(message.step)
        self._emit(
            save,
            SaveCommitted(
                step=message.step,
                directory=message.directory,
                size_bytes=message.size_bytes,
                seconds=message.seconds,
                captured_ns=self._job.wall_ns(save.sealed.captured_mono_ns),
            ),
        )

    def _on_verified(self, save: _Save, message: WriterProgress) -> None:
        self._held = None
        if save.is_abandoned:
            self._report_failure(save, SaveFailure.ABANDONED_LINE, "the run went back before this step")
            return
        self._emit(
            save,
            SaveVerified(
                step=message.step,
                directory=message.directory,
                seconds=message.seconds,
                captured_ns=self._job.wall_ns(save.sealed.captured_mono_ns),
            ),
        )
        # Not while ranks restore: what they go back to is surplus until the fence says that the newer line is none.
        if self._commits.is_restored and self._job.stage is not Stage.FORMING and not self.keeps_all:
            self._job.command(RetainSaves())

    def _fail(self, save: _Save, reason: SaveFailure, text: str) -> None:
        self._held = None
        if not save.is_committed:
            self._end_attempt(save)
            self._release(save)
        elif reason is SaveFailure.VERIFY:  # read back damaged, and out of discovery by now
            self.committed_step = min(self.committed_step, save.committed_before)
        self._report_failure(save, reason, text)

    def _report_failure(self, save: _Save, reason: SaveFailure, text: str) -> None:
        if save.is_reported:
            return
        save.is_reported = True
        event = given_up(save.sealed.step, reason, text, is_committed=save.is_on_record)
        if isinstance(event, SaveFailed):
            self.last_failure = f"{reason}: {text}" if text else str(reason)
        self._emit(save, event)

    def _release(self, save: _Save) -> None:
        self._job.command(ReleaseSlots(step=save.sealed.step))

    def _skip(self, step: int, reason: SkipReason) -> None:
        self._job.emit(SaveSkipped(step=step, tier=Tier.DURABLE, reason=reason))
        self._release_boundary(step)

    def _emit_sealed(self, sealed: Sealed) -> None:
        sealed_ns = self._job.wall_ns(sealed.captured_mono_ns)
        self._job.emit(SaveSealed(step=sealed.step, sealed_ns=sealed_ns), generation=sealed.generation)

    def _emit(self, save: _Save, event: Event) -> None:
        self._job.emit(event, generation=save.sealed.generation)

    def _are_writers_parked(self) -> bool:
        """Each node that the world has ranks on has a writer that takes saves."""
        nodes = set(self._job.nodes if self._held is None else self._held.nodes)
        return nodes <= self._roster.nodes_with_parked(Role.WRITER)
