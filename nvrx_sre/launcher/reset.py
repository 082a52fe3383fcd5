"""Refill a stopped run's budgets: one `BudgetReset` record under an epoch of its own, then the halt is cleared."""

from __future__ import annotations

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import StorageError
from nvrx_sre.core.limits import TelemetryLimits
from nvrx_sre.events import journal
from nvrx_sre.events.schema import BudgetReset, Record
from nvrx_sre.launcher.braking import BrakeConsent, read_consent, write_consent
from nvrx_sre.launcher.rundir import RunDirectory

SYNC_S = 5.0


def reset_budgets(directory: RunDirectory, run: str, reason: str) -> None:
    """Record the reset durably. Raises `RunDirectoryBusy` if a launcher is live, `StorageError` if the disk refuses.

    Taking an epoch fences any launcher of an older one, so the reset cannot race a start.
    """
    epoch = directory.take_epoch()
    journal.repair(directory.journal)
    known = journal.read_journal(directory.journal) if directory.journal.is_dir() else ()
    generation = max((record.generation for record in known), default=0)
    writer = journal.JournalWriter(directory.journal, run, epoch.number, limits=TelemetryLimits())
    record = Record(
        run=run,
        epoch=epoch.number,
        generation=generation,
        rank=None,
        seq=1,
        time_ns=SystemClock().wall_ns(),
        event=BudgetReset(reason=reason),
    )
    writer.append(record)
    synced = writer.sync(SYNC_S)
    writer.close(SYNC_S)
    if not synced:
        raise StorageError(f"cannot write the journal of {directory.path}: the budgets were not refilled")
    # Before the halt is lifted: an alert of the time before must not bring it back.
    consent = read_consent(directory)
    write_consent(directory, BrakeConsent(is_allowed=consent.is_allowed, since_ns=record.time_ns))
    directory.halt.unlink(missing_ok=True)
