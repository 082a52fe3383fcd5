"""What the product's own fold exports of a hand-written journal, as levels of a story.

A story that states its series by hand cannot show that a metric says the wrong thing; one that is told in records can.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_sre.core.clock import seconds
from nvrx_sre.core.limits import Limits
from nvrx_sre.events.schema import Phase, Record
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import Metric, Unit
from nvrx_sre.telemetry.series import SeriesFold
from nvrx_sre.telemetry.series_phases import PhaseSeries
from nvrx_sre.telemetry.values import Values
from tests.promtool.fleet import Level
from tests.stories import RUN, START_S


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


def levels_of(records: Sequence[Record], *metrics: Metric) -> dict[tuple[str, ...], Level]:
    """(metric, label values..) -> what the fold exports of these metrics, over the time of the story."""
    ledger, tracker = Ledger(), IncidentTracker(RUN)
    fold = SeriesFold(ledger, tracker, Limits())
    told: list[tuple[float, dict[tuple[str, ...], float]]] = []
    for record in records:
        ledger.apply(record)
        tracker.apply(record)
        fold.apply(record)
        at_s = seconds(record.time_ns) - START_S
        told.append((at_s, {(item.name, *labels): value for item in metrics for labels, value in _told(fold, item)}))
    return {key: _step_of(told, key) for key in told[-1][1]}


def _told(fold: SeriesFold, metric: Metric) -> list[tuple[tuple[str, ...], float]]:
    begin_s = START_S if metric.unit is Unit.TIMESTAMP else 0.0
    return [(labels, value and value - begin_s) for labels, value in fold.values.numbers[metric.name].items()]


def _step_of(told: list[tuple[float, dict[tuple[str, ...], float]]], key: tuple[str, ...]) -> Level:
    return lambda now: next((values[key] for at, values in reversed(told) if at <= now), 0.0)
