"""The one place that decides: restart or stop, in which layer, after which wait, from how far back.

`decide` is a pure function of (history, fault, now, limits); launcher, simulator and tests drive the same
one. Each layer acts only when a fault has crossed the one below it: a class starts at its first layer, a
lost process lifts it to `worker`, and so does a third attempt at the same fingerprint, which an in-process
restart has evidently not cured. A stop is layer `job`.

A device that was the root often enough, by faults that a device can have, is excluded if the world stays large
enough without it. That is the one restart which a full cap does not stop, since the next attempt is another one:
it refills nothing, and a device is excluded once, so that attempts without progress stay within the caps plus one
for each device.

Must not: read a clock, know processes, look into message texts.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_sre.core.errors import ExitCode, NothingRestorable
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events.schema import Action, Cap, FaultClass, Layer, RestartDecided
from nvrx_sre.policy.caps import Budgets, PolicyFault, evaluate
from nvrx_sre.policy.classify import RULES, RetryClass
from nvrx_sre.policy.history import History

__all__ = ["Decision", "PolicyFault", "decide"]

_LAST_ATTEMPT = 2
"""Faults of one fingerprint after which the next attempt goes one checkpoint further back."""
_LADDER = tuple(Layer)
_OUTWEIGHED_CAPS = frozenset({Cap.SAME_FINGERPRINT, Cap.STARTUP, Cap.CONSECUTIVE, Cap.WINDOW, Cap.DEVICE, None})
"""Caps that do not stop an attempt without the device (None: none has tripped)."""
_RETRYABLE_CAPS = frozenset({Cap.STARTUP, Cap.STORAGE})
"""Caps after which a start elsewhere may help (exit 75); the others end the job (exit 93)."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do about a fault, and why.

    `exit_code` is None for a restart. `restarts_since_progress` counts attempts that ended without
    progress, this one included; `cap` is the budget that stopped the run, if one did. `is_excluding`: the root's
    device takes no further part.
    """

    action: Action
    layer: Layer
    backoff_s: float
    reason: str
    exit_code: int | None
    checkpoints_back: int
    cap: Cap | None
    restarts_since_progress: int
    budget_used: dict[str, int]
    budget_limit: dict[str, int]
    is_excluding: bool = False

    def event(self) -> RestartDecided:
        """The decision as it is recorded."""
        return RestartDecided(
            action=self.action,
            layer=self.layer,
            reason=self.reason,
            backoff_s=self.backoff_s,
            exit_code=self.exit_code,
            restarts_since_progress=self.restarts_since_progress,
            checkpoints_back=self.checkpoints_back,
            budget_used=self.budget_used,
            budget_limit=self.budget_limit,
            is_excluding=self.is_excluding,
            is_capped=self.cap is not None,
        )


def decide(history: History, fault: PolicyFault, now_ns: int, limits: CapLimits) -> Decision:
    """Decide on `fault`, which `history` does not hold yet. `now_ns`: wall ns like `Record.time_ns`."""
    budgets = evaluate(history, fault, now_ns, limits)
    incurable = _incurable(fault)
    if incurable is not None:
        exit_code, reason = incurable
        return _stop(budgets, exit_code, reason, None)
    if _excludes(fault, budgets):
        return _exclusion(fault, budgets)
    if budgets.tripped is not None:
        return _capped(budgets, budgets.tripped)
    if fault.fault is FaultClass.PREEMPTION:
        return _stop(budgets, ExitCode.PREEMPTED, "preempted: the orchestrator starts the job again", None)
    return _restart(history, fault, budgets, limits)


def _incurable(fault: PolicyFault) -> tuple[int, str] | None:
    """Exit code and reason if no restart can cure the fault."""
    if fault.fault is FaultClass.USER_ERROR:
        return ExitCode.CONFIG, "a configuration or user error: no restart can cure it"
    if fault.fault is FaultClass.CHECKPOINT_CORRUPT and fault.exception_type == NothingRestorable.__name__:
        return ExitCode.DO_NOT_RESTART, "commits are on record, none can be loaded: bring one back, or --start-fresh"
    return None


def _capped(budgets: Budgets, cap: Cap) -> Decision:
    exit_code = ExitCode.RETRYABLE if cap in _RETRYABLE_CAPS else ExitCode.DO_NOT_RESTART
    used, limit = budgets.used[cap.value], budgets.limit[cap.value]
    without = "" if cap is Cap.LIFETIME else " without progress"
    return _stop(budgets, exit_code, f"cap {cap.value} reached: {used} of {limit}{without}", cap)


def _stop(budgets: Budgets, exit_code: int, reason: str, cap: Cap | None) -> Decision:
    return Decision(
        action=Action.STOP,
        layer=Layer.JOB,
        backoff_s=0.0,
        reason=reason,
        exit_code=int(exit_code),
        checkpoints_back=0,
        cap=cap,
        restarts_since_progress=budgets.num_attempts,
        budget_used=budgets.used,
        budget_limit=budgets.limit,
    )


def _excludes(fault: PolicyFault, budgets: Budgets) -> bool:
    is_blamed = budgets.used[Cap.DEVICE.value] >= budgets.limit[Cap.DEVICE.value]
    return is_blamed and fault.can_exclude and budgets.tripped in _OUTWEIGHED_CAPS


def _exclusion(fault: PolicyFault, budgets: Budgets) -> Decision:
    times = budgets.used[Cap.DEVICE.value]
    return Decision(
        action=Action.RESTART,
        layer=Layer.WORKER,
        backoff_s=0.0,
        reason=f"{fault.fault.value}: {fault.device} was the root {times} times without progress: on without it",
        exit_code=None,
        checkpoints_back=0,
        cap=None,
        restarts_since_progress=budgets.num_attempts,
        budget_used=budgets.used,
        budget_limit=budgets.limit,
        is_excluding=True,
    )


def _restart(history: History, fault: PolicyFault, budgets: Budgets, limits: CapLimits) -> Decision:
    last_attempt = budgets.num_same >= _LAST_ATTEMPT
    layer = max(RULES[fault.fault].first_layer, fault.min_layer, key=_LADDER.index)
    if last_attempt:
        layer = max(layer, Layer.WORKER, key=_LADDER.index)
    back = 1 if last_attempt or fault.fault is FaultClass.NONFINITE else 0
    return Decision(
        action=Action.RESTART,
        layer=min(layer, Layer.WORKER, key=_LADDER.index),
        backoff_s=_backoff_s(fault, budgets, limits),
        reason=f"{_reason(fault, budgets, limits)}{_going_back(history, fault) if back else ''}",
        exit_code=None,
        checkpoints_back=back,
        cap=None,
        restarts_since_progress=budgets.num_attempts,
        budget_used=budgets.used,
        budget_limit=budgets.limit,
    )


def _backoff_s(fault: PolicyFault, budgets: Budgets, limits: CapLimits) -> float:
    """Wait before the next attempt (seconds): waiting helps only against what passes by itself."""
    if budgets.num_attempts == 1 or RULES[fault.fault].retry not in (RetryClass.TRANSIENT, RetryClass.NODE):
        return 0.0
    index = min(budgets.num_attempts, len(limits.backoff_s)) - 1
    return limits.backoff_s[index] if index >= 0 else 0.0


def _reason(fault: PolicyFault, budgets: Budgets, limits: CapLimits) -> str:
    if budgets.num_attempts == 1:
        return f"{fault.fault.value}: first attempt since progress"
    attempt = f"{fault.fault.value}: attempt {budgets.num_attempts} without progress"
    if budgets.held_s is None:
        return f"{attempt}, no cap reached"
    return (
        f"{attempt}; caps count from {limits.transient_grace_s:g} s without progress on ({budgets.held_s:.0f} s so far)"
    )


def _going_back(history: History, fault: PolicyFault) -> str:
    """What it means here to leave out the newest checkpoint."""
    if history.durable_step >= 0:
        return "; from an older checkpoint"
    return "; from step 0, no checkpoint is durable yet" if max(fault.high_water, fault.hot_sealed_step) > 0 else ""
