"""Judgements over folds: state of a run, verdict of an incident. Pure functions and closed sets.

Invariants: each function depends on its arguments alone. Must not: read a clock, keep state.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events.schema import LedgerState, Verdict


class RunState(StrEnum):
    """What a run is doing, coarse enough for an alert. Label of the run-state metric. Closed set."""

    STARTING = "starting"
    RENDEZVOUS = "rendezvous"
    RESTORING = "restoring"
    TRAINING = "training"
    RECOVERING = "recovering"
    BACKOFF = "backoff"
    DRAINING = "draining"
    FINISHED = "finished"
    HALTED = "halted"
    FAILED = "failed"
    PREEMPTED = "preempted"
    RETRYING = "retrying"


FINAL_STATES = frozenset({RunState.FINISHED, RunState.HALTED, RunState.FAILED})
"""No launcher will follow by itself."""

_RUN_STATES = {
    LedgerState.INIT: RunState.STARTING,
    LedgerState.RENDEZVOUS: RunState.RENDEZVOUS,
    LedgerState.REBUILD: RunState.RESTORING,
    LedgerState.LOAD: RunState.RESTORING,
    LedgerState.DETECT: RunState.RECOVERING,
    LedgerState.TEARDOWN: RunState.RECOVERING,
    LedgerState.BACKOFF: RunState.BACKOFF,
    LedgerState.DOWN: RunState.RETRYING,
    LedgerState.SUSPENDED: RunState.PREEMPTED,
    LedgerState.HALTED: RunState.HALTED,
}
_EXIT_STATES = {
    ExitCode.FINISHED: RunState.FINISHED,
    ExitCode.DO_NOT_RESTART: RunState.HALTED,
    ExitCode.CONFIG: RunState.FAILED,
    ExitCode.USAGE: RunState.FAILED,
    ExitCode.PREEMPTED: RunState.PREEMPTED,
    ExitCode.INTERRUPTED: RunState.PREEMPTED,
}


def run_state_of(state: LedgerState) -> RunState:
    """Run state while the ledger is in `state` and the launcher lives."""
    return _RUN_STATES.get(state, RunState.TRAINING)


def run_state_after(exit_code: int) -> RunState:
    """Run state after the launcher exited with `exit_code`; unknown codes count as retried."""
    return _EXIT_STATES.get(exit_code, RunState.RETRYING)  # type: ignore[call-overload, no-any-return]  # int keys


def verdict_open(attempts: int, caps: CapLimits) -> Verdict:
    """Verdict of an incident that still lacks progress after `attempts` faults."""
    return Verdict.CRASH_LOOP if attempts >= caps.crash_loop_attempts else Verdict.RECOVERING


def verdict_recovered(opened_ns: Sequence[int], now_ns: int, caps: CapLimits) -> Verdict:
    """Verdict of an incident that ended with progress.

    `opened_ns`: when the recovered incidents (this one included) began. Enough of them in the window
    make the run flapping.
    """
    since_ns = now_ns - to_ns(caps.flapping_window_s)
    recent = sum(1 for opened in opened_ns if opened >= since_ns)
    return Verdict.FLAPPING if recent >= caps.flapping_faults else Verdict.RECOVERED


def ends_incident(exit_code: int | None) -> bool:
    """True if a launcher's exit with this code means that nobody will try again by itself."""
    return exit_code in (ExitCode.DO_NOT_RESTART, ExitCode.CONFIG, ExitCode.USAGE)
