"""The launcher's processor time in `bench telemetry`, on readings made by hand."""

from __future__ import annotations

import pytest

from nvrx_sre.bench.telemetry_launcher import rates_between


def test_a_rate_is_events_for_processor_time() -> None:
    """Of each slice; one reading alone is none."""
    assert rates_between([(0, 1.0), (50_000, 1.5), (100_000, 2.5)]) == [100_000, 50_000]
    assert rates_between([(50_000, 1.0)]) == []


@pytest.mark.parametrize("num_us", [0, 3, 900])
def test_aggregates_of_one_turn_are_one_slice(num_us: int) -> None:
    """The second was recorded without any work in between: its events are those of the time before the first."""
    readings = [(0, 1.0), (50_000, 2.0), (100_000, 2.0 + num_us / 1e6), (150_000, 3.0 + num_us / 1e6)]
    assert rates_between(readings) == pytest.approx([100_000, 50_000], rel=0.001)


def test_the_first_reading_of_a_turn_is_no_beginning() -> None:
    """What two readings right after the warm-up have between them was not taken in after it."""
    assert rates_between([(0, 1.0), (50_000, 1.0), (100_000, 2.0)]) == pytest.approx([50_000])
