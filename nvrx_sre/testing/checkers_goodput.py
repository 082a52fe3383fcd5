"""What must hold of the time ledger and of incidents in every journal.

The ledger is driven record by record, as the launcher and the exporter drive it, and weighed against what can be
recounted from the records alone: the wall time between two of them, the gaps between launchers, the back-offs that
were decided. Incidents are recounted from faults, restores and commits. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from nvrx_sre.core.clock import seconds
from nvrx_sre.events import schema
from nvrx_sre.events.schema import LedgerState, Record, Verdict
from nvrx_sre.goodput.ledger import Ledger

MAX_UNBOOKED_SHARE = 0.005
"""Of the wall time, that may be neither booked nor open."""
MAX_OTHER_SHARE = 0.01
_STRIDE = 32
"""Records between two looks at the sums."""
_BETWEEN = (LedgerState.DOWN, LedgerState.SUSPENDED, LedgerState.HALTED)
"""States of a job without a launcher."""
_EPSILON_S = 1e-6


def check_ledger(records: Sequence[Record]) -> list[str]:
    """What is wrong with the ledger of these records; empty if it adds up."""
    ledger = Ledger()
    problems: list[str] = []
    before = ledger.booked()
    for number, record in enumerate(records):
        ledger.apply(record)
        if number % _STRIDE and record is not records[-1]:
            continue
        booked = ledger.booked()
        fell = [state.value for state in booked if booked[state] < before[state] - _EPSILON_S]
        before = booked
        wall_s, open_s = ledger.wall_s(record.time_ns), ledger.open_s(record.time_ns)
        if fell:
            problems.append(f"record {record.seq}: the ledger took back time of {', '.join(fell)}")
        if abs(wall_s - sum(booked.values()) - open_s) > MAX_UNBOOKED_SHARE * max(wall_s, 1.0):
            problems.append(f"record {record.seq}: {sum(booked.values()):.3f} s booked of {wall_s:.3f} s")
    return problems + (_check_shares(ledger, records) if records else [])


def _check_shares(ledger: Ledger, records: Sequence[Record]) -> list[str]:
    booked = ledger.booked()
    wall_s = ledger.wall_s(records[-1].time_ns)
    recounted_s = seconds(records[-1].time_ns - records[0].time_ns)
    between_s, decided_s = _between_s(records), _decided_backoff_s(records)
    problems = []
    if abs(wall_s - recounted_s) > MAX_UNBOOKED_SHARE * recounted_s:
        problems.append(f"the ledger's wall time is {wall_s:.3f} s, the records span {recounted_s:.3f} s")
    if booked[LedgerState.OTHER] > MAX_OTHER_SHARE * wall_s:
        problems.append(f"{booked[LedgerState.OTHER]:.3f} s of {wall_s:.3f} s are booked as other")
    if abs(sum(booked[state] for state in _BETWEEN) - between_s) > MAX_OTHER_SHARE * wall_s:
        problems.append(f"without a launcher: {between_s:.3f} s, booked {[booked[state] for state in _BETWEEN]}")
    if booked[LedgerState.BACKOFF] > decided_s + _EPSILON_S:
        problems.append(f"{booked[LedgerState.BACKOFF]:.3f} s of back-off booked, {decided_s:.3f} s decided")
    if booked[LedgerState.BACKOFF] < 0.99 * _served_backoff_s(records) - _EPSILON_S:
        problems.append(f"{booked[LedgerState.BACKOFF]:.3f} s of back-off booked, more was served")
    return problems


def _between_s(records: Sequence[Record]) -> float:
    """Time between the last record of a launcher and the first of the next; an operator's epoch is none's."""
    gaps_ns = 0
    for earlier, later in itertools.pairwise(records):
        if earlier.epoch != later.epoch:
            gaps_ns += later.time_ns - earlier.time_ns
    return seconds(gaps_ns)


def _decided_backoff_s(records: Sequence[Record]) -> float:
    return sum(record.event.backoff_s for record in records if isinstance(record.event, schema.RestartDecided))


def _served_backoff_s(records: Sequence[Record]) -> float:
    """Back-offs that ended with a new generation: nothing cut them short."""
    served_s, waiting_s = 0.0, 0.0
    for record in records:
        event = record.event
        if isinstance(event, schema.RestartDecided):
            waiting_s = event.backoff_s
        elif isinstance(event, schema.GenerationFormed):
            served_s, waiting_s = served_s + waiting_s, 0.0
        elif isinstance(event, schema.LauncherStarted):
            waiting_s = 0.0
    return served_s


def check_incidents(records: Sequence[Record], *, is_finished: bool) -> list[str]:
    """What is wrong with the incidents of these records. `is_finished`: the run ended well, so none may be open."""
    fold = _Incidents()
    for record in records:
        fold.apply(record)
    if is_finished and fold.faults_ns:
        fold.problems.append(f"the run finished and the incident of {len(fold.faults_ns)} faults is open")
    return fold.problems


@dataclass(kw_only=True)
class _Incidents:
    """Recount: faults since the last incident closed."""

    problems: list[str] = field(default_factory=list)
    faults_ns: list[int] = field(default_factory=list)
    """Times of the faults of the open incident."""
    high_water: int = 0
    """H at the newest fault."""
    safe_step: int = -1
    """Newest step sealed on all ranks, or verified, since the newest fault."""
    newest_step: int = 0
    num_closed: int = 0
    is_resumed: bool = False
    has_ended: bool = False
    """The launcher stopped for good or in order."""

    def apply(self, record: Record) -> None:
        event = record.event
        if isinstance(event, schema.FaultDetected):
            self.faults_ns.append(record.time_ns)
            self.high_water, self.safe_step, self.is_resumed = event.high_water, -1, False
        elif isinstance(event, schema.StepsCommitted):
            self.newest_step = max(self.newest_step, event.last_step)
            self.safe_step = max(self.safe_step, event.hot_sealed_step)
        elif isinstance(event, schema.SaveVerified):
            self.safe_step = max(self.safe_step, event.step)
        elif isinstance(event, schema.RestartDecided):
            self.has_ended = event.exit_code is not None
        elif isinstance(event, schema.LauncherStarted):
            self.has_ended = False
        elif isinstance(event, schema.RunFinished):
            self.has_ended = True
        elif isinstance(event, schema.ProgressResumed):
            self._on_resumed(record, event)
        elif isinstance(event, schema.IncidentClosed):
            self._on_closed(record, event)

    def _on_resumed(self, record: Record, event: schema.ProgressResumed) -> None:
        if not self.faults_ns or self.is_resumed:
            self.problems.append(f"record {record.seq}: progress resumed without a fault before it")
        if event.step <= self.high_water or self.newest_step < event.step:
            self.problems.append(f"record {record.seq}: resumed at {event.step}, H at the fault {self.high_water}")
        self.is_resumed = True

    def _on_closed(self, record: Record, event: schema.IncidentClosed) -> None:
        if event.incident != self.num_closed + 1:
            self.problems.append(f"record {record.seq}: incident {event.incident} closed after {self.num_closed}")
        if event.attempts != len(self.faults_ns):
            faults = len(self.faults_ns)
            self.problems.append(f"record {record.seq}: {event.attempts} attempts, {faults} faults were recorded")
        is_recovered = event.verdict in (Verdict.RECOVERED, Verdict.FLAPPING)
        if is_recovered and not self.has_ended and (not self.is_resumed or self.safe_step <= self.high_water):
            self.problems.append(f"record {record.seq}: closed {event.verdict} without progress that is safe")
        if not is_recovered and not self.has_ended:
            self.problems.append(f"record {record.seq}: closed {event.verdict} while the run goes on")
        self.num_closed = event.incident
        self.faults_ns = []
