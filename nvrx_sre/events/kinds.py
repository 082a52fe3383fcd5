"""The closed sets that events and metric labels are made of.

Invariants: each is closed, its values are lower case and stable once released; an unknown value is an error where it
is read. Pure, immutable.
"""

from __future__ import annotations

from enum import StrEnum


class FaultClass(StrEnum):
    """The `fault` label. Closed set."""

    EXCEPTION = "exception"
    HANG = "hang"
    KILLED = "killed"
    OOM_KILL = "oom_kill"
    CUDA_OOM = "cuda_oom"
    CUDA_ERROR = "cuda_error"
    COLLECTIVE_ERROR = "collective_error"
    NONFINITE = "nonfinite"
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    STORAGE = "storage"
    SHM_EXHAUSTED = "shm_exhausted"
    STARTUP = "startup"
    USER_ERROR = "user_error"
    PREEMPTION = "preemption"
    NODE_LOST = "node_lost"
    OTHER = "other"


DEVICE_FAULTS = frozenset({FaultClass.HANG, FaultClass.KILLED, FaultClass.CUDA_ERROR, FaultClass.STARTUP})
"""What a bad device does to its rank. An exception that repeats on one rank is the program's or the data's: moving it
to other hardware is no cure (failure case C35)."""
NODE_FAULTS = DEVICE_FAULTS | {FaultClass.SHM_EXHAUSTED, FaultClass.NODE_LOST}
"""What makes the node a suspect: its devices, or what its ranks share."""


class Layer(StrEnum):
    """Where a recovery happens, lowest first."""

    IN_PROCESS = "in_process"
    WORKER = "worker"
    JOB = "job"


class Tier(StrEnum):
    """Where a checkpoint lives."""

    HOT = "hot"
    DURABLE = "durable"


class RestoredFrom(StrEnum):
    """What a generation started from."""

    HOT = "hot"
    DURABLE = "durable"
    FRESH = "fresh"


class Phase(StrEnum):
    """What a rank is doing, outside the split of a single step."""

    INIT = "init"
    RENDEZVOUS = "rendezvous"
    REBUILD = "rebuild"
    LOAD = "load"
    FIRST_STEP = "first_step"
    STEP = "step"
    DATA = "data"
    EVALUATE = "evaluate"
    SAVE = "save"
    FINALIZE = "finalize"
    TEARDOWN = "teardown"

    __hash__ = str.__hash__
    """That of its text, without the detour by which an enum finds its name: a step looks up a dozen phases."""


class LedgerState(StrEnum):
    """The job is in exactly one of these at any instant."""

    NEW = "new"
    REDO = "redo"
    LOST_STEP = "lost_step"
    CHECKPOINT_BLOCK = "checkpoint_block"
    DATA = "data"
    EVALUATE = "evaluate"
    INIT = "init"
    DETECT = "detect"
    TEARDOWN = "teardown"
    RENDEZVOUS = "rendezvous"
    REBUILD = "rebuild"
    LOAD = "load"
    BACKOFF = "backoff"
    DOWN = "down"
    SUSPENDED = "suspended"
    HALTED = "halted"
    OTHER = "other"


class Detector(StrEnum):
    """What noticed a fault."""

    EXCEPTION = "exception"
    DEATH = "death"
    DEADLINE = "deadline"
    REPORT = "report"


class Verdict(StrEnum):
    """State of an incident."""

    RECOVERING = "recovering"
    RECOVERED = "recovered"
    FLAPPING = "flapping"
    CRASH_LOOP = "crash_loop"
    EXHAUSTED = "exhausted"


class RejectReason(StrEnum):
    """Why a checkpoint was not used. Closed set; label of `nvrx_checkpoint_rejected_total`."""

    NO_COMMIT_MARKER = "no_commit_marker"
    MANIFEST = "manifest"
    VERSION = "version"
    OTHER_RUN = "other_run"
    MISSING_FILE = "missing_file"
    SIZE = "size"
    CHECKSUM = "checksum"
    LAYOUT = "layout"
    DIGEST = "digest"
    UNREADABLE = "unreadable"


class SkipReason(StrEnum):
    """Why a due save did not happen."""

    WRITER_BUSY = "writer_busy"
    NO_FREE_SLOT = "no_free_slot"
    INCOMPLETE = "incomplete"


class Unverified(StrEnum):
    """Why a committed save was not read back."""

    WRITER_DIED = "writer_died"
    INTERRUPTED = "interrupted"
    ABANDONED_LINE = "abandoned_line"


class SaveFailure(StrEnum):
    """Why a save that had started did not commit, or was no good when it was read back."""

    STORAGE = "storage"
    NO_SPACE = "no_space"
    WRITER_DIED = "writer_died"
    INTERRUPTED = "interrupted"
    NONFINITE = "nonfinite"
    VERIFY = "verify"
    ABANDONED_LINE = "abandoned_line"


class Cap(StrEnum):
    """Retry caps; label of the budget metrics."""

    SAME_FINGERPRINT = "same_fingerprint"
    CONSECUTIVE = "consecutive"
    WINDOW = "window"
    DEVICE = "device"
    STARTUP = "startup"
    NONFINITE = "nonfinite"
    UNKNOWN_PROGRESS = "unknown_progress"
    STORAGE = "storage"
    PREEMPTION = "preemption"
    LIFETIME = "lifetime"


class Action(StrEnum):
    """What a decision does."""

    RESTART = "restart"
    STOP = "stop"


class StepKind(StrEnum):
    """`new` is above the high water mark, `redone` at or below it."""

    NEW = "new"
    REDONE = "redone"


class Role(StrEnum):
    """Kind of child process."""

    WORKER = "worker"
    STANDBY = "standby"
    WRITER = "writer"


class HaltReason(StrEnum):
    """Why a run was stopped so that it stays stopped. The first two ask for it, the others follow from faults."""

    OPERATOR = "operator"
    BRAKE = "brake"
    CAP = "cap"
    INCURABLE = "incurable"
