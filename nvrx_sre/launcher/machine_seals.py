"""What became of the captures of committed steps.

Model: a rank's report of a step names the slot that takes it; a `Sealed` message says that the slot holds it, or
that the capture was given up. A committed step is settled when the captures of it are over on every rank, in the
order of steps: sealed if every rank holds it, else not. A step whose report was lost on the way counts as not
captured there. A step may be captured after its report, before weights are changed by hand and at the end of a run, and
is then settled a second time if no later one was.

Invariants: a step is sealed only if each rank said so itself; nothing is settled before an earlier step is, so
that what is stranded above a sealed step never frees one that may still be sealed. Bounded: steps wait only
while a copy runs. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import StepKind


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A step that every rank holds in a hot slot. `slots[rank]`; `captured_mono_ns`: its last rank's boundary."""

    step: int
    generation: int
    slots: tuple[int, ...]
    captured_mono_ns: int


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A committed step whose captures are over. `sealed` if every rank holds it; `is_durable_due` if a save is due."""

    step: int
    kind: StepKind
    sealed: Sealed | None
    is_durable_due: bool
    is_captured_partly: bool
    is_stranded: bool
    """Some ranks hold it in a slot and not all do, as far as is known."""
    mono_ns: int


@dataclass(frozen=True, kw_only=True)
class Unsettled:
    """A committed step, and the reports of it that arrived."""

    step: int
    kind: StepKind
    reports: tuple[wire.Step, ...]
    mono_ns: int
    is_begun_everywhere: bool
    """Every rank told of it, and of a slot that takes it."""


@dataclass(kw_only=True)
class _RankSeals:
    """All captures of a rank up to `over_step` are over; `slots`: where those are that are not settled yet."""

    over_step: int = 0
    slots: dict[int, int] = field(default_factory=dict)


class Seals:
    """Captures of the open generation."""

    def __init__(self) -> None:
        self.sealed: Sealed | None = None
        """Newest step that every rank holds, None if none is known."""
        self._generation = 0
        self._ranks: list[_RankSeals] = []
        self._waiting: deque[Unsettled] = deque()
        self._uncaptured: Unsettled | None = None
        """The newest step, if it is settled and not sealed: ranks capture the last one after their report."""

    def open(self, generation: int, world_size: int) -> None:
        """A generation was opened: nothing of it is captured yet."""
        self._generation = generation
        self._ranks = [_RankSeals() for _ in range(world_size)]
        self._waiting.clear()
        self._uncaptured = None

    def committed(self, item: Unsettled) -> None:
        """The next step was committed."""
        self._waiting.append(item)

    def over(self, rank: int, message: wire.Sealed) -> None:
        """A rank's capture is over."""
        state = self._ranks[rank]
        state.over_step = max(state.over_step, message.step)
        if message.slot >= 0:
            state.slots[message.step] = message.slot

    def settle(self) -> list[Committed]:
        """The steps whose captures are over by now, in order."""
        settled: list[Committed] = []
        while self._waiting and self._is_over(self._waiting[0]):
            item = self._waiting.popleft()
            outcome = self._outcome(item)
            self._uncaptured = None if outcome.sealed else item
            # A rank that is through may have captured the last step before another one has reported it.
            is_dropping = self._drop_below(item.step if self._uncaptured else item.step + 1)
            # What was captured late and not by all would keep its slots for ever if nothing is sealed above it.
            settled.append(replace(outcome, is_stranded=True) if self._uncaptured and is_dropping else outcome)
        last = self._uncaptured
        if last is not None and not self._waiting and self._seal(last):
            self._uncaptured = None
            settled.append(self._described(last, is_due=False))
        return settled

    def _drop_below(self, first_kept: int) -> bool:
        """Forget captures of earlier steps: they cannot become common to all ranks. True if there were any."""
        num_dropped = 0
        for state in self._ranks:
            kept = {step: slot for step, slot in state.slots.items() if step >= first_kept}
            num_dropped += len(state.slots) - len(kept)
            state.slots = kept
        return num_dropped > 0

    def _is_over(self, item: Unsettled) -> bool:
        return not item.is_begun_everywhere or all(state.over_step >= item.step for state in self._ranks)

    def _outcome(self, item: Unsettled) -> Committed:
        if item.is_begun_everywhere:
            self._seal(item)
        return self._described(item, is_due=any(report.durable for report in item.reports))

    def _seal(self, item: Unsettled) -> bool:
        """True if every rank holds the step; it is the newest sealed one then."""
        if any(item.step not in state.slots for state in self._ranks):
            return False
        self.sealed = Sealed(
            step=item.step,
            generation=self._generation,
            slots=tuple(state.slots[item.step] for state in self._ranks),
            captured_mono_ns=max((report.mono_ns for report in item.reports), default=item.mono_ns),
        )
        return True

    def _described(self, item: Unsettled, *, is_due: bool) -> Committed:
        sealed = self.sealed if self.sealed is not None and self.sealed.step == item.step else None
        is_complete = len(item.reports) == len(self._ranks)
        return Committed(
            step=item.step,
            kind=item.kind,
            sealed=sealed,
            is_durable_due=is_due,
            is_captured_partly=sealed is None and (not is_complete or item.is_begun_everywhere),
            is_stranded=sealed is None and any(report.slot >= 0 for report in item.reports),
            mono_ns=item.mono_ns,
        )
