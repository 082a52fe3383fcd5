"""What kind of fault it is, and what that kind allows.

Two sources: a dead process (`classify_exit`) and a rank's own report (`classify_report`). Per class one row
of `RULES` says which layer acts first and how retries are counted. Nothing here reads a message text: only
exit codes, signals and type names, all bounded.

Pure: no clock, no I/O, no torch. Thread safety: constants and functions only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.messages import Fault
from nvrx_sre.events.schema import FaultClass, Layer

SPAWN_FAILED_EXIT = 127
"""Exit code that stands for 'the process could not be started' (the shell's convention, POSIX sh)."""
_SIGBUS = 7
"""A store into shared memory that has no page left to give (Linux): loader workers and /dev/shm."""
_FINGERPRINT_HEX = 16


class RetryClass(StrEnum):
    """How attempts of a fault class are counted against the caps."""

    TRANSIENT = "transient"
    NODE = "node"
    DETERMINISTIC = "deterministic"
    USER = "user"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class FaultRule:
    """First layer that acts on a class, and its retry class."""

    first_layer: Layer
    retry: RetryClass


def _rule(first_layer: Layer, retry: RetryClass) -> FaultRule:
    return FaultRule(first_layer=first_layer, retry=retry)


RULES: dict[FaultClass, FaultRule] = {
    FaultClass.EXCEPTION: _rule(Layer.IN_PROCESS, RetryClass.DETERMINISTIC),
    FaultClass.HANG: _rule(Layer.IN_PROCESS, RetryClass.TRANSIENT),
    FaultClass.KILLED: _rule(Layer.WORKER, RetryClass.TRANSIENT),
    # The same model in the same memory is killed again: waiting does not help.
    FaultClass.OOM_KILL: _rule(Layer.WORKER, RetryClass.DETERMINISTIC),
    FaultClass.CUDA_OOM: _rule(Layer.IN_PROCESS, RetryClass.DETERMINISTIC),
    # A sticky CUDA error poisons the context, so the process cannot be kept.
    FaultClass.CUDA_ERROR: _rule(Layer.WORKER, RetryClass.NODE),
    FaultClass.COLLECTIVE_ERROR: _rule(Layer.IN_PROCESS, RetryClass.TRANSIENT),
    FaultClass.NONFINITE: _rule(Layer.IN_PROCESS, RetryClass.DETERMINISTIC),
    FaultClass.CHECKPOINT_CORRUPT: _rule(Layer.IN_PROCESS, RetryClass.DETERMINISTIC),
    FaultClass.STORAGE: _rule(Layer.IN_PROCESS, RetryClass.TRANSIENT),
    FaultClass.SHM_EXHAUSTED: _rule(Layer.WORKER, RetryClass.NODE),
    FaultClass.STARTUP: _rule(Layer.WORKER, RetryClass.TRANSIENT),
    FaultClass.USER_ERROR: _rule(Layer.JOB, RetryClass.USER),
    FaultClass.PREEMPTION: _rule(Layer.JOB, RetryClass.NONE),
    FaultClass.NODE_LOST: _rule(Layer.WORKER, RetryClass.NODE),
    FaultClass.OTHER: _rule(Layer.WORKER, RetryClass.DETERMINISTIC),
}
"""First layer and retry class of every fault class."""


def classify_exit(exit_code: int | None, signal: int | None, oom: bool, before_first_step: bool) -> FaultClass:
    """Class of an unexpected death.

    `oom`: the cgroup's oom_kill counter rose with it. `before_first_step`: no step of the run was ever
    committed, so the program has not been shown to work.
    """
    if signal == _SIGBUS:
        return FaultClass.SHM_EXHAUSTED
    if signal is not None:
        return FaultClass.OOM_KILL if oom else FaultClass.KILLED
    if exit_code == ExitCode.CONFIG:
        return FaultClass.USER_ERROR
    if exit_code == SPAWN_FAILED_EXIT:
        return FaultClass.STARTUP
    if before_first_step:
        # Usage errors, a script that cannot be imported, one that ends without calling the training function.
        return FaultClass.USER_ERROR if exit_code in (ExitCode.FINISHED, ExitCode.USAGE) else FaultClass.STARTUP
    # An orderly exit in mid-training is nobody's exception; any other code is an error nobody caught.
    return FaultClass.EXCEPTION if exit_code else FaultClass.OTHER


def classify_report(message: Fault) -> FaultClass:
    """Class of a rank's report: its own classification if it is in the closed set, else `other`.

    A communication error is `collective_error` whatever the rank called it; whether to believe it is the
    launcher's decision.
    """
    if message.communication:
        return FaultClass.COLLECTIVE_ERROR
    try:
        return FaultClass(message.fault)
    except ValueError:
        return FaultClass.OTHER


def fingerprint(fault: FaultClass, exception_type: str, frame: str, step: int) -> str:
    """Identity under which attempts are counted: class, exception type, top user frame and step."""
    text = "\0".join((fault.value, exception_type, frame, str(step)))
    return hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_HEX]
