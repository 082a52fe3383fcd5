"""Panels of a dashboard: grafanalib's models, brought to the schema of a current Grafana.

grafanalib 0.7.1 writes schema 12 and lacks fields that Grafana reads today. Here is what is ours: `Panel`, a
description of a panel in our words; `render`, which builds it through grafanalib and keeps of its JSON only
what schema 39 knows; a target with an object data source. Every panel must have title, description and unit.

Pure; thread-safe.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grafanalib import core as grafana
from grafanalib._gen import DashboardEncoder

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, ORANGE, RED, BLUE = "green", "orange", "red", "blue"
PANEL_KEYS = (
    "id", "type", "title", "description", "gridPos", "datasource", "targets", "fieldConfig", "options", "collapsed",
    "panels", "links", "transparent",
)  # fmt: skip
TIMESERIES_CUSTOM_KEYS = (
    "axisLabel", "axisPlacement", "barAlignment", "drawStyle", "fillOpacity", "gradientMode", "hideFrom",
    "lineInterpolation", "lineWidth", "pointSize", "showPoints", "spanNulls", "stacking", "thresholdsStyle",
)  # fmt: skip


class Kind:
    """Panel types in use."""

    STAT = "stat"
    TIMESERIES = "timeseries"
    BARGAUGE = "bargauge"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One query of a panel."""

    expr: str
    legend: str
    instant: bool = False
    format: str = "time_series"

    def to_json(self, reference: str) -> dict[str, Any]:
        return {
            "datasource": DATA_SOURCE,
            "editorMode": "code",
            "expr": self.expr,
            "format": self.format,
            "instant": self.instant,
            "legendFormat": self.legend,
            "range": not self.instant,
            "refId": reference,
        }


@dataclass(frozen=True, kw_only=True)
class Step:
    """A threshold: from `value` on (None: from the bottom) the field has `color`."""

    color: str
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Panel:
    """What a panel shows. `mappings` are (value, text, color); `unit` is Grafana's unit id."""

    kind: str
    title: str
    description: str
    unit: str
    width: int
    height: int
    targets: tuple[Target, ...]
    steps: tuple[Step, ...] = (Step(color=GREEN),)
    mappings: tuple[tuple[float, str, str], ...] = ()
    stacked: bool = False
    name_only: bool = False
    """A stat that shows the series' name: the answer is a word."""
    color_background: bool = False
    decimals: int | None = None
    minimum: float | None = None
    no_value: str = "no data"
    draw: str = "line"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A titled row of panels, laid out from left to right and wrapped at 24 columns."""

    title: str
    panels: tuple[Panel, ...] = field(default_factory=tuple)


def render_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """JSON of all panels with ids and grid positions, each row under its header."""
    rendered: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        header = grafana.RowPanel(title=row.title, id=len(rendered) + 1, gridPos=grafana.GridPos(h=1, w=24, x=0, y=y))
        rendered.append(_keep(_plain(header), PANEL_KEYS) | {"panels": [], "collapsed": False})
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > 24:
                x, y, height = 0, y + height, 0
            position = grafana.GridPos(h=panel.height, w=panel.width, x=x, y=y)
            rendered.append(render(panel, len(rendered) + 1, position))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return rendered


def render(panel: Panel, identifier: int, position: grafana.GridPos) -> dict[str, Any]:
    """One panel as schema 39 JSON."""
    common: dict[str, Any] = {
        "title": panel.title,
        "description": panel.description,
        "id": identifier,
        "gridPos": position,
        "dataSource": DATA_SOURCE,
        "targets": [target.to_json(chr(ord("A") + index)) for index, target in enumerate(panel.targets)],
        "thresholds": [{"color": step.color, "value": step.value} for step in panel.steps],
    }
    value = _keep(_plain(_model(panel, common)), PANEL_KEYS)
    defaults = value["fieldConfig"]["defaults"]
    defaults.update(_field_defaults(panel))
    if panel.kind == Kind.TIMESERIES:
        defaults["custom"] = _keep(defaults["custom"], TIMESERIES_CUSTOM_KEYS) | {
            "scaleDistribution": {"type": "linear"}
        }
    else:
        defaults.pop("custom", None)
    value["fieldConfig"]["defaults"] = {key: item for key, item in defaults.items() if item is not None}
    return value


def _model(panel: Panel, common: dict[str, Any]) -> grafana.Panel:
    if panel.kind == Kind.STAT:
        return grafana.Stat(
            **common,
            colorMode="background" if panel.color_background else "value",
            graphMode="none",
            reduceCalc="lastNotNull",
            textMode="name" if panel.name_only else "auto",
        )
    if panel.kind == Kind.BARGAUGE:
        return _BarGauge(**common)
    return grafana.TimeSeries(
        **common,
        drawStyle=panel.draw,
        fillOpacity=70 if panel.stacked else 8,
        legendPlacement="bottom",
        stacking={"mode": "normal" if panel.stacked else "none", "group": "A"},
        tooltipMode="multi",
        tooltipSort="desc",
    )


def _field_defaults(panel: Panel) -> dict[str, Any]:
    color = "palette-classic" if panel.kind == Kind.TIMESERIES else "thresholds"
    defaults: dict[str, Any] = {
        "color": {"mode": color},
        "decimals": panel.decimals,
        "mappings": _mappings(panel.mappings),
        "min": panel.minimum,
        "noValue": panel.no_value,
        "unit": panel.unit,
    }
    return defaults


def _mappings(mappings: Sequence[tuple[float, str, str]]) -> list[dict[str, Any]]:
    if not mappings:
        return []
    options = {
        f"{value:g}": {"color": color, "index": index, "text": text}
        for index, (value, text, color) in enumerate(mappings)
    }
    return [{"type": "value", "options": options}]


class _BarGauge(grafana.Panel):  # type: ignore[misc]  # grafanalib ships no types; its BarGauge writes `fieldOptions`
    """Bars of the newest values."""

    def to_json_data(self) -> dict[str, Any]:
        options = {
            "displayMode": "basic",
            "minVizHeight": 10,
            "minVizWidth": 0,
            "orientation": "vertical",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "showUnfilled": True,
        }
        panel: dict[str, Any] = self.panel_json(
            {"type": Kind.BARGAUGE, "options": options, "fieldConfig": {"defaults": {}, "overrides": []}}
        )
        return panel


def _plain(model: Any) -> dict[str, Any]:
    """The model as JSON data: grafanalib leaves nested objects to its encoder."""
    value: dict[str, Any] = json.loads(json.dumps(model.to_json_data(), cls=DashboardEncoder))
    return value


def _keep(value: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value[key] for key in keys if value.get(key) not in (None, [], {})}
