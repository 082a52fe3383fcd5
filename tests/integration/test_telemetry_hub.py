"""The hub: every view from one record, continuity over launchers, and failures that stay telemetry's own."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.limits import Limits, TelemetryLimits
from nvrx_sre.events.journal import JournalReader, read_journal
from nvrx_sre.events.schema import IncidentClosed, ProgressResumed, Record, TelemetryDegraded
from nvrx_sre.goodput.incidents import FollowUp, incident_trace_id
from nvrx_sre.launcher.config import RunConfig
from nvrx_sre.launcher.main import start_telemetry
from nvrx_sre.launcher.past import LauncherFolds
from nvrx_sre.launcher.shell import Recorder
from nvrx_sre.telemetry import catalog, hub
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.telemetry.context import run_trace_id
from nvrx_sre.telemetry.hub import Telemetry, TelemetryConfig
from nvrx_sre.telemetry.span_file import SpanFile
from nvrx_sre.telemetry.spans import FinishedSpan
from tests.patience import PATIENCE_S, wait_until
from tests.stories import RUN, Story, begin, exception_story, fallback_story, lost_launcher_story

SYNC_S = PATIENCE_S
PATIENT = Limits(telemetry=TelemetryLimits(exporter_timeout_s=PATIENCE_S, loop_unhealthy_s=PATIENCE_S))
Start = Callable[..., Telemetry]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts telemetry on the test's run directory; closed at the end. Bounds hold on a busy machine too."""
    monkeypatch.setattr(hub, "SCRAPE_SYNC_S", PATIENCE_S)
    started: list[Telemetry] = []

    def begin(**changes: object) -> Telemetry:
        options = {"run": RUN, "run_dir": tmp_path, "epoch": 1, "limits": PATIENT, **changes}
        started.append(Telemetry(TelemetryConfig(**options)))  # type: ignore[arg-type]  # free-form for tests
        return started[-1]

    yield begin
    for telemetry in started:
        telemetry.close()


def play(telemetry: Telemetry, records: list[Record]) -> list[FollowUp]:
    """Record all; returns every follow-up."""
    return [follow_up for record in records for follow_up in telemetry.record(record)]


def get(url: str, accept: str = "") -> tuple[int, str, str]:
    """(status, content type, body)."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, response.headers["Content-Type"], response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_one_record_reaches_every_view(start: Start, tmp_path: Path) -> None:
    """Journal, metrics, spans, log, reporter and summary tell the same story."""
    told: list[Record] = []
    telemetry = start(sinks=(told.append,))
    telemetry.replay()
    records = exception_story().records
    follow_ups = play(telemetry, records)
    assert [type(event) for event, _ in follow_ups] == [ProgressResumed, IncidentClosed]
    summary = telemetry.summary(records[-1].time_ns)
    status, _, metrics = get(telemetry.metrics_url)
    telemetry.close()
    assert list(read_journal(tmp_path / "journal")) == records == told
    assert status == 200
    assert f'nvrx_incidents_total{{run="{RUN}",verdict="recovered"}} 1.0' in metrics
    spans = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    assert len(spans) == summary["telemetry"]["spans"] == telemetry.metrics.value(catalog.TELEMETRY_SPANS)
    log = [json.loads(line) for line in (tmp_path / "logs" / "launcher.log").read_text().splitlines()]
    assert [line["event"] for line in log] == [type(record.event).__name__ for record in records]
    closed = next(line for line in log if line["event"] == "FaultDetected")
    assert closed["trace_id"] == next(span["trace_id"] for span in spans if span["name"] == "nvrx.incident")
    assert summary["telemetry"]["dropped"] == 0


def test_metrics_answer_503_until_the_journal_was_replayed(start: Start) -> None:
    """A counter must never be seen at less than it was."""
    telemetry = start()
    base = telemetry.metrics_url.removesuffix("/metrics")
    assert get(f"{base}/metrics")[0] == 503
    assert get(f"{base}/readyz")[0] == 503
    telemetry.replay()
    assert get(f"{base}/metrics")[0] == 200
    assert get(f"{base}/readyz")[0] == 200
    assert get(f"{base}/healthz")[0] == 200
    assert get(f"{base}/anything")[0] == 404


def test_openmetrics_by_accept_with_exemplars(start: Start) -> None:
    """Prometheus asks for it; a browser gets the classic text."""
    telemetry = start()
    telemetry.replay(exception_story().records)
    _, kind, body = get(telemetry.metrics_url, "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert 'trace_id="' in body
    assert body.endswith("# EOF\n")
    _, kind, body = get(telemetry.metrics_url)
    assert kind.startswith("text/plain")
    assert "trace_id" not in body


def test_counters_continue_after_a_launcher_restart(start: Start) -> None:
    """Scraped, killed, replayed, scraped: nothing fell."""
    records = lost_launcher_story().records
    cut = next(index for index, record in enumerate(records) if record.epoch == 2)
    first = start()
    first.replay()
    play(first, records[:cut])
    before = counters(get(first.metrics_url)[2])
    first.close()
    second = start(epoch=2)
    second.replay()
    after = counters(get(second.metrics_url)[2])
    assert before.keys() == after.keys()
    assert all(after[series] >= value for series, value in before.items() if "nvrx_telemetry_" not in series)
    assert after[f'nvrx_steps_total{{kind="new",run="{RUN}"}}'] == 10.0


def counters(body: str) -> dict[str, float]:
    """Series of counters with their values."""
    lines = (line for line in body.splitlines() if "_total{" in line and not line.startswith("#"))
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_events_that_a_dead_launcher_owed_come_with_the_next_record(start: Start) -> None:
    """It died between the step that closed the incident and the record of it."""
    records = [
        record
        for record in exception_story().records
        if not isinstance(record.event, (ProgressResumed, IncidentClosed))
    ]
    telemetry = start(epoch=2)
    telemetry.replay(records[:-2])
    owed = telemetry.record(records[-2])
    assert [type(event) for event, _ in owed] == [ProgressResumed, IncidentClosed]
    again = start(epoch=3)
    again.replay(exception_story().records[:-2])
    assert again.record(records[-2]) == []


def test_spans_are_in_their_file_before_a_rotation_forgets_them(start: Start, tmp_path: Path) -> None:
    """Wherever a launcher is killed: what its newest snapshot says is finished stands in spans.jsonl."""
    limits = Limits(telemetry=TelemetryLimits(journal_segment_bytes=2_000, exporter_timeout_s=PATIENCE_S))
    telemetry = start(limits=limits)
    telemetry.replay()
    story, at_s = begin()
    for first in range(1, 400, 10):
        story.steps(at_s, at_s + 10.0, first, first + 9)
        story.save(at_s + 10.1, first + 9)
        at_s += 10.0
    finished_at_rotations: list[int] = []
    for record in story.records:
        telemetry.record(record)
        assert telemetry.sync(SYNC_S)
        snapshot = JournalReader(tmp_path / "journal", fits=lambda _: True).snapshot
        if snapshot is None or snapshot.last != (record.epoch, record.seq):
            telemetry._span_sink.flush(SYNC_S)
            continue
        finished = snapshot.folds["spans"]["state"]["num_finished"]
        finished_at_rotations.append(finished)
        path = tmp_path / "spans.jsonl"
        assert len(path.read_text().splitlines() if path.exists() else []) == finished
    assert len(finished_at_rotations) >= 2 and any(finished_at_rotations)


def test_a_full_disk_leaves_no_half_line_among_the_spans(tmp_path: Path) -> None:
    """What did not fit is gone as a whole: the next span stands on a line of its own."""
    file = SpanFile(tmp_path / "spans.jsonl")
    first, second, third = (
        FinishedSpan(
            name=f"s{n}",
            trace_id="0" * 32,
            span_id=f"{n:016x}",
            parent_span_id=None,
            start_ns=0,
            end_ns=1,
            attributes={"pad": "x" * 2000},
        )
        for n in range(3)
    )
    file.write([first])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "spans.jsonl").stat().st_size + 100, hard))
    try:
        with pytest.raises(OSError):
            file.write([second])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    file.write([third])
    names = [json.loads(line)["name"] for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    assert names == ["s0", "s2"]


def test_exemplars_lead_from_outage_detection_and_save_to_their_traces(start: Start) -> None:
    """What is clicked on a panel opens the incident's trace, or the run's."""
    telemetry = start()
    telemetry.replay(fallback_story().records)
    body = get(telemetry.metrics_url, "application/openmetrics-text; version=1.0.0")[2]
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            if sample.exemplar is not None:
                found.setdefault(family.name, set()).add(sample.exemplar.labels["trace_id"])
    incident, run = {incident_trace_id(RUN, 1)}, {run_trace_id(RUN)}
    assert found["nvrx_outage_seconds"] == found["nvrx_detection_seconds"] == incident
    assert found["nvrx_save_seconds"] == run


def test_health_follows_the_loop(start: Start) -> None:
    """503 when the loop has not turned for the limit, 200 again when it does."""
    telemetry = start(limits=Limits(telemetry=TelemetryLimits(loop_unhealthy_s=1e-9)))
    base = telemetry.metrics_url.removesuffix("/metrics")
    assert get(f"{base}/healthz")[0] == 503
    relaxed = start()
    relaxed.loop_turned()
    assert get(relaxed.metrics_url.removesuffix("/metrics") + "/healthz")[0] == 200


def test_c58_a_busy_explicit_port_is_one_clear_error(start: Start, tmp_path: Path) -> None:
    """Nothing is left behind; without an explicit port any number of runs share a host."""
    taken = start()
    with pytest.raises(UserError, match=rf"127.0.0.1:{taken.metrics_port}.*--metrics-port"):
        start(metrics_port=taken.metrics_port, run_dir=tmp_path / "other")
    assert not (tmp_path / "other").exists()
    other = start(run_dir=tmp_path / "other")
    assert other.metrics_port != taken.metrics_port


def test_c58_a_run_that_goes_on_takes_another_port(start: Start, tmp_path: Path) -> None:
    """Busy at the run's first start is an error, later only a note: the run is worth more than its port."""
    taken = start()
    config = RunConfig(
        run=RUN,
        run_dir=tmp_path / "other",
        command=("x.py",),
        nproc=1,
        min_world_size=1,
        metrics_port=taken.metrics_port,
    )
    with pytest.raises(UserError, match="--metrics-port"):
        start_telemetry(config, 1, (), SystemClock(), is_first_start=True)
    later = start_telemetry(config, 2, (), SystemClock(), is_first_start=False)
    later.replay()
    assert get(later.metrics_url)[0] == 200
    assert later.metrics_port != taken.metrics_port
    later.close()
    assert f"uses port {later.metrics_port}" in (tmp_path / "other" / "logs" / "launcher.log").read_text()


def test_the_end_is_seen_by_two_scrapes(start: Start) -> None:
    """Linger ends with the second scrape after the end, and at once if nobody ever scraped."""
    telemetry = start()
    telemetry.replay()
    assert not telemetry.linger(2, 60.0, pytest.fail)
    while telemetry.server.num_scrapes == 0:  # counted just after the answer was sent
        get(telemetry.metrics_url)
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(telemetry.linger(2, 60.0)))
    waiter.start()
    while waiter.is_alive():
        get(telemetry.metrics_url)
    assert seen == [True]
    said: list[str] = []
    assert not telemetry.linger(2, 0.01, said.append)
    assert said == ["metrics stay up to 0.01 s for the last scrape; Ctrl-C ends it"]


def _break_log(telemetry: Telemetry) -> None:
    telemetry._write_log = _raise  # type: ignore[method-assign]
    telemetry._log_sink._handle = _raise


def _break_journal(telemetry: Telemetry) -> None:
    telemetry.journal.append = _raise  # type: ignore[method-assign]


def _break_spans(telemetry: Telemetry) -> None:
    telemetry._span_sink._handle = _raise


def _break_metrics(telemetry: Telemetry) -> None:
    telemetry.metrics.apply = _raise  # type: ignore[method-assign]


def _break_ledger(telemetry: Telemetry) -> None:
    telemetry.ledger.apply = _raise  # type: ignore[method-assign]


def _raise(*_: object) -> bool:
    raise RuntimeError("telemetry is broken")


@pytest.mark.parametrize(
    ("part", "component"),
    [
        (_break_log, Component.LOG),
        (_break_journal, Component.JOURNAL),
        (_break_spans, Component.SPANS),
        (_break_metrics, Component.METRICS),
        (_break_ledger, Component.FOLD),
    ],
)
def test_c52_a_broken_part_changes_no_decision(
    start: Start, part: Callable[[Telemetry], None], component: Component
) -> None:
    """Each part raises in turn: the launcher gets the same follow-ups, the failure is counted, the rest works."""
    records = exception_story().records
    expected = play_expected(records)
    telemetry = start()
    telemetry.replay()
    part(telemetry)
    assert play(telemetry, records) == expected
    telemetry.summary(records[-1].time_ns)
    telemetry.close()
    assert telemetry.num_errors()[component] >= 1


def play_expected(records: list[Record]) -> list[FollowUp]:
    """What an unbroken telemetry answers."""
    return [
        (record.event, record.rank) for record in records if isinstance(record.event, (ProgressResumed, IncidentClosed))
    ]


def test_c52_a_reporter_that_raises_costs_nobody_else(start: Start) -> None:
    """A broken terminal does not silence the next sink, and is counted a record."""
    told: list[Record] = []
    telemetry = start(sinks=(_raise, told.append))
    telemetry.replay()
    records = exception_story().records
    play(telemetry, records)
    telemetry.close()
    assert told == records
    assert telemetry.num_errors()[Component.REPORTER] == len(records)


def test_c52_failures_are_noted_once_a_minute(start: Start, tmp_path: Path) -> None:
    """Hundreds of failures, one line in the log."""
    telemetry = start()
    telemetry.replay()
    _break_metrics(telemetry)
    play(telemetry, fallback_story().records)
    telemetry.close()
    log = (tmp_path / "logs" / "launcher.log").read_text().splitlines()
    notes = [line for line in log if "metrics failed" in line]
    assert len(notes) == 1
    assert "training goes on" in notes[0]


def test_c52_an_unwritable_run_directory_costs_only_telemetry(start: Start, tmp_path: Path) -> None:
    """Files in the way of every sink: records are folded, errors counted, the end is not delayed for long."""
    for name in ("journal", "logs"):
        (tmp_path / name).write_text("in the way")
    (tmp_path / "spans.jsonl").mkdir()
    telemetry = start(limits=Limits(telemetry=TelemetryLimits(exporter_timeout_s=0.2)))
    telemetry.replay()
    records = exception_story().records
    assert play(telemetry, records) == play_expected(records)
    assert not telemetry.sync(0.01)
    assert telemetry.summary(records[-1].time_ns)["incidents"]
    assert telemetry._span_sink.flush(SYNC_S) and telemetry._log_sink.flush(SYNC_S)
    wait_until(lambda: telemetry.num_errors()[Component.JOURNAL], "the journal was refused")
    telemetry.close()
    errors = telemetry.num_errors()
    assert errors[Component.JOURNAL] >= 1
    assert errors[Component.SPANS] >= 1
    assert errors[Component.LOG] >= 1


def test_what_a_busy_disk_takes_late_is_in_the_journal(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fsync that takes as long as a save does costs the end no record: the next launcher goes by them."""
    begun, is_free = threading.Event(), threading.Event()
    fsync = os.fsync

    def busy(descriptor: int) -> None:
        if threading.current_thread().name == "nvrx-journal":
            begun.set()
            assert is_free.wait(SYNC_S)
        fsync(descriptor)

    telemetry = start(limits=Limits(telemetry=TelemetryLimits(exporter_timeout_s=0.01)))
    monkeypatch.setattr(hub, "EXIT_SYNC_S", SYNC_S)
    telemetry.replay()
    *records, last = fallback_story().records
    play(telemetry, records)
    monkeypatch.setattr(os, "fsync", busy)
    assert not telemetry.sync(0.01)
    assert begun.wait(SYNC_S)
    play(telemetry, [last])
    end = threading.Thread(target=lambda: (telemetry.settle(), telemetry.close()))
    end.start()
    end.join(0.2)  # to an end that does not wait it is enough
    is_free.set()
    end.join(SYNC_S)
    assert not end.is_alive()
    assert list(JournalReader(tmp_path / "journal"))[-1] == last


def test_secrets_reach_neither_journal_nor_span_nor_log(start: Start, tmp_path: Path) -> None:
    """One redactor stands before all of them."""
    story = Story()
    story.start(0.0)
    story.finish(1.0)
    story.records[-1].event.__dict__["reason"] = "password=topsecret1 and envsecret9"
    telemetry = start(environment={"WANDB_API_KEY": "envsecret9"})
    telemetry.replay()
    play(telemetry, story.records)
    telemetry.close()
    for path in (tmp_path / "journal", tmp_path / "logs"):
        for file in path.iterdir():
            assert "topsecret1" not in file.read_text()
            assert "envsecret9" not in file.read_text()


def test_a_degradation_names_its_cause(start: Start, tmp_path: Path) -> None:
    """In the journal, where a person looks for what was lost: one line of bounded length, without secrets."""
    telemetry = start(environment={"WANDB_API_KEY": "envsecret9"})
    telemetry.replay()
    said = f"collector at https://me:topsecret1@c did not\ntake envsecret9 {'x' * 500}"
    telemetry.boundary.failed(Component.OTLP, said)
    telemetry.channel_losses = (3, 0)
    config = RunConfig(run=RUN, run_dir=tmp_path, command=("x.py",), nproc=1, min_world_size=1)
    Recorder(config, 1, telemetry.clock, LauncherFolds(), telemetry).note_degradation(1)
    telemetry.close()
    events = [record.event for record in JournalReader(tmp_path / "journal")]
    told = {event.component: event for event in events if isinstance(event, TelemetryDegraded)}
    error = told["otlp"].error
    assert error.startswith("collector at https://***@c did not take *** xxx") and len(error) == hub.ERROR_CHARS
    assert (told["channel"].dropped, told["channel"].error) == (3, "")


def test_the_ranks_context_loads_neither_torch_nor_structlog() -> None:
    """A rank pays nothing for importing it."""
    code = (
        "import sys; import nvrx_sre.telemetry.context; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'structlog', 'prometheus_client')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_hub_never_loads_torch_nor_an_exporter_that_is_not_asked_for() -> None:
    """The launcher starts fast."""
    code = (
        "import sys; import nvrx_sre.telemetry.hub; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'opentelemetry.sdk', 'requests')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
