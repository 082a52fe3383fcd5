"""Runs seen from their journals: the exporter's exposition, what `runs` lists, what `events` prints and replays."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nvrx_sre.cli.events import replayed
from nvrx_sre.cli.exporter import Exporter
from nvrx_sre.cli.main import main
from nvrx_sre.cli.runs import read_rows
from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.core.limits import TelemetryLimits
from nvrx_sre.events.journal import JournalWriter, Snapshot
from nvrx_sre.events.schema import LauncherStopped, Record
from nvrx_sre.events.snapshot import take
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.archive import RunShelf
from nvrx_sre.telemetry.folded import FoldedRun
from nvrx_sre.telemetry.metric import Scope
from nvrx_sre.testing.clock import ManualClock
from tests.stories import RUN, begin, crash_loop_story, exception_story, lost_launcher_story, ns

SYNC_S = 60.0


def write_run(root: Path, directory: str, records: list[Record], *, run: str = RUN, rotate_at: int = 0) -> Path:
    """A run directory as launchers leave it, its journal with a snapshot after `rotate_at` records."""
    path = root / directory
    (path / "epochs").mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps({"run": run, "config_digest": "x", "config": {}}))
    views = FoldedRun(run)
    for epoch in sorted({record.epoch for record in records}):
        (path / "epochs" / f"{epoch:08d}.json").write_text(json.dumps({"node": f"n{epoch}", "pid": 1, "boot_id": "?"}))
        writer = JournalWriter(path / "journal", run, epoch, limits=TelemetryLimits())
        for number, record in enumerate(records, 1):
            if record.epoch != epoch:
                continue
            writer.append(replace(record, run=run))
            views.apply(record)
            if number == rotate_at:
                writer.rotate(Snapshot(last=(record.epoch, record.seq), folds=take(views.parts)))
        assert writer.close(SYNC_S)
    return path


def clock_at(at_s: float) -> ManualClock:
    """A clock that stands at a moment of the story."""
    return ManualClock(wall_offset_ns=ns(at_s))


def samples(shelf: RunShelf) -> dict[str, float]:
    """Every series of an exposition, as text through the format and back."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(shelf)
    text = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in families
        for sample in family.samples
    }


def test_the_exporter_shows_what_the_launcher_showed(tmp_path: Path) -> None:
    """Same families of the job, same values; nothing of nodes and ranks, which only a live launcher knows."""
    records = lost_launcher_story().records
    write_run(tmp_path, "a", records)
    shelf = RunShelf(tmp_path, clock_at(120.0))
    assert [item.run for item in shelf.refresh()] == [RUN]
    live = FoldedRun(RUN, clock=clock_at(120.0))
    live.replay(None, records)
    job = {metric.name for metric in catalog.CATALOG.values() if metric.scope is Scope.JOB}
    expected = {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in live.metrics.collect()
        for sample in family.samples
        if (metric := catalog.metric_of(sample.name)) is not None and metric.name in job
    }
    shown = samples(shelf)
    assert shown.keys() == expected.keys()
    assert {key: repr(value) for key, value in shown.items()} == {key: repr(value) for key, value in expected.items()}


def test_the_exporter_follows_and_lets_go(tmp_path: Path) -> None:
    """A journal that grows, a run that appears, one that ended long ago; each family stands once."""
    records = exception_story().records
    clock = clock_at(20.0)
    write_run(tmp_path, "old", [replace(item, time_ns=item.time_ns - 10**15) for item in records], run="old")
    write_run(tmp_path, "a", records[:20])
    shelf = RunShelf(tmp_path, clock)
    assert [item.run for item in shelf.refresh()] == [RUN]
    before = samples(shelf)
    write_run(tmp_path, "a", records[20:])
    write_run(tmp_path, "b", crash_loop_story().records, run="other")
    assert sorted(item.run for item in shelf.refresh()) == [RUN, "other"]
    after = samples(shelf)
    incidents = f"nvrx_incidents_total[('run', '{RUN}'), ('verdict', 'recovered')]"
    assert (before[incidents], after[incidents]) == (0.0, 1.0)
    assert after["nvrx_incidents_total[('run', 'other'), ('verdict', 'exhausted')]"] == 1.0
    assert len(after) > 2 * len(before) - 20


def test_two_directories_of_one_name_are_told_once_and_shown_once(tmp_path: Path) -> None:
    """Series must be unique: the newest record wins; the labels of the key come from the scrape, not from here."""
    older = [replace(record, time_ns=record.time_ns - 10**9) for record in exception_story().records]
    write_run(tmp_path, "a", older)
    write_run(tmp_path, "b", crash_loop_story().records)
    said: list[str] = []
    exporter = Exporter(RunShelf(tmp_path, clock_at(60.0)), ("127.0.0.1", None), SystemClock(), said.append)
    exporter.server.start()
    try:
        exporter.turn()
        exporter.turn()
        with urllib.request.urlopen(exporter.server.url, timeout=10.0) as response:
            body = response.read().decode()
    finally:
        exporter.server.close()
    assert len(said) == 1
    assert f"{tmp_path / 'a'} is left out" in said[0]
    assert f'nvrx_incidents_total{{run="{RUN}",verdict="exhausted"}} 1.0' in body


def test_a_long_journal_is_read_from_its_newest_snapshot(tmp_path: Path) -> None:
    """Damage before the snapshot no longer matters; the answer is the same."""
    records = exception_story().records
    whole = write_run(tmp_path / "whole", "a", records)
    cut = write_run(tmp_path / "cut", "a", records, rotate_at=30)
    first = min((cut / "journal").iterdir())
    first.write_bytes(first.read_bytes().splitlines(keepends=True)[0])
    shelves = [RunShelf(path.parent, clock_at(20.0)) for path in (whole, cut)]
    for shelf in shelves:
        shelf.refresh()
    expected, found = (samples(shelf) for shelf in shelves)
    assert found == pytest.approx(expected, nan_ok=True)


def test_a_journal_that_cannot_be_read_costs_only_its_run(tmp_path: Path) -> None:
    """A newer version, and a directory without a journal: left out with the reason."""
    write_run(tmp_path, "good", exception_story().records)
    newer = write_run(tmp_path, "newer", exception_story().records, run="newer")
    path = next((newer / "journal").iterdir())
    path.write_bytes(path.read_bytes().replace(b'"schema": 1', b'"schema": 9', 1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text('{"run": "empty"}')
    shelf = RunShelf(tmp_path, clock_at(20.0))
    assert [item.run for item in shelf.refresh()] == [RUN]
    assert "version 9" in shelf.unreadable[newer]
    assert tmp_path / "empty" in shelf.unreadable


def test_runs_finds_a_directory_by_the_runs_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Name -> directory, state, host and launcher; the newest first; JSON for scripts."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    directory = write_run(tmp_path, "x", story.records, run="steady")
    write_run(tmp_path, "y", crash_loop_story().records, run="looping")
    rows = {row.run: row for row in read_rows(tmp_path)[0]}
    assert (rows["steady"].state, rows["steady"].step, rows["steady"].directory) == ("training", 10, str(directory))
    assert (rows["looping"].state, rows["looping"].launcher) == ("halted", "ended")
    assert rows["steady"].launcher == "elsewhere"
    assert main(["runs", "steady", "--root", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["run"], found["host"], found["epoch"]) == ("steady", "n1", 1)
    assert main(["runs", "--root", str(tmp_path)]) == 0
    assert "looping" in capsys.readouterr().out


def test_a_run_that_a_person_ended_is_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The word follows the exit code; scripts get the state of the metric and the code."""
    for run, exit_code in (("by_hand", 130), ("taken", 143)):
        story, begin_s = begin()
        story.steps(begin_s, 12.4, 1, 10)
        story.add(13.0, LauncherStopped(exit_code=exit_code, reason=""))
        write_run(tmp_path, run, story.records, run=run)
    assert main(["runs", "--root", str(tmp_path)]) == 0
    shown = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:])
    assert shown == {"by_hand": "interrupted", "taken": "preempted"}
    assert main(["runs", "by_hand", "--root", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["state"], found["exit_code"]) == ("preempted", 130)


def test_runs_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A root that is none, a name that is none: one line, exit 78."""
    assert main(["runs", "--root", str(tmp_path / "no")]) == 78
    assert "name the directory of the run directories" in capsys.readouterr().err
    assert main(["runs", "nobody", "--root", str(tmp_path)]) == 78
    assert "no run 'nobody'" in capsys.readouterr().err


def test_events_prints_and_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a record with time, generation, rank and name; by kind and rank; JSON lines are the journal's."""
    records = exception_story().records
    directory = str(write_run(tmp_path, "a", records))
    assert main(["events", directory]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(records)
    assert main(["events", directory, "--kind", "FaultDetected,RankReplaced", "--rank", "1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "rank 1" in line
    assert "FaultDetected" in line
    assert "exception" in line
    assert main(["events", directory, "--json", "--kind", "IncidentClosed"]) == 0
    (value,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert value["data"]["verdict"] == "recovered"
    assert main(["events", directory, "--follow"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--kind", "Nonsense"], 2, "Nonsense is no event"),
        (["--replay", "--follow"], 2, "--replay"),
    ],
)
def test_events_refuses_what_makes_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    """One line that says what and where."""
    directory = str(write_run(tmp_path, "a", exception_story().records))
    assert main(["events", directory, *arguments]) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("story", [exception_story, crash_loop_story, lost_launcher_story])
def test_a_replay_equals_the_live_exposition(story: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counters, ledger, incidents and spans, as the launcher had them at the end of the run."""
    records = story().records
    directory = write_run(tmp_path, "a", records)
    live = FoldedRun(RUN, clock=clock_at(seconds(records[-1].time_ns - ns(0.0))))
    spans = [span.to_dict() for record in records for span in live.apply(record)]
    summary = live.summary.to_dict(records[-1].time_ns)
    value = replayed(directory / "journal", RUN)
    assert value["spans"] == json.loads(json.dumps(spans))
    assert (value["ledger"], value["incidents"]) == (summary["ledger"], summary["incidents"])
    job_counters = {
        f"{sample.name}{{"
        + ",".join(f'{key}="{item}"' for key, item in sorted(sample.labels.items()))
        + "}": sample.value
        for family in live.metrics.collect()
        for sample in family.samples
        if (metric := catalog.metric_of(sample.name)) is not None
        and metric.scope is Scope.JOB
        and metric.type in ("counter", "histogram")
        and metric is not catalog.WALL_SECONDS
    }
    assert {name: item for name, item in value["counters"].items() if "wall_seconds" not in name} == job_counters
    assert main(["events", str(directory), "--replay"]) == 0
    assert f"{len(records)} events" in capsys.readouterr().out
