"""What a panel shows, in our words; `panel_json` turns it into what Grafana reads.

Model: a `Panel` has queries (`Target`) and the way they are shown; the functions below build each kind with its
usual size. A table is a list of `Column`s, each a label or a query of its own, joined by their labels. Every panel
has title, description and unit; `tests` and `lint` hold that.

Invariants: nothing here knows Grafana's JSON. Immutable, hence thread-safe. Must not: spell a metric name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

GREEN, ORANGE, RED, BLUE, GREY = "green", "orange", "red", "blue", "text"
STAT_HEIGHT = 4
PANEL_HEIGHT = 8

Mapping = tuple[float, str, str]
"""(value, text, color)."""


class Kind(StrEnum):
    """Panel types in use: Grafana's own names."""

    STAT = "stat"
    TIMESERIES = "timeseries"
    BARGAUGE = "bargauge"
    TABLE = "table"
    TIMELINE = "state-timeline"
    TEXT = "text"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One query of a panel."""

    expr: str
    legend: str
    instant: bool = False
    format: str = "time_series"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A threshold: from `value` on (None: from the bottom) the field has `color`."""

    color: str
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Override:
    """How fields of one name differ from the others. None leaves the panel's own setting."""

    name: str
    """Display name of the field; a regular expression where `pattern`."""
    pattern: bool = False
    unit: str | None = None
    color: str | None = None
    decimals: int | None = None
    steps: tuple[Step, ...] = ()
    mappings: tuple[Mapping, ...] = ()
    colored_cell: bool = False
    dashed: bool = False
    link: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Link:
    """Where a click leads."""

    title: str
    url: str


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: the value of `expr`, or (without one) the label `label` of the rows."""

    title: str
    label: str = ""
    expr: str = ""
    unit: str | None = None
    decimals: int | None = None
    steps: tuple[Step, ...] = ()
    mappings: tuple[Mapping, ...] = ()
    link: Link | None = None
    hidden: bool = False
    """The query only brings labels: its value is not shown."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """What a panel shows; `unit` is Grafana's unit id."""

    kind: Kind
    title: str
    description: str
    unit: str
    width: int
    height: int
    targets: tuple[Target, ...] = ()
    steps: tuple[Step, ...] = (Step(color=GREEN),)
    mappings: tuple[Mapping, ...] = ()
    overrides: tuple[Override, ...] = ()
    columns: tuple[Column, ...] = ()
    sort_by: str = ""
    """Title of the column by which a table is sorted, largest first."""
    runbooks: tuple[str, ...] = ()
    """Alerts that judge what the panel shows; it leads to their pages."""
    stacked: bool = False
    text_mode: str = "auto"
    """A stat's `name`, `value`, `value_and_name`; `auto` names several values."""
    color_background: bool = False
    decimals: int | None = None
    minimum: float | None = None
    maximum: float | None = None
    no_value: str = "no data"
    content: str = ""
    """Markdown of a text panel."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A titled row of panels, laid out from left to right and wrapped at 24 columns."""

    title: str
    panels: tuple[Panel, ...]


def stat(title: str, description: str, unit: str, width: int, *targets: Target, **rest: Any) -> Panel:
    """Newest values, large. `rest`: other fields of `Panel`."""
    rest.setdefault("height", STAT_HEIGHT)
    return Panel(kind=Kind.STAT, title=title, description=description, unit=unit, width=width, targets=targets, **rest)


def timeseries(title: str, description: str, unit: str, width: int, *targets: Target, **rest: Any) -> Panel:
    """Lines over time, or areas where `stacked`."""
    rest.setdefault("height", PANEL_HEIGHT)
    return Panel(
        kind=Kind.TIMESERIES, title=title, description=description, unit=unit, width=width, targets=targets, **rest
    )


def bars(title: str, description: str, unit: str, width: int, *targets: Target, **rest: Any) -> Panel:
    """Bars of the newest values."""
    rest.setdefault("height", PANEL_HEIGHT)
    rest.setdefault("steps", (Step(color=BLUE),))
    rest.setdefault("minimum", 0)
    return Panel(
        kind=Kind.BARGAUGE, title=title, description=description, unit=unit, width=width, targets=targets, **rest
    )


def timeline(title: str, description: str, width: int, *targets: Target, **rest: Any) -> Panel:
    """One strip a series, colored while the value holds."""
    rest.setdefault("height", PANEL_HEIGHT)
    return Panel(
        kind=Kind.TIMELINE, title=title, description=description, unit="none", width=width, targets=targets, **rest
    )


def table(title: str, description: str, width: int, columns: Sequence[Column], **rest: Any) -> Panel:
    """A row for each combination of the columns' labels."""
    rest.setdefault("height", PANEL_HEIGHT)
    targets = tuple(
        Target(expr=column.expr, legend=column.title, instant=True, format="table") for column in columns if column.expr
    )
    return Panel(
        kind=Kind.TABLE, title=title, description=description, unit="none", width=width, targets=targets,
        columns=tuple(columns), **rest,
    )  # fmt: skip


def text(title: str, description: str, width: int, content: str, **rest: Any) -> Panel:
    """Markdown."""
    rest.setdefault("height", STAT_HEIGHT)
    return Panel(
        kind=Kind.TEXT, title=title, description=description, unit="none", width=width, content=content, **rest
    )
