"""Who is blamed, weighed against what was really done to the job.

A journal alone cannot show that a fault has the wrong root; the simulated world knows what it injected. Where exactly
one fault struck a generation, and nothing else disturbed it, the root fault must name that rank, or nobody; what must
not end a rank (a slow one, a stopped launcher, a damaged disk) must not be told as a fault; and a process that the
launcher killed is never to blame for its death. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nvrx_sre.events.schema import Detector, FaultDetected, Record
from nvrx_sre.testing.world_plan import BLAMED, HARMLESS, SimKind


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A planned fault that struck a rank of a generation."""

    kind: SimKind
    rank: int
    generation: int


def check_blame(records: Sequence[Record], strikes: Sequence[Strike], kills_ns: Mapping[int, int]) -> list[str]:
    """Faults with the wrong root or none at all. `kills_ns`: pid -> wall time at which its launcher killed it."""
    problems = []
    if all(strike.kind in HARMLESS for strike in strikes):
        problems = [f"record {record.seq}: a fault although nothing harmful struck" for record, _ in _faults(records)]
    alone, struck = _alone(strikes), _struck(strikes)
    for record, event in _faults(records):
        if struck is not None and record.generation not in struck:
            problems.append(f"record {record.seq}: a fault of generation {record.generation}, which nothing struck")
        killed_ns = kills_ns.get(event.pid or 0)
        if event.detector is Detector.DEATH and killed_ns is not None and killed_ns <= event.evidence_ns:
            problems.append(f"record {record.seq}: process {event.pid} is blamed, and its launcher had killed it")
        strike = alone.get(record.generation)
        if strike is None or record.rank is None:
            continue
        if record.rank != strike.rank or event.fault is not BLAMED[strike.kind]:
            told = f"rank {record.rank} ({event.fault.value})"
            problems.append(f"record {record.seq}: {told} is blamed for {strike.kind.value} on rank {strike.rank}")
    return problems


def _faults(records: Sequence[Record]) -> Iterable[tuple[Record, FaultDetected]]:
    return ((record, record.event) for record in records if isinstance(record.event, FaultDetected))


def _struck(strikes: Sequence[Strike]) -> set[int] | None:
    """Generations that a fault struck; None if some fault may show in a later one."""
    if any(strike.kind not in BLAMED and strike.kind not in HARMLESS for strike in strikes):
        return None
    return {strike.generation for strike in strikes if strike.kind not in HARMLESS}


def _alone(strikes: Sequence[Strike]) -> dict[int, Strike]:
    """Generations that one fault struck, of a kind with a known root; a lingering one leaves none of them."""
    if _struck(strikes) is None:
        return {}
    by_generation: dict[int, list[Strike]] = {}
    for strike in strikes:
        if strike.kind not in HARMLESS:
            by_generation.setdefault(strike.generation, []).append(strike)
    return {generation: found[0] for generation, found in by_generation.items() if len(found) == 1}
