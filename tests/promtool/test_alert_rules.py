"""The shipped rules in promtool: quiet, single recovery, fires, resolves, at three scrape intervals."""

from __future__ import annotations

import pytest

from nvrx_sre.monitoring import generate, promtool
from nvrx_sre.monitoring.alerts import alert_rules
from nvrx_sre.monitoring.values import Values
from tests.promtool.fleet import KEY, case_of, expectations
from tests.promtool.histories import stories

QUICK = Values(
    event_window_s=900,
    flapping_window_s=900,
    save_failing_window_s=900,
    retry_cap_window_s=600,
    saturation_for_s=240,
    standby_missing_for_s=240,
    slow_rank_for_s=240,
    step_time_for_s=240,
    telemetry_window_s=600,
    world_shrunk_for_s=180,
    memory_for_s=180,
    hold_s=120,
)
"""Shorter windows, so that a story fits into forty minutes."""
UNTIL_S = 2_400
SETTLING_SCRAPES = 2.1
"""A condition is seen by the next scrape, a `for` ends with the evaluation after it."""


@pytest.mark.parametrize("interval_s", [15, 30, 60])
def test_c68_every_story_alerts_exactly_when_it_says(interval_s: int) -> None:
    """All alerts of all stories at 15, 30 and 60 s scrapes (C63, C65 to C69, C71, C72)."""
    outcome = check(QUICK, interval_s, UNTIL_S)
    assert outcome.passed, outcome.output[:20_000]


def check(values: Values, interval_s: int, until_s: int) -> promtool.Outcome:
    """All stories against all rules."""
    runs = stories(values)
    names = {
        rule.name: rule.name for rule in alert_rules(values) if rule.name not in ("NvrxWatchdog", "NvrxGoodputBurn")
    }
    told = expectations(runs, names, range(60, until_s, 60), SETTLING_SCRAPES * interval_s)
    return promtool.run(generate.rules_file(values), [case_of("fleet", runs, told, until_s)], interval_s, KEY)
