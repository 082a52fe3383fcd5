"""How a value looks: units, mappings, thresholds, colors, as a panel's field options and overrides say.

Model: `field_of` merges the panel's defaults with the overrides that match a field's name; the `Field` then formats
and colors values. Colors are Grafana's own of the dark theme.

Pure; thread-safe.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

COLORS = {
    "green": "#73BF69",
    "yellow": "#FADE2A",
    "orange": "#FF9830",
    "red": "#F2495C",
    "blue": "#5794F2",
    "text": "#CCCCDC",
}
PALETTE = (
    "#73BF69", "#F2CC0C", "#8AB8FF", "#FF780A", "#F2495C", "#5794F2", "#B877D9", "#705DA0", "#37872D", "#FADE2A",
    "#447EBC", "#C15C17", "#890F02", "#0A437C", "#6D1F62", "#584477", "#B7DBAB", "#F4D598",
)  # fmt: skip
TIME_UNITS = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "min"), (1.0, "s"))
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
SUFFIXES = {"percent": " %", "celsius": " °C", "decmbytes": " MB", "ops": " /s"}


@dataclass(frozen=True, kw_only=True)
class Field:
    """Options of one field: the panel's defaults under the overrides that match it."""

    options: dict[str, Any]
    properties: dict[str, Any]

    def text(self, value: float | None) -> str:
        """The value as a panel shows it; a mapped one is its word."""
        if value is None or math.isnan(value):
            return str(self.options.get("noValue", "-"))
        mapped = self._mapped(value)
        if mapped is not None:
            return str(mapped["text"])
        return number_text(value, self._get("unit", "none"), self._get("decimals", None))

    def color(self, value: float | None, index: int = 0) -> str:
        """Color of the value; of a line, that of its place in the palette, unless an override fixes it."""
        fixed = self.properties.get("color")
        if fixed is not None:
            return COLORS[fixed["fixedColor"]]
        if self.options["color"]["mode"] == "palette-classic":
            return PALETTE[index % len(PALETTE)]
        mapped = None if value is None else self._mapped(value)
        if mapped is not None:
            return COLORS[mapped["color"]]
        steps = self._get("thresholds", {"steps": [{"color": "text", "value": None}]})["steps"]
        below = [step for step in steps if step["value"] is None or (value is not None and value >= step["value"])]
        return COLORS[below[-1]["color"]]

    @property
    def colors_cell(self) -> bool:
        """True if a table's cell is filled with the color."""
        return "custom.cellOptions" in self.properties

    @property
    def is_dashed(self) -> bool:
        """True if a line is dashed."""
        return "custom.lineStyle" in self.properties

    def _get(self, key: str, otherwise: Any) -> Any:
        return self.properties.get(key, self.options.get(key, otherwise))

    def _mapped(self, value: float) -> dict[str, Any] | None:
        for mapping in self._get("mappings", []):
            found: dict[str, Any] | None = mapping["options"].get(f"{value:g}")
            if found is not None:
                return found
        return None


def field_of(panel: dict[str, Any], name: str) -> Field:
    """Options of the field called `name`."""
    properties: dict[str, Any] = {}
    for override in panel["fieldConfig"]["overrides"]:
        matcher = override["matcher"]
        is_hit = matcher["options"] == name if matcher["id"] == "byName" else re.search(matcher["options"], name)
        if is_hit:
            properties |= {item["id"]: item["value"] for item in override["properties"]}
    return Field(options=panel["fieldConfig"]["defaults"], properties=properties)


def number_text(value: float, unit: str, decimals: int | None) -> str:
    """A number in a unit of Grafana's, e.g. 90 in `s` is `1.5 min`."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "s":
        return _scaled_time(value, decimals)
    if unit == "percentunit":
        return f"{_rounded(value * 100, decimals, 1)} %"
    if unit == "bytes":
        power = 0 if abs(value) < 1 else min(len(BYTE_UNITS) - 1, int(math.log(abs(value), 1024)))
        return f"{_rounded(value / 1024**power, decimals, 1)} {BYTE_UNITS[power]}"
    if unit == "short" and abs(value) >= 1000:
        return f"{_rounded(value / 1000, decimals, 1)} K"
    return _rounded(value, decimals, 2) + SUFFIXES.get(unit, "")


def _scaled_time(value: float, decimals: int | None) -> str:
    if 0 < abs(value) < 1 and decimals != 0:
        scale, word = (1e3, "ms") if abs(value) >= 1e-3 else (1e6, "µs")
        return f"{_rounded(value * scale, None, 0)} {word}"
    size, word = next(((size, word) for size, word in TIME_UNITS if abs(value) >= size), TIME_UNITS[-1])
    return f"{_rounded(value / size, 1 if decimals == 0 and size > 1 else decimals, 1)} {word}"


def _rounded(value: float, decimals: int | None, most: int) -> str:
    """Exactly `decimals` digits after the point, else up to `most` without trailing zeros."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    text = f"{value:.{most}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
