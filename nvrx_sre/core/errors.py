"""Every error that some caller reacts to.

    NvrxError                    base: one clear line for a person, a bounded `code`, an `exit_code`
    |- UserError           78    configuration, data or input that cannot work (what, where, what to do)
    |  |- UsageError        2    a command line that cannot be parsed
    |- RunDirectoryBusy    78    another live launcher on this host owns the run directory
    |- Superseded          75    a higher epoch owns the run
    |- StorageError        75    the run directory's storage failed
    |- CheckpointError     93    base of what the durable tier finds wrong
    |  |- CheckpointCorrupt 93   files do not match their manifest; carries `reason`
    |  |- NothingRestorable 93   commits are on record and none is loadable
    |- InternalError       70    ours: an invariant did not hold

    Interrupted                  control flow (BaseException): the generation was interrupted
    RestartAborted               control flow (BaseException): this process must not go on

`policy` never reads a message text; it sees `code` and exception type names.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of launcher and CLI. Frozen."""

    FINISHED = 0
    USAGE = 2
    INTERNAL = 70
    RETRYABLE = 75
    CONFIG = 78
    DO_NOT_RESTART = 93
    INTERRUPTED = 130
    PREEMPTED = 143


class NvrxError(Exception):
    """Base error. `str()` is one line a person can act on."""

    code = "internal"
    exit_code = ExitCode.INTERNAL


class UserError(NvrxError):
    """Input that cannot work. The message says what, where and what to do."""

    code = "user_error"
    exit_code = ExitCode.CONFIG


class UsageError(UserError):
    """A command line that cannot be parsed."""

    code = "usage"
    exit_code = ExitCode.USAGE


class RunDirectoryBusy(NvrxError):
    """Another live launcher on this host holds the run directory."""

    code = "run_directory_busy"
    exit_code = ExitCode.CONFIG


class Superseded(NvrxError):
    """A higher epoch owns the run; this launcher must stop without writing."""

    code = "superseded"
    exit_code = ExitCode.RETRYABLE


class StorageError(NvrxError):
    """Reading or writing the run directory failed."""

    code = "storage"
    exit_code = ExitCode.RETRYABLE


class CheckpointError(NvrxError):
    """Base of the durable tier's findings."""

    code = "checkpoint"
    exit_code = ExitCode.DO_NOT_RESTART


class CheckpointCorrupt(CheckpointError):
    """A checkpoint differs from its manifest. `reason` is one of `events.schema.RejectReason`."""

    code = "checkpoint_corrupt"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NothingRestorable(CheckpointError):
    """Commits are on record and none of them is loadable."""

    code = "nothing_restorable"


class InternalError(NvrxError):
    """An invariant of ours did not hold."""


class Interrupted(BaseException):
    """Raised in a rank's main thread when its generation is interrupted. Never swallowed."""

    def __init__(self, generation: int) -> None:
        super().__init__(generation)
        self.generation = generation


class RestartAborted(BaseException):
    """This process must leave: it was replaced, or the launcher is gone."""
