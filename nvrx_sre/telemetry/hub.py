"""The facade that the launcher's shell holds: one record in, every view of it updated.

    record -> redactor -> journal -> ledger, incidents, summary -> metrics -> spans -> log -> extra sinks
                             ^------- snapshot of the folds whenever a segment is full

Journal, spans, OTLP, log and extra sinks have threads and bounded queues of their own, so recording costs
the loop the folds and a few appends. Whatever fails ends at one boundary (`telemetry.boundary`): counted,
noted at most once a minute, training untouched (failure case C52).

Usage: construct (raises `UserError` for an explicit port that is busy), `replay` the journal, then `record`
each event. Thread safety: `replay`, `record`, `loop_turned`, `close` from the launcher's loop; the endpoint
reads from its own threads. Must not: raise after construction, decide anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvrx_sre.core.atomic import PRIVATE_FILE_MODE, make_private_directory
from nvrx_sre.core.clock import Clock, SystemClock, seconds, to_ns
from nvrx_sre.core.limits import Limits
from nvrx_sre.core.signals import SignalPipe
from nvrx_sre.events.journal import JournalReader, JournalWriter, Snapshot
from nvrx_sre.events.schema import IncidentClosed, ProgressResumed, Record
from nvrx_sre.events.snapshot import Snapshotted, fits, put_back, take
from nvrx_sre.goodput.incidents import FollowUp
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.boundary import Boundary, SinkThread
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.telemetry.endpoint import EndpointSecurity, MetricsServer
from nvrx_sre.telemetry.folded import FoldedRun
from nvrx_sre.telemetry.labels import RankMetrics
from nvrx_sre.telemetry.logs import EventLog
from nvrx_sre.telemetry.metric import Metric, Scope
from nvrx_sre.telemetry.metrics import MetricSources
from nvrx_sre.telemetry.node_board import NodeBoard
from nvrx_sre.telemetry.otlp import OtlpSink
from nvrx_sre.telemetry.redact import Redactor, blanked
from nvrx_sre.telemetry.span_file import SpanFile
from nvrx_sre.telemetry.spans import FinishedSpan
from nvrx_sre.telemetry.values import Values

SCRAPE_SYNC_S = 2.0
"""Longest wait of a scrape for the journal; beyond it counters stay at the last synced values."""
EXIT_SYNC_S = 10.0
"""Longest wait for the journal at the end: the next launcher goes by it, and a disk that is busy with a save takes
seconds for an fsync. One that fails already is waited for no longer than any other part."""
ROTATE_AFTER_RECORDS = 20_000
"""A replay of more records than this is made short for the next launcher by a snapshot at once."""
ERROR_CHARS = 300
"""What a record holds of an error of a part of telemetry."""
ERROR_SEEN_CHARS = 4_000
"""What is looked at of a longer one: it is masked before it is cut, since half a secret has no form."""

Sink = Callable[[Record], None]
LogItem = tuple[Record, tuple[str, str] | None]


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Where the telemetry of one launcher goes."""

    run: str
    run_dir: Path
    epoch: int
    limits: Limits = field(default_factory=Limits)
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """Explicit port, or None for a free one."""
    metrics_security: EndpointSecurity = field(default_factory=EndpointSecurity)
    otlp_endpoint: str | None = None
    """OTLP/HTTP traces URL, or None for no export."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Whose secret variables are masked wherever their values appear."""
    rank_metrics: RankMetrics = RankMetrics.ALL
    is_leader: bool = True
    """Exports the families of the job."""
    sinks: tuple[Sink, ...] = ()
    """Further views of live records (a terminal reporter), called on a thread of their own."""


class Telemetry:
    """All views of one launcher's records. Raises `UserError` if an explicit metrics port cannot be bound."""

    def __init__(self, config: TelemetryConfig, clock: Clock | None = None) -> None:
        self.run = config.run
        self.run_dir = config.run_dir
        self.limits = config.limits
        self.clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._log_lock = threading.Lock()
        self._ready = False
        self._turned_ns = self.clock.monotonic_ns()
        self._pending: list[FollowUp] = []
        self.channel_losses = (0, 0)
        """(messages that found no room, packets that were no message); set by the launcher's loop."""
        self._log: EventLog | None = None
        self.redactor = Redactor.from_environment(config.environment)
        self.boundary = Boundary(self.clock, self._note)
        self.board = NodeBoard(config.rank_metrics)
        """Live readings of the node and its ranks; fed by the launcher."""
        self.companions: dict[str, Snapshotted] = {}
        """Further folds that snapshots hold: the launcher's own."""
        self._is_leader = config.is_leader
        self._rotation_due = False
        self._is_journal_late = False
        sources = MetricSources(
            sync=lambda: self.journal.sync(SCRAPE_SYNC_S),
            dropped=self.num_dropped,
            errors=self.num_errors,
            fill=self._fill_node,
            exports=self._exports,
            lock=self._lock,
        )
        folded = FoldedRun(self.run, clock=self.clock, limits=self.limits, sources=sources)
        self._parts = folded.parts
        self.ledger, self.tracker = folded.ledger, folded.tracker
        self.summary_fold, self.spans, self.metrics = folded.summary, folded.spans, folded.metrics
        # Before any thread or file: a port that is taken must leave nothing behind.
        self.server = MetricsServer(
            self.metrics.registry,
            config.metrics_host,
            config.metrics_port,
            self._is_healthy,
            self._is_ready,
            config.metrics_security,
        )
        self.journal = JournalWriter(self.run_dir / "journal", self.run, config.epoch, limits=self.limits.telemetry)
        self.journal.on_error = lambda message: self.boundary.failed(Component.JOURNAL, message)
        self._log_sink: SinkThread[LogItem] = SinkThread(Component.LOG, self._write_log, self.boundary)
        self._note_sink: SinkThread[str] = SinkThread(Component.LOG, self._write_notes, self.boundary)
        self._span_file = SpanFile(self.run_dir / "spans.jsonl")
        self._span_sink: SinkThread[FinishedSpan] = SinkThread(Component.SPANS, self._write_spans, self.boundary)
        self._otlp_sink = self._create_otlp_sink(config)
        self._reporters = [
            SinkThread[Record](Component.REPORTER, _each(sink, self.boundary), self.boundary) for sink in config.sinks
        ]
        self.server.start(lambda message: self.boundary.failed(Component.METRICS, message))

    def _create_otlp_sink(self, config: TelemetryConfig) -> SinkThread[FinishedSpan] | None:
        if config.otlp_endpoint is None:
            return None
        timeout_s = self.limits.telemetry.exporter_timeout_s
        otlp = OtlpSink(config.otlp_endpoint, timeout_s, self.run, config.epoch)
        return SinkThread(Component.OTLP, otlp.write, self.boundary)

    # --- what the launcher calls --------------------------------------------------------------------------

    @property
    def metrics_url(self) -> str:
        """Where Prometheus scrapes."""
        return self.server.url

    @property
    def metrics_port(self) -> int:
        """The real port."""
        return self.server.port

    @property
    def traceparent(self) -> str:
        """The run's span in W3C form, for the environment of its processes; '' while none is open."""
        return self.spans.run_traceparent

    def replay(self, records: Sequence[Record] | None = None, snapshot: Snapshot | None = None) -> None:
        """Fold what earlier launchers recorded (default: this run's journal), then answer scrapes.

        What the last launcher had still to emit when it died is returned by the first `record`.
        """
        directory = self.run_dir / "journal"
        if records is None and directory.is_dir():
            reader = JournalReader(directory, fits=lambda folds: fits(self._parts, folds))
            records, snapshot = list(reader), reader.snapshot
        self.boundary.call(Component.JOURNAL, self._replay, records or (), snapshot)
        self.boundary.call(Component.METRICS, self.metrics.mark_synced)
        self._ready = True

    def _replay(self, records: Sequence[Record], snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            put_back(self._parts, snapshot.folds)
        for record in records:
            if self._pending and isinstance(record.event, (ProgressResumed, IncidentClosed)):
                self._pending.pop(0)
            self._pending += self._fold(record)
        self._rotation_due = len(records) > ROTATE_AFTER_RECORDS

    def record(self, record: Record) -> list[FollowUp]:
        """Take one live record into every view; returns events to stamp and record next, with their rank.

        Never raises, never waits for a disk, a terminal or a collector.
        """
        record = self.boundary.call(Component.FOLD, self.redactor.record, record) or blanked(record)
        self.boundary.call(Component.JOURNAL, self.journal.append, record)
        self.boundary.call(Component.NODE, self.board.apply, record.event)
        pending, self._pending = self._pending, []
        follow_ups = pending + self._fold(record)
        if not follow_ups and (self.journal.is_full or self._rotation_due) and self._span_sink.is_idle:
            self.boundary.call(Component.JOURNAL, self._rotate, record)
        self.boundary.call(Component.LOG, self._log_sink.submit, (record, self.spans.current_trace))
        for reporter in self._reporters:
            self.boundary.call(Component.REPORTER, reporter.submit, record)
        return follow_ups

    def _rotate(self, last: Record) -> None:
        """Begin a new segment after `last`, unless events that follow from a record are still to be recorded.

        The spans that were finished by then are in their file: a successor that begins here does not write them.
        """
        if isinstance(last.event, (ProgressResumed, IncidentClosed)):
            return
        self._rotation_due = False
        with self._lock:
            folds = take(self._parts | self.companions)
        self.journal.rotate(Snapshot(last=(last.epoch, last.seq), folds=folds))

    def resign(self) -> None:
        """This launcher leads the run no longer: the job's families are its successor's to export."""
        self._is_leader = False

    def loop_turned(self) -> None:
        """The launcher's main loop turned: feeds the heartbeat series and `/healthz`."""
        self._turned_ns = self.clock.monotonic_ns()
        self.boundary.call(Component.METRICS, self.metrics.loop_turned, self.clock.wall_ns())

    def sync(self, timeout_s: float) -> bool:
        """Wait until everything recorded so far is on disk; False if it took longer than `timeout_s`."""
        return bool(self.boundary.call(Component.JOURNAL, self.journal.sync, timeout_s))

    def settle(self) -> None:
        """The run is over: wait until everything recorded so far is on disk, `EXIT_SYNC_S` at most."""
        self._is_journal_late = not self.sync(self._journal_patience_s())

    def _journal_patience_s(self) -> float:
        is_hopeless = self._is_journal_late or self.journal.is_failing
        return self.limits.telemetry.exporter_timeout_s if is_hopeless else EXIT_SYNC_S

    def summary(self, now_ns: int) -> dict[str, Any]:
        """The run's summary so far (`now_ns`: wall time)."""
        with self._lock:
            dropped = sum(self.num_dropped().values())
            return self.summary_fold.to_dict(now_ns, dropped=dropped, spans=self.spans.num_finished)

    def linger(
        self,
        num_scrapes: int,
        timeout_s: float,
        say: Callable[[str], None] = lambda _: None,
        signals: SignalPipe | None = None,
    ) -> bool:
        """The run has ended: keep answering until `num_scrapes` more came, at most `timeout_s`, or a signal.

        Returns at once if nobody ever scraped, else `say` takes a line about it first. True if the end was seen.
        """
        if not self.server.num_scrapes:
            return False
        self._flush_sinks()  # what happened before is shown before, and what failed is in the last scrapes
        say(f"metrics stay up to {timeout_s:g} s for the last scrape; Ctrl-C ends it")
        return self.server.wait_for_scrapes(num_scrapes, timeout_s, signals)

    def close(self) -> None:
        """Write out the journal, flush every sink, all within one bound, and stop the endpoint. Never raises."""
        until_ns = self._sinks_until_ns()
        self.boundary.call(Component.OTHER, self.journal.close, self._journal_patience_s())
        for sink in self._sinks():
            self.boundary.call(Component.OTHER, sink.close, max(0.0, seconds(until_ns - self.clock.monotonic_ns())))
        self.boundary.call(Component.METRICS, self.server.close)
        if self._log is not None:
            self.boundary.call(Component.LOG, self._log.close)

    def num_dropped(self) -> dict[Component, int]:
        """Items dropped by component, the journal's included."""
        counts = self.boundary.num_dropped()
        counts[Component.JOURNAL] += self.journal.num_dropped
        counts[Component.CHANNEL] += self.channel_losses[0]
        return counts

    def num_errors(self) -> dict[Component, int]:
        """Failures swallowed by component."""
        counts = self.boundary.num_errors()
        counts[Component.CHANNEL] += self.channel_losses[1]
        return counts

    def last_error(self, component: Component) -> str:
        """What the newest failure of `component` said, a line of at most `ERROR_CHARS`, masked; '' if none failed."""
        text = self.redactor.text(self.boundary.last_error(component)[:ERROR_SEEN_CHARS])
        return " ".join(text.split())[:ERROR_CHARS]

    # --- inside -------------------------------------------------------------------------------------------

    def _sinks(self) -> list[SinkThread[Any]]:
        """All of them; that of the log's notes last, since the others tell it what failed."""
        sinks: list[SinkThread[Any]] = [*self._reporters, self._log_sink, self._span_sink]
        return sinks + ([self._note_sink] if self._otlp_sink is None else [self._otlp_sink, self._note_sink])

    def _sinks_until_ns(self) -> int:
        """They work at once from now on; the one bound that they share."""
        for sink in self._sinks():
            self.boundary.call(Component.OTHER, sink.hurry)
        return self.clock.monotonic_ns() + to_ns(self.limits.telemetry.exporter_timeout_s)

    def _flush_sinks(self) -> None:
        until_ns = self._sinks_until_ns()
        for sink in self._sinks():
            self.boundary.call(Component.OTHER, sink.flush, max(0.0, seconds(until_ns - self.clock.monotonic_ns())))

    def _fold(self, record: Record) -> list[FollowUp]:
        """The pure folds, in their order, under the lock of the scraping threads."""
        with self._lock:
            self.boundary.call(Component.FOLD, self.ledger.apply, record)
            follow_ups = self.boundary.call(Component.FOLD, self.tracker.apply, record) or []
            self.boundary.call(Component.FOLD, self.summary_fold.apply, record)
            finished = self.boundary.call(Component.SPANS, self.spans.apply, record) or []
            self.boundary.call(Component.METRICS, self.metrics.apply, record)
            self.boundary.call(Component.METRICS, self.metrics.spans_finished, len(finished))
        for span in finished:
            self.boundary.call(Component.SPANS, self._span_sink.submit, span)
        return follow_ups

    def _write_spans(self, spans: Sequence[FinishedSpan]) -> None:
        """To the file first, then to the collector: what a replay finds in the file was sent before."""
        new = spans
        try:
            new = self._span_file.write(spans)
        finally:
            if self._otlp_sink is not None:
                for span in new:
                    self._otlp_sink.submit(span)

    def _exports(self, metric: Metric) -> bool:
        return (self._is_leader or metric.scope is Scope.NODE) and self.board.exports(metric)

    def _fill_node(self, values: Values) -> None:
        values.set(catalog.JOURNAL_SEGMENTS, self.journal.num_segments)
        values.set(catalog.TELEMETRY_SCRAPES, self.server.num_scrapes)
        self.board.fill(values)

    def _is_healthy(self) -> bool:
        return self.clock.monotonic_ns() - self._turned_ns < to_ns(self.limits.telemetry.loop_unhealthy_s)

    def _is_ready(self) -> bool:
        return self._ready

    def _open_log(self) -> EventLog:
        with self._log_lock:  # records and notes have a thread each
            if self._log is None:
                directory = self.run_dir / "logs"
                make_private_directory(directory)
                path = directory / "launcher.log"
                path.touch(mode=PRIVATE_FILE_MODE)
                # Line buffered: a reader can follow it.
                stream = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # closed by `close`
                self._log = EventLog(stream, self.redactor)
            return self._log

    def _write_log(self, items: Sequence[LogItem]) -> None:
        log = self._open_log()
        for record, trace in items:
            log.write(record, *(trace or ()))

    def _note(self, text: str) -> None:
        self._note_sink.submit(text)

    def _write_notes(self, texts: Sequence[str]) -> None:
        log = self._open_log()
        for text in texts:
            log.note(text)


def _each(sink: Sink, boundary: Boundary) -> Callable[[Sequence[Record]], None]:
    """Call `sink` for every record of a batch; one that fails does not cost the others."""

    def handle(batch: Sequence[Record]) -> None:
        for record in batch:
            boundary.call(Component.REPORTER, sink, record)

    return handle
