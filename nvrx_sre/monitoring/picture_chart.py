"""Lines, areas and strips over time as inline SVG.

Pure; thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from nvrx_sre.monitoring.picture_axis import clock_lines, lines_between, step_for
from nvrx_sre.monitoring.picture_data import Evaluated, Mark, Series, View
from nvrx_sre.monitoring.picture_values import COLORS, field_of

LEFT, RIGHT, TOP, TIME_AXIS = 64, 12, 6, 20
ROUNDING = 1e-9
LEGEND_LINE = 18
CHARACTER = 7.9
"""Pixels of a character of the legend."""
GRID_COLOR, TEXT_COLOR = "#25282e", "#9d9fa8"
STRIP_LABEL = 110
CLOCK_HALF_WIDTH = 26
"""Pixels on either side of a time of day's middle."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Where values lie on the picture."""

    view: View
    left: float
    right: float
    top: float
    bottom: float
    low: float
    high: float

    def x(self, at_s: float) -> float:
        share = (at_s - self.view.start_s) / (self.view.end_s - self.view.start_s)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        """What is beyond an end of the axis lies on its edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - self.top)


def chart(item: Evaluated, marks: Sequence[Mark], view: View, size: tuple[int, int]) -> str:
    """A time series panel: lines, or areas on top of each other; annotations are dashed lines."""
    width, height = size
    legend, legend_height = _legend(item, size)
    is_stacked = item.panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    layers = _stack(item.series) if is_stacked else [(series.points, ()) for series in item.series]
    low, high = _scale(item, [value for points, _ in layers for _, value in points])
    bottom = height - legend_height - TIME_AXIS
    frame = _Frame(view=view, left=LEFT, right=width - RIGHT, top=TOP, bottom=bottom, low=low, high=high)
    parts = [_axes(item, frame)]
    for index, (series, (points, below)) in enumerate(zip(item.series, layers, strict=True)):
        field = field_of(item.panel, series.name)
        color = field.color(series.last, index)
        dash = " stroke-dasharray='6 5'" if field.is_dashed else ""
        for piece in _pieces(points, view.step_s):
            parts.append(_area(frame, piece, dict(below), color) if is_stacked else _line(frame, piece, color, dash))
    parts += [_mark(frame, mark) for mark in marks]
    return f"<svg width='{width}' height='{height}' xmlns='http://www.w3.org/2000/svg'>{''.join(parts)}{legend}</svg>"


def strips(item: Evaluated, view: View, size: tuple[int, int]) -> str:
    """A state timeline: one strip a series, filled while it has a value."""
    width, height = size
    rows = max(1, len(item.series))
    row_height = min(34.0, (height - TIME_AXIS - TOP) / rows)
    bottom = TOP + rows * row_height
    frame = _Frame(view=view, left=STRIP_LABEL, right=width - RIGHT, top=TOP, bottom=bottom, low=0, high=1)
    parts = [_time_axis(frame)]
    for index, series in enumerate(item.series):
        top = TOP + index * row_height
        field = field_of(item.panel, series.name)
        parts.append(_text(STRIP_LABEL - 8, top + row_height / 2 + 4, series.name, "end"))
        for piece in _pieces(series.points, view.step_s):
            left = max(frame.left, frame.x(piece[0][0] - view.step_s))
            parts.append(
                f"<rect x='{left:.1f}' y='{top + 2:.1f}' width='{max(1.5, frame.x(piece[-1][0]) - left):.1f}' "
                f"height='{row_height - 4:.1f}' fill='{field.color(piece[-1][1])}'/>"
            )
    return f"<svg width='{width}' height='{height}' xmlns='http://www.w3.org/2000/svg'>{''.join(parts)}</svg>"


def _stack(series: Sequence[Series]) -> list[tuple[tuple[Point, ...], tuple[Point, ...]]]:
    """Points of each series on top of those before it, and what lies below them."""
    below: dict[float, float] = {}
    layers = []
    for item in series:
        points = tuple((at, below.get(at, 0.0) + (0.0 if math.isnan(value) else value)) for at, value in item.points)
        layers.append((points, tuple((at, below.get(at, 0.0)) for at, _ in points)))
        below |= dict(points)
    return layers


def _scale(item: Evaluated, values: Sequence[float]) -> tuple[float, float]:
    """Least and greatest value of the axis, never equal; round numbers where the panel does not fix them."""
    defaults = item.panel["fieldConfig"]["defaults"]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = defaults.get("min", min(finite)), defaults.get("max", max(finite))
    if defaults.get("decimals") == 0:
        high = max(high, low + 1)
    if high <= low:
        high = low + max(abs(low), 1.0)
    step = _step(item, low, high)
    return (
        low if "min" in defaults else math.floor(low / step + ROUNDING) * step,
        high if "max" in defaults else math.ceil(high / step - ROUNDING) * step,
    )


def _step(item: Evaluated, low: float, high: float) -> float:
    defaults = item.panel["fieldConfig"]["defaults"]
    return step_for(high - low, defaults.get("unit", "none"), is_whole=defaults.get("decimals") == 0)


def _pieces(points: Sequence[Point], step_s: float) -> Iterator[list[Point]]:
    """Runs of points without a gap."""
    piece: list[Point] = []
    for at, value in points:
        is_gap = bool(piece) and at - piece[-1][0] > 1.5 * step_s
        if (is_gap or math.isnan(value)) and piece:
            yield piece
            piece = []
        if not math.isnan(value):
            piece.append((at, value))
    if piece:
        yield piece


def _line(frame: _Frame, points: Sequence[Point], color: str, dash: str) -> str:
    if len(points) == 1:
        return f"<circle cx='{frame.x(points[0][0]):.1f}' cy='{frame.y(points[0][1]):.1f}' r='2' fill='{color}'/>"
    path = " ".join(f"{frame.x(at):.1f},{frame.y(value):.1f}" for at, value in points)
    return f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='1.5'{dash}/>"


def _area(frame: _Frame, points: Sequence[Point], below: dict[float, float], color: str) -> str:
    upper = [f"{frame.x(at):.1f},{frame.y(value):.1f}" for at, value in points]
    lower = [f"{frame.x(at):.1f},{frame.y(below[at]):.1f}" for at, _ in reversed(points)]
    return f"<polygon points='{' '.join(upper + lower)}' fill='{color}' fill-opacity='0.7' stroke='{color}'/>"


def _mark(frame: _Frame, mark: Mark) -> str:
    x = frame.x(mark.at_s)
    return (
        f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{frame.top}' y2='{frame.bottom:.1f}' stroke='{COLORS[mark.color]}' "
        f"stroke-dasharray='3 3'><title>{escape(mark.text)}</title></line>"
    )


def _axes(item: Evaluated, frame: _Frame) -> str:
    field = field_of(item.panel, "")
    parts = [_time_axis(frame)]
    for value in lines_between(frame.low, frame.high, _step(item, frame.low, frame.high)):
        y = frame.y(value)
        parts.append(f"<line x1='{frame.left}' x2='{frame.right}' y1='{y:.1f}' y2='{y:.1f}' stroke='{GRID_COLOR}'/>")
        parts.append(_text(frame.left - 6, y + 4, field.text(value), "end"))
    return "".join(parts)


def _time_axis(frame: _Frame) -> str:
    view = frame.view
    form = "%H:%M" if view.end_s - view.start_s >= 600 else "%H:%M:%S"
    parts = []
    for at in clock_lines(view.start_s, view.end_s, frame.right - frame.left):
        if frame.x(at) > frame.right + RIGHT - CLOCK_HALF_WIDTH:
            continue  # it would be cut
        parts.append(_text(frame.x(at), frame.bottom + 15, datetime.fromtimestamp(at, UTC).strftime(form), "middle"))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' fill='{TEXT_COLOR}' font-size='11' text-anchor='{anchor}'>{escape(text)}</text>"
    )


def _legend(item: Evaluated, size: tuple[int, int]) -> tuple[str, int]:
    """Names with their colors, in lines from the bottom up to a third of the picture; and the height used."""
    width, height = size
    lines: list[list[str]] = [[]]
    x, most = 8.0, max(1, height // 3 // LEGEND_LINE)
    for index, series in enumerate(item.series):
        room = 22 + CHARACTER * len(series.name)
        if x + room > width and lines[-1]:
            if len(lines) == most:
                break
            lines.append([])
            x = 8.0
        color = field_of(item.panel, series.name).color(series.last, index)
        lines[-1].append(
            f"<rect x='{x:.0f}' y='-8' width='12' height='4' fill='{color}'/>"
            f"<text x='{x + 16:.0f}' y='-2' fill='{COLORS['text']}' font-size='12'>{escape(series.name)}</text>"
        )
        x += room
    used = len(lines) * LEGEND_LINE
    parts = [
        f"<g transform='translate(0,{height - used + (index + 1) * LEGEND_LINE - 3})'>{''.join(line)}</g>"
        for index, line in enumerate(lines)
    ]
    return "".join(parts), used
