"""One open generation, from 'go' to the last step: formed, restored, trained, finished.

Model: the generation is formed when every rank left the rendezvous, restored when every rank reports the same
state, finished when every rank's training function returned. A restore below H (or from another tier than
the hot one) abandons what lies above it: recorded and fenced before anything of this generation is saved.

Messages of any other generation never reach this class. Pure.
"""

from __future__ import annotations

from typing import Any

from nvrx_sre.events.messages import Entered, Finished, Rejected, Restored, Step
from nvrx_sre.events.messages import Sealed as SealedReport
from nvrx_sre.events.schema import (
    CheckpointRejected,
    GenerationFormed,
    Phase,
    RejectReason,
    RestoredFrom,
    RolledBack,
    StateRestored,
    Tier,
)
from nvrx_sre.launcher.commands import Fence, MoveRejected
from nvrx_sre.launcher.machine_commits import Commits
from nvrx_sre.launcher.machine_job import Job
from nvrx_sre.launcher.machine_progress import Progress
from nvrx_sre.launcher.machine_roster import Child, ChildState, Roster
from nvrx_sre.launcher.machine_saves import Saves
from nvrx_sre.launcher.machine_seals import Committed, Sealed

_BEFORE_FORMED = frozenset({Phase.INIT, Phase.RENDEZVOUS})


class Generation:
    """Progress of the open generation as a whole."""

    def __init__(self, job: Job, roster: Roster, commits: Commits, saves: Saves, progress: Progress) -> None:
        self._job = job
        self._roster = roster
        self._commits = commits
        self._saves = saves
        self._progress = progress
        self._number = 0
        self._formed: set[int] = set()
        self._in_loop: set[int] = set()
        self._is_formed = False
        self._restored: dict[int, Restored] = {}
        self._is_restored = False
        self._finished: set[int] = set()
        self._rejected: set[tuple[str, int, str]] = set()
        self.result: dict[str, Any] = {}

    @property
    def is_finished(self) -> bool:
        """Every rank's training function returned."""
        return self._number == self._job.generation and len(self._finished) == self._job.world_size

    def on_entered(self, child: Child, message: Entered, now_ns: int) -> None:
        """A rank entered a phase."""
        self._renew()
        phase = self._progress.on_entered(child, message, now_ns)
        if phase is Phase.FIRST_STEP and child.number not in self._in_loop:
            self._in_loop.add(child.number)  # it comes back to its first step from fetching data for it
            self._commits.enter_loop(message.mono_ns)
        if phase is not None and phase not in _BEFORE_FORMED:
            self._note_formed(child)

    def on_restored(self, child: Child, message: Restored, now_ns: int) -> bool:
        """A rank holds a state; False if the ranks hold different ones."""
        self._renew()
        if child.rank is None or self._is_restored:
            return True
        child.step = message.step
        child.heard_ns = child.progressed_ns = now_ns
        self._restored[child.rank] = message
        if len(self._restored) < self._job.world_size:
            return True
        if len({(item.step, item.source) for item in self._restored.values()}) > 1:
            return False
        self._all_restored(message.step, RestoredFrom(message.source))
        return True

    def on_step(self, child: Child, message: Step, now_ns: int) -> None:
        """A rank committed a step."""
        if child.rank is None:
            return
        self._renew()
        self._progress.on_step(child, message, now_ns)
        self._take(self._commits.report(child.rank, message), now_ns)

    def on_sealed(self, child: Child, message: SealedReport, now_ns: int) -> None:
        """A rank's capture is over."""
        if child.rank is not None:
            self._take(self._commits.seal(child.rank, message), now_ns)

    def _take(self, settled: list[Committed], now_ns: int) -> None:
        """Save what is due, publish what is sealed."""
        for committed in settled:
            if self._job.config.exact_replay and self._commits.divergence is not None:
                return  # the run ends here: a state that led to other numbers is not saved
            self._saves.on_commit(committed, now_ns)
            if committed.sealed is not None:
                self._job.publish_sealed(committed.step)
            elif committed.is_stranded:
                self._job.strand(committed.step)

    def on_finished(self, child: Child, message: Finished) -> None:
        """A rank's training function returned."""
        if child.rank is None:
            return
        self._renew()
        child.state = ChildState.FINISHED
        child.deadline_ns = None
        self._finished.add(child.rank)
        if child.rank == 0:
            self.result = dict(message.result)

    def on_rejected(self, message: Rejected) -> None:
        """The ranks agreed that a candidate is unusable; every rank says so, the first one counts."""
        key = (message.tier, message.step, message.directory)
        if key in self._rejected:
            return
        self._rejected.add(key)
        try:
            reason = RejectReason(message.reason)
        except ValueError:
            reason = RejectReason.UNREADABLE
        if message.tier == Tier.DURABLE:
            self._job.command(
                MoveRejected(directory=message.directory, step=message.step, reason=reason, message=message.message)
            )
            return
        if self._commits.sealed is not None and self._commits.sealed.step == message.step:
            self._commits.forget_sealed()  # were the run to end now it would be saved as a good one
        self._job.emit(
            CheckpointRejected(
                step=message.step,
                tier=Tier.HOT,
                directory=message.directory,
                reason=reason,
                message=message.message,
                moved_to="",
            )
        )

    def _renew(self) -> None:
        """The first message of a new generation: nothing of the last one counts."""
        if self._number == self._job.generation:
            return
        self._number = self._job.generation
        self._formed, self._restored, self._finished = set(), {}, set()
        self._in_loop = set()
        self._rejected = set()
        self._is_formed = self._is_restored = False
        self.result = {}

    def _note_formed(self, child: Child) -> None:
        self._formed.add(child.number)
        if self._is_formed or len(self._formed) < self._job.world_size:
            return
        seated = self._roster.seated()
        self._is_formed = True
        self._job.emit(
            GenerationFormed(
                world_size=len(seated),
                go_ns=self._job.wall_ns(self._job.go_ns),
                pids=[item.pid for item in seated],
                devices=[self._job.device(item.rank) for item in seated],
            )
        )

    def _held(self, step: int, mono_ns: int) -> Sealed | None:
        """The slots that hold the restored state on every rank, None if it came from elsewhere."""
        told = [self._restored[rank] for rank in sorted(self._restored)]
        generations = {item.slot_generation for item in told}
        if len(generations) > 1 or any(item.slot < 0 for item in told):
            return None
        slots = tuple(item.slot for item in told)
        return Sealed(step=step, generation=generations.pop(), slots=slots, captured_mono_ns=mono_ns)

    def _all_restored(self, step: int, source: RestoredFrom) -> None:
        job = self._job
        self._is_restored = True
        slowest = max(self._restored.values(), key=lambda item: item.mono_ns)
        self._commits.restored(step, slowest.mono_ns, self._held(step, slowest.mono_ns))
        high_water = self._commits.high_water
        if step < high_water or (high_water > 0 and source is not RestoredFrom.HOT):
            job.emit(RolledBack(step=step, high_water=high_water, source=source))
            job.command(Fence(generation=job.generation, step=step))
            self._saves.fence(step)
        job.hot_allowed = True
        job.checkpoints_back = 0
        job.emit(
            StateRestored(
                step=step,
                source=source,
                restored_ns=job.wall_ns(slowest.mono_ns),
                seconds=max(item.seconds for item in self._restored.values()),
            )
        )
