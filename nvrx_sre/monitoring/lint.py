"""Checks of what is generated or written by hand: queries against the catalog, rules, runbooks.

Model: every query is parsed into its tree (`promql-parser`, part of the extra `test`); each series must be in
the catalog or a recording rule, each matched label and value in its closed set, each function fit the metric's
type, rates be taken of raw series. Each function returns problems, one line each; an empty list is good.

Pure apart from parsing. Must not: be imported by a command that has to run without the extra.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser

from nvrx_sre.monitoring.alerts import RecordingRule
from nvrx_sre.monitoring.alerts_kubernetes import KUBERNETES_SERIES
from nvrx_sre.monitoring.dashboard_ranks import DCGM_SERIES
from nvrx_sre.monitoring.dashboard_telemetry import SCRAPE_SERIES
from nvrx_sre.monitoring.endings import ALERT_LABELS
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import Label, MetricType

GRAFANA_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$__interval": "1m", "$price": "1"}
TARGET_LABELS = ("job", "instance")
"""Labels that Prometheus adds; a matcher on them is never wrong, but nothing of ours needs one."""
COUNTER_FUNCTIONS = ("rate", "increase", "irate", "resets")
GAUGE_FUNCTIONS = ("delta", "deriv", "idelta", "changes", "predict_linear", "holt_winters")
FOREIGN_SERIES = ("ALERTS", "ALERTS_FOR_STATE", "up", *SCRAPE_SERIES, *DCGM_SERIES, *KUBERNETES_SERIES)
"""Of Prometheus and of other exporters: not in our catalog, and not checked further."""

FOREIGN_LABELS = {**KUBERNETES_SERIES, "ALERTS": ALERT_LABELS}
"""Series -> labels that a query may group by."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a query may name: series with their type and labels, and the labels of the key."""

    types: Mapping[str, MetricType]
    labels: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Series -> label -> closed values (empty: open)."""
    key: tuple[str, ...]


def known_series(recordings: Iterable[RecordingRule], key: tuple[str, ...]) -> Known:
    """Catalog and recording rules as `Known`."""
    types: dict[str, MetricType] = {}
    labels: dict[str, Mapping[str, tuple[str, ...]]] = {}
    for metric in catalog.CATALOG.values():
        for name in metric.sample_names:
            more = (Label(name="le", values=()),) if name.endswith("_bucket") else ()
            types[name] = metric.type
            labels[name] = {label.name: label.values for label in (*metric.labels, *more)}
    for rule in recordings:
        types[rule.name] = MetricType.COUNTER if rule.cumulative else MetricType.GAUGE
        closed = {label.name: label.values for label in rule.metric.labels} if rule.metric is not None else {}
        labels[rule.name] = {label: closed.get(label, ()) for label in rule.labels}
    return Known(types=types, labels=labels, key=key)


def query_problems(expression: str, known: Known) -> list[str]:
    """What is wrong with one query; Grafana's interval variables are filled in first."""
    for variable, value in GRAFANA_VARIABLES.items():
        expression = expression.replace(variable, value)
    try:
        tree = promql_parser.parse(expression)
    except ValueError as error:
        return [f"{expression!r} does not parse: {error}"]
    found: list[str] = []
    available = {*known.key, *TARGET_LABELS}

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.extend(_selector_problems(node, known))
            available.update(known.labels.get(node.name or "", FOREIGN_LABELS.get(node.name or "", ())))
        elif isinstance(node, promql_parser.Call):
            found.extend(_call_problems(node, known))
        available.update(_made_labels(node))
        return True

    promql_parser.walk(tree, visit)
    for label in _grouping_labels(tree):
        if label not in available:
            found.append(f"no series of the query has the label {label!r} that it groups or matches by")
    return found


def _made_labels(node: Any) -> list[str]:
    """Labels that the query itself makes."""
    if isinstance(node, promql_parser.Call) and node.func.name == "label_replace":
        return [node.args[1].val]
    if isinstance(node, promql_parser.AggregateExpr) and str(node.op) == "count_values":
        return [str(getattr(node.param, "val", ""))]
    return []


def _selector_problems(node: Any, known: Known) -> list[str]:
    name = node.name or ""
    if name in FOREIGN_SERIES:
        return []
    if name not in known.types:
        return [f"{name or 'a selector without a name'} is not in the catalog"]
    found = []
    for matcher in node.matchers.matchers:
        if matcher.name in (*known.key, *TARGET_LABELS):
            continue
        values = known.labels[name].get(matcher.name)
        if values is None:
            found.append(f"{name} has no label {matcher.name!r}")
            continue
        wanted = matcher.value.split("|")
        found += [
            f"label {matcher.name!r} of {name} is never {item!r}" for item in wanted if values and item not in values
        ]
    return found


def _call_problems(node: Any, known: Known) -> list[str]:
    function = node.func.name
    if function not in COUNTER_FUNCTIONS + GAUGE_FUNCTIONS:
        return []
    argument = node.args[0]
    if not isinstance(argument, promql_parser.MatrixSelector):
        return [f"{function} of something that is not a raw series: take rates first, then aggregate"]
    kind = known.types.get(argument.vector_selector.name or "")
    cumulative = kind in (MetricType.COUNTER, MetricType.HISTOGRAM)
    if kind is not None and cumulative != (function in COUNTER_FUNCTIONS):
        return [f"{function} of {argument.vector_selector.name}, which is a {kind}"]
    return []


def _grouping_labels(tree: Any) -> list[str]:
    labels: list[str] = []

    def visit(node: Any) -> bool:
        modifier = getattr(node, "modifier", None)
        if isinstance(node, promql_parser.AggregateExpr) and modifier is not None:
            labels.extend(modifier.labels)
        elif isinstance(node, promql_parser.BinaryExpr) and modifier is not None and modifier.matching is not None:
            labels.extend(modifier.matching.labels)
        return True

    promql_parser.walk(tree, visit)
    return labels


def rules_problems(document: dict[str, Any], known: Known, runbooks: Iterable[str]) -> list[str]:
    """What is wrong with a rules file: queries, annotations, and alerts against runbooks, both ways."""
    found: list[str] = []
    names = []
    for group in document["groups"]:
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            found += [f"{name}: {item}" for item in query_problems(rule["expr"], known)]
            if "alert" in rule:
                names.append(name)
                found += _alert_problems(rule)
    pages = set(runbooks)
    found += [f"alert {name} has no runbook" for name in names if name not in pages]
    found += [f"runbook {name} has no alert" for name in sorted(pages - set(names))]
    return found


def _alert_problems(rule: dict[str, Any]) -> list[str]:
    name, annotations = rule["alert"], rule.get("annotations", {})
    wanted = ("summary", "description", "runbook_url", "dashboard_url")
    found = [f"{name}: no {key}" for key in wanted if not annotations.get(key)]
    if not name.startswith("Nvrx"):
        found.append(f"{name}: alerts are called Nvrx<Symptom>")
    severities = re.sub(r"\{\{.*?\}\}", " ", rule.get("labels", {}).get("severity", "")).split()
    if not severities or not set(severities) <= {"critical", "warning", "info"}:
        found.append(f"{name}: severity is not critical, warning or info")
    if not str(annotations.get("runbook_url", "")).endswith(f"/{name}.md"):
        found.append(f"{name}: runbook_url does not lead to {name}.md")
    if "$labels.run" not in str(annotations.get("summary", "")):
        found.append(f"{name}: the summary does not name the run")
    return found
