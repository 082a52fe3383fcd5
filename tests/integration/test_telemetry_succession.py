"""One launcher after another: what is exported by whom, and that no counter ever falls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nvrx_sre.core.limits import Limits, TelemetryLimits
from nvrx_sre.events.journal import JournalReader
from nvrx_sre.events.schema import FaultClass, IncidentClosed, LauncherStarted, ProgressResumed, Record, RestoredFrom
from nvrx_sre.events.snapshot import fits
from nvrx_sre.launcher.past import LauncherFolds, read_past
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.telemetry import catalog, hub
from nvrx_sre.telemetry.folded import FoldedRun
from nvrx_sre.telemetry.hub import Telemetry, TelemetryConfig
from nvrx_sre.telemetry.metric import Scope
from tests.integration.test_telemetry_hub import PATIENT, counters, get
from tests.patience import PATIENCE_S
from tests.stories import RUN, Story, begin, exception_story, lost_launcher_story

SMALL = Limits(
    telemetry=TelemetryLimits(journal_segment_bytes=2_500, journal_segments=6, exporter_timeout_s=PATIENCE_S)
)
SYNC_S = PATIENCE_S
Start = Callable[..., Telemetry]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts telemetry on the test's run directory, with its journal replayed; closed at the end."""
    monkeypatch.setattr(hub, "SCRAPE_SYNC_S", PATIENCE_S)
    started: list[Telemetry] = []

    def begin_at(epoch: int = 1, **changes: object) -> Telemetry:
        options = {"run": RUN, "run_dir": tmp_path / "run", "epoch": epoch, "limits": PATIENT, **changes}
        telemetry = Telemetry(TelemetryConfig(**options))  # type: ignore[arg-type]  # free-form for tests
        telemetry.companions = LauncherFolds().parts
        telemetry.replay()
        started.append(telemetry)
        return telemetry

    yield begin_at
    for telemetry in started:
        telemetry.close()


def job_counters(telemetry: Telemetry) -> dict[str, float]:
    """The job's counters of a scrape, less wall time: the stories are of another year than the clock."""
    found = counters(get(telemetry.metrics_url)[2])
    job = {name for name, metric in catalog.CATALOG.items() if metric.scope is Scope.JOB} - {catalog.WALL_SECONDS.name}
    return {series: value for series, value in found.items() if series.partition("{")[0] in job}


def settle(telemetry: Telemetry) -> None:
    """Wait until everything is on disk: a segment gives way only to what the span file has as well."""
    assert telemetry.sync(SYNC_S)
    assert telemetry._span_sink.flush(SYNC_S)


def families(telemetry: Telemetry) -> set[str]:
    """Metrics that a scrape shows."""
    lines = get(telemetry.metrics_url)[2].splitlines()
    names = {line.partition("{")[0] for line in lines if line and not line.startswith("#")}
    return {metric.name for name in names if (metric := catalog.metric_of(name)) is not None}


def killed(run_dir: Path, into: Path) -> Path:
    """The disk of a launcher that was killed at this moment."""
    shutil.copytree(run_dir, into)
    return into


def test_a_launcher_killed_between_scrapes_takes_no_count_with_it(start: Start, tmp_path: Path) -> None:
    """What was scraped was on the disk: the next launcher begins at that or above, after every scrape."""
    records = exception_story().records
    first = start()
    for number, record in enumerate(records, 1):
        first.record(record)
        if number % 15 == 0:
            before = job_counters(first)
            left = killed(tmp_path / "run", tmp_path / f"killed-{number}")
            second = start(2, run_dir=left)
            after = job_counters(second)
            assert before.keys() <= after.keys()
            assert [series for series in before if after[series] < before[series]] == []


def test_a_pod_replaced_in_mid_incident_goes_on_with_it(start: Start) -> None:
    """Another node, the same incident: its beginning, its trace and its count stay; it closes once."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.9, 13.0, FaultClass.KILLED, 1)
    first = start()
    for record in story.records:
        first.record(record)
    opened = first.metrics.value(catalog.INCIDENT_OPENED)
    trace_id = first.tracker.open and first.tracker.open.trace_id
    before = job_counters(first)
    first.close()
    seen = len(story.records)
    story.start(40.0)
    again_s = story.form(42.0, 10, RestoredFrom.DURABLE)
    second = start(2)
    assert second.metrics.value(catalog.INCIDENT_OPENED) == opened > 0
    closed = []
    for record in story.records[seen:]:
        if isinstance(record.event, LauncherStarted):
            record = replace(record, event=replace(record.event, node="n2"))
        closed += second.record(record)
    seen = len(story.records)
    story.steps(again_s, 44.0, 11, 11)
    for record in story.records[seen:]:
        closed += second.record(record)
    ends = [event for event, _ in closed if isinstance(event, IncidentClosed)]
    assert [event.trace_id for event in ends] == [trace_id]
    after = job_counters(second)
    assert [series for series in before if after[series] < before[series]] == []
    assert after[f'nvrx_incidents_total{{run="{RUN}",verdict="recovering"}}'] == 1.0
    assert 'node="n2"' in get(second.metrics_url)[2]


def test_a_leader_that_is_superseded_drops_what_is_its_successors(start: Start) -> None:
    """The job's families go, the node's stay; the successor has them all, a follower never had them."""
    records = exception_story().records
    first = start()
    for record in records[:-2]:
        first.record(record)
    assert {catalog.STEPS.name, catalog.RUN_INFO.name, catalog.LAUNCHER_LOOP.name} <= families(first)
    before = job_counters(first)
    first.sync(SYNC_S)
    second = start(2)
    first.resign()
    assert {catalog.CATALOG[name].scope for name in families(first)} == {Scope.NODE}
    after = job_counters(second)
    assert [series for series in before if after[series] < before[series]] == []
    follower = start(2, is_leader=False)
    assert catalog.STEPS.name not in families(follower)
    assert catalog.LAUNCHER_LOOP.name in families(follower)


def test_the_labels_of_the_place_come_from_the_scrape(start: Start) -> None:
    """Two runs of one name in two namespaces: nothing of a run says where it is, so targets may."""
    telemetry = start()
    for record in exception_story().records:
        telemetry.record(record)
    body = get(telemetry.metrics_url)[2]
    assert f'run="{RUN}"' in body
    assert "namespace=" not in body
    assert "cluster=" not in body


def test_c55_a_directory_that_was_used_before_is_continued_never_overwritten(start: Start, tmp_path: Path) -> None:
    """The same epoch and process again, beside what another left: new segments, counters that go on."""
    records = exception_story().records
    first = start()
    for record in records[:30]:
        first.record(record)
    before = job_counters(first)
    first.close()
    left = {path.name: path.read_bytes() for path in (tmp_path / "run" / "journal").iterdir()}
    second = start()
    for record in records[30:]:
        second.record(record)
    after = job_counters(second)
    second.close()
    kept = {path.name: path.read_bytes() for path in (tmp_path / "run" / "journal").iterdir()}
    assert len(kept) == len(left) + 1
    assert left == {name: kept[name] for name in left}
    assert [series for series in before if after[series] < before[series]] == []
    assert list(JournalReader(tmp_path / "run" / "journal")) == records


def restarted(number: int) -> list[Record]:
    """What one of many launchers records: a start, a fault, and no orderly end."""
    story = Story()
    story.epoch = number
    story.start(100.0 * number)
    story.records = [replace(record, epoch=number) for record in story.records]
    story.epoch = number
    story.fault(100.0 * number + 5, 100.0 * number + 6, FaultClass.KILLED, 1)
    return story.records


def test_c56_many_launchers_later_counters_have_not_fallen_and_files_are_few(start: Start, tmp_path: Path) -> None:
    """Twenty restarts with small segments: monotonic counters, the same series, a bounded number of files."""
    before: dict[str, float] = {}
    sizes = set()
    for number in range(1, 21):
        telemetry = start(number, limits=SMALL)
        for record in restarted(number):
            telemetry.record(record)
            settle(telemetry)
        now = job_counters(telemetry)
        assert [series for series in before if now[series] < before[series]] == []
        before = now
        sizes.add(len(now))
        telemetry.close()
        assert len(list((tmp_path / "run" / "journal").iterdir())) <= SMALL.telemetry.journal_segments + 2
    assert before[f'nvrx_faults_total{{fault="killed",run="{RUN}"}}'] == 20.0
    assert before[f'nvrx_launcher_starts_total{{run="{RUN}"}}'] == 20.0
    assert len(sizes) == 1


def test_a_long_run_starts_from_its_newest_snapshot(start: Start, tmp_path: Path) -> None:
    """Segments rotate while it runs; the next launcher reads one, and has the same counters, history and spans."""
    records = lost_launcher_story().records
    first_epoch = [record for record in records if record.epoch == 1]
    folds = LauncherFolds()
    first = start(limits=SMALL)
    first.companions = folds.parts
    for record in first_epoch:
        folds.apply(record)
        first.record(record)
        settle(first)
    before = job_counters(first)
    first.close()
    directory = RunDirectory(tmp_path / "run")
    past = read_past(directory, RUN)
    assert past.snapshot is not None
    assert len(past.records) < len(first_epoch)
    whole = LauncherFolds()
    for record in first_epoch:
        whole.apply(record)
    assert vars(past.folds.past) == vars(whole.past)
    for name in whole.history.STATE:
        assert getattr(past.folds.history, name) == getattr(whole.history, name), name
    second = Telemetry(TelemetryConfig(run=RUN, run_dir=tmp_path / "run", epoch=2, limits=SMALL))
    second.replay(past.records, past.snapshot)
    after = job_counters(second)
    second.close()
    assert after == before


def test_events_owed_at_a_rotation_are_not_lost(start: Start, tmp_path: Path) -> None:
    """A snapshot is never taken between a record and the events that follow from it."""
    records = exception_story().records
    telemetry = start(limits=Limits(telemetry=TelemetryLimits(journal_segment_bytes=1, exporter_timeout_s=PATIENCE_S)))
    for record in records:
        telemetry.record(record)
        settle(telemetry)
    telemetry.close()
    wanted = FoldedRun(RUN).parts
    owing = [
        number for number, record in enumerate(records) if isinstance(record.event, ProgressResumed | IncidentClosed)
    ]
    assert len(owing) == 2
    for cut in (owing[0] - 5, *owing, owing[1] + 1):
        left = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "run", left)
        for path in (left / "journal").iterdir():
            kept = [line for line in path.read_bytes().splitlines(keepends=True) if _seq(line) <= cut]
            path.write_bytes(b"".join(kept))
        again = Telemetry(TelemetryConfig(run=RUN, run_dir=left, epoch=2))
        reader = JournalReader(left / "journal", fits=lambda folds: fits(wanted, folds))
        again.replay(list(reader), reader.snapshot)
        rest = [event for record in records[cut:] for event in again.record(record)]
        again.close()
        for kind in (ProgressResumed, IncidentClosed):
            told = [type(record.event) for record in records[:cut]].count(kind)
            assert [type(event) for event, _ in rest].count(kind) + told == 1, f"{kind.__name__}, cut after {cut}"


def _seq(line: bytes) -> int:
    value = json.loads(line)
    return int(value["last"][1]) if "snapshot" in value else int(value.get("seq", 0))
