"""The ledger: wall time of a job, partitioned. A pure fold over records.

    W = new + redo + lost_step + checkpoint_block + data + evaluate + init + detect + teardown
      + rendezvous + rebuild + load + backoff + down + suspended + halted + other  (+ open)

A cursor says up to when time is booked. Each record moves it to the moment the record tells of, never
back and never beyond the record's own time; the time between goes to the state the job was in. The job is
in the highest-priority activity of any live rank. The time of a step stays open until the step is
committed (then it is split by the phases of the rank that committed last) or cut short by a fault (then it
is `lost_step` up to the evidence and `detect` from there). What follows the last step is waiting until it
is safe: `checkpoint_block`.

Invariants: the sum of all states is exactly the cursor minus the start; no state ever falls; the same
records give the same ledger. Integers of nanoseconds inside. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from nvrx_sre.core.clock import seconds, to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Action, LedgerState, Phase, Record, StepKind, Tier
from nvrx_sre.events.snapshot import Snapshotted
from nvrx_sre.goodput.ratios import FirstExecutions, GoodputKind, StepReference, ratios


class _Activity(IntEnum):
    """What a rank does; a lower number wins for the job."""

    TEARDOWN = 1
    RENDEZVOUS = 2
    REBUILD = 3
    LOAD = 4
    INIT = 5
    STEPPING = 6
    FINALIZE = 7


_OF_PHASE = {
    Phase.INIT: _Activity.INIT,
    Phase.RENDEZVOUS: _Activity.RENDEZVOUS,
    Phase.REBUILD: _Activity.REBUILD,
    Phase.LOAD: _Activity.LOAD,
    Phase.FIRST_STEP: _Activity.STEPPING,
    Phase.STEP: _Activity.STEPPING,
    Phase.FINALIZE: _Activity.FINALIZE,
}
_BOOKED_AS = {
    _Activity.TEARDOWN: LedgerState.TEARDOWN,
    _Activity.RENDEZVOUS: LedgerState.RENDEZVOUS,
    _Activity.REBUILD: LedgerState.REBUILD,
    _Activity.LOAD: LedgerState.LOAD,
    _Activity.INIT: LedgerState.INIT,
    _Activity.FINALIZE: LedgerState.CHECKPOINT_BLOCK,
}
_AFTER_EXIT = {
    int(ExitCode.FINISHED): LedgerState.SUSPENDED,
    int(ExitCode.DO_NOT_RESTART): LedgerState.HALTED,
    int(ExitCode.PREEMPTED): LedgerState.SUSPENDED,
    int(ExitCode.INTERRUPTED): LedgerState.SUSPENDED,
}


class Ledger(Snapshotted):
    """Fold of records into seconds per state. `now_ns` arguments are wall time (ns since the epoch)."""

    STATE = (
        *("_booked_ns", "_rank_ns", "_start_ns", "_cursor_ns", "_now_ns", "_epoch", "_activities", "_idle"),
        *("_tearing_down", "_backoff_until_ns", "_draining_ns", "_ended", "_finished", "_nproc", "_world_size"),
        *("_high_water", "_next_step", "_new_tokens", "_first", "_reference"),
    )
    STORED = (_Activity,)

    def __init__(self) -> None:
        self._booked_ns: dict[LedgerState, int] = dict.fromkeys(LedgerState, 0)
        self._rank_ns: dict[LedgerState, int] = dict.fromkeys(LedgerState, 0)
        self._start_ns: int | None = None
        self._cursor_ns = 0
        self._now_ns = 0
        self._epoch = 0
        self._activities: dict[int, _Activity] = {}
        """Of each rank. `_enter` alone changes it; all else puts another dict in its place."""
        self._counted: dict[int, _Activity] | None = None
        """Whose values `_num_in` has counted: a look at each rank for each record would cost the ranks squared."""
        self._num_in: Counter[_Activity] = Counter()
        self._idle = _Activity.INIT
        self._tearing_down = False
        self._backoff_until_ns = 0
        self._draining_ns: int | None = None
        self._ended: LedgerState | None = None
        self._finished = False
        self._nproc = 0
        self._world_size = 0
        self._high_water = 0
        self._next_step = 1
        self._new_tokens = 0
        self._first = FirstExecutions()
        self._reference = StepReference()
        self._handlers: dict[type[schema.Event], Callable[[Record, Any], None]] = {
            schema.RunStarted: self._on_run_started,
            schema.PhaseEntered: self._on_phase_entered,
            schema.GenerationFormed: self._on_generation_formed,
            schema.StateRestored: self._on_state_restored,
            schema.StepsCommitted: self._on_steps_committed,
            schema.FaultDetected: self._on_fault_detected,
            schema.TeardownFinished: self._on_teardown_finished,
            schema.RestartDecided: self._on_restart_decided,
            schema.PreemptionReceived: self._on_draining,
            schema.HaltRequested: self._on_draining,
            schema.RunFinished: self._on_end,
            schema.LauncherStopped: self._on_end,
            schema.SaveVerified: self._on_save_verified,
            schema.CheckpointRejected: self._on_checkpoint_rejected,
            schema.RolledBack: self._on_rolled_back,
        }

    # --- reading ------------------------------------------------------------------------------------------

    def booked(self) -> dict[LedgerState, float]:
        """Seconds per state, all states present."""
        return {state: seconds(value) for state, value in self._booked_ns.items()}

    def booked_by_ranks(self) -> dict[LedgerState, float]:
        """Seconds per state times the ranks that were there: those of the newest generation, before it all."""
        return {state: seconds(value) for state, value in self._rank_ns.items()}

    def wall_s(self, now_ns: int) -> float:
        """Wall time since the first record; it stands still while a finished run is not started again."""
        if self._start_ns is None:
            return 0.0
        end_ns = self._cursor_ns if self._finished else max(now_ns, self._now_ns)
        return seconds(end_ns - self._start_ns)

    def open_s(self, now_ns: int) -> float:
        """Wall time that is not booked yet."""
        return max(0.0, self.wall_s(now_ns) - seconds(sum(self._booked_ns.values())))

    def current_state(self) -> LedgerState:
        """State that the open time belongs to as far as is known now."""
        if self._ended is not None:
            return self._ended
        if self._backoff_until_ns > self._now_ns:
            return LedgerState.BACKOFF
        return self._state(LedgerState.NEW if self._next_step > self._high_water else LedgerState.REDO)

    def goodput(self, now_ns: int) -> dict[GoodputKind, float]:
        """All goodput ratios."""
        reference_s = self._reference.seconds_per_token
        effective_s = None if reference_s is None else self._new_tokens * reference_s
        return ratios(self.booked(), self.wall_s(now_ns), seconds(self._first.durable_ns), effective_s)

    @property
    def reference_step_s(self) -> float | None:
        """Median time of the first new steps after warm-up at the configured world, None before one is known."""
        return self._reference.step_s

    @property
    def start_ns(self) -> int | None:
        """Time of the first record, None before it."""
        return self._start_ns

    @property
    def last_ns(self) -> int:
        """Time of the newest record, 0 before any."""
        return self._now_ns

    @property
    def high_water(self) -> int:
        """H: the highest step ever committed."""
        return self._high_water

    # --- folding ------------------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Fold one record. Records come in the order of (epoch, seq)."""
        if self._start_ns is None:
            self._start_ns = self._cursor_ns = self._now_ns = record.time_ns
            self._epoch = record.epoch
        if record.epoch > self._epoch:
            self._enter_epoch(record)
        self._now_ns = max(self._now_ns, record.time_ns)
        handler = self._handlers.get(type(record.event))
        if handler is not None:
            handler(record, record.event)

    def _enter_epoch(self, record: Record) -> None:
        """A new launcher: what the old one left open ends with its last record, the gap is down time."""
        if self._ended is None:
            self._advance(self._now_ns)
        gap = self._ended or LedgerState.DOWN
        self._now_ns = max(self._now_ns, record.time_ns)
        self._book(gap, self._now_ns)
        self._epoch = record.epoch
        if isinstance(record.event, schema.BudgetReset):  # an operator's epoch: no launcher lives in it
            self._ended = gap
            return
        self._activities = {}
        self._idle = _Activity.INIT
        self._tearing_down = self._finished = False
        self._backoff_until_ns = 0
        self._draining_ns = self._ended = None

    def _book(self, state: LedgerState, until_ns: int) -> None:
        until_ns = min(until_ns, self._now_ns)
        if until_ns > self._cursor_ns:
            spent_ns = until_ns - self._cursor_ns
            self._booked_ns[state] += spent_ns
            self._rank_ns[state] += spent_ns * (self._world_size or self._nproc)
            self._cursor_ns = until_ns

    def _advance(self, until_ns: int, stepping: LedgerState = LedgerState.LOST_STEP) -> None:
        """Book up to `until_ns` to the job's state; `stepping` is what an open step counts as."""
        if self._ended is not None:
            if not self._finished:
                self._book(self._ended, until_ns)
            return
        if self._backoff_until_ns > self._cursor_ns:
            self._book(LedgerState.BACKOFF, min(until_ns, self._backoff_until_ns))
        self._book(self._state(stepping), until_ns)

    def _activity(self) -> _Activity:
        if self._tearing_down:
            return _Activity.TEARDOWN
        return min(self._num_by_activity(), default=self._idle)

    def _num_by_activity(self) -> Counter[_Activity]:
        """How many ranks are in each activity that any is in."""
        if self._counted is not self._activities:
            self._counted, self._num_in = self._activities, Counter(self._activities.values())
        return self._num_in

    def _enter(self, rank: int, activity: _Activity) -> None:
        num_in, left = self._num_by_activity(), self._activities.get(rank)
        self._activities[rank] = activity
        num_in[activity] += 1
        if left is not None:
            num_in[left] -= 1
            if not num_in[left]:
                del num_in[left]

    def _state(self, stepping: LedgerState) -> LedgerState:
        return _BOOKED_AS.get(self._activity(), stepping)

    def _on_run_started(self, _: Record, event: schema.RunStarted) -> None:
        self._nproc = event.nproc

    def _on_phase_entered(self, record: Record, event: schema.PhaseEntered) -> None:
        activity = _OF_PHASE.get(event.phase)
        if activity is None or record.rank is None:
            return
        if activity is _Activity.RENDEZVOUS and self._tearing_down:
            self._advance(event.entered_ns)
            self._tearing_down = False
        if activity < _Activity.STEPPING or self._activity() < _Activity.STEPPING:
            self._advance(event.entered_ns)
        self._enter(record.rank, activity)

    def _on_generation_formed(self, _: Record, event: schema.GenerationFormed) -> None:
        self._advance(event.go_ns)
        self._tearing_down = False
        self._book(LedgerState.RENDEZVOUS, self._now_ns)
        self._world_size = event.world_size
        self._reference.generation_formed()
        # A smaller world: what its former ranks did last holds nobody up any more.
        activities = {rank: item for rank, item in self._activities.items() if rank < event.world_size}
        for rank in range(event.world_size):
            if activities.get(rank, _Activity.INIT) in (_Activity.RENDEZVOUS, _Activity.INIT):
                activities[rank] = _Activity.REBUILD
        self._activities = activities

    def _on_state_restored(self, _: Record, event: schema.StateRestored) -> None:
        self._advance(event.restored_ns)
        self._next_step = event.step + 1
        self._activities = {rank: max(item, _Activity.STEPPING) for rank, item in self._activities.items()}

    def _on_steps_committed(self, _: Record, event: schema.StepsCommitted) -> None:
        if event.proven_by_restore:
            self._high_water = max(self._high_water, event.last_step)
            self._first.add(event.last_step, 0)
            return
        self._advance(event.started_ns, stepping=LedgerState.OTHER)
        spent_ns = self._split(event)
        num_steps = event.last_step - event.first_step + 1
        if event.kind is StepKind.NEW:
            self._high_water = max(self._high_water, event.last_step)
            self._new_tokens += event.tokens
            self._first.add(event.last_step, spent_ns)
            if self._world_size == self._nproc:
                self._reference.add(seconds(spent_ns), event.tokens, num_steps)
        self._next_step = event.last_step + 1
        if not self._tearing_down:
            self._activities = dict.fromkeys(self._activities, _Activity.STEPPING)

    def _split(self, event: schema.StepsCommitted) -> int:
        """Book the interval of committed steps by phase; returns the step kind's share in ns."""
        interval_ns = min(event.committed_ns, self._now_ns) - self._cursor_ns
        if interval_ns <= 0:
            return 0
        parts = {
            LedgerState.DATA: max(0.0, event.data_s),
            LedgerState.CHECKPOINT_BLOCK: max(0.0, event.checkpoint_block_s),
            LedgerState.EVALUATE: max(0.0, event.evaluate_s),
        }
        whole_ns = max(interval_ns, event.committed_ns - event.started_ns, to_ns(sum(parts.values())))
        rest_ns = interval_ns
        for state, part_s in parts.items():
            part_ns = min(rest_ns, round(to_ns(part_s) * interval_ns / whole_ns))
            self._book(state, self._cursor_ns + part_ns)
            rest_ns -= part_ns
        self._book(LedgerState.NEW if event.kind is StepKind.NEW else LedgerState.REDO, self._cursor_ns + rest_ns)
        return rest_ns

    def _on_fault_detected(self, _: Record, event: schema.FaultDetected) -> None:
        if self._activity() >= _Activity.STEPPING:
            self._advance(event.evidence_ns)
            self._book(LedgerState.DETECT, self._now_ns)
        else:
            self._advance(self._now_ns)
        self._tearing_down = True

    def _on_teardown_finished(self, _: Record, __: schema.TeardownFinished) -> None:
        self._advance(self._now_ns)
        self._tearing_down = False
        self._activities = {}
        self._idle = _Activity.RENDEZVOUS

    def _on_restart_decided(self, _: Record, event: schema.RestartDecided) -> None:
        if event.action is Action.RESTART and event.backoff_s > 0:
            self._advance(self._now_ns)
            self._backoff_until_ns = self._now_ns + to_ns(event.backoff_s)

    def _on_draining(self, _: Record, __: schema.Event) -> None:
        if self._draining_ns is None:
            self._draining_ns = self._now_ns

    def _on_end(self, _: Record, event: schema.RunFinished | schema.LauncherStopped) -> None:
        if self._ended is None:
            if event.exit_code == ExitCode.FINISHED:
                self._advance(self._now_ns, stepping=LedgerState.CHECKPOINT_BLOCK)
            elif self._draining_ns is not None:
                self._advance(self._draining_ns)
                self._book(LedgerState.TEARDOWN, self._now_ns)
            else:
                self._advance(self._now_ns)
            self._finished = event.exit_code == ExitCode.FINISHED
            self._ended = _AFTER_EXIT.get(event.exit_code, LedgerState.DOWN)
        self._advance(self._now_ns)

    def _on_save_verified(self, _: Record, event: schema.SaveVerified) -> None:
        self._first.verified(event.step)

    def _on_checkpoint_rejected(self, _: Record, event: schema.CheckpointRejected) -> None:
        if event.tier is Tier.DURABLE:
            self._first.rejected(event.step)

    def _on_rolled_back(self, _: Record, event: schema.RolledBack) -> None:
        self._first.abandoned_above(event.step)
