"""Closed label sets that belong to metrics alone; those of events are in `events.kinds`.

Invariants: each is closed and its values are lower case. Pure, immutable.
"""

from __future__ import annotations

from enum import StrEnum

from nvrx_sre.core.errors import ExitCode

DEFAULT_OWNER = {"team": "none", "priority": "prod"}
"""What whoever started a run did not say."""


class RestartOutcome(StrEnum):
    """How a decision ended. Counted when it is known."""

    RESUMED = "resumed"
    NO_PROGRESS = "no_progress"
    STOPPED = "stopped"


class IncidentOutcome(StrEnum):
    """Opened, and how it ended: with progress, or with the run."""

    OPENED = "opened"
    RECOVERED = "recovered"
    EXHAUSTED = "exhausted"


class SaveOutcome(StrEnum):
    """How a due save ended. `committed` counts hot captures sealed by a rank set, durable saves renamed."""

    COMMITTED = "committed"
    FAILED = "failed"
    SKIPPED = "skipped"
    REJECTED = "rejected"


class SaveStage(StrEnum):
    """Parts of a durable save: sealed until taken over, written, renamed into place, read back."""

    SEAL = "seal"
    WRITE = "write"
    COMMIT = "commit"
    VERIFY = "verify"


class Component(StrEnum):
    """Parts of telemetry that may drop or fail without touching training."""

    JOURNAL = "journal"
    FOLD = "fold"
    METRICS = "metrics"
    SPANS = "spans"
    OTLP = "otlp"
    LOG = "log"
    REPORTER = "reporter"
    CHANNEL = "channel"
    NODE = "node"
    OTHER = "other"


class StartKind(StrEnum):
    """How a launcher found the run: without a journal, with one, or told to leave its commits alone."""

    NEW = "new"
    RESUMED = "resumed"
    FRESH = "fresh"


class FreshProgress(StrEnum):
    """What a run lost that began at step 0: nothing, or steps that were committed before."""

    NONE = "none"
    LOST = "lost"


class RunEnd(StrEnum):
    """How a launcher's run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    RETRYABLE = "retryable"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"


_RUN_ENDS = {
    int(ExitCode.FINISHED): RunEnd.FINISHED,
    int(ExitCode.DO_NOT_RESTART): RunEnd.STOPPED,
    int(ExitCode.CONFIG): RunEnd.STOPPED,
    int(ExitCode.USAGE): RunEnd.STOPPED,
    int(ExitCode.PREEMPTED): RunEnd.PREEMPTED,
    int(ExitCode.INTERRUPTED): RunEnd.INTERRUPTED,
}


def run_end(exit_code: int) -> RunEnd:
    """What an exit code means for the run; unknown codes are retried."""
    return _RUN_ENDS.get(exit_code, RunEnd.RETRYABLE)


class TeardownOutcome(StrEnum):
    """A rank left its generation in process, or was killed past its grace."""

    KEPT = "kept"
    KILLED = "killed"


class NodeCount(StrEnum):
    """Nodes of a formation: those that take part, those that are there, those that are waited for."""

    EXPECTED = "expected"
    JOINED = "joined"
    MISSING = "missing"


class Suspect(StrEnum):
    """What a fault on a node speaks against: the node (`events.schema.NODE_FAULTS`), or something else."""

    NODE = "node"
    OTHER = "other"


class MemoryKind(StrEnum):
    """Memory of a node: the limit that would end it, what is used, and the hot slots within that."""

    LIMIT = "limit"
    USED = "used"
    HOT_SLOTS = "hot_slots"


class SpaceKind(StrEnum):
    """Space of a file system."""

    SIZE = "size"
    FREE = "free"


class DeviceCount(StrEnum):
    """NVIDIA devices that a node's ranks may have: all, those that should have no rank, those that are slowed down."""

    SEEN = "seen"
    UNFIT = "unfit"
    THROTTLED = "throttled"


class DeviceErrorKind(StrEnum):
    """Errors of a node's NVIDIA devices."""

    ECC_UNCORRECTED = "ecc_uncorrected"
    ROWS_REMAPPED = "rows_remapped"
    NVLINK = "nvlink"
    XID = "xid"


class RankMetrics(StrEnum):
    """How ranks are exported: each one, their extremes, or not at all."""

    ALL = "all"
    SUMMARY = "summary"
    OFF = "off"
