"""The Prometheus view: a fold of records into series, rendered by a registry of its own.

Values live in plain dictionaries with every closed label combination present from the start; a scrape
copies them under the lock and builds families outside it. Wall time, open time, goodput and everything of
the open incident are computed at scrape. Counters come from records alone, so replaying the journal
continues them after a launcher's restart.

A scrape exposes only what the journal has synced: the values are copied first, then `sync` is asked. If the
disk does not answer in time, job-level counters and histograms stay at the last synced copy while gauges
and telemetry's own error counters go on: an exposed counter never falls after a restart, and trouble with
the disk does not blind the on-call.

The leader exports the job's families and its node's; a launcher that is none, or was superseded, its node's
alone; the exporter of many runs the job's alone.

Thread safety: `apply` by one thread, `collect` by any; both under the lock that ledger and tracker are
updated under. Must not: take a label value from outside a closed set.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from nvrx_sre.core.clock import Clock, seconds
from nvrx_sre.core.limits import Limits
from nvrx_sre.events.schema import Record
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.telemetry.exposition import Labels
from nvrx_sre.telemetry.metric import RUN_LABEL, Metric, MetricType, Scope
from nvrx_sre.telemetry.series import SeriesFold
from nvrx_sre.telemetry.values import Histogram, Values

MAX_LABEL_SETS = 4096
"""Label sets of a family whose text is kept; more than a run has series. Pods come and go in a long one."""
_LIVE_COUNTERS = frozenset({catalog.WALL_SECONDS.name})
"""Job counters that no record feeds."""


def _no_counts() -> dict[Component, int]:
    return {}


@dataclass(frozen=True, kw_only=True)
class MetricSources:
    """What a scrape reads beside the fold. All are called by the scraping thread and must not block long."""

    sync: Callable[[], bool] = lambda: True
    """Ask the journal to sync (bounded); False if it could not."""
    dropped: Callable[[], Mapping[Component, int]] = _no_counts
    """Items dropped by component."""
    errors: Callable[[], Mapping[Component, int]] = _no_counts
    """Errors swallowed by component."""
    fill: Callable[[Values], None] = lambda _: None
    """Write what is live of the node into the values."""
    exports: Callable[[Metric], bool] = lambda _: True
    """Is the family exported now?"""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while ledger, tracker and this fold change."""


class MetricsFold(Collector):
    """Fold of records into the catalog's series. Ledger and tracker are applied by the caller, first."""

    def __init__(
        self,
        run: str,
        ledger: Ledger,
        tracker: IncidentTracker,
        clock: Clock,
        limits: Limits | None = None,
        sources: MetricSources | None = None,
    ) -> None:
        self._run = run
        self._ledger = ledger
        self._tracker = tracker
        self._clock = clock
        self._sources = sources or MetricSources()
        self.fold = SeriesFold(ledger, tracker, limits or Limits())
        """The state behind the series, for snapshots."""
        self._synced = self.fold.values.copy()
        self._label_sets: dict[str, dict[tuple[str, ...], Labels]] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def apply(self, record: Record) -> None:
        """Fold one record that ledger and tracker have seen."""
        with self._sources.lock:
            self.fold.apply(record)

    def loop_turned(self, wall_ns: int) -> None:
        """The launcher's main loop turned."""
        self.fold.values.set(catalog.LAUNCHER_LOOP, seconds(wall_ns))

    def spans_finished(self, count: int) -> None:
        """`count` spans were finished by the span fold."""
        with self._sources.lock:
            self.fold.values.add(catalog.TELEMETRY_SPANS, count)

    def mark_synced(self) -> None:
        """Everything folded so far is known to be on disk (it was replayed from there)."""
        self._synced = self._snapshot()

    def value(self, metric: Metric, *labels: str) -> float:
        """Current value of one series (a histogram's count). For tests and reports."""
        return self._snapshot().get(metric, *labels)

    def describe(self) -> list[Family]:
        """Families without samples: registration must not render."""
        return [family_of(metric) for metric in catalog.CATALOG.values()]

    def collect(self) -> Iterator[Family]:
        """All families. Blocks for the bounded `sync` of the sources."""
        now = self._snapshot()
        if self._sources.sync():
            self._synced = now
        pinned = self._synced
        for metric in filter(self._sources.exports, catalog.CATALOG.values()):
            counts = metric.type in (MetricType.COUNTER, MetricType.HISTOGRAM)
            live = metric.scope is Scope.NODE or metric.name in _LIVE_COUNTERS
            family = family_of(metric)
            self._render(family, metric, pinned if counts and not live else now)
            yield family

    def add_to(self, families: Mapping[str, Family]) -> None:
        """Add this run's samples to families by metric name: several runs in one exposition."""
        now = self._snapshot()
        for name, family in families.items():
            self._render(family, catalog.CATALOG[name], now)

    def _snapshot(self) -> Values:
        dropped, errors = self._sources.dropped(), self._sources.errors()
        with self._sources.lock:
            values = self.fold.values.copy()
            self.fold.compute(values, self._clock.wall_ns())
        for component in Component:
            values.set(catalog.TELEMETRY_DROPPED, dropped.get(component, 0), component)
            values.set(catalog.TELEMETRY_ERRORS, errors.get(component, 0), component)
        self._sources.fill(values)
        return values

    def _render(self, family: Family, metric: Metric, values: Values) -> None:
        if metric.name in values.info:
            info = values.info[metric.name]
            if any(info.values()):  # an info series with unknown labels would be replaced by another one
                family.add_sample(metric.name, {RUN_LABEL: self._run, **info}, 1.0)
        elif metric.type is MetricType.HISTOGRAM:
            for labels, histogram in values.histograms[metric.name].items():
                self._add_histogram(family, metric, labels, histogram)
        else:
            for labels, value in values.numbers[metric.name].items():
                family.add_sample(metric.name, self._labels(metric, labels), value)

    def _add_histogram(self, family: Family, metric: Metric, labels: tuple[str, ...], histogram: Histogram) -> None:
        total = 0
        for bound, count, exemplar in zip(
            (*metric.buckets, float("inf")), histogram.counts, histogram.exemplars, strict=True
        ):
            total += count
            shown = (
                None if exemplar is None else Exemplar({"trace_id": exemplar.trace_id}, exemplar.value, exemplar.time_s)
            )
            of_bucket = self._labels(metric, (*labels, _bound(bound)))
            family.add_sample(f"{metric.name}_bucket", of_bucket, float(total), exemplar=shown)
        family.add_sample(f"{metric.name}_sum", self._labels(metric, labels), histogram.sum)
        family.add_sample(f"{metric.name}_count", self._labels(metric, labels), float(total))

    def _labels(self, metric: Metric, values: tuple[str, ...]) -> Labels:
        """Labels of a series; a histogram's bucket has one value more."""
        known = self._label_sets.setdefault(metric.name, {})
        labels = known.get(values)
        if labels is None:
            if len(known) >= MAX_LABEL_SETS:
                known.clear()
            names = (RUN_LABEL, *metric.label_names, "le")[: 1 + len(values)]
            labels = known[values] = Labels(dict(zip(names, (self._run, *values), strict=True)))
        return labels


def family_of(metric: Metric) -> Family:
    """The metric's family without samples, under the name that the exposition formats want."""
    name = metric.name.removesuffix("_total").removesuffix("_info")
    if metric.type in (MetricType.GAUGE, MetricType.HISTOGRAM):
        name = metric.name
    return Family(name, metric.help, metric.type.value)


def _bound(value: float) -> str:
    return "+Inf" if math.isinf(value) else repr(float(value))
