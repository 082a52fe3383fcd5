"""Values: overrides from a file, relations, clear refusals; the key reaches rules, routes and dashboard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvrx_sre.core.errors import UserError
from nvrx_sre.monitoring.alertmanager import alertmanager_config
from nvrx_sre.monitoring.alerts import alert_rules, recording_rules
from nvrx_sre.monitoring.dashboards import run_dashboard
from nvrx_sre.monitoring.values import Values, load_values


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("crash_loop_ratio: 1\n", "unknown value 'crash_loop_ratio'"),
        ("crash_loop_budget_ratio: high\n", "must be a number"),
        ("crash_loop_budget_ratio: 1.5\n", "at most 1"),
        ("crash_loop_budget_ratio: 0\n", "more than 0"),
        ("crash_loop_for_s: -1\n", "0 or more"),
        ("sample_memory_s: 0\n", "at least 1"),
        ("halted_memory_s: 60\n", "must be above"),
        ("group_labels: run\n", "list of label names"),
        ("group_labels: [cluster]\n", "must contain 'run'"),
        ("group_labels: [run, 'a b']\n", "not a label name"),
        ("runbook_base_url: ftp://x\n", "http or https"),
        ("runbook_base_url: 1\n", "must be text"),
        ("- 1\n", "must be a mapping"),
        ("a: [\n", "cannot be parsed"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(tmp_path: Path, text: str, word: str) -> None:
    """Unknown keys, wrong types, numbers out of range or relation: one line that says what."""
    file = tmp_path / "values.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=word):
        load_values(file)


def test_a_missing_values_file_is_named(tmp_path: Path) -> None:
    """The path stands in the message."""
    with pytest.raises(UserError, match=r"cannot read values .*none\.yaml"):
        load_values(tmp_path / "none.yaml")


def test_a_file_overrides_single_values(tmp_path: Path) -> None:
    """The rest stays at the default; an empty file changes nothing."""
    file = tmp_path / "values.yaml"
    file.write_text("group_labels: [team, run]\nsample_memory_s: 300\n")
    assert load_values(file) == Values(group_labels=("team", "run"), sample_memory_s=300.0)
    file.write_text("# nothing\n")
    assert load_values(file) == Values()


def test_the_key_reaches_rules_routes_and_dashboard() -> None:
    """Another aggregation key changes every grouping, the inhibition, the link and the variables."""
    values = Values(group_labels=("team", "run"))
    rules = [rule.expr for rule in recording_rules(values)] + [rule.expr for rule in alert_rules(values)]
    assert all("(team, run" in expr and "namespace" not in expr for expr in rules)
    config = alertmanager_config(values=values)
    assert config["route"]["group_by"] == config["inhibit_rules"][0]["equal"] == ["team", "run"]
    document = json.loads(run_dashboard(values))
    assert [item["name"] for item in document["templating"]["list"]] == ["datasource", "team", "run"]
    assert 'team=~"$team",run="$run"' in document["panels"][1]["targets"][0]["expr"]
    link = alert_rules(values)[0].to_rule(values)["annotations"]["dashboard_url"]
    assert link.endswith("?var-team={{ $labels.team }}&var-run={{ $labels.run }}")
