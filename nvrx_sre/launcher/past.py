"""What earlier launchers of the run left in the journal: read once at the start, from the newest snapshot on.

Model: the launcher's own folds (`LauncherFolds`) and telemetry's are stored together in a segment's snapshot; only
one that holds all of them in their present shape is used, else the journal is read from its beginning. Live, the
recorder feeds the same folds, so that the next snapshot holds them.

Not thread-safe. Blocking; memory grows with the records after the snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events import journal
from nvrx_sre.events.schema import (
    BudgetReset,
    FaultInjected,
    LauncherStopped,
    Record,
    RestoredFrom,
    RolledBack,
    RunFinished,
    RunStarted,
    SaveCommitted,
)
from nvrx_sre.events.snapshot import Snapshotted, fits, put_back
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.launcher.started_saves import StartedSaves
from nvrx_sre.policy.history import History
from nvrx_sre.telemetry.folded import FoldedRun


class RunPast(Snapshotted):
    """Fold: where the run stands between two launchers."""

    STATE = ("last_generation", "stop_reason", "newest", "is_orderly", "passes", "commits_ever")

    def __init__(self) -> None:
        self.last_generation = 0
        """Highest generation number ever used."""
        self.stop_reason = ""
        """Why the run may not be started again, '' if it may."""
        self.newest: tuple[int, int] | None = None
        """(epoch, time in ns) of the last record, None before any."""
        self.is_orderly = True
        """The last record is the end of a launcher that stopped in order."""
        self.passes: dict[str, int] = {}
        """Planned fault -> passes that have fired."""
        self.commits_ever = False
        """A durable commit is on record that may be restored."""

    def apply(self, record: Record) -> None:
        """Fold one record."""
        event = record.event
        self.last_generation = max(self.last_generation, record.generation)
        self.newest = (record.epoch, record.time_ns)
        self.is_orderly = isinstance(event, LauncherStopped | BudgetReset)
        if isinstance(event, RunFinished):
            self.stop_reason = event.reason if event.exit_code == ExitCode.DO_NOT_RESTART else ""
        elif isinstance(event, BudgetReset) or (isinstance(event, RunStarted) and event.fresh):
            self.stop_reason = ""
        elif isinstance(event, FaultInjected):
            self.passes[event.spec] = max(self.passes.get(event.spec, 0), event.passes)
        elif isinstance(event, SaveCommitted):
            self.commits_ever = True
        elif isinstance(event, RolledBack) and event.source is RestoredFrom.FRESH:
            self.commits_ever = False  # fenced: nothing of before will be restored again

    @property
    def has_records(self) -> bool:
        """The run was started before."""
        return self.newest is not None

    def unfinished_epoch(self) -> tuple[int, int] | None:
        """(epoch, time of its last record) if the newest launcher did not stop in order."""
        return None if self.is_orderly else self.newest


class LauncherFolds:
    """What the launcher itself remembers of the run."""

    def __init__(self) -> None:
        self.past = RunPast()
        self.history = History()
        self.saves = StartedSaves()

    @property
    def parts(self) -> dict[str, Snapshotted]:
        """What a snapshot holds, by name."""
        return {"past": self.past, "history": self.history, "started_saves": self.saves}

    def apply(self, record: Record) -> None:
        """Fold one record."""
        self.past.apply(record)
        self.history.apply(record)
        self.saves.apply(record)


@dataclass(frozen=True, kw_only=True)
class Past:
    """What is on record. `folds` have seen all of it; telemetry replays `snapshot` and `records` itself."""

    snapshot: journal.Snapshot | None
    records: list[Record]
    repaired_bytes: int
    num_leftovers: int
    """Processes of a killed predecessor that were ended."""
    folds: LauncherFolds = field(default_factory=LauncherFolds)


def look_back(directory: RunDirectory) -> LauncherFolds:
    """What is on record, for who only asks: nothing is repaired. Blocking; may be called while a launcher writes."""
    folds = LauncherFolds()
    if directory.journal.is_dir():
        _read(directory, folds, folds.parts)
    return folds


def read_past(directory: RunDirectory, run: str, num_leftovers: int = 0) -> Past:
    """Repair and read the journal. Raises `UserError` for a journal of a newer version."""
    repaired_bytes = journal.repair(directory.journal)
    folds = LauncherFolds()
    snapshot, records = _read(directory, folds, folds.parts | FoldedRun(run).parts)
    return Past(
        snapshot=snapshot,
        records=records,
        repaired_bytes=repaired_bytes,
        num_leftovers=num_leftovers,
        folds=folds,
    )


def _read(
    directory: RunDirectory, folds: LauncherFolds, wanted: Mapping[str, Snapshotted]
) -> tuple[journal.Snapshot | None, list[Record]]:
    """Fill `folds`; the newest snapshot that holds all of `wanted`, and the records after it."""
    reader = journal.JournalReader(directory.journal, fits=lambda value: fits(wanted, value))
    if reader.snapshot is not None:
        put_back(folds.parts, reader.snapshot.folds)
    records = list(reader)
    for record in records:
        folds.apply(record)
    return reader.snapshot, records
