"""`bench telemetry`, small: every target has its row with a verdict, and the rows say what was counted."""

from __future__ import annotations

import re

import pytest

from nvrx_sre.bench import telemetry
from nvrx_sre.bench.fault_records import fault_records
from nvrx_sre.bench.rows import MACHINE, Row
from nvrx_sre.bench.telemetry_launcher import LauncherConfig
from nvrx_sre.events.schema import FaultDetected
from nvrx_sre.telemetry.folded import FoldedRun

TARGETS = {
    "step event, paced": "median at most 10 us",
    "step event, after work": "median at most 10 us",
    "share of a step": "median at most 0.1 %",
    "launcher events": "at least 50000",
    "scrape": "median at most 10 ms",
    "exit, collector silent": "at most 2 s",
    "exit, collector gone": "at most 2 s",
}


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """A few of everything, with a real launcher of two ranks."""
    launcher = LauncherConfig(ranks=2, events_per_s=400, duration_s=5.0, num_records=2_000, num_scrapes=2, num_exits=1)
    small = telemetry.BenchConfig(num_steps=200, num_paced_steps=50, num_pairs=4, launcher=launcher)
    return {row.case: row for row in telemetry.measure(small)}


@pytest.mark.slow
def test_every_target_has_a_verdict(rows: dict[str, Row]) -> None:
    """Whatever this machine can do now, the note says what was wanted and whether it was so."""
    for case, wanted in TARGETS.items():
        assert re.search(rf"^target {re.escape(wanted)}.*: (met|MISSED);", rows[case].note), rows[case]
    assert [row.bench for row in rows.values()][-1] == MACHINE


@pytest.mark.slow
def test_what_was_counted_is_what_was_sent(rows: dict[str, Row]) -> None:
    """Nothing is dropped at a modest rate; the scrape has as many series after 500 faults as after 5."""
    assert "; 0 dropped at 400/s" in rows["launcher events"].note
    few, many = re.findall(r"(\d+) and (\d+) series", rows["scrape"].note)[0]
    assert few == many and int(few) > 500


def test_the_faults_are_incidents_that_recovered() -> None:
    """As many as asked for, each closed by the folds, with texts that no other has."""
    run = FoldedRun("bench")
    records = fault_records(20, 4, 10**18)
    for record in records:
        run.apply(record)
    assert (run.tracker.num_closed, run.tracker.open) == (20, None)
    messages = [record.event.message for record in records if isinstance(record.event, FaultDetected)]
    assert len(set(messages)) == 20
