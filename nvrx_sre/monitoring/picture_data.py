"""What the panels of a dashboard show: its queries evaluated on a Prometheus, as Grafana would.

Model: `evaluate` reads a dashboard's JSON alone. Variables are filled in, each panel's queries run over the time range
(or at its end, where `instant`), legends named, a heatmap's cumulative buckets taken apart, and the transformations of
tables applied: `merge`, `organize`, `sortBy`. The result holds every number that a picture needs.

Blocking: one HTTP request a query. Raises `QueryError` for a query that the server refuses. Thread safety: no state.
Must not: know how anything is drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvrx_sre.monitoring import query
from nvrx_sre.monitoring.panels import Kind
from nvrx_sre.monitoring.promql import duration

MAX_POINTS = 240
"""Points of a series over the range."""
SCRAPES_A_RATE = 4
"""Grafana's $__rate_interval: at least this many scrape intervals, and one more than the step."""
LEGEND = re.compile(r"\{\{\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*\}\}")


@dataclass(frozen=True, kw_only=True)
class View:
    """What is looked at: the server, the time range and the values of the dashboard's variables."""

    base_url: str
    start_s: float
    end_s: float
    variables: Mapping[str, str]
    scrape_interval_s: float = 15.0

    @property
    def step_s(self) -> float:
        """Distance of two points."""
        return max(self.scrape_interval_s, (self.end_s - self.start_s) / MAX_POINTS)

    def fill(self, expression: str) -> str:
        """`expression` with Grafana's and the dashboard's variables filled in."""
        rate_s = max(self.step_s + self.scrape_interval_s, SCRAPES_A_RATE * self.scrape_interval_s)
        values = {
            "__rate_interval": duration(rate_s),
            "__range": duration(max(1.0, round(self.end_s - self.start_s))),
            **self.variables,
        }
        for name in sorted(values, key=len, reverse=True):
            expression = expression.replace(f"${name}", values[name])
        return expression


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, bar or value of a panel: its name in the legend and its points (seconds, value)."""

    name: str
    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float | None:
        """Newest value that is a number."""
        return next((value for _, value in reversed(self.points) if not math.isnan(value)), None)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table after its transformations; a cell is a label's text, a number or nothing."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A panel with its data. `panel` is its JSON."""

    panel: dict[str, Any]
    series: tuple[Series, ...] = ()
    table: Table | None = None

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to draw."""
        return not self.series and not (self.table and self.table.rows)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An annotation: a moment with a text."""

    at_s: float
    text: str
    color: str


def evaluate(document: dict[str, Any], view: View) -> list[Evaluated]:
    """All panels of a dashboard in the order of its JSON."""
    return [evaluate_panel(panel, view) for panel in document["panels"]]


def evaluate_panel(panel: dict[str, Any], view: View) -> Evaluated:
    """One panel."""
    targets = panel.get("targets", [])
    if panel["type"] == Kind.TABLE:
        samples = [query.instant(view.base_url, view.fill(item["expr"]), at_s=view.end_s) for item in targets]
        return Evaluated(panel=panel, table=_table(panel, samples))
    series = [item for target in targets for item in _series(target, view)]
    return Evaluated(panel=panel, series=tuple(series))


def marks(document: dict[str, Any], view: View) -> list[Mark]:
    """The annotations of a dashboard within the range; a condition that holds for a while is one mark."""
    found = []
    for item in document["annotations"]["list"]:
        courses = query.over_range(view.base_url, view.fill(item["expr"]), view.start_s, view.end_s, view.step_s)
        for course in courses:
            text = legend(item["titleFormat"], course.labels)
            if item.get("useValueForTime"):
                moments = sorted({value / 1000 for _, value in course.points})
            else:
                moments = _beginnings([at for at, _ in course.points], view.step_s)
            found += [
                Mark(at_s=at, text=text, color=item["iconColor"]) for at in moments if view.start_s <= at <= view.end_s
            ]
    return sorted(found, key=lambda mark: mark.at_s)


def legend(form: str, labels: Mapping[str, str]) -> str:
    """`form` with its `{{label}}`s filled in."""
    return LEGEND.sub(lambda match: labels.get(match[1], ""), form).strip()


def _beginnings(moments: Sequence[float], step_s: float) -> list[float]:
    """First moments of those that follow each other without a gap."""
    return [at for index, at in enumerate(moments) if index == 0 or at - moments[index - 1] > 1.5 * step_s]


def _series(target: dict[str, Any], view: View) -> list[Series]:
    expression = view.fill(target["expr"])
    if target["instant"]:
        samples = query.instant(view.base_url, expression, at_s=view.end_s)
        found = [query.Course(labels=item.labels, points=((view.end_s, item.value),)) for item in samples]
    else:
        found = query.over_range(view.base_url, expression, view.start_s, view.end_s, view.step_s)
    named = [
        Series(name=legend(target["legendFormat"], item.labels), labels=item.labels, points=item.points)
        for item in found
    ]
    return _single_buckets(named) if target["format"] == "heatmap" else named


def _single_buckets(series: Sequence[Series]) -> list[Series]:
    """Cumulative buckets as what each one holds alone, in the order of their bounds."""
    ordered = sorted(series, key=lambda item: float(item.labels["le"].replace("+Inf", "inf")))
    found, below = [], 0.0
    for item in ordered:
        at, value = item.points[-1]
        found.append(Series(name=item.name, labels=item.labels, points=((at, value - below),)))
        below = value
    return found


def _table(panel: dict[str, Any], samples: Sequence[Sequence[query.Sample]]) -> Table:
    """The queries' samples merged by their labels, then named, ordered and sorted as the panel says."""
    options = {item["id"]: item["options"] for item in panel["transformations"]}
    merged = _merge(panel["targets"], samples)
    organize = options["organize"]
    names = sorted(organize["indexByName"], key=organize["indexByName"].__getitem__)
    shown = [name for name in names if not organize["excludeByName"].get(name)]
    columns = tuple(organize["renameByName"].get(name, name) for name in shown)
    rows = [tuple(row.get(name) for name in shown) for row in merged]
    if "sortBy" in options:
        key = options["sortBy"]["sort"][0]
        index = columns.index(key["field"])
        rows.sort(key=lambda row: _order(row[index]), reverse=key["desc"])
    return Table(columns=columns, rows=tuple(rows))


def _order(cell: str | float | None) -> tuple[int, float, str]:
    if isinstance(cell, str):
        return 1, 0.0, cell
    return (0, -math.inf, "") if cell is None or math.isnan(cell) else (1, cell, "")


def _merge(targets: Sequence[dict[str, Any]], samples: Sequence[Sequence[query.Sample]]) -> list[dict[str, Any]]:
    """Rows of the first queries, joined by later ones that agree on all labels that both have."""
    rows: list[dict[str, Any]] = []
    labels: list[dict[str, str]] = []
    for target, found in zip(targets, samples, strict=True):
        field = "Value" if len(targets) == 1 else f"Value #{target['refId']}"
        for sample in found:
            fits = [
                index for index, known in enumerate(labels) if _agree(known, sample.labels) and field not in rows[index]
            ]
            for index in fits:
                rows[index] |= {**sample.labels, field: sample.value}
                labels[index] |= sample.labels
            if not fits:
                rows.append({**sample.labels, field: sample.value})
                labels.append(dict(sample.labels))
    return rows


def _agree(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    shared = one.keys() & other.keys()
    return bool(shared or not one) and all(one[name] == other[name] for name in shared)
