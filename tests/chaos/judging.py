"""What a run of the chaos matrix says about each of its cells: read from the journal alone, and written down.

Must not: decide what is expected; that is `cells`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from nvrx_sre.events.schema import (
    Event,
    FaultClass,
    FaultDetected,
    FaultInjected,
    IncidentClosed,
    Layer,
    LeaderLost,
    RankReplaced,
    Record,
    RestartDecided,
    Verdict,
)
from tests.chaos.cells import OPENER_RANK, Row, Strike
from tests.integration.launched import Ended

E = TypeVar("E", bound=Event)
DIGESTS = ("loss_digest", "samples_digest", "state_digest")
UNNOTICED = "unnoticed"
WORKER, JOB = str(Layer.WORKER), str(Layer.JOB)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What came of one cell. `problem` is "" if that is as it has to be."""

    column: str
    outcome: str
    problem: str


def judge(row: Row, ended: Ended, unfaulted: Ended) -> list[Judged]:
    """Each cell of a run that has ended, judged against the run without faults."""
    general = _of_the_run(ended, unfaulted)
    records = ended.records
    verdicts = []
    for strike in row.strikes:
        outcome, problem = _of_the_strike(strike, records)
        verdicts.append(Judged(column=strike.column, outcome=outcome, problem=problem or general))
    return verdicts


def judge_launcher(row: Row, end: int | None, ended: Ended, unfaulted: Ended) -> list[Judged]:
    """The same for a row whose launcher ended with `end` each time, or stood still: no rank is blamed for it."""
    general = _of_the_run(ended, unfaulted)
    blamed = [str(event) for record, event in ended.events(FaultDetected) if not _is_opener(record, event)]
    lost = len(ended.events(LeaderLost))
    if blamed:
        general = general or f"taken for a fault of a rank: {blamed[0]}"
    elif lost != (0 if end is None else len(row.strikes)):
        general = general or f"{lost} launchers are known to be lost"
    outcome = UNNOTICED if end is None else JOB
    return [Judged(column=strike.column, outcome=outcome, problem=general) for strike in row.strikes]


def _is_opener(record: Record, event: FaultDetected) -> bool:
    """It is the first fault. The root of a hang is unknown where the others wait for it."""
    return record.rank == OPENER_RANK or (record.rank is None and event.fault is FaultClass.HANG)


def write(directory: Path | None, row: Row, verdicts: list[Judged]) -> None:
    """Leave what came of a row for the table, if somebody wants one."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(verdict) for verdict in verdicts], indent=1)
        (directory / f"{row.stem}.json").write_text(text, encoding="utf-8")


def _of_the_run(ended: Ended, unfaulted: Ended) -> str:
    if ended.exit_code:
        return f"exit {ended.exit_code}"
    differing = [name for name in DIGESTS if ended.summary[name] != unfaulted.summary[name]]
    return f"differs: {', '.join(differing)}" if differing else ""


def _of_the_strike(strike: Strike, records: list[Record]) -> tuple[str, str]:
    """(outcome, problem) of one cell."""
    struck = {spec: position_of(spec, records) for spec in (*strike.openers, *strike.specs)}
    missing = [spec for spec, position in struck.items() if position is None]
    if missing:
        return "", f"{missing} never struck"
    first = min(struck[spec] or 0 for spec in strike.specs or strike.openers)
    own = _until_the_next_strike(strike, records[first:])
    if strike.expected is None:
        return _of_no_fault(strike, own)
    found = _detection(strike, own)
    closed = [event for _, event in _events(IncidentClosed, records[first + (found or 0) :])]
    if not closed:
        return "", "no incident was closed after it"
    if closed[0].verdict is not Verdict.RECOVERED:
        return closed[0].verdict, f"the incident ended {closed[0].verdict}"
    if set(strike.ranks) & {record.rank for record, _ in _events(RankReplaced, own)}:
        # Also a rank that the launcher ends because it does not get through the teardown, which is no further fault.
        return WORKER, ""
    if found is None:
        seen = [(record.rank, str(event.fault)) for record, event in _events(FaultDetected, own)]
        return "", f"no {strike.expected} of rank {strike.ranks}, but {seen}"
    return str(_events(RestartDecided, own[found:])[0][1].layer), ""


def _until_the_next_strike(strike: Strike, records: list[Record]) -> list[Record]:
    """What belongs to this cell: all until another cell's faults begin."""
    for position, event in enumerate(record.event for record in records):
        if isinstance(event, FaultInjected) and event.spec not in (*strike.openers, *strike.specs):
            return records[:position]
    return records


def _detection(strike: Strike, own: list[Record]) -> int | None:
    """Where the fault was detected. The root of a hang is unknown if it hangs where the others wait for it."""
    ranks = (*strike.ranks, None) if strike.expected is FaultClass.HANG else strike.ranks
    for position, record in enumerate(own):
        event = record.event
        if isinstance(event, FaultDetected) and record.rank in ranks and event.fault is strike.expected:
            return position
    return None


def _events(kind: type[E], records: list[Record]) -> list[tuple[Record, E]]:
    return [(record, record.event) for record in records if isinstance(record.event, kind)]


def _of_no_fault(strike: Strike, own: list[Record]) -> tuple[str, str]:
    faults = [event for record, event in _events(FaultDetected, own) if record.rank != OPENER_RANK]
    return (UNNOTICED, "") if not faults else ("", f"taken for a fault: {faults[0]}")


def position_of(spec: str, records: list[Record]) -> int | None:
    """Where in the journal a planned fault has struck first, None if it has not."""
    for position, record in enumerate(records):
        if isinstance(record.event, FaultInjected) and record.event.spec == spec:
            return position
    return None
