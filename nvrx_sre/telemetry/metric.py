"""What a metric is: the types that the catalog is written in.

Invariants: a label is closed (all its values are known beforehand and exported from the start), bounded by the
run's ranks or nodes (its series appear with them, at 0), or open, which only info metrics may be; a counter
ends in `_total`, an info metric in `_info`, and a metric with a unit carries it in its name. Checked when the
catalog is built. Immutable, hence thread-safe.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from enum import StrEnum

RUN_LABEL = "run"
"""On every series: the one label without a closed set."""
METRIC_NAME = re.compile(r"nvrx_[a-z0-9]+(_[a-z0-9]+)*")


class MetricType(StrEnum):
    """Prometheus type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Unit(StrEnum):
    """Unit of a metric's value. `timestamp` is seconds since the Unix epoch, 0 where it never happened."""

    SECONDS = "seconds"
    TIMESTAMP = "timestamp"
    BYTES = "bytes"
    RATIO = "ratio"
    STEPS = "steps"
    TOKENS = "tokens"
    COUNT = "count"
    NATS = "nats"
    NONE = "none"


class Scope(StrEnum):
    """Who exports it: the leader for the whole job, every launcher for its node, or a service of the site."""

    JOB = "job"
    NODE = "node"
    SITE = "site"


class Bound(StrEnum):
    """What bounds the values of a label that is not closed: they are known once the run is."""

    RANKS = "ranks"
    NODES = "nodes"


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label beside `run`. `values` is its closed set; empty means bounded, or open (info metrics only)."""

    name: str
    values: tuple[str, ...]
    bound: Bound | None = None

    @property
    def open_values(self) -> bool:
        return not self.values


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric family. `name` is what a query spells; a histogram's samples add a suffix to it."""

    name: str
    type: MetricType
    unit: Unit
    scope: Scope
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    initial: float = 0.0
    """Value of each series before the first event."""

    def __post_init__(self) -> None:
        assert METRIC_NAME.fullmatch(self.name), self.name
        assert self.name.endswith("_total") == (self.type is MetricType.COUNTER), self.name
        assert self.name.endswith("_info") == (self.type is MetricType.INFO), self.name
        assert bool(self.buckets) == (self.type is MetricType.HISTOGRAM), self.name
        for label in self.labels:
            assert self.type is MetricType.INFO or label.bound or not label.open_values, self.name
        assert self.buckets == tuple(sorted(set(self.buckets))), self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels without `run`."""
        return tuple(label.name for label in self.labels)

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Series names that a query may use."""
        if self.type is MetricType.HISTOGRAM:
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)

    @property
    def bound(self) -> Bound | None:
        """What bounds its number of series, None if it is fixed."""
        return next((label.bound for label in self.labels if label.bound is not None), None)

    def label_values(self) -> tuple[tuple[str, ...], ...]:
        """Every combination of the closed label values; one empty tuple without labels, none for a bounded label."""
        return tuple(itertools.product(*(label.values for label in self.labels)))

    @property
    def num_series(self) -> int:
        """Series that one run exports of this family, `+Inf` bucket, sum and count included; for each rank or
        node where these bound it."""
        combinations = 1 if self.type is MetricType.INFO or self.bound else len(self.label_values())
        return combinations * (len(self.buckets) + 3 if self.type is MetricType.HISTOGRAM else 1)
