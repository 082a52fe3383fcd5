"""A dashboard's picture follows from its JSON and from what its queries return, for every kind of panel."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from nvrx_sre.monitoring import picture, picture_chart, picture_data, picture_values, query
from nvrx_sre.monitoring.dashboards import dashboard_files
from nvrx_sre.monitoring.picture_axis import clock_lines, lines_between, step_for
from nvrx_sre.monitoring.picture_data import View
from nvrx_sre.monitoring.query import Course, Sample
from nvrx_sre.monitoring.values import Values

VIEW = View(
    base_url="http://127.0.0.1:1", start_s=1000.0, end_s=1060.0, variables={"run": "demo"}, scrape_interval_s=1.0
)

Answers = dict[str, list[tuple[dict[str, str], float]]]
"""Query -> series: labels and the value (over a range: constant)."""


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], None]:
    """Let the server return `answers` for the queries named, nothing for others."""

    def use(answers: Answers) -> None:
        def instant(_: str, expression: str, *, at_s: float | None = None) -> list[Sample]:
            assert at_s == VIEW.end_s
            return [Sample(labels=labels, value=value) for labels, value in answers.get(expression, [])]

        def over_range(_: str, expression: str, start_s: float, end_s: float, step_s: float) -> list[Course]:
            moments = [start_s + index * step_s for index in range(int((end_s - start_s) / step_s) + 1)]
            series = answers.get(expression, [])
            return [Course(labels=labels, points=tuple((at, value) for at in moments)) for labels, value in series]

        monkeypatch.setattr(query, "instant", instant)
        monkeypatch.setattr(query, "over_range", over_range)

    return use


def panel(kind: str, *expressions: str, **changes: Any) -> dict[str, Any]:
    """A panel with one query an expression; the legend is its label `kind`."""
    instant = kind not in ("timeseries", "state-timeline")
    targets = [
        {
            "expr": expression,
            "legendFormat": "the {{kind}}",
            "instant": instant,
            "format": "table" if kind == "table" else "time_series",
            "refId": chr(ord("A") + index),
        }
        for index, expression in enumerate(expressions)
    ]
    color = "palette-classic" if kind == "timeseries" else "thresholds"
    steps = [{"color": "green", "value": None}, {"color": "red", "value": 5}]
    defaults = {"unit": "none", "noValue": "nothing", "color": {"mode": color}, "thresholds": {"steps": steps}}
    if kind == "timeseries":
        defaults["custom"] = {"stacking": {"mode": "none"}}
    value = {
        "type": kind,
        "title": "A panel",
        "gridPos": {"x": 0, "y": 1, "w": 12, "h": 8},
        "options": {"textMode": "auto", "colorMode": "value"},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }
    return value | changes


def drawn(*panels: dict[str, Any], marks: tuple[picture_data.Mark, ...] = ()) -> str:
    """The page of a dashboard of `panels`."""
    document = {"title": "A board", "panels": list(panels), "templating": {"list": [{"name": "run"}]}}
    return picture.page(document, picture_data.evaluate(document, VIEW), marks, VIEW)


def test_variables_are_filled_in_longest_name_first() -> None:
    """`$__rate_interval` is four scrapes or more, `$__range` the range, `$run` its value; `$runs` is another name."""
    view = View(base_url="", start_s=0, end_s=3600, variables={"run": "a", "runs": "b"}, scrape_interval_s=15)
    filled = view.fill('rate(x{run="$run",runs="$runs"}[$__rate_interval]) + y[$__range]')
    assert filled == 'rate(x{run="a",runs="b"}[1m]) + y[1h]'


@pytest.mark.parametrize("kind", ["stat", "timeseries", "bargauge", "state-timeline"])
def test_another_expression_is_another_picture(kind: str, answer: Callable[[Answers], None]) -> None:
    """Same panel, other query: the picture differs; the same query gives the same bytes."""
    answer({"one": [({"kind": "new"}, 3.0)], "other": [({"kind": "redone"}, 7.0)]})
    assert drawn(panel(kind, "one")) == drawn(panel(kind, "one"))
    assert drawn(panel(kind, "one")) != drawn(panel(kind, "other"))
    assert "nothing" in drawn(panel(kind, "no such query"))


def test_a_stat_shows_value_color_and_name(answer: Callable[[Answers], None]) -> None:
    """Threshold color; several values are named; a mapped value is its word on its color."""
    answer({"low": [({"kind": "x"}, 1.0)], "high": [({"kind": "y"}, 6.0)]})
    page = drawn(panel("stat", "low", "high"))
    assert "the x" in page
    assert re.search(rf"color:{picture_values.COLORS['red']};font-size:\d+px'>6<", page)
    single = drawn(panel("stat", "low"))
    assert "the x" not in single
    mapping = [{"type": "value", "options": {"1": {"text": "crash loop", "color": "red", "index": 0}}}]
    mapped = panel("stat", "low", options={"textMode": "auto", "colorMode": "background"})
    mapped["fieldConfig"]["defaults"]["mappings"] = mapping
    assert f"background:{picture_values.COLORS['red']}'" in drawn(mapped)
    assert ">crash loop<" in drawn(mapped)


def test_stacked_series_lie_on_each_other(answer: Callable[[Answers], None]) -> None:
    """The upper edge of the second area is the sum: the axis reaches it."""
    answer({"x": [({"kind": "a"}, 2.0), ({"kind": "b"}, 3.0)]})
    stacked = panel("timeseries", "x")
    stacked["fieldConfig"]["defaults"]["custom"] = {"stacking": {"mode": "normal"}}
    found = picture_data.evaluate_panel(stacked, VIEW)
    assert [series.last for series in found.series] == [2.0, 3.0]
    page = drawn(stacked)
    assert page.count("<polygon") == 2
    assert ">5</text>" in page
    assert "<polygon" not in drawn(panel("timeseries", "x"))


def test_a_gap_is_not_bridged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing and NaN points end a line; the next one begins another."""
    points = [(1000.0 + at, math.nan if at == 30 else 1.0) for at in (0, 1, 2, 10, 11, 29, 30, 31, 32)]
    monkeypatch.setattr(query, "over_range", lambda *_: [Course(labels={"kind": "a"}, points=tuple(points))])
    page = drawn(panel("timeseries", "x"))
    assert page.count("<polyline") == 3
    assert page.count("<circle") == 1


def test_a_heatmap_s_buckets_are_taken_apart(answer: Callable[[Answers], None]) -> None:
    """Cumulative 1, 4, 4 are 1, 3 and 0, in the order of their bounds."""
    answer({"x": [({"le": "+Inf"}, 4.0), ({"le": "0.5"}, 1.0), ({"le": "10.0"}, 4.0)]})
    bars = panel("bargauge", "x")
    bars["targets"][0] |= {"format": "heatmap", "legendFormat": "{{le}}"}
    found = picture_data.evaluate_panel(bars, VIEW)
    assert [(series.name, series.last) for series in found.series] == [("0.5", 1.0), ("10.0", 3.0), ("+Inf", 0.0)]


def test_a_table_is_merged_named_ordered_and_sorted(answer: Callable[[Answers], None]) -> None:
    """Rows join on their labels; a value without a partner keeps its row; hidden columns are left out."""
    answer(
        {
            "faults": [({"node": "n1"}, 1.0), ({"node": "n2"}, 9.0)],
            "runs": [({"node": "n2"}, 2.0), ({"node": "n3"}, 4.0)],
            "info": [({"node": "n1", "zone": "z"}, 1.0)],
        }
    )
    organize = {
        "excludeByName": {"Time": True, "Value #C": True},
        "indexByName": {"node": 0, "Value #A": 1, "Value #B": 2, "zone": 3, "Value #C": 4},
        "renameByName": {"node": "Node", "Value #A": "Faults", "Value #B": "Runs"},
    }
    transformations = [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": organize},
        {"id": "sortBy", "options": {"sort": [{"field": "Faults", "desc": True}]}},
    ]
    table = picture_data.evaluate_panel(
        panel("table", "faults", "runs", "info", transformations=transformations), VIEW
    ).table
    assert table is not None
    assert table.columns == ("Node", "Faults", "Runs", "zone")
    assert table.rows == (("n2", 9.0, 2.0, None), ("n1", 1.0, None, "z"), ("n3", None, 4.0, None))


def test_overrides_reach_the_field_that_they_name(answer: Callable[[Answers], None]) -> None:
    """Unit, color and dashes by name or by expression; other fields keep the panel's own."""
    answer({"x": [({"kind": "limit"}, 90.0), ({"kind": "age"}, 90.0)]})
    properties = [
        {"id": "unit", "value": "s"},
        {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
        {"id": "custom.lineStyle", "value": {"fill": "dash"}},
    ]
    value = panel("timeseries", "x")
    value["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": "the limit"}, "properties": properties}
    ]
    limit, age = (picture_values.field_of(value, name) for name in ("the limit", "the age"))
    assert (limit.text(90.0), age.text(90.0)) == ("1.5 min", "90")
    assert drawn(value).count("stroke-dasharray='6 5'") == 1


@pytest.mark.parametrize(
    ("value", "unit", "decimals", "text"),
    [
        (0.000_25, "s", None, "250 µs"),
        (0.25, "s", None, "250 ms"),
        (59.0, "s", 0, "59 s"),
        (150.0, "s", 0, "2.5 min"),
        (7200.0, "s", None, "2 hours"),
        (0.0, "s", None, "0 s"),
        (0.333, "percentunit", 0, "33 %"),
        (3 * 1024.0**3, "bytes", None, "3 GiB"),
        (12_500.0, "short", None, "12.5 K"),
        (2.0, "none", None, "2"),
        (math.inf, "none", None, "∞"),
    ],
)
def test_units(value: float, unit: str, decimals: int | None, text: str) -> None:
    """As a person reads them."""
    assert picture_values.number_text(value, unit, decimals) == text


def test_annotations_are_marked_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition that holds for a while is one mark; a time in the value is used; outside the range is left out."""
    held = Course(labels={"verdict": "recovered"}, points=tuple((1000.0 + at, 1.0) for at in (5, 6, 7, 40, 41)))
    stamps = Course(labels={}, points=((1001.0, 1_020_000.0), (1002.0, 1_020_000.0), (1003.0, 5_000.0)))
    monkeypatch.setattr(query, "over_range", lambda _, expression, *__: [held] if expression == "ended" else [stamps])
    document = {
        "annotations": {
            "list": [
                {"expr": "ended", "titleFormat": "{{verdict}}", "iconColor": "green"},
                {"expr": "opened", "titleFormat": "incident", "iconColor": "orange", "useValueForTime": "on"},
            ]
        }
    }
    found = picture_data.marks(document, VIEW)
    assert [(mark.at_s, mark.text) for mark in found] == [
        (1005.0, "recovered"),
        (1020.0, "incident"),
        (1040.0, "recovered"),
    ]


@pytest.mark.parametrize("file", dashboard_files(Values()))
def test_every_dashboard_can_be_drawn_without_data(file: str, answer: Callable[[Answers], None]) -> None:
    """Each panel has its place and its title, and says in its own words that there is nothing."""
    answer({})
    document = json.loads(dashboard_files(Values())[file])
    page = picture.page(document, picture_data.evaluate(document, VIEW), (), VIEW)
    for item in document["panels"]:
        assert picture.escape(item["title"]) in page
    assert page.count("<div class=panel") == sum(item["type"] != "row" for item in document["panels"])
    assert 0 < picture.top_height(document) < picture.page_height(document)
    assert "http" not in page


@pytest.mark.parametrize(
    ("high", "unit", "is_whole", "lines"),
    [
        (5.49, "none", False, [0, 2, 4]),
        (1.0, "percentunit", False, [0, 0.25, 0.5, 0.75, 1.0]),
        (0.957, "s", False, [0, 0.25, 0.5, 0.75]),
        (59.4, "s", False, [0, 20, 40]),
        (420.0, "s", False, [0, 120, 240, 360]),
        (4.0e8, "bytes", False, [0, 2**27, 2**28]),
        (3.0, "none", True, [0, 1, 2, 3]),
        (638.0, "none", True, [0, 200, 400, 600]),
    ],
)
def test_an_axis_has_lines_at_round_numbers(high: float, unit: str, is_whole: bool, lines: list[float]) -> None:
    """Such as a person would choose in that unit, five at most."""
    step = step_for(high, unit, is_whole=is_whole)
    assert lines_between(0, high, step) == pytest.approx(lines)


def test_times_of_day_are_round_and_fit_side_by_side() -> None:
    """Every 20 s of a minute and a half where six labels fit, every five minutes of half an hour."""
    minute = 1_700_000_040.0
    assert clock_lines(minute, minute + 90, 370) == [minute + 20 * index for index in range(5)]
    assert {at % 300 for at in clock_lines(minute, minute + 1_800, 600)} == {0}


def test_a_value_beyond_the_axis_is_drawn_on_its_edge() -> None:
    """A share of more than everything, as rounding makes it, does not leave its panel."""
    frame = picture_chart._Frame(view=VIEW, left=0, right=10, top=5, bottom=105, low=0, high=1)
    assert (frame.y(1.3), frame.y(0.5), frame.y(-1)) == (5, 55, 105)
