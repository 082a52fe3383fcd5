"""What the policy would do about faults that have not happened: a run of events that are told to a real `History`.

Model: a run that has trained for a while (or has not begun) meets faults one after the other. Each is decided by the
same `decide` as in a launcher and then told to the history, with whatever follows from it; waits are as long as the
policy says. Time is simulated and begins at 0.

Pure; not thread-safe. Must not: decide anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_sre.core.clock import seconds, to_ns
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events.schema import (
    BudgetReset,
    DecisionUnrecorded,
    Detector,
    Event,
    FaultClass,
    FaultDetected,
    Phase,
    PreemptionReceived,
    RankExcluded,
    Record,
    SaveVerified,
    StepKind,
    StepsCommitted,
)
from nvrx_sre.policy.classify import fingerprint
from nvrx_sre.policy.history import History
from nvrx_sre.policy.ladder import Decision, PolicyFault, decide
from nvrx_sre.policy.membership import members

TRAINED_STEPS = 100
"""Steps that are committed and saved before the first fault of a run that has begun."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of the rehearsed run: one node, as large as it is at first, at least, and in units of."""

    num_ranks: int
    min_world_size: int
    multiple: int = 1

    @property
    def devices(self) -> tuple[str, ...]:
        """A device a rank."""
        return tuple(f"node/{index}" for index in range(self.num_ranks))


class Rehearsal:
    """A run that is told what happens to it."""

    def __init__(self, limits: CapLimits, world: World, *, has_begun: bool = True) -> None:
        self.history = History()
        self.now_ns = 0
        self._limits = limits
        self._world = world
        self._seq = 0
        self._high_water = 0
        self._sealed = -1
        if has_begun:
            self.progress(TRAINED_STEPS)

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return seconds(self.now_ns)

    @property
    def step(self) -> int:
        """Step that is executed now."""
        return self._high_water + 1

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that take part, by rank."""
        return members(self._world.devices, self.history.excluded, self._world.multiple)

    def wait(self, seconds_s: float) -> None:
        """Time passes and nothing happens."""
        self.now_ns += to_ns(seconds_s)

    def progress(self, num_steps: int = 1, *, is_sealed: bool = True, is_saved: bool = True) -> None:
        """New steps; `is_sealed`: in the hot tier on all ranks, `is_saved`: verified on disk."""
        first, self._high_water = self.step, self._high_water + num_steps
        self._sealed = self._high_water if is_sealed else self._sealed
        self._tell(
            StepsCommitted(
                kind=StepKind.NEW,
                first_step=first,
                last_step=self._high_water,
                started_ns=self.now_ns,
                committed_ns=self.now_ns,
                step_s=0.0,
                data_s=0.0,
                checkpoint_block_s=0.0,
                evaluate_s=0.0,
                tokens=0,
                loss=None,
                hot_sealed_step=self._sealed,
                hot_captured=0,
                hot_skipped=0,
            )
        )
        if is_saved:
            self._tell(SaveVerified(step=self._high_water, directory="", seconds=0.0, captured_ns=self.now_ns))

    def fault(self, kind: FaultClass, *, rank: int | None = 0, step: int | None = None, detail: str = "") -> Decision:
        """A fault now, the decision on it, and what follows. `detail`: type of the exception."""
        at = self.step if step is None else step
        mark = fingerprint(kind, detail, "", at)
        device = self.devices[rank] if rank is not None and rank < len(self.devices) else ""
        decision = decide(
            self.history,
            PolicyFault(
                fault=kind,
                fingerprint=mark,
                high_water=self._high_water,
                exception_type=detail,
                device=device,
                hot_sealed_step=self._sealed,
                can_exclude=self._can_exclude(device),
            ),
            self.now_ns,
            self._limits,
        )
        if kind is FaultClass.PREEMPTION:
            self._tell(PreemptionReceived(signal=15, by_person=False))
        else:
            self._tell(self._detected(kind, detail, mark, device, at))
            self._tell(decision.event())
        if decision.is_excluding:
            self._tell(RankExcluded(device=device, reason=decision.reason, world_size=len(self.devices)))
        self.wait(decision.backoff_s)
        return decision

    def lose_decision(self) -> None:
        """The disk did not take the last decision in time."""
        self._tell(DecisionUnrecorded(waited_s=0.5))

    def reset(self) -> None:
        """An operator resumes the run."""
        self._tell(BudgetReset(reason="rehearsed"))

    def _can_exclude(self, device: str) -> bool:
        world = members(self._world.devices, {device, *self.history.excluded}, self._world.multiple)
        return bool(device) and len(world) >= self._world.min_world_size

    def _detected(self, kind: FaultClass, exception_type: str, mark: str, device: str, step: int) -> FaultDetected:
        return FaultDetected(
            fault=kind,
            detector=Detector.REPORT,
            phase=Phase.STEP,
            step=step,
            high_water=self._high_water,
            evidence_ns=self.now_ns,
            exception_type=exception_type,
            frame="",
            message="",
            fingerprint=mark,
            exit_code=None,
            signal=None,
            pid=None,
            device=device,
        )

    def _tell(self, event: Event) -> None:
        self._seq += 1
        self.history.apply(
            Record(run="rehearsal", epoch=1, generation=1, rank=None, seq=self._seq, time_ns=self.now_ns, event=event)
        )
