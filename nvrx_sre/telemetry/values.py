"""Values of all series: one number each, all of the catalog's, from the start.

Every closed label combination exists from construction on, so the number of series never changes (failure
case C57) and the first event of a kind is an increase (C63); series of ranks and nodes appear with them, at 0.
Invariants: counters only grow; an unknown label value is a `KeyError`, never a new series. Not thread-safe.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from nvrx_sre.core.clock import seconds
from nvrx_sre.events.snapshot import Snapshotted
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import Metric, MetricType


@dataclass(frozen=True)
class ExemplarPoint:
    """The newest observation of a bucket and the trace that it belongs to."""

    trace_id: str
    value: float
    time_s: float


@dataclass
class Histogram:
    """Observations a bucket (not cumulative; the last is `+Inf`), their sum, and exemplars."""

    counts: list[int]
    exemplars: list[ExemplarPoint | None]
    sum: float = 0.0

    def copy(self) -> Histogram:
        return Histogram(list(self.counts), list(self.exemplars), self.sum)


class Values(Snapshotted):
    """One number a series, all of the catalog's."""

    STATE = ("numbers", "histograms", "info")
    STORED = (Histogram, ExemplarPoint)

    def __init__(self) -> None:
        self.numbers: dict[str, dict[tuple[str, ...], float]] = {}
        self.histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}
        self.info: dict[str, dict[str, str]] = {}
        for metric in catalog.CATALOG.values():
            if metric.type is MetricType.INFO and metric.bound is None:
                self.info[metric.name] = dict.fromkeys(metric.label_names, "")
            elif metric.type is MetricType.HISTOGRAM:
                size = len(metric.buckets) + 1
                self.histograms[metric.name] = {
                    labels: Histogram([0] * size, [None] * size) for labels in metric.label_values()
                }
            else:
                self.numbers[metric.name] = dict.fromkeys(metric.label_values(), metric.initial)

    def copy(self) -> Values:
        """An independent copy."""
        other = Values.__new__(Values)
        other.numbers = {name: dict(series) for name, series in self.numbers.items()}
        other.histograms = {
            name: {labels: item.copy() for labels, item in series.items()} for name, series in self.histograms.items()
        }
        other.info = {name: dict(labels) for name, labels in self.info.items()}
        return other

    def get(self, metric: Metric, *labels: str) -> float:
        """Value of a series; the number of observations for a histogram."""
        if metric.type is MetricType.HISTOGRAM:
            return float(sum(self.histograms[metric.name][labels].counts))
        return self.numbers[metric.name][labels]

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a series that exists. Raises `KeyError` for labels outside the closed sets."""
        series = self.numbers[metric.name]
        if labels not in series:
            raise KeyError(f"{metric.name} has no series {labels}")
        series[labels] = float(value)

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        """Add to a counter. Raises `KeyError` for labels outside the closed sets."""
        assert amount >= 0, f"{metric.name} cannot fall"
        self.numbers[metric.name][labels] += amount

    def raise_to(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge that holds a maximum, if `value` is greater."""
        if value > self.get(metric, *labels):
            self.set(metric, value, *labels)

    def observe(
        self, metric: Metric, value: float, trace_id: str | None, time_ns: int, labels: tuple[str, ...] = ()
    ) -> None:
        """One observation, with the trace (if there is one) as exemplar of its bucket."""
        histogram = self.histograms[metric.name][labels]
        bucket = bisect.bisect_left(metric.buckets, value)
        histogram.counts[bucket] += 1
        histogram.sum += value
        if trace_id is not None:
            histogram.exemplars[bucket] = ExemplarPoint(trace_id, value, seconds(time_ns))
