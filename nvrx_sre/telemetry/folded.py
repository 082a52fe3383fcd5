"""One run's records folded into all views: ledger, incidents, summary, spans and series.

The hub holds one for its launcher and feeds it record by record; the exporter, `events --replay` and `runs` fill one
from a journal, read-only. `parts` is what a snapshot of the journal holds of it.

Invariants: the same records give the same views, live or replayed. Not thread-safe, but the metrics may be collected
by any thread under the lock of their sources. Must not: do I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

from nvrx_sre.core.clock import Clock, SystemClock
from nvrx_sre.core.limits import Limits
from nvrx_sre.events.journal import Snapshot
from nvrx_sre.events.schema import Record
from nvrx_sre.events.snapshot import Snapshotted, put_back
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.goodput.summary import SummaryFold
from nvrx_sre.telemetry.metrics import MetricsFold, MetricSources
from nvrx_sre.telemetry.spans import FinishedSpan, SpanFold


class FoldedRun:
    """All views of one run."""

    def __init__(
        self,
        run: str,
        *,
        clock: Clock | None = None,
        limits: Limits | None = None,
        sources: MetricSources | None = None,
    ) -> None:
        limits = limits or Limits()
        self.run = run
        self.ledger = Ledger()
        self.tracker = IncidentTracker(run, limits.caps)
        self.summary = SummaryFold(run, self.ledger, self.tracker)
        self.spans = SpanFold(run, self.tracker)
        self.metrics = MetricsFold(run, self.ledger, self.tracker, clock or SystemClock(), limits, sources)

    @property
    def parts(self) -> dict[str, Snapshotted]:
        """What a snapshot holds, by name."""
        return {
            "ledger": self.ledger,
            "incidents": self.tracker,
            "summary": self.summary,
            "spans": self.spans,
            "series": self.metrics.fold,
        }

    def apply(self, record: Record) -> list[FinishedSpan]:
        """Fold one record into all views; the spans that it finished."""
        self.ledger.apply(record)
        self.tracker.apply(record)
        self.summary.apply(record)
        finished = self.spans.apply(record)
        self.metrics.apply(record)
        self.metrics.spans_finished(len(finished))
        return finished

    def replay(self, snapshot: Snapshot | None, records: Iterable[Record]) -> list[FinishedSpan]:
        """Fold what a journal holds; the spans that were finished since the snapshot.

        Raises `ValueError` for a snapshot that does not fit `parts`.
        """
        if snapshot is not None:
            put_back(self.parts, snapshot.folds)
        finished = [span for record in records for span in self.apply(record)]
        self.metrics.mark_synced()
        return finished
