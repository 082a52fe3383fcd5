"""Panels as JSON: grafanalib's models, brought to the schema of a current Grafana.

grafanalib 0.7.1 writes schema 12 and lacks fields that Grafana reads today. Here its models are built, and of their
JSON only what schema 39 knows is kept; what they lack (table and state timeline options, transformations, overrides,
a bar gauge's `fieldConfig`) is added. A test sends the result through Grafana's own types and loses nothing.

Pure; thread-safe.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from grafanalib import core as grafana
from grafanalib._gen import DashboardEncoder

from nvrx_sre.monitoring.panels import Column, Kind, Link, Mapping, Override, Panel, Row, Step, Target

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID_COLUMNS = 24
PANEL_KEYS = (
    "id", "type", "title", "description", "gridPos", "datasource", "targets", "fieldConfig", "options", "collapsed",
    "panels", "links", "transformations",
)  # fmt: skip
ROW_KEYS = ("id", "type", "title", "gridPos")
TIMESERIES_CUSTOM_KEYS = (
    "axisLabel", "axisPlacement", "barAlignment", "drawStyle", "fillOpacity", "gradientMode", "hideFrom",
    "lineInterpolation", "lineWidth", "pointSize", "showPoints", "spanNulls", "stacking", "thresholdsStyle",
)  # fmt: skip


def render_rows(rows: Sequence[Row], runbook_base_url: str) -> list[dict[str, Any]]:
    """JSON of all panels with ids and grid positions, each row under its header."""
    rendered: list[dict[str, Any]] = []
    y, identifier = 0, 1
    for row in rows:
        header = grafana.RowPanel(
            title=row.title, id=identifier, gridPos=grafana.GridPos(h=1, w=GRID_COLUMNS, x=0, y=y)
        )
        panels, end = _layout(row.panels, identifier + 1, y + 1, runbook_base_url)
        identifier += 1 + len(panels)
        rendered.append(_keep(_plain(header), ROW_KEYS) | {"collapsed": False, "panels": []})
        rendered.extend(panels)
        y = end
    return rendered


def _layout(
    panels: Sequence[Panel], identifier: int, y: int, runbook_base_url: str
) -> tuple[list[dict[str, Any]], int]:
    """JSON of `panels` from left to right, and the first free line below them."""
    rendered: list[dict[str, Any]] = []
    x = height = 0
    for panel in panels:
        if x + panel.width > GRID_COLUMNS:
            x, y, height = 0, y + height, 0
        position = grafana.GridPos(h=panel.height, w=panel.width, x=x, y=y)
        rendered.append(render(panel, identifier + len(rendered), position, runbook_base_url))
        x, height = x + panel.width, max(height, panel.height)
    return rendered, y + height


def render(panel: Panel, identifier: int, position: grafana.GridPos, runbook_base_url: str) -> dict[str, Any]:
    """One panel as schema 39 JSON."""
    common: dict[str, Any] = {
        "title": panel.title,
        "description": panel.description,
        "id": identifier,
        "gridPos": position,
        "dataSource": DATA_SOURCE,
        "targets": [_target(target, index) for index, target in enumerate(panel.targets)],
        "thresholds": _steps(panel.steps),
        "links": [_runbook(name, runbook_base_url) for name in panel.runbooks],
    }
    value = _keep(_plain(_model(panel, common)), PANEL_KEYS)
    if panel.kind is Kind.TEXT:
        del value["datasource"]
        value.pop("fieldConfig", None)
        return value
    custom = value["fieldConfig"]["defaults"].get("custom", {})
    value["fieldConfig"] = {"defaults": _field_defaults(panel, custom), "overrides": _overrides(panel)}
    if panel.kind is Kind.TABLE:
        value["transformations"] = _transformations(panel)
    return value


def reference(index: int) -> str:
    """Letter of the query at `index`."""
    return chr(ord("A") + index)


def _target(target: Target, index: int) -> dict[str, Any]:
    return {
        "datasource": DATA_SOURCE,
        "editorMode": "code",
        "expr": target.expr,
        "format": target.format,
        "instant": target.instant,
        "legendFormat": target.legend,
        "range": not target.instant,
        "refId": reference(index),
    }


def _model(panel: Panel, common: dict[str, Any]) -> grafana.Panel:
    if panel.kind is Kind.STAT:
        return grafana.Stat(
            **common,
            colorMode="background" if panel.color_background else "value",
            graphMode="none",
            reduceCalc="lastNotNull",
            textMode=panel.text_mode,
        )
    if panel.kind is Kind.TEXT:
        without = {key: item for key, item in common.items() if key not in ("targets", "thresholds")}
        return grafana.Text(**without, content=panel.content, mode="markdown")
    if panel.kind is not Kind.TIMESERIES:
        return _Modern(**common, options=_options(panel), type=panel.kind.value)
    return grafana.TimeSeries(
        **common,
        fillOpacity=70 if panel.stacked else 8,
        legendPlacement="bottom",
        stacking={"mode": "normal" if panel.stacked else "none", "group": "A"},
        tooltipMode="multi",
        tooltipSort="desc",
    )


def _options(panel: Panel) -> dict[str, Any]:
    """Options of the kinds that grafanalib writes in an old form, or not at all."""
    if panel.kind is Kind.TABLE:
        sort = [{"desc": True, "displayName": panel.sort_by}] if panel.sort_by else []
        return {"cellHeight": "sm", "showHeader": True, "sortBy": sort}
    if panel.kind is Kind.TIMELINE:
        return {
            "alignValue": "left",
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
            "mergeValues": True,
            "rowHeight": 0.8,
            "showValue": "never",
            "tooltip": {"mode": "single", "sort": "none"},
        }
    return {
        "displayMode": "basic",
        "minVizHeight": 10,
        "minVizWidth": 0,
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showUnfilled": True,
    }


class _Modern(grafana.Panel):  # type: ignore[misc]  # grafanalib ships no types; its own classes write old options
    """A panel whose options are given as Grafana reads them."""

    def __init__(self, *, options: dict[str, Any], type: str, thresholds: list[dict[str, Any]], **common: Any) -> None:
        super().__init__(**common)
        self._options, self._type = options, type

    def to_json_data(self) -> dict[str, Any]:
        panel: dict[str, Any] = self.panel_json(
            {"type": self._type, "options": self._options, "fieldConfig": {"defaults": {}, "overrides": []}}
        )
        return panel


def _field_defaults(panel: Panel, custom: dict[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "color": {"mode": "palette-classic" if panel.kind is Kind.TIMESERIES else "thresholds"},
        "decimals": panel.decimals,
        "mappings": _mappings(panel.mappings),
        "min": panel.minimum,
        "max": panel.maximum,
        "noValue": panel.no_value,
        "thresholds": {"mode": "absolute", "steps": _steps(panel.steps)},
        "unit": panel.unit,
    }
    if panel.kind is Kind.TIMESERIES:
        kept = _keep(custom, TIMESERIES_CUSTOM_KEYS)
        defaults["custom"] = kept | {"scaleDistribution": {"type": "linear"}}
    elif panel.kind is Kind.TIMELINE:
        defaults["custom"] = {"fillOpacity": 80, "lineWidth": 0}
    return {key: item for key, item in defaults.items() if item is not None}


def _steps(steps: Sequence[Step]) -> list[dict[str, Any]]:
    return [{"color": step.color, "value": step.value} for step in steps]


def _mappings(mappings: Sequence[Mapping]) -> list[dict[str, Any]]:
    if not mappings:
        return []
    options = {
        f"{value:g}": {"color": color, "index": index, "text": text}
        for index, (value, text, color) in enumerate(mappings)
    }
    return [{"type": "value", "options": options}]


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    columns = tuple(
        Override(
            name=column.title,
            unit=column.unit,
            decimals=column.decimals,
            steps=column.steps,
            mappings=column.mappings,
            colored_cell=bool(column.steps or column.mappings),
            link=column.link,
        )
        for column in panel.columns
    )
    rendered = [(override, _properties(override)) for override in (*panel.overrides, *columns)]
    return [
        {
            "matcher": {"id": "byRegexp" if override.pattern else "byName", "options": override.name},
            "properties": properties,
        }
        for override, properties in rendered
        if properties
    ]


def _properties(override: Override) -> list[dict[str, Any]]:
    values: dict[str, Any] = {
        "unit": override.unit,
        "decimals": override.decimals,
        "color": override.color and {"fixedColor": override.color, "mode": "fixed"},
        "thresholds": override.steps and {"mode": "absolute", "steps": _steps(override.steps)},
        "mappings": _mappings(override.mappings),
        "links": override.link and [_link(override.link)],
        "custom.cellOptions": override.colored_cell and {"mode": "basic", "type": "color-background"},
        "custom.lineStyle": override.dashed and {"dash": [10, 10], "fill": "dash"},
    }
    return [{"id": key, "value": item} for key, item in values.items() if item or (item == 0 and item is not False)]


def _runbook(name: str, base_url: str) -> dict[str, Any]:
    """A link in the panel's header; Grafana opens it beside the dashboard."""
    url = f"{base_url.rstrip('/')}/{name}.md"
    return {"targetBlank": True, "title": f"Runbook {name}", "type": "link", "url": url}


def _link(link: Link) -> dict[str, Any]:
    return {"title": link.title, "url": link.url}


def _transformations(panel: Panel) -> list[dict[str, Any]]:
    """Join the queries by their labels, name and order the columns, hide what has no column."""
    fields = _column_fields(panel.columns)
    organize = {
        "excludeByName": {"Time": True, **{field: True for field, column in fields.items() if column.hidden}},
        "includeByName": {},
        "indexByName": {field: index for index, field in enumerate(fields)},
        "renameByName": {
            field: column.title for field, column in fields.items() if not column.hidden and field != column.title
        },
    }
    rendered: list[dict[str, Any]] = [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}]
    if panel.sort_by:
        rendered.append({"id": "sortBy", "options": {"sort": [{"desc": True, "field": panel.sort_by}]}})
    return rendered


def _column_fields(columns: Sequence[Column]) -> dict[str, Column]:
    """Name of each column's field before it is renamed -> the column."""
    queries = [column for column in columns if column.expr]
    fields = {}
    for column in columns:
        if not column.expr:
            fields[column.label] = column
        elif len(queries) == 1:
            fields["Value"] = column
        else:
            fields[f"Value #{reference(queries.index(column))}"] = column
    return fields


def _plain(model: Any) -> dict[str, Any]:
    """The model as JSON data: grafanalib leaves nested objects to its encoder."""
    value: dict[str, Any] = json.loads(json.dumps(model.to_json_data(), cls=DashboardEncoder))
    return value


def _keep(value: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value[key] for key in keys if value.get(key) not in (None, [], {})}
