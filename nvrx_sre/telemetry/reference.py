"""The metric reference in docs/, generated from the catalog; a test compares it with the file.

Pure: `render` returns text.
"""

from __future__ import annotations

import math

from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import RUN_LABEL, Metric, MetricType

DOCUMENT = "docs/reference/metrics.md"
"""Where the text lies in a checkout."""

_HEAD = f"""# Metrics

Generated from `nvrx_sre.telemetry.catalog` by `python -m nvrx_sre.telemetry.reference > {DOCUMENT}`: do not
edit. A test compares the two.

Every series carries `{RUN_LABEL}`. Label values are closed sets, all exported from the first scrape on: {{families}}
families, {{series}} series a run, whatever happens. A timestamp is in seconds since the Unix epoch, 0 where it
never happened. Definitions of the numbers are in [ARCHITECTURE](../ARCHITECTURE.md).
"""


def render() -> str:
    """The whole document as Markdown."""
    parts = [_HEAD.format(families=len(catalog.CATALOG), series=catalog.num_series())]
    parts += [_section(metric) for metric in catalog.CATALOG.values()]
    return "\n".join(parts)


def _section(metric: Metric) -> str:
    lines = [f"## `{metric.name}`", "", metric.help, "", f"- {metric.type}, unit {metric.unit}, scope {metric.scope}"]
    for label in metric.labels:
        values = ", ".join(f"`{value}`" for value in label.values) or "free text"
        lines.append(f"- `{label.name}`: {values}")
    if metric.buckets:
        lines.append(f"- buckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}, +Inf")
    if metric.type is MetricType.GAUGE and metric.initial != 0:
        lines.append(f"- before the first event: {'NaN' if math.isnan(metric.initial) else f'{metric.initial:g}'}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(render())
