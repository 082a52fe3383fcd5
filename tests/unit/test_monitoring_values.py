"""Values: overrides from a file, relations, clear refusals; the key reaches rules, routes and dashboard."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nvrx_sre.core.errors import UserError
from nvrx_sre.monitoring.alertmanager import alertmanager_config
from nvrx_sre.monitoring.alerts import alert_rules, kubernetes_document, recording_rules, rules_document
from nvrx_sre.monitoring.dashboards import dashboard_files
from nvrx_sre.monitoring.slo import burns
from nvrx_sre.monitoring.values import Values, load_values


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("crash_loop_ratio: 1\n", "unknown value 'crash_loop_ratio'"),
        ("crash_loop_budget_ratio: high\n", "must be a number"),
        ("crash_loop_budget_ratio: 1.5\n", "at most 1"),
        ("crash_loop_budget_ratio: 0\n", "more than 0"),
        ("crash_loop_budget_ratio: .nan\n", "finite"),
        ("stalled_ratio: 0\n", "more than 0"),
        ("hold_s: -1\n", "0 or more"),
        ("budget_low_ratio: 1\n", "must be above budget_low_ratio"),
        ("target_missing_s: 600\n", "must be above target_missing_s"),
        ("burn_fast_window_s: 30000\n", "must be above burn_fast_window_s"),
        ("slo_goodput: 2\n", "at most 1"),
        ("crash_loop_for_s: -1\n", "0 or more"),
        ("sample_memory_s: 0.5\n", "at least 1"),
        ("halted_memory_s: 60\n", "must be above"),
        ("group_labels: run\n", "list of label names"),
        ("group_labels: [cluster]\n", "must contain 'run'"),
        ("group_labels: [run, 'a b']\n", "not a label name"),
        ("runbook_base_url: ftp://x\n", "http or https"),
        ("runbook_base_url: 1\n", "must be text"),
        ("deadman_url: deadman.example\n", "http or https"),
        ("slack_channel: ' '\n", "slack_channel is empty"),
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
    file.write_text("group_labels: [team, run]\nsample_memory_s: 310\n")
    assert load_values(file) == Values(group_labels=("team", "run"), sample_memory_s=310.0)
    file.write_text("# nothing\n")
    assert load_values(file) == Values()


def test_the_key_reaches_rules_routes_and_dashboards() -> None:
    """Another aggregation key changes every grouping, the inhibition, the link and the variables."""
    values = Values(group_labels=("team", "run"))
    rules = [rule.expr for rule in recording_rules(values)] + [rule.expr for rule in alert_rules(values)]
    assert not [expr for expr in rules if "namespace" in expr or "cluster" in expr]
    assert not [expr for expr in rules if "(run" in expr.replace("(run:", "")]
    config = alertmanager_config(values=values)
    assert config["route"]["group_by"] == config["inhibit_rules"][0]["equal"] == ["team", "run"]
    for text in dashboard_files(values).values():
        names = [item["name"] for item in json.loads(text)["templating"]["list"]]
        assert "team" in names
        assert not {"cluster", "namespace"} & set(names)
    link = alert_rules(values)[0].to_rule(values)["annotations"]["dashboard_url"]
    assert link.endswith(
        '?var-run={{ $labels.run }}{{ if ne $labels.team "none" }}&var-team={{ $labels.team }}{{ end }}'
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"slo_goodput": 0.9, "burn_fast_budget_ratio": 0.06}, "never fires"),
        ({"slo_goodput": 0.5, "burn_slow_budget_ratio": 0.08}, "never fires"),
        ({"burn_slow_budget_ratio": 0.03}, "while the objective is kept"),
        ({"slo_goodput": 1.0}, "no budget"),
    ],
)
def test_burn_rates_that_cannot_fire_are_refused(changes: dict[str, float], word: str) -> None:
    """A threshold of 1 or more, a factor below 1, an objective without a budget: refused when rules are generated."""
    with pytest.raises(UserError, match=word):
        rules_document(Values(**changes))


def test_burn_factors_are_computed() -> None:
    """2 % of a week's budget in an hour is 3.36 times too fast; with 10 % lost allowed that is 33.6 % (PITFALLS)."""
    fast, slow = burns(Values())
    assert (fast.factor, fast.threshold, fast.short_s) == (pytest.approx(3.36), 0.336, 300)
    assert (slow.factor, slow.threshold, slow.short_s) == (pytest.approx(1.4), 0.14, 1_800)
    assert burns(Values(slo_goodput=0.95))[0].threshold == 0.168


def test_every_value_reaches_a_rule() -> None:
    """A value that neither rules nor notifications read would be an option that is ignored."""
    plain = _generated(Values())
    for item in dataclasses.fields(Values):
        changes = CHANGES.get(item.name, {item.name: _other(item.default)})
        values = Values(**changes)
        assert _generated(values) != plain, item.name


def _generated(values: Values) -> str:
    return json.dumps([rules_document(values), kubernetes_document(values), alertmanager_config(values=values)])


CHANGES = {
    "slo_period_s": {"slo_period_s": 600_000.0},
    "burn_slow_window_s": {"burn_slow_window_s": 25_200.0},
    "burn_fast_budget_ratio": {"burn_fast_budget_ratio": 0.021},
}
"""Where the usual change would be refused."""


def _other(value: object) -> object:
    if isinstance(value, tuple):
        return ("team", "run")
    return f"{value}/x" if isinstance(value, str) else float(value) * 0.98 if value else 1.0  # type: ignore[arg-type]  # a number
