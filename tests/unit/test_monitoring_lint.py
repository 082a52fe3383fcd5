"""The lint finds planted mistakes in queries, rules and runbooks."""

from __future__ import annotations

import copy

import pytest

from nvrx_sre.monitoring import lint, runbooks
from nvrx_sre.monitoring.alerts import alert_rules, recording_rules, rules_document
from nvrx_sre.monitoring.values import Values

VALUES = Values()
KNOWN = lint.known_series(recording_rules(VALUES), VALUES.group_labels)
NAMES = [rule.name for rule in alert_rules(VALUES)]


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("rate(nvrx_no_such_total[5m])", "not in the catalog"),
        ("sum(", "does not parse"),
        ("rate(nvrx_loss[5m])", "which is a gauge"),
        ("delta(nvrx_steps_total[5m])", "which is a counter"),
        ("increase(run:nvrx_budget_used:max[5m])", "which is a gauge"),
        ("rate((sum(nvrx_steps_total))[5m:1m])", "not a raw series"),
        ('nvrx_loss{rank="0"}', "no label 'rank'"),
        ('nvrx_steps_total{kind="old"}', "never 'old'"),
        ('nvrx_budget_used{cap=~"window|patience"}', "never 'patience'"),
        ("sum by (kind) (nvrx_loss)", "has the label 'kind'"),
        ("nvrx_loss + on (rank) nvrx_loss", "has the label 'rank'"),
        ("nvrx_outage_seconds", "not in the catalog"),
    ],
)
def test_wrong_queries_are_found(expression: str, word: str) -> None:
    """Unknown series, label or value, a function that does not fit, a rate of a sum."""
    found = lint.query_problems(expression, KNOWN)
    assert len(found) == 1
    assert word in found[0]


@pytest.mark.parametrize(
    "expression",
    [
        "sum by (kind) (rate(nvrx_steps_total[$__rate_interval]))",
        "histogram_quantile(0.5, sum by (le, layer) (increase(nvrx_outage_seconds_bucket[$__range])))",
        'run:nvrx_budget_used:max{cap="window",namespace="a"} > 0',
        "changes(nvrx_run_start_timestamp_seconds[1h])",
        'count_over_time(ALERTS{alertname="A"}[1h])',
    ],
)
def test_right_queries_pass(expression: str) -> None:
    """Grafana's intervals are filled in; buckets, recordings and meta series are known."""
    assert lint.query_problems(expression, KNOWN) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda rule: rule.update(alert="CrashLoop"), "Nvrx<Symptom>"),
        (lambda rule: rule["annotations"].pop("dashboard_url"), "no dashboard_url"),
        (lambda rule: rule["annotations"].update(summary="it loops"), "does not name the run"),
        (lambda rule: rule["annotations"].update(runbook_url="https://x/other.md"), "does not lead to"),
        (lambda rule: rule["labels"].update(severity="page"), "severity"),
        (lambda rule: rule.update(expr="nvrx_nothing > 0"), "not in the catalog"),
    ],
)
def test_an_alert_that_lacks_something_is_found(change: object, word: str) -> None:
    """Name, annotations, severity, query."""
    document = copy.deepcopy(rules_document(VALUES))
    change(next(rule for rule in document["groups"][0]["rules"] if "alert" in rule))
    assert any(word in item for item in lint.rules_problems(document, KNOWN, NAMES))


def test_alerts_and_runbooks_are_compared_both_ways() -> None:
    """A missing page and a page without an alert are both findings."""
    pages = [*sorted(set(NAMES) - {"NvrxRunHalted"}), "NvrxNothing"]
    found = lint.rules_problems(rules_document(VALUES), KNOWN, pages)
    assert found == ["alert NvrxRunHalted has no runbook", "runbook NvrxNothing has no alert"]


def test_an_incomplete_runbook_is_found() -> None:
    """Title, head rows, sections in order, at least one command."""
    found = runbooks.problems("NvrxNothing", "# Other\n\n## Impact\n\n## Meaning\n")
    words = ["first line is not", "the head is []", "sections are ['Impact', 'Meaning']", "'Impact' is empty"]
    words += ["'Meaning' is empty", "no shell command", "no amtool line"]
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))
    assert found[0] == "NvrxNothing: the first line is not '# NvrxNothing'"
