"""Runs seen from their journals alone, read-only: what `exporter`, `runs` and `events --replay` show.

Model: a `FollowedRun` folds one run's journal and what is appended to it; a `RunShelf` holds those below a root that
are live or ended recently. Journals of any age are read from their newest snapshot.

Thread safety: `RunShelf.refresh` by one thread; its families may be collected by any. Must not: write, or wait for a
launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from nvrx_sre.core.clock import Clock, to_ns
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.identity import RUN_FILE, recorded_run
from nvrx_sre.events.journal_tail import JournalTail
from nvrx_sre.events.snapshot import fits
from nvrx_sre.goodput.verdict import RunState
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.folded import FoldedRun
from nvrx_sre.telemetry.metric import Scope
from nvrx_sre.telemetry.metrics import MetricSources, family_of

KEEP_S = 24 * 3600.0
"""A run is shown until its last record is this old: long enough for the morning after."""


class FollowedRun:
    """One run's journal, folded as far as it has been read.

    Raises `UserError` for a journal of a newer version, `FileNotFoundError` if there is no journal.
    """

    def __init__(self, run: str, directory: Path, clock: Clock) -> None:
        self.directory = directory
        self.views = FoldedRun(run, clock=clock, sources=MetricSources(lock=threading.RLock()))
        self._tail = JournalTail(directory / "journal", fits=lambda folds: fits(self.views.parts, folds))
        self.views.replay(self._tail.snapshot, ())

    def refresh(self) -> None:
        """Fold what was appended since the last time. Blocks for the reading."""
        for record in self._tail.poll():
            self.views.apply(record)

    @property
    def run(self) -> str:
        """The run's name."""
        return self.views.run

    @property
    def last_ns(self) -> int:
        """Time of the newest record, 0 before any."""
        return self.views.ledger.last_ns

    @property
    def state(self) -> RunState | None:
        """State of the run as of its last record."""
        return self.views.metrics.fold.run_state


class RunShelf(Collector):
    """Runs one level below `root`, as one exposition of the job's families."""

    def __init__(self, root: Path, clock: Clock, keep_s: float = KEEP_S) -> None:
        self._root = root
        self._clock = clock
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._runs: dict[Path, FollowedRun] = {}
        self.unreadable: dict[Path, str] = {}
        """Run directories that cannot be shown, and why."""

    def refresh(self) -> list[FollowedRun]:
        """Read on; runs that appeared join, those that ended too long ago leave. The runs shown now, by directory."""
        self.unreadable = {}
        with self._lock:
            known = dict(self._runs)
        for path in sorted(item.parent for item in self._root.glob(f"*/{RUN_FILE}")):
            self._read(known, path)
        horizon_ns = self._clock.wall_ns() - to_ns(self._keep_s)
        shown = {path: item for path, item in known.items() if item.last_ns > max(0, horizon_ns)}
        with self._lock:
            self._runs = self._distinct(shown)
            return list(self._runs.values())

    def _read(self, known: dict[Path, FollowedRun], path: Path) -> None:
        name = recorded_run(path)
        try:
            if name is not None and path not in known:
                known[path] = FollowedRun(name, path, self._clock)
            if path in known:
                known[path].refresh()
        except (OSError, UserError, ValueError) as error:
            known.pop(path, None)
            self.unreadable[path] = str(error)

    def _distinct(self, shown: dict[Path, FollowedRun]) -> dict[Path, FollowedRun]:
        """One directory a run name: of two that share one, that with the newest record; series must be unique."""
        newest: dict[str, Path] = {}
        for path, item in shown.items():
            other = newest.get(item.run)
            if other is None or item.last_ns > shown[other].last_ns:
                newest[item.run] = path
        for path, item in shown.items():
            if newest[item.run] != path:
                self.unreadable[path] = f"another directory holds a newer run {item.run!r}: {newest[item.run]}"
        return {path: item for path, item in shown.items() if newest[item.run] == path}

    def describe(self) -> list[Family]:
        """Families without samples."""
        return list(self._families().values())

    def collect(self) -> Iterator[Family]:
        """The job's families of all runs."""
        families = self._families()
        with self._lock:
            runs = list(self._runs.values())
        for item in runs:
            item.views.metrics.add_to(families)
        yield from families.values()

    @staticmethod
    def _families() -> dict[str, Family]:
        job = (metric for metric in catalog.CATALOG.values() if metric.scope is Scope.JOB)
        return {metric.name: family_of(metric) for metric in job}
