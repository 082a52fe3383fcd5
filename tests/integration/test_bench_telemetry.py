"""`bench telemetry`, small: every target has its row with a verdict, and the rows say what was counted."""

from __future__ import annotations

import math
import re

import pytest

from nvrx_sre.bench import telemetry
from nvrx_sre.bench.fault_records import fault_records
from nvrx_sre.bench.rows import MACHINE, Row
from nvrx_sre.bench.share_rank import ORDER
from nvrx_sre.bench.telemetry_launcher import LauncherConfig
from nvrx_sre.bench.telemetry_share import ShareConfig, median_interval, share_rows
from nvrx_sre.core.rng import seeded
from nvrx_sre.events.schema import FaultDetected
from nvrx_sre.telemetry.folded import FoldedRun

TARGETS = {
    "step event, paced": "median at most 10 us",
    "step event, after training": "median at most 10 us",
    "share of a step": "median at most 0.1 %",
    "launcher events": "at least 50000",
    "scrape": "median at most 10 ms",
    "exit, collector silent": "at most 2 s",
    "exit, collector gone": "at most 2 s",
}

PAUSES = ("paced", "after training")


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """A few of everything, with a real launcher of two ranks."""
    launcher = LauncherConfig(ranks=2, events_per_s=400, duration_s=5.0, num_records=2_000, num_scrapes=2, num_exits=1)
    small = telemetry.BenchConfig(
        num_steps=200, num_paced_steps=50, share=ShareConfig(num_blocks=2, num_steps=200), launcher=launcher
    )
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


@pytest.mark.slow
def test_all_that_a_rank_reports_is_taken_in(rows: dict[str, Row]) -> None:
    """Also without any pause between the reports; a share is compared over as many blocks as were asked for."""
    assert rows["step event, back to back"].note.endswith("; 0 of 200 dropped")
    pairs = [(rows[f"step event, {case}"], rows[f"no event, {case}"]) for case in ("back to back", *PAUSES)]
    assert [(event.n, control.n) for event, control in pairs] == [(200, 200), (50, 50), (50, 50)]
    shares = [row for case, row in rows.items() if case.startswith("share of a step")]
    assert [row.n for row in shares[:2]] == [2, 2] and all("95 % sure of " in row.note for row in shares)
    assert len(shares) == 5 and all(row.n > 0 for row in shares)


def test_a_share_says_how_sure_it_is() -> None:
    """Reports that cost 1 % in all, 0.01 % in the rank alone, and 2 % of the step during which the launcher looks."""
    told_ns, off_ns = 10_001_000, 10_000_000
    steps = [(told, False, told_ns if told else off_ns, 900 if told else 50) for told in ORDER * 30]
    for number in (41, 80):
        steps[number] = (steps[number][0], True, steps[number][2] + 200_000, steps[number][3])
    runs = [(told, 1.01 if told else 1.0, 0.909 if told else 0.9) for told in ORDER * 20]
    share, processor, alone, report, looks = share_rows({"runs": runs, "steps": steps})
    assert [row.median for row in (share, processor, alone)] == pytest.approx([1.0, 1.0, 0.01])
    assert [row.median for row in (report, looks)] == pytest.approx([0.0085, 2.0 * 2 / 120])
    assert (share.n, alone.n, report.n, looks.n) == (20, 28, 30, 2)
    assert share.note.startswith(
        "target median at most 0.1 % of a step of 10 ms: MISSED; 95 % sure of 1.000 to 1.000 %;"
    )


def test_noise_beyond_the_target_is_admitted() -> None:
    """A median of nothing, of blocks that differ by 2 % either way, says nothing about 0.1 %."""
    runs = [(told, 1.0 + extra * told, 0.9) for extra in (-0.02, 0.0, 0.02) for told in ORDER]
    steps = [(told, number % 11 == 5, 10_000_000, 1_000) for number, told in enumerate(ORDER * 30)]
    note = share_rows({"runs": runs, "steps": steps})[0].note
    assert ": met; 95 % sure of -2.000 to 2.000 %, so that noise decided;" in note


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    """Of 1,000 sets of 41 samples, 19 in 20 or somewhat more have the true median within their interval."""
    random = seeded(41)
    num_hit = 0
    for _ in range(1000):
        low, high = median_interval([random.expovariate(1.0) for _ in range(41)])
        num_hit += low <= math.log(2) <= high
    assert 945 <= num_hit <= 995
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_the_faults_are_incidents_that_recovered() -> None:
    """As many as asked for, each closed by the folds, with texts that no other has."""
    run = FoldedRun("bench")
    records = fault_records(20, 4, 10**18)
    for record in records:
        run.apply(record)
    assert (run.tracker.num_closed, run.tracker.open) == (20, None)
    messages = [record.event.message for record in records if isinstance(record.event, FaultDetected)]
    assert len(set(messages)) == 20
