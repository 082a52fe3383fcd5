"""Which steps are committed, and what they cost; `Seals` follows what became of their captures.

Model: every rank reports steps cumulatively; a step is committed when every rank of the generation has
reported it or a later one. Committed steps are gathered into one `StepsCommitted` a second; kind changes, faults,
ends and the first new step after an incident (once it is settled) close it earlier. Times are those of the rank
that committed last.

Invariants: H never falls; within a generation steps are committed once, in order; reports of other
generations never reach this class. Bounded: reports wait only between the fastest and the slowest rank, and
losses are kept for `MAX_LOSSES` steps. Pure.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass, field

from nvrx_sre.core.clock import to_ns
from nvrx_sre.events.messages import Sealed as SealedReport
from nvrx_sre.events.messages import Step
from nvrx_sre.events.schema import ReplayDiverged, StepKind, StepsCommitted
from nvrx_sre.launcher.machine_interval import HotInterval
from nvrx_sre.launcher.machine_job import Job
from nvrx_sre.launcher.machine_seals import Committed, Sealed, Seals, Unsettled

MAX_LOSSES = 65_536
"""Steps whose loss is kept to notice a replay that differs; at 100 bytes a step about 6 MB."""


@dataclass(kw_only=True)
class _Totals:
    """What some steps cost, as the ranks that committed them last told."""

    step_s: float = 0.0
    data_s: float = 0.0
    checkpoint_block_s: float = 0.0
    evaluate_s: float = 0.0
    tokens: int = 0
    captured: int = 0
    skipped: int = 0

    def add_difference(self, new: Step, old: Step | None) -> None:
        """By what a rank's totals grew from its report `old` (None: from the generation's begin) to `new`."""
        for name in _TOTALS:
            before = 0 if old is None else getattr(old, name)
            setattr(self, name, getattr(self, name) + max(0, getattr(new, name) - before))


_TOTALS = ("step_s", "data_s", "checkpoint_block_s", "evaluate_s", "tokens", "captured", "skipped")


@dataclass(kw_only=True)
class _Rank:
    """Reports of one rank: the newest step, those not committed yet, the last committed one that arrived."""

    step: int = 0
    waiting: dict[int, Step] = field(default_factory=dict)
    committed: Step | None = None


@dataclass(kw_only=True)
class _Aggregate:
    """Committed steps of one kind that have not been recorded yet. Times are monotonic."""

    kind: StepKind
    first_step: int
    last_step: int
    started_ns: int
    committed_ns: int
    totals: _Totals
    loss: float | None


class Commits:
    """Commits of the open generation, and what outlives it: H, losses, the newest sealed step."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.high_water = job.start.high_water
        self.step = 0
        """Newest committed step of the generation (at first the restored one)."""
        self.num_committed = 0
        """Steps committed in this generation."""
        self.divergence: ReplayDiverged | None = None
        """The first step whose loss differed when it was executed again in the same world."""
        self.incident_high_water = job.history.incident_high_water()
        """H at the newest fault while no step above it is committed: that step is recorded at once."""
        self._interval = HotInterval(job)
        self._seals = Seals()
        self._ranks: list[_Rank] = []
        self._num_at: dict[int, int] = {}
        """Ranks whose newest reported step it is."""
        self.is_restored = False
        """Every rank of the newest generation holds a state, and goes on from it."""
        self._record_at: int | None = None
        """First step above an incident's H: recorded alone, once it is settled."""
        self._aggregate: _Aggregate | None = None
        self._last_committed_ns = 0
        self._losses: dict[int, tuple[float, int]] = {}

    @property
    def sealed(self) -> Sealed | None:
        """Newest step that every rank holds in a slot, None if none is known."""
        return self._seals.sealed

    def open(self) -> None:
        """A generation was opened: nothing of it is committed yet."""
        self._ranks = [_Rank() for _ in range(self._job.world_size)]
        self._num_at = {0: len(self._ranks)}
        self.is_restored = False
        self._seals.open(self._job.generation, len(self._ranks))
        self._record_at = None
        self._aggregate = None
        self.num_committed = 0
        self._last_committed_ns = 0

    def restored(self, step: int, mono_ns: int, held: Sealed | None = None) -> None:
        """Every rank holds the state of `step`: what was sealed above it is void. `held`: in these slots as well.

        A rank seals beside its report, which dies with it or comes after the fault; a launcher dies with what it had
        not recorded. What is restored was executed, so it is committed here unless it was before.
        """
        self.is_restored = True
        if step > self.high_water:
            self._record_proven(step, mono_ns)
        self.step = step
        for rank in self._ranks:
            rank.step = max(rank.step, step)
        self._num_at = dict(Counter(rank.step for rank in self._ranks))
        if self.sealed is not None and self.sealed.step != step:
            self.forget_sealed()
        if held is not None and self.sealed is None:
            # Not heard before: the last report or seal died with its generation. It may be all that is to be saved.
            self._seals.sealed = held
            self._job.publish_sealed(step)

    def forget_sealed(self) -> None:
        """No sealed step is known any more."""
        self._seals.sealed = None
        self._job.forget_sealed()

    def enter_loop(self, mono_ns: int) -> None:
        """A rank entered its step loop; the last one starts the first step."""
        if self.num_committed == 0:
            self._last_committed_ns = max(self._last_committed_ns, mono_ns)

    def report(self, rank: int, message: Step) -> list[Committed]:
        """Take in a rank's report and commit what it completes; the steps that are settled by it, in order."""
        state = self._ranks[rank]
        if message.step <= state.step:
            return []
        left = state.step
        state.step = message.step
        state.waiting[message.step] = message
        self._num_at[message.step] = self._num_at.get(message.step, 0) + 1
        num_left = self._num_at[left] - 1
        if num_left:
            self._num_at[left] = num_left
            return []  # the common case, on the launcher's hot path
        del self._num_at[left]
        if left > self.step:
            return []  # it was ahead already: reports of a rank arrive several at a time
        # The slowest rank of this generation: `self.step` is the last one's until all have restored.
        for step in range(self.step + 1, min(self._num_at) + 1):
            self._commit(step, rank, message.mono_ns)
        return self._settle()

    def seal(self, rank: int, message: SealedReport) -> list[Committed]:
        """A rank's capture is over; the steps that are settled by it, in order."""
        self._seals.over(rank, message)
        return self._settle()

    def losses(self) -> dict[int, float]:
        """Loss of the last execution of each step, as far as it is kept."""
        return {step: loss for step, (loss, _) in sorted(self._losses.items())}

    def flush(self) -> None:
        """Record what is committed and not recorded yet."""
        item, self._aggregate = self._aggregate, None
        if item is None:
            return
        self._job.emit(
            StepsCommitted(
                kind=item.kind,
                first_step=item.first_step,
                last_step=item.last_step,
                started_ns=self._job.wall_ns(item.started_ns),
                committed_ns=self._job.wall_ns(item.committed_ns),
                step_s=item.totals.step_s,
                data_s=item.totals.data_s,
                checkpoint_block_s=item.totals.checkpoint_block_s,
                evaluate_s=item.totals.evaluate_s,
                tokens=item.totals.tokens,
                loss=item.loss,
                hot_sealed_step=-1 if self.sealed is None else self.sealed.step,
                hot_captured=item.totals.captured,
                hot_skipped=item.totals.skipped,
            )
        )

    def _record_proven(self, step: int, mono_ns: int) -> None:
        """Commit the steps above H up to `step`, whose time and cost are not known."""
        first_step, self.high_water = self.high_water + 1, step
        if self.incident_high_water is not None:
            self.incident_high_water = step
        known_ns = self._job.wall_ns(mono_ns)
        self._job.emit(
            StepsCommitted(
                kind=StepKind.NEW,
                first_step=first_step,
                last_step=step,
                started_ns=known_ns,
                committed_ns=known_ns,
                step_s=0.0,
                data_s=0.0,
                checkpoint_block_s=0.0,
                evaluate_s=0.0,
                tokens=0,
                loss=None,
                hot_sealed_step=-1,
                hot_captured=0,
                hot_skipped=0,
                proven_by_restore=True,
            )
        )

    def deadline_ns(self) -> int | None:
        """When the aggregate is to be recorded."""
        if self._aggregate is None:
            return None
        return self._aggregate.started_ns + to_ns(self._job.config.limits.telemetry.step_aggregate_s)

    def _commit(self, step: int, last_rank: int, mono_ns: int) -> None:
        if self._record_at is not None:
            self._record_first()
        reports = [state.waiting.pop(step, None) for state in self._ranks]
        complete = [report for report in reports if report is not None]
        kind = StepKind.NEW if step > self.high_water else StepKind.REDONE
        if self._aggregate is not None and self._aggregate.kind is not kind:
            self.flush()
        mono_ns = max(mono_ns, self._last_committed_ns)
        aggregate = self._aggregate_with(step, kind, mono_ns)
        aggregate.loss = self._note_loss(step, complete)
        last = reports[last_rank]
        if last is not None:
            aggregate.totals.add_difference(last, self._ranks[last_rank].committed)
        if self._job.config.hot_every is None:
            self._measure(step, reports)
        for state, report in zip(self._ranks, reports, strict=True):
            if report is not None:
                state.committed = report
        self.step = step
        self.num_committed += 1
        self.high_water = max(self.high_water, step)
        is_begun = len(complete) == len(reports) and all(report.slot >= 0 for report in complete)
        self._seals.committed(
            Unsettled(step=step, kind=kind, reports=tuple(complete), mono_ns=mono_ns, is_begun_everywhere=is_begun)
        )
        if self.incident_high_water is not None and step > self.incident_high_water:
            self.incident_high_water = None
            self._record_at = step

    def _settle(self) -> list[Committed]:
        settled = self._seals.settle()
        if self._record_at is not None and any(item.step >= self._record_at for item in settled):
            self._record_first()
        return settled

    def _record_first(self) -> None:
        """Record the first step above an incident's H, which ends the outage."""
        self._record_at = None
        self.flush()

    def _measure(self, step: int, reports: list[Step | None]) -> None:
        """Tell how long the step took on the slowest rank, if every rank told."""
        times_s = []
        for state, report in zip(self._ranks, reports, strict=True):
            before = state.committed
            if report is not None and (before.step if before is not None else 0) == step - 1:
                before_s = 0.0 if before is None else before.step_s + before.checkpoint_block_s
                times_s.append(report.step_s + report.checkpoint_block_s - before_s)
        is_captured = any(report is not None and report.slot >= 0 for report in reports)
        known_s = max(times_s) if len(times_s) == len(self._ranks) else None
        self._interval.on_step(step, known_s, is_captured, max(state.step for state in self._ranks))

    def _aggregate_with(self, step: int, kind: StepKind, mono_ns: int) -> _Aggregate:
        """The steps that are not recorded yet, with `step` among them."""
        aggregate = self._aggregate
        if aggregate is None:
            started_ns = self._last_committed_ns or self._job.go_ns
            aggregate = self._aggregate = _Aggregate(
                kind=kind,
                first_step=step,
                last_step=step,
                started_ns=started_ns,
                committed_ns=mono_ns,
                totals=_Totals(),
                loss=None,
            )
        aggregate.last_step = step
        aggregate.committed_ns = self._last_committed_ns = mono_ns
        return aggregate

    def _note_loss(self, step: int, complete: list[Step]) -> float | None:
        """Mean loss over the ranks that gave one; a replay is compared only if all reports are in."""
        losses = [report.loss for report in complete if report.has_loss]
        if not losses or len(complete) < len(self._ranks):
            return None
        loss = _mean(losses)
        world_size = len(self._ranks)
        earlier = self._losses.pop(step, None)
        if earlier is not None and earlier[1] == world_size and _bits(earlier[0]) != _bits(loss):
            diverged = ReplayDiverged(step=step, expected=_bits(earlier[0]), actual=_bits(loss))
            self.divergence = self.divergence or diverged
            self._job.emit(diverged)
        self._losses[step] = (loss, world_size)
        if len(self._losses) > MAX_LOSSES:
            del self._losses[next(iter(self._losses))]
        return loss


def _mean(losses: list[float]) -> float:
    """Mean in the order of ranks, so that a replay gives the same bits; of equal losses exactly that loss."""
    if len(set(losses)) == 1:
        return losses[0]
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()
