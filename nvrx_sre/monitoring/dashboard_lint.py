"""Checks of a dashboard's JSON: our own rules and those of grafana/dashboard-linter.

Model: `dashboard_problems` returns problems, one line each; an empty list is good. Of dashboard-linter's rules these
hold here under other names or not at all, each for a reason:

- template-job-rule, template-instance-rule, target-job-rule, target-instance-rule: series are told apart by the
  aggregation key (cluster, namespace, run), which outlives pods; every query must match all of its labels.
- target-counter-agg-rule: holds, but for `RAW_COUNTERS`. They are totals of the whole run that a launcher continues
  from its journal, and the panel shows that total.
- target-rate-interval-rule: holds for `rate` and `irate`; what happened within the chosen range is read by
  `max_over_time - min_over_time`, which is exact.

Pure apart from parsing. Must not: be imported by a command that has to run without the extra `test`.
"""

from __future__ import annotations

import json
from typing import Any

import promql_parser

from nvrx_sre.monitoring.lint import GRAFANA_VARIABLES, Known, query_problems
from nvrx_sre.monitoring.panels import Kind
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import MetricType

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RAW_COUNTERS = {
    catalog.STEPS.name: "steps so far",
    catalog.WALL_SECONDS.name: "with the run's start, its own clock (`Query.clock`)",
    catalog.REPLAY_DIVERGENCES.name: "one ever is too many",
    catalog.TIME_SECONDS.name: "wall time so far by state",
    catalog.INCIDENT_OUTCOMES.name: "opened minus ended is open",
    catalog.GENERATIONS.name: "generation in force",
    catalog.RANK_REPLACEMENTS.name: "of the whole run, beside the generations",
    catalog.RANKS_EXCLUDED.name: "of the whole run, beside the generations",
    catalog.PROGRESS_RESUMED.name: "of the whole run, beside the generations",
    catalog.INCIDENTS_DEGRADED.name: "of the whole run, beside the generations",
    catalog.JOURNAL_REPAIRS.name: "one ever is news",
    catalog.LAUNCHER_STARTS.name: "of the whole run, beside its losses",
    catalog.LAUNCHER_STOPS.name: "of the whole run, beside its starts",
    catalog.LEADERS_LOST.name: "of the whole run, beside its starts",
    catalog.RUN_STARTS.name: "of the whole run, beside what was asked of it",
    catalog.BUDGET_RESETS.name: "of the whole run, beside its starts",
    catalog.HALT_REQUESTS.name: "of the whole run, beside its starts",
    catalog.PREEMPTIONS.name: "of the whole run, beside its starts",
    catalog.NODES_JOINED.name: "of the whole run, beside its starts",
    catalog.NODES_LOST.name: "of the whole run, beside its starts",
    catalog.DECISIONS_UNRECORDED.name: "of the whole run, beside its starts",
}
"""Counter -> what a panel that reads it without a rate shows."""


def dashboard_problems(text: str, known: Known) -> list[str]:
    """What is wrong with a dashboard's JSON."""
    document = json.loads(text)
    found = _document_problems(document)
    panels = document["panels"]
    identifiers = [panel["id"] for panel in panels]
    if len(set(identifiers)) != len(identifiers):
        found.append("panel ids repeat")
    titles = [panel["title"] for panel in panels if panel["type"] != "row"]
    found += [
        f"two panels are called {title!r}" for title in sorted({item for item in titles if titles.count(item) > 1})
    ]
    for panel in panels:
        if panel["type"] != "row":
            found += _panel_problems(panel, known)
    for annotation in document["annotations"]["list"]:
        where = f"annotation {annotation['name']!r}"
        found += _source_problems(where, annotation)
        found += [f"{where}: {item}" for item in _expression_problems(annotation["expr"], known)]
    return found + _overlaps(panels)


def _document_problems(document: dict[str, Any]) -> list[str]:
    found = [] if document.get("schemaVersion") == 39 else ["schemaVersion is not 39"]
    if not document.get("uid"):
        found.append("no stable uid")
    if document.get("editable") is not False:
        found.append("editable: changes would be lost at the next import")
    variables = document["templating"]["list"]
    sources = [item["name"] for item in variables if item["type"] == "datasource"]
    if sources != ["datasource"]:
        found.append(f"data source variables are {sources}, not the one called datasource")
    for variable in variables:
        if variable["type"] != "query":
            continue
        if variable.get("refresh") != 2:
            found.append(f"variable {variable['name']!r} is not read again when the time range changes")
        found += _source_problems(f"variable {variable['name']!r}", variable)
    links = document.get("links", [])
    found += [f"link {link['title']!r} loses the time range" for link in links if _is_lossy(link)]
    return found


def _is_lossy(link: dict[str, Any]) -> bool:
    return str(link["url"]).startswith("/d/") and not (link["keepTime"] and link["includeVars"])


def _panel_problems(panel: dict[str, Any], known: Known) -> list[str]:
    where = f"panel {panel.get('title') or panel['id']!r}"
    found = [f"{where}: no {key}" for key in ("title", "description") if not panel.get(key)]
    if panel["type"] == Kind.TEXT:
        return found
    if not panel["fieldConfig"]["defaults"].get("unit"):
        found.append(f"{where}: no unit")
    if not panel.get("targets"):
        found.append(f"{where}: no query")
    found += _source_problems(where, panel)
    for target in panel.get("targets", ()):
        found += _source_problems(where, target)
        found += [f"{where}: {item}" for item in _expression_problems(target["expr"], known)]
        if not target.get("legendFormat"):
            found.append(f"{where}: a query without a legend")
    return found


def _expression_problems(expression: str, known: Known) -> list[str]:
    """Of one query: what `lint` finds, and what a dashboard must do besides."""
    found = query_problems(expression, known)
    if found:
        return found
    filled = expression
    for variable, value in GRAFANA_VARIABLES.items():
        filled = filled.replace(variable, value)
    in_ranges: list[Any] = []
    selectors: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.MatrixSelector):
            in_ranges.append(node.vector_selector)
        elif isinstance(node, promql_parser.VectorSelector):
            selectors.append(node)
        return True

    promql_parser.walk(promql_parser.parse(filled), visit)
    ours = [node for node in (*selectors, *in_ranges) if node.name in known.types]
    for node in ours:
        missing = [label for label in known.key if label not in {item.name for item in node.matchers.matchers}]
        found += [f"{node.name} is not selected by {label}" for label in missing]
    ranged = {str(node) for node in in_ranges}
    for node in selectors:
        is_counter = known.types.get(node.name) is MetricType.COUNTER and str(node) not in ranged
        if is_counter and node.name not in RAW_COUNTERS:
            found.append(f"the counter {node.name} is read without a rate")
    return sorted({*found, *_rate_windows(expression)})


def _rate_windows(expression: str) -> list[str]:
    parts = expression.split("rate(")[1:]
    return [
        "a rate does not use $__rate_interval"
        for part in parts
        if not part[part.index("[") + 1 :].startswith("$__rate_interval]")
    ]


def _source_problems(where: str, holder: dict[str, Any]) -> list[str]:
    return (
        [] if holder.get("datasource") == DATA_SOURCE else [f"{where}: the data source is not the dashboard's variable"]
    )


def _overlaps(panels: list[dict[str, Any]]) -> list[str]:
    taken: dict[tuple[int, int], str] = {}
    found = []
    for panel in panels:
        grid = panel["gridPos"]
        cells = [
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        ]
        if grid["x"] + grid["w"] > 24:
            found.append(f"panel {panel['title']!r} is wider than the dashboard")
        others = {taken[cell] for cell in cells if cell in taken}
        found += [f"panel {panel['title']!r} covers {other!r}" for other in sorted(others)]
        taken.update(dict.fromkeys(cells, panel["title"]))
    return found
