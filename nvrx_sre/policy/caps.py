"""Retry budgets: what is used of each cap, and which one has tripped.

Caps count only attempts without progress; a fault with progress is always the first of
its episode and trips none. Transient and node classes trip only once `transient_grace_s` has passed since
the first attempt of the episode, so that a two-second link flap cannot burn them at 0.1 s a recovery;
start-up is bounded at once, because the orchestrator starts again anyway.

Pure. Used counts include the fault at hand, except `nonfinite`, which counts retries already spent.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events.schema import Cap, FaultClass, Layer
from nvrx_sre.policy.classify import RULES, RetryClass
from nvrx_sre.policy.history import Attempt, History


@dataclass(frozen=True, kw_only=True)
class PolicyFault:
    """A fault as the policy sees it.

    `high_water` and `hot_sealed_step` are the live values, which the journal may not hold yet. `min_layer`
    is `worker` when a process is already lost or has to be replaced.
    """

    fault: FaultClass
    fingerprint: str
    high_water: int
    exception_type: str = ""
    device: str = ""
    hot_sealed_step: int = -1
    min_layer: Layer = Layer.IN_PROCESS


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """State of the caps for one fault. `num_attempts`: faults since progress, this one included."""

    num_attempts: int
    num_same: int
    used: dict[str, int]
    limit: dict[str, int]
    tripped: Cap | None


_ORDER = (
    Cap.NONFINITE,
    Cap.UNKNOWN_PROGRESS,
    Cap.SAME_FINGERPRINT,
    Cap.STARTUP,
    Cap.CONSECUTIVE,
    Cap.WINDOW,
    Cap.DEVICE,
    Cap.STORAGE,
)
"""If several trip at once the most specific names the reason."""
_AT_ONCE = frozenset({Cap.NONFINITE, Cap.UNKNOWN_PROGRESS, Cap.STARTUP})
"""Caps that do not wait for the transient grace."""


def evaluate(history: History, fault: PolicyFault, now_ns: int, limits: CapLimits) -> Budgets:
    """Budgets as they stand with `fault`, which `history` does not hold yet. `now_ns`: wall time."""
    earlier = [] if history.has_progress(fault.hot_sealed_step) else list(history.attempts)
    used = _used(history, fault, earlier, now_ns, limits)
    limit = _limits(limits)
    tripped = [cap for cap in _ORDER if used[cap.value] >= limit[cap.value]] if earlier else []
    if history.progress_unknown:
        tripped = [cap for cap in tripped if cap is Cap.UNKNOWN_PROGRESS]
    elif not _may_trip(fault, earlier, now_ns, limits):
        tripped = [cap for cap in tripped if cap in _AT_ONCE]
    return Budgets(
        num_attempts=len(earlier) + 1,
        num_same=used[Cap.SAME_FINGERPRINT.value],
        used=used,
        limit=limit,
        tripped=tripped[0] if tripped else None,
    )


def _may_trip(fault: PolicyFault, earlier: list[Attempt], now_ns: int, limits: CapLimits) -> bool:
    if RULES[fault.fault].retry not in (RetryClass.TRANSIENT, RetryClass.NODE):
        return True
    return bool(earlier) and now_ns - earlier[0].time_ns >= to_ns(limits.transient_grace_s)


def _used(
    history: History, fault: PolicyFault, earlier: list[Attempt], now_ns: int, limits: CapLimits
) -> dict[str, int]:
    before_first_step = history.first_step_ns is None and fault.high_water == 0
    nonfinite = fault.fault is FaultClass.NONFINITE
    return {
        Cap.SAME_FINGERPRINT.value: 1 + sum(1 for item in earlier if item.fingerprint == fault.fingerprint),
        Cap.CONSECUTIVE.value: len(earlier) + 1,
        Cap.WINDOW.value: history.num_fruitless(now_ns, limits.window_s) + bool(earlier),
        Cap.DEVICE.value: _same_device(fault, earlier, now_ns, limits),
        Cap.STARTUP.value: len(earlier) + 1 if before_first_step else 0,
        Cap.NONFINITE.value: sum(1 for item in earlier if nonfinite and item.fault is FaultClass.NONFINITE),
        Cap.UNKNOWN_PROGRESS.value: len(earlier) + 1 if history.progress_unknown else 0,
        Cap.STORAGE.value: _count_class(FaultClass.STORAGE, fault, earlier),
    }


def _same_device(fault: PolicyFault, earlier: list[Attempt], now_ns: int, limits: CapLimits) -> int:
    if not fault.device:
        return 0
    start_ns = now_ns - to_ns(limits.window_s)
    return 1 + sum(1 for item in earlier if item.device == fault.device and item.time_ns > start_ns)


def _count_class(kind: FaultClass, fault: PolicyFault, earlier: list[Attempt]) -> int:
    if fault.fault is not kind:
        return 0
    return 1 + sum(1 for item in earlier if item.fault is kind)


def _limits(limits: CapLimits) -> dict[str, int]:
    return {
        Cap.SAME_FINGERPRINT.value: limits.same_fingerprint_attempts,
        Cap.CONSECUTIVE.value: limits.consecutive_attempts,
        Cap.WINDOW.value: limits.window_attempts,
        Cap.DEVICE.value: limits.device_faults,
        Cap.STARTUP.value: limits.startup_attempts,
        Cap.NONFINITE.value: limits.nonfinite_attempts,
        Cap.UNKNOWN_PROGRESS.value: limits.unknown_progress_attempts,
        Cap.STORAGE.value: limits.storage_attempts,
    }
