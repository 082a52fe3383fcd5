"""Panels and queries that several dashboards share: percentiles, distributions, targets.

Pure. Must not: spell a metric name.
"""

from __future__ import annotations

from nvrx_sre.monitoring.panels import Column, Panel, Target, bars, table
from nvrx_sre.monitoring.promql import Query
from nvrx_sre.telemetry.metric import Metric

RATE_WINDOW = "$__rate_interval"
RANGE = "$__range"
MIN_SAMPLES = 20
"""Below this many samples the 95th percentile is the maximum or one below it: it is not shown."""
PERCENTAGE = "percentunit"


def now(expr: str, legend: str) -> Target:
    """The newest value."""
    return Target(expr=expr, legend=legend, instant=True)


def course(expr: str, legend: str) -> Target:
    """The values over the dashboard's time range."""
    return Target(expr=expr, legend=legend)


def quantile(q: Query, share: float, metric: Metric, *by: str) -> str:
    """Quantile of what `metric` observed in the time range, interpolated within buckets; hidden where one beyond the
    median would rest on fewer than `MIN_SAMPLES` samples."""
    buckets = f"sum by ({', '.join((*by, 'le'))}) ({q.gain(metric, *by, 'le', window=RANGE, suffix='bucket')})"
    least = 1 if share <= 0.5 else MIN_SAMPLES
    return f"histogram_quantile({share:g}, {buckets}) and {_count(q, metric, *by)} >= {least}"


def _count(q: Query, metric: Metric, *by: str) -> str:
    """Samples of all runs chosen in the time range."""
    samples = q.gain(metric, *by, window=RANGE, suffix="count")
    return f"sum by ({', '.join(by)}) ({samples})" if by else f"sum({samples})"


def _at_most(quantiles: str, largest: str) -> str:
    """Interpolation within a bucket may pass the largest sample; a person should not see that."""
    return f"({quantiles}) <= ({largest}) or ({largest}) and ({quantiles})"


def percentiles(q: Query, title: str, description: str, metric: Metric, most: Metric, *by: str) -> Panel:
    """A table of `metric` in the time range, all runs chosen together: count, median, 95th percentile; and `most`,
    the largest so far, 0 where all were."""
    unit = "s" if metric.unit == "seconds" else "none"
    so_far = f"max by ({', '.join(by)}) ({q.latest(most, *by)})"
    columns = [Column(title=label.capitalize(), label=label) for label in by]
    columns += [
        Column(title="Count", expr=f"{_count(q, metric, *by)} > 0", decimals=0),
        *(
            Column(title=title, expr=_at_most(quantile(q, share, metric, *by), so_far), unit=unit, decimals=2)
            for title, share in (("p50", 0.5), ("p95", 0.95))
        ),
    ]
    largest = f"{so_far} > 0 or 0 * ({_count(q, metric, *by)} > 0)"
    columns.append(Column(title="Max so far", expr=largest, unit=unit, decimals=2))
    note = f" In the chosen time range; the 95th percentile is hidden below {MIN_SAMPLES} samples."
    return table(title, description + note, 12, columns, no_value="none")


def distribution(q: Query, title: str, description: str, width: int, metric: Metric, **labels: str) -> Panel:
    """Bars: how many samples fell into each bucket in the time range."""
    buckets = q.gain(metric, "le", window=RANGE, suffix="bucket", **labels)
    target = Target(expr=f"sum by (le) ({buckets})", legend="{{le}}", instant=True, format="heatmap")
    return bars(title, description, "none", width, target, decimals=0)
