"""Retry budgets: what is used of each cap, and which one has tripped.

Caps count only attempts without progress; a fault with progress is always the first of its episode and trips none,
but for the cap on the run's whole life, which is off unless asked for. Transient and node classes trip only once
`transient_grace_s` has passed since the first attempt of the episode, so that a two-second link flap cannot burn them
at 0.1 s a recovery; start-up is bounded at once, because the orchestrator starts again anyway. Preemptions have a
budget of their own.

Used counts include the fault at hand, except `nonfinite`, which counts retries already spent. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_sre.core.clock import seconds, to_ns
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events.schema import DEVICE_FAULTS, Cap, FaultClass, Layer
from nvrx_sre.policy.classify import RULES, RetryClass
from nvrx_sre.policy.history import Attempt, History


@dataclass(frozen=True, kw_only=True)
class PolicyFault:
    """A fault as the policy sees it.

    `high_water` and `hot_sealed_step` are the live values, which the journal may not hold yet. `min_layer`
    is `worker` when a process is already lost or has to be replaced. `can_exclude`: without `device` the world
    would still be as large as it must be.
    """

    fault: FaultClass
    fingerprint: str
    high_water: int
    exception_type: str = ""
    device: str = ""
    hot_sealed_step: int = -1
    min_layer: Layer = Layer.IN_PROCESS
    can_exclude: bool = False


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """State of the caps for one fault. `num_attempts`: faults since progress, this one included.

    `held_s`: time without progress so far, if that is why a full cap does not trip; else None.
    """

    num_attempts: int
    num_same: int
    used: dict[str, int]
    limit: dict[str, int]
    tripped: Cap | None
    held_s: float | None = None


_ORDER = (
    Cap.LIFETIME,
    Cap.NONFINITE,
    Cap.UNKNOWN_PROGRESS,
    Cap.STORAGE,
    Cap.STARTUP,
    Cap.SAME_FINGERPRINT,
    Cap.CONSECUTIVE,
    Cap.WINDOW,
    Cap.DEVICE,
)
"""If several trip at once the most specific names the reason."""
_AT_ONCE = frozenset({Cap.NONFINITE, Cap.UNKNOWN_PROGRESS, Cap.STARTUP, Cap.LIFETIME})
"""Caps that do not wait for the transient grace."""


def evaluate(history: History, fault: PolicyFault, now_ns: int, limits: CapLimits) -> Budgets:
    """Budgets as they stand with `fault`, which `history` does not hold yet. `now_ns`: wall time."""
    earlier = [] if history.has_progress(fault.hot_sealed_step) else list(history.attempts)
    used = _used(history, fault, earlier, now_ns, limits)
    limit = _limits(limits)
    held_s = None
    full = [cap for cap in _ORDER if cap in limit and used[cap] >= limit[cap]]
    if fault.fault is FaultClass.PREEMPTION:
        tripping = [Cap.PREEMPTION] if used[Cap.PREEMPTION] >= limit[Cap.PREEMPTION] else []
    elif not earlier:
        tripping = [cap for cap in full if cap is Cap.LIFETIME]
    elif history.progress_unknown:
        tripping = [cap for cap in full if cap in (Cap.LIFETIME, Cap.UNKNOWN_PROGRESS)]
    elif _may_trip(fault, earlier, now_ns, limits):
        tripping = full
    else:
        tripping = [cap for cap in full if cap in _at_once(history, limits)]
        held_s = seconds(now_ns - earlier[0].time_ns) if full and not tripping else None
    return Budgets(
        num_attempts=len(earlier) + 1,
        num_same=used[Cap.SAME_FINGERPRINT],
        used={cap.value: used[cap] for cap in limit},
        limit={cap.value: number for cap, number in limit.items()},
        tripped=tripping[0] if tripping else None,
        held_s=held_s,
    )


def _at_once(history: History, limits: CapLimits) -> frozenset[Cap]:
    """Caps that trip within the transient grace; the storage's does if decisions were not recorded that often."""
    is_unrecorded = history.num_unrecorded >= limits.storage_attempts
    return _AT_ONCE | ({Cap.STORAGE} if is_unrecorded else set())


def _passes_by_itself(fault: PolicyFault) -> bool:
    return RULES[fault.fault].retry in (RetryClass.TRANSIENT, RetryClass.NODE)


def _may_trip(fault: PolicyFault, earlier: list[Attempt], now_ns: int, limits: CapLimits) -> bool:
    if not _passes_by_itself(fault):
        return True
    return bool(earlier) and now_ns - earlier[0].time_ns >= to_ns(limits.transient_grace_s)


def _used(
    history: History, fault: PolicyFault, earlier: list[Attempt], now_ns: int, limits: CapLimits
) -> dict[Cap, int]:
    # A bug that shows at every start is no matter of the node: what repeats by itself is not counted as start-up.
    starts_up = history.first_step_ns is None and fault.high_water == 0 and _passes_by_itself(fault)
    nonfinite = fault.fault is FaultClass.NONFINITE
    is_preempted = fault.fault is FaultClass.PREEMPTION
    unrecorded = history.num_unrecorded if earlier else 0
    return {
        Cap.SAME_FINGERPRINT: 1 + sum(1 for item in earlier if item.fingerprint == fault.fingerprint),
        Cap.CONSECUTIVE: len(earlier) + 1,
        Cap.WINDOW: history.num_fruitless(now_ns, limits.window_s) + bool(earlier),
        Cap.DEVICE: _same_device(fault, earlier, now_ns, limits),
        Cap.STARTUP: len(earlier) + 1 if starts_up else 0,
        Cap.NONFINITE: sum(1 for item in earlier if nonfinite and item.fault is FaultClass.NONFINITE),
        Cap.UNKNOWN_PROGRESS: len(earlier) + 1 if history.progress_unknown else 0,
        Cap.STORAGE: max(_count_class(FaultClass.STORAGE, fault, earlier), unrecorded),
        Cap.PREEMPTION: history.preemptions() if is_preempted else history.num_preempted,
        Cap.LIFETIME: history.num_faults + (not is_preempted),
    }


def _same_device(fault: PolicyFault, earlier: list[Attempt], now_ns: int, limits: CapLimits) -> int:
    if not fault.device or fault.fault not in DEVICE_FAULTS:
        return 0
    start_ns = now_ns - to_ns(limits.window_s)
    same = [item for item in earlier if item.device == fault.device and item.fault in DEVICE_FAULTS]
    return 1 + sum(1 for item in same if item.time_ns > start_ns)


def _count_class(kind: FaultClass, fault: PolicyFault, earlier: list[Attempt]) -> int:
    if fault.fault is not kind:
        return 0
    return 1 + sum(1 for item in earlier if item.fault is kind)


def _limits(limits: CapLimits) -> dict[Cap, int]:
    """Limit of every cap that is in force."""
    lifetime = {Cap.LIFETIME: limits.lifetime_faults} if limits.lifetime_faults else {}
    return lifetime | {
        Cap.SAME_FINGERPRINT: limits.same_fingerprint_attempts,
        Cap.CONSECUTIVE: limits.consecutive_attempts,
        Cap.WINDOW: limits.window_attempts,
        Cap.DEVICE: limits.device_faults,
        Cap.STARTUP: limits.startup_attempts,
        Cap.NONFINITE: limits.nonfinite_attempts,
        Cap.UNKNOWN_PROGRESS: limits.unknown_progress_attempts,
        Cap.STORAGE: limits.storage_attempts,
        Cap.PREEMPTION: limits.preemption_attempts,
    }
