"""PromQL from the catalog: what it writes, and what it refuses to write."""

from __future__ import annotations

import pytest

from nvrx_sre.core.errors import InternalError
from nvrx_sre.monitoring.promql import Query, duration, number, recorded
from nvrx_sre.telemetry import catalog

QUERY = Query(group_labels=("namespace", "run"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "500ms"), (1, "1s"), (60, "1m"), (90, "90s"), (3600, "1h"), (604_800, "1w"), (0.0001, "1ms")],
)
def test_duration_uses_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    """One unit, no fraction, never zero."""
    assert duration(seconds) == text


def test_numbers_are_written_without_a_needless_fraction() -> None:
    """1.0 is 1; 0.5 stays."""
    assert [number(1.0), number(0.5), number(-2)] == ["1", "0.5", "-2"]


def test_series_take_closed_label_values_only() -> None:
    """One value is an equality, several a pattern; the audience's matchers come along."""
    query = Query(group_labels=("run",), selectors=('run="$run"',))
    assert query.series(catalog.STEPS, kind="new") == 'nvrx_steps_total{kind="new",run="$run"}'
    assert query.series(catalog.STEPS, kind=("new", "redone")).startswith('nvrx_steps_total{kind=~"new|redone"')
    assert QUERY.series(catalog.LOSS) == catalog.LOSS.name


@pytest.mark.parametrize(
    "build",
    [
        lambda: QUERY.series(catalog.LOSS, kind="new"),
        lambda: QUERY.series(catalog.STEPS, kind="old"),
        lambda: QUERY.series(catalog.STEPS, kind=()),
        lambda: QUERY.series(catalog.OUTAGE_SECONDS),
        lambda: QUERY.series(catalog.LOSS, "bucket"),
        lambda: QUERY.latest(catalog.LOSS, "cap"),
        lambda: QUERY.rate(catalog.LOSS, window="5m"),
        lambda: QUERY.gain(catalog.BUDGET_USED, "cap", window="5m"),
    ],
    ids=["no such label", "no such value", "no value", "histogram as number", "gauge as histogram", "no such group",
         "rate of a gauge", "gain of a gauge"],
)  # fmt: skip
def test_c72_a_query_that_does_not_fit_the_metric_is_refused(build: object) -> None:
    """Wrong label, value, suffix or function for the type is an error where the expression is built."""
    with pytest.raises(InternalError):
        build()


def test_c69_pods_are_aggregated_away_by_the_key() -> None:
    """`max by` the key and the labels asked for; memory is a last_over_time inside it."""
    assert QUERY.latest(catalog.LOSS) == f"max by (namespace, run) ({catalog.LOSS.name})"
    remembered = QUERY.latest(catalog.BUDGET_USED, "cap", memory_s=600)
    assert remembered == "max by (namespace, run, cap) (last_over_time(nvrx_budget_used[10m]))"
    assert QUERY.live(catalog.BUDGET_USED, "cap", memory_s=600).split("\nor\n")[1] == remembered


def test_c70_rates_are_taken_before_aggregation() -> None:
    """The rate is inside the max, also for a histogram's buckets."""
    assert QUERY.rate(catalog.STEPS, "kind", window="5m") == (
        "max by (namespace, run, kind) (rate(nvrx_steps_total[5m]))"
    )
    assert "rate(nvrx_outage_seconds_bucket[1m])" in QUERY.rate(
        catalog.OUTAGE_SECONDS, "le", window="1m", suffix="bucket"
    )


def test_what_launchers_count_for_themselves_is_added_up() -> None:
    """The job's counters go on over pods; those of a launcher begin at 0 with it, so that the extremes over all of them
    would show as a gain what one lost long ago."""
    job, own = (
        QUERY.gain(m, "component", window="1h") for m in (catalog.TELEMETRY_DEGRADATIONS, catalog.TELEMETRY_DROPPED)
    )
    assert "max by (namespace, run, component) (max_over_time(" in job
    assert own == (
        "sum by (namespace, run, component) "
        "(max_over_time(nvrx_telemetry_dropped_total[1h]) - min_over_time(nvrx_telemetry_dropped_total[1h]))"
    )


def test_recording_rules_are_named_level_metric_operation() -> None:
    """`run:<metric>:max`."""
    assert recorded(catalog.LOSS) == "run:nvrx_loss:max"
