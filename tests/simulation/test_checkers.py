"""The checkers themselves: a sound journal passes, a tampered one does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record
from nvrx_sre.testing.checkers import check_liveness, check_safety
from nvrx_sre.testing.world import World
from nvrx_sre.testing.world_plan import SimFault, SimKind, WorldConfig


def sound() -> list[Record]:
    """A run with a fault that takes it back to the durable tier, and one exception."""
    faults = [SimFault(kind=SimKind.NODE_KILL, rank=1, step=50), SimFault(kind=SimKind.EXCEPTION, rank=0, step=60)]
    world = World(1, WorldConfig(num_steps=70), faults)
    assert world.run() == 0
    return world.records


def changed(records: list[Record], kind: type, index: int = 0, **fields: object) -> list[Record]:
    """The records with fields of one event changed."""
    at = [number for number, record in enumerate(records) if isinstance(record.event, kind)][index]
    event = replace(records[at].event, **fields)  # type: ignore[arg-type]  # the fields fit `kind`
    return [*records[:at], replace(records[at], event=event), *records[at + 1 :]]


def without(records: list[Record], kind: type) -> list[Record]:
    """The records without an event type."""
    return [record for record in records if not isinstance(record.event, kind)]


TAMPERED: dict[str, Callable[[list[Record]], list[Record]]] = {
    "lost step": lambda records: changed(records, schema.StepsCommitted, 1, first_step=9),
    "silent rollback": lambda records: without(records, schema.RolledBack),
    "executed and never counted": lambda records: changed(records, schema.StateRestored, -1, step=69),
    "nobody decided": lambda records: without(records, schema.RestartDecided),
    "never formed": lambda records: without(records, schema.GenerationFormed),
    "save without a start": lambda records: without(records, schema.SaveStarted),
    "wrong count": lambda records: changed(records, schema.RestartDecided, restarts_since_progress=2),
    "stopped with progress": lambda records: changed(
        records, schema.RestartDecided, action=schema.Action.STOP, exit_code=93
    ),
    "wrong high water": lambda records: changed(records, schema.FaultDetected, high_water=1),
    "redone told as new": lambda records: [
        replace(record, event=replace(record.event, kind=schema.StepKind.NEW))
        if isinstance(record.event, schema.StepsCommitted)
        else record
        for record in records
    ],
    "back in time": lambda records: [*records[:5], replace(records[5], time_ns=0), *records[6:]],
}


def test_sound_journal_passes() -> None:
    """Nothing to find where nothing is wrong."""
    records = sound()
    assert check_safety(records) == []
    assert check_liveness(records) == []


@pytest.mark.parametrize("name", list(TAMPERED))
def test_planted_violations_are_found(name: str) -> None:
    """Each kind of damage is noticed."""
    assert check_safety(TAMPERED[name](sound()))


def test_unfinished_run_is_not_alive() -> None:
    """A journal without its end, with something after it, or empty, is no ended run."""
    records = sound()
    assert check_liveness(without(records, schema.RunFinished))
    assert check_liveness([*records, replace(records[0], seq=10_000)])
    assert check_liveness([])
