"""A dashboard as one HTML page, drawn from its own JSON and live data: what `make screenshots` takes pictures of.

Model: `page` lays the evaluated panels out on Grafana's grid of 24 columns and draws each kind with plain HTML and
inline SVG: no script, no font, no request. A page is a function of the dashboard's JSON and of what its queries
returned, so a changed expression is a changed picture. It stands in for Grafana where none can be had.

Pure; thread-safe. Must not: query anything, load anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from nvrx_sre.monitoring.panels import Kind
from nvrx_sre.monitoring.picture_chart import chart, strips
from nvrx_sre.monitoring.picture_data import Evaluated, Mark, View
from nvrx_sre.monitoring.picture_values import field_of

PAGE_WIDTH = 1600
MARGIN = 16
GAP = 8
CELL_HEIGHT = 30
"""Grafana's: a row of the grid is 30 pixels and a gap of 8."""
HEADER_HEIGHT = 56
TITLE_HEIGHT = 30
MAX_TABLE_ROWS = 40
STYLE = """
body { margin: 0; background: #111217; color: #ccccdc; font: 13px "DejaVu Sans", sans-serif; position: relative; }
h1 { position: absolute; left: 16px; top: 14px; margin: 0; font-size: 19px; font-weight: normal; }
.variables { position: absolute; right: 16px; top: 18px; color: #9d9fa8; }
.row { position: absolute; font-size: 15px; line-height: 30px; }
.panel { position: absolute; box-sizing: border-box; background: #181b1f; border: 1px solid #2a2d33; border-radius: 3px;
  overflow: hidden; }
.title { height: 30px; line-height: 30px; padding: 0 8px; font-weight: bold; white-space: nowrap; }
.stat { display: flex; flex-direction: column; height: calc(100% - 30px); justify-content: center; text-align: center; }
.stat.full { color: #fff; }
.name { font-size: 13px; padding: 0 4px; }
.value { line-height: 1.1; }
.none { height: calc(100% - 30px); display: flex; align-items: center; justify-content: center; color: #9d9fa8; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: #8ab8ff; font-weight: normal; }
th, td { padding: 4px 8px; border-bottom: 1px solid #25282e; }
.bar { display: flex; align-items: center; margin: 1px 8px; }
.bar .label { width: 40%; text-align: right; padding-right: 8px; white-space: nowrap; overflow: hidden; }
.bar .track { flex: 1; background: #22252b; height: 14px; } .bar .fill { height: 14px; }
.bar .number { width: 76px; padding-left: 8px; white-space: nowrap; }
.text { padding: 8px; white-space: pre-wrap; }
"""


def page(document: dict[str, Any], panels: Sequence[Evaluated], marks: Sequence[Mark], view: View) -> str:
    """The whole dashboard as HTML."""
    body = [_panel(item, marks, view) for item in panels]
    known = {item["name"] for item in document["templating"]["list"]}
    shown = [f"{name}: {value}" for name, value in view.variables.items() if name in known and value != ".*"]
    title = f"<h1>{escape(document['title'])}</h1><div class=variables>{escape('   '.join(shown))}</div>"
    height = page_height(document)
    return (
        f"<!doctype html><html><head><meta charset=utf-8><title>{escape(document['title'])}</title>"
        f"<style>{STYLE}</style></head><body style='height:{height}px;width:{PAGE_WIDTH}px'>{title}{''.join(body)}"
        "</body></html>\n"
    )


def page_height(document: dict[str, Any]) -> int:
    """Pixels that the page needs."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in document["panels"])
    return int(HEADER_HEIGHT + rows * (CELL_HEIGHT + GAP) + GAP)


def top_height(document: dict[str, Any]) -> int:
    """Pixels down to the second row: what one sees without scrolling."""
    rows = [panel["gridPos"]["y"] for panel in document["panels"] if panel["type"] == "row"]
    return int(HEADER_HEIGHT + rows[1] * (CELL_HEIGHT + GAP))


def _panel(item: Evaluated, marks: Sequence[Mark], view: View) -> str:
    grid = item.panel["gridPos"]
    column = (PAGE_WIDTH - 2 * MARGIN + GAP) / 24
    left, top = MARGIN + grid["x"] * column, HEADER_HEIGHT + grid["y"] * (CELL_HEIGHT + GAP)
    width, height = round(grid["w"] * column - GAP), round(grid["h"] * (CELL_HEIGHT + GAP) - GAP)
    place = f"left:{left:.0f}px;top:{top}px;width:{width}px;height:{height}px"
    title = escape(item.panel["title"])
    if item.panel["type"] == "row":
        return f"<div class=row style='{place}'>{title}</div>"
    inside = _inside(item, marks, view, (width - 2, height - TITLE_HEIGHT - 2))
    return f"<div class=panel style='{place}'><div class=title>{title}</div>{inside}</div>"


def _inside(item: Evaluated, marks: Sequence[Mark], view: View, size: tuple[int, int]) -> str:
    kind = item.panel["type"]
    if kind == Kind.TEXT:
        return f"<div class=text>{escape(item.panel['options']['content'])}</div>"
    if item.is_empty:
        return f"<div class=none>{escape(item.panel['fieldConfig']['defaults'].get('noValue', 'no data'))}</div>"
    if kind == Kind.TIMESERIES:
        return chart(item, marks, view, size)
    if kind == Kind.TIMELINE:
        return strips(item, view, size)
    return {Kind.STAT: _stat, Kind.BARGAUGE: _bars, Kind.TABLE: _table}[Kind(kind)](item, size)


def _stat(item: Evaluated, size: tuple[int, int]) -> str:
    """Values below each other; named where there are several, or where the panel asks for it."""
    options = item.panel["options"]
    mode = options["textMode"]
    is_named = mode in ("name", "value_and_name") or (mode == "auto" and len(item.series) > 1)
    is_full = options["colorMode"] == "background"
    lines, background = [], ""
    for series in item.series:
        field = field_of(item.panel, series.name)
        text, color = field.text(series.last), field.color(series.last)
        background = color if is_full else background
        shown = "#fff" if is_full else color
        room = max(len(text), 6)
        pixels = min(44, round(1.5 * size[0] / room), round(size[1] / len(item.series) / (2.1 if is_named else 1.3)))
        name = f"<div class=name>{escape(series.name)}</div>" if is_named else ""
        value = (
            ""
            if mode == "name"
            else f"<div class=value style='color:{shown};font-size:{pixels}px'>{escape(text)}</div>"
        )
        lines.append(name + value)
    style = f" style='background:{background}'" if is_full else ""
    return f"<div class='stat{' full' if is_full else ''}'{style}>{''.join(lines)}</div>"


def _bars(item: Evaluated, _: tuple[int, int]) -> str:
    """A bar a value, all on one scale."""
    largest = max((abs(series.last or 0.0) for series in item.series), default=0.0) or 1.0
    lines = []
    for series in item.series:
        field = field_of(item.panel, series.name)
        value = series.last or 0.0
        lines.append(
            f"<div class=bar><div class=label>{escape(series.name)}</div><div class=track><div class=fill "
            f"style='width:{100 * max(0.0, value) / largest:.1f}%;background:{field.color(value)}'></div></div>"
            f"<div class=number>{escape(field.text(series.last))}</div></div>"
        )
    return "".join(lines)


def _table(item: Evaluated, _: tuple[int, int]) -> str:
    table = item.table
    assert table is not None
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = []
    for row in table.rows[:MAX_TABLE_ROWS]:
        cells = [_cell(item.panel, name, cell) for name, cell in zip(table.columns, row, strict=True)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _cell(panel: dict[str, Any], column: str, cell: str | float | None) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    if cell is None:
        return "<td></td>"
    field = field_of(panel, column)
    style = f" style='background:{field.color(cell)};color:#111217'" if field.colors_cell else ""
    return f"<td{style}>{escape(field.text(cell))}</td>"
