"""PromQL from catalog objects: a query can name only what the catalog exports, and use it as its type allows.

Model: `Query` binds the grouping labels and the matchers that select a run; its methods turn a `Metric` into
text. A matcher on a label, or a label value, that the metric does not have, `rate` of a gauge and an instant
read of a histogram are errors where the expression is built (failure case C72). Rates are taken before any
aggregation (C70); pods are aggregated away with `max` first (C69). An age is judged by the run's own clock at the
scrape, never by `time()`: an old scrape or two clocks that differ must not make what is well look late.

Thread safety: immutable. Must not: spell a metric name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nvrx_sre.core.errors import InternalError
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import RUN_LABEL, Metric, MetricType, Scope

CUMULATIVE = (MetricType.COUNTER, MetricType.HISTOGRAM)
_MS_PER_UNIT = (("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))


def duration(duration_s: float) -> str:
    """Seconds as the shortest Prometheus duration of one unit, e.g. 90 -> '90s', 604800 -> '1w'; at least 1 ms."""
    total_ms = max(1, round(duration_s * 1_000))
    return next(f"{total_ms // size}{unit}" for unit, size in _MS_PER_UNIT if total_ms % size == 0)


def number(value: float) -> str:
    """A number as PromQL writes it: integers without a fraction."""
    return str(int(value)) if value == int(value) else repr(value)


def one_of(values: Sequence[str]) -> str:
    """Matcher text (with its operator) for any of `values`."""
    return f'="{values[0]}"' if len(values) == 1 else f'=~"{"|".join(values)}"'


@dataclass(frozen=True, kw_only=True)
class Query:
    """Builder for one audience: rules select every run, a dashboard the run of its variables."""

    group_labels: tuple[str, ...]
    """Aggregation key, `run` among them."""
    selectors: tuple[str, ...] = ()
    """Matchers put on every series, e.g. 'run=~"$run"'."""

    def keys(self, *more: str) -> str:
        """The key and `more` as a label list in parentheses."""
        return f"({', '.join((*self.group_labels, *more))})"

    def series(self, metric: Metric, suffix: str = "", **labels: str | Sequence[str]) -> str:
        """Instant selector of `metric`; `labels` are closed label values, one or several.

        `suffix` picks `bucket`, `sum` or `count` of a histogram, and is required for one.
        """
        name = f"{metric.name}_{suffix}" if suffix else metric.name
        if name not in metric.sample_names:
            raise InternalError(f"{name} is not a series of the {metric.type} {metric.name}")
        matchers = [*_matchers(metric, labels), *self.selectors]
        return f"{name}{{{','.join(matchers)}}}" if matchers else name

    def latest(self, metric: Metric, *by: str, memory_s: float = 0.0, **labels: str | Sequence[str]) -> str:
        """Newest value of a gauge or total, pods aggregated away; `memory_s` lets a sample outlive its target."""
        selector = self.series(metric, "", **labels)
        if memory_s:
            selector = f"last_over_time({selector}[{duration(memory_s)}])"
        return f"max by {self.keys(*_checked(metric, by))} ({selector})"

    def live(self, metric: Metric, *by: str, memory_s: float, **labels: str | Sequence[str]) -> str:
        """Newest value of a gauge that may fall: a remembered sample counts only where there is no live one."""
        now = self.latest(metric, *by, memory_s=0.0, **labels)
        return f"{now}\nor\n{self.latest(metric, *by, memory_s=memory_s, **labels)}"

    def clock(self) -> str:
        """The run's own time at each scrape, with the labels of its target: a launcher's, or an exporter's of it."""
        return f"({self.series(catalog.RUN_START_TIMESTAMP)} + {self.series(catalog.WALL_SECONDS)})"

    def ahead(self) -> str:
        """By how much the run's clock is ahead of Prometheus' at each scrape (seconds)."""
        return f"({self.clock()} - timestamp({self.series(catalog.WALL_SECONDS)}))"

    def age(self, since: str) -> str:
        """Seconds from `since`, by the key and maybe more labels, to the run's own time; nothing without a scrape."""
        return f"(max by {self.keys()} ({self.clock()}) - on {self.keys()} group_right () ({since}))"

    def shown_age(self, since: str) -> str:
        """The same for a person: of a run that is not scraped, the time until now by Prometheus' clock."""
        return f"({self.age(since)} or time() - ({since}))"

    def seen(self, stamp: str) -> str:
        """A stamp of the run, by the key, in Prometheus' time; as it is without a scrape."""
        return f"({stamp} - on {self.keys()} max by {self.keys()} ({self.ahead()}) or {stamp})"

    def rate(self, metric: Metric, *by: str, window: str, suffix: str = "", **labels: str | Sequence[str]) -> str:
        """Per-second rate of a counter or of a histogram's parts."""
        if metric.type not in CUMULATIVE:
            raise InternalError(f"rate of {metric.name}, which is a {metric.type}")
        selector = self.series(metric, suffix, **labels)
        return f"max by {self.keys(*_checked(metric, by))} (rate({selector}[{window}]))"

    def gain(self, metric: Metric, *by: str, window: str, suffix: str = "", **labels: str | Sequence[str]) -> str:
        """What a counter or a histogram's part gained within `window`: whole numbers, never extrapolated.

        A run's counters go on where its last launcher stopped, so the difference of the extremes over all pods is
        exact where a sum or a maximum of `increase` over pods is not. What each launcher counts for itself is added
        up over launchers.
        """
        if metric.type not in CUMULATIVE:
            raise InternalError(f"gain of {metric.name}, which is a {metric.type}")
        _checked(metric, by)
        series = f"{self.series(metric, suffix, **labels)}[{window}]"
        fixed = [name for name, wanted in labels.items() if isinstance(wanted, str)]
        varying = [name for name in metric.label_names if name not in fixed and name not in by]
        if metric.scope is Scope.NODE:
            return f"sum by {self.keys(*by)} (max_over_time({series}) - min_over_time({series}))"
        keys = self.keys(*by, *varying)
        gained = f"(max by {keys} (max_over_time({series})) - min by {keys} (min_over_time({series})))"
        return f"sum by {self.keys(*by)} {gained}" if varying else gained


def recorded(metric: Metric, operation: str = "max") -> str:
    """Name of the recording rule of `metric` for a run: `run:<metric>:<operation>`."""
    return f"{RUN_LABEL}:{metric.name}:{operation}"


def _matchers(metric: Metric, labels: Mapping[str, str | Sequence[str]]) -> list[str]:
    closed = {label.name: label.values for label in metric.labels}
    matchers = []
    for name, wanted in labels.items():
        values = [wanted] if isinstance(wanted, str) else list(wanted)
        if name not in closed:
            raise InternalError(f"{metric.name} has no label {name!r}")
        unknown = [value for value in values if closed[name] and value not in closed[name]]
        if unknown or not values:
            raise InternalError(f"label {name!r} of {metric.name} never is {unknown or 'empty'}")
        matchers.append(f"{name}{one_of([str(value) for value in values])}")
    return matchers


def _checked(metric: Metric, by: Sequence[str]) -> Sequence[str]:
    allowed = {*metric.label_names, "le"} if metric.type is MetricType.HISTOGRAM else set(metric.label_names)
    for name in by:
        if name not in allowed:
            raise InternalError(f"{metric.name} cannot be grouped by {name!r}")
    return by
