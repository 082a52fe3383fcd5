"""What the product's own fold exports of a hand-written journal, as levels of a story.

A story that states its series by hand cannot show that a metric says the wrong thing; one that is told in records can.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_sre.core.clock import seconds
from nvrx_sre.events.schema import Phase, Record
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.series_phases import PhaseSeries
from nvrx_sre.telemetry.values import Values
from tests.promtool.fleet import Level
from tests.stories import START_S


def phases_of(records: Sequence[Record]) -> dict[tuple[str, ...], Level]:
    """(metric, phase) -> when the job last entered it, over the time of the story."""
    values = Values()
    fold = PhaseSeries(values)
    told: list[tuple[float, dict[Phase, float]]] = []
    for record in records:
        fold.apply(record)
        entered = {phase: values.get(catalog.PHASE_ENTERED, phase) for phase in Phase}
        told.append((seconds(record.time_ns) - START_S, {item: at and at - START_S for item, at in entered.items()}))
    return {(catalog.PHASE_ENTERED.name, phase): _level(told, phase) for phase in Phase}


def _level(told: Sequence[tuple[float, dict[Phase, float]]], phase: Phase) -> Level:
    return lambda now: next((entered[phase] for at, entered in reversed(told) if at <= now), 0.0)
