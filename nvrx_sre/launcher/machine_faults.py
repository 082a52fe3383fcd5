"""From evidence to one root fault: who it was, what it was, and what the policy decides about it.

Model: a generation has one root fault; whatever else happens in it is collateral. A communication error is
suspicion until `suspicion_s` has passed without a death or an error of another kind. A death that we caused
is never a fault. While ranks are gathered, a death counts as a new fault only if that process belongs to the
attempt at hand, so that ranks failing together for one reason are one attempt.

`detect` emits what led up to it, the fault and the decision, in this order. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_sre.core.clock import to_ns
from nvrx_sre.events.messages import Fault
from nvrx_sre.events.schema import Action, Detector, FaultClass, FaultDetected, Layer, Phase
from nvrx_sre.launcher.commands import Exited
from nvrx_sre.launcher.machine_commits import Commits
from nvrx_sre.launcher.machine_job import Job, Stage
from nvrx_sre.launcher.machine_progress import Hang, is_in_loop
from nvrx_sre.launcher.machine_roster import Child
from nvrx_sre.policy.classify import classify_exit, classify_report, fingerprint
from nvrx_sre.policy.ladder import Decision, PolicyFault, decide


@dataclass(frozen=True, kw_only=True)
class RootFault:
    """A fault with its root. `evidence_ns`: monotonic. `root` is None where it is unknown."""

    fault: FaultClass
    detector: Detector
    root: Child | None
    phase: Phase
    step: int
    evidence_ns: int
    exception_type: str = ""
    frame: str = ""
    message: str = ""
    exit_code: int | None = None
    signal: int | None = None
    min_layer: Layer = Layer.IN_PROCESS


@dataclass(frozen=True, kw_only=True)
class _Suspicion:
    """First communication error of the generation, and until when it waits for a better explanation."""

    child: Child
    message: Fault
    until_ns: int


class Faults:
    """Detects faults and has them decided."""

    def __init__(self, job: Job, commits: Commits) -> None:
        self._job = job
        self._commits = commits
        self._suspicion: _Suspicion | None = None

    @property
    def is_suspecting(self) -> bool:
        """A communication error waits for its explanation."""
        return self._suspicion is not None

    def on_report(self, child: Child, message: Fault, now_ns: int) -> RootFault | None:
        """A rank's report; the root fault, or None if it is only suspicion."""
        if message.communication:
            if self._suspicion is None:
                wait_ns = to_ns(self._job.config.limits.deadlines.suspicion_s)
                self._suspicion = _Suspicion(child=child, message=message, until_ns=now_ns + wait_ns)
            return None
        return self._from_report(classify_report(message), child, message)

    def on_death(self, child: Child, exited: Exited) -> RootFault | None:
        """An unexpected death in the attempt at hand; None if it explains less than what is suspected."""
        suspicion = self._suspicion
        if suspicion is not None and suspicion.child is child and exited.signal is None:
            return None
        before = self._job.is_before_first_step and self._commits.num_committed == 0
        in_loop = is_in_loop(child)
        return RootFault(
            fault=classify_exit(exited.exit_code, exited.signal, exited.oom, before),
            detector=Detector.DEATH,
            root=child,
            phase=child.phase,
            step=child.step + 1 if in_loop else child.step,
            evidence_ns=exited.exited_ns,
            message=exited.last_line,
            exit_code=exited.exit_code,
            signal=exited.signal,
            min_layer=Layer.WORKER,
        )

    def on_hang(self, hang: Hang, was_kept: bool) -> RootFault:
        """No progress. `was_kept`: the root came into this generation through an in-process restart.

        A root that is silent cannot be interrupted, and one that hangs before the first commit after an
        in-process restart was not cured by it: both go to layer worker. Where the root is unknown, each rank
        may be it, and `was_kept` speaks of any.
        """
        at = hang.root or hang.child
        lift = hang.is_root_silent or (was_kept and self._commits.num_committed == 0)
        return RootFault(
            fault=FaultClass.HANG,
            detector=Detector.DEADLINE,
            root=hang.root,
            phase=at.phase,
            step=at.step + 1 if is_in_loop(at) else at.step,
            evidence_ns=at.progressed_ns,
            message=f"no progress in {at.phase.value} for {at.limit_s:g} s",
            min_layer=Layer.WORKER if lift else Layer.IN_PROCESS,
        )

    def on_stuck(self, child: Child) -> RootFault:
        """A starting or assigned process that did not get ready in time."""
        return RootFault(
            fault=FaultClass.HANG,
            detector=Detector.DEADLINE,
            root=child,
            phase=Phase.INIT,
            step=0,
            evidence_ns=child.progressed_ns,
            message=f"not ready within {child.limit_s:g} s",
            min_layer=Layer.WORKER,
        )

    def on_unfit(self, child: Child, reason: str, now_ns: int) -> RootFault:
        """A fresh process that says it cannot take part."""
        return RootFault(
            fault=FaultClass.STARTUP,
            detector=Detector.REPORT,
            root=child,
            phase=Phase.INIT,
            step=0,
            evidence_ns=now_ns,
            message=reason,
            min_layer=Layer.WORKER,
        )

    def on_node_kill(self, child: Child, mono_ns: int) -> RootFault:
        """The node is lost, told through the injection on `child`'s rank."""
        return RootFault(
            fault=FaultClass.NODE_LOST,
            detector=Detector.REPORT,
            root=child,
            phase=child.phase,
            step=child.step + 1 if is_in_loop(child) else child.step,
            evidence_ns=mono_ns,
            message="the node and its hot slots are lost",
            min_layer=Layer.WORKER,
        )

    def on_node_lost(self, child: Child, reason: str, mono_ns: int) -> RootFault:
        """A node is gone with all that ran there; `child` had the lowest of its ranks."""
        return RootFault(
            fault=FaultClass.NODE_LOST,
            detector=Detector.DEADLINE,
            root=child,
            phase=child.phase,
            step=child.step + 1 if is_in_loop(child) else child.step,
            evidence_ns=mono_ns,
            message=reason,
            min_layer=Layer.WORKER,
        )

    def on_disagreement(self, now_ns: int) -> RootFault:
        """Ranks restored different states."""
        return RootFault(
            fault=FaultClass.CHECKPOINT_CORRUPT,
            detector=Detector.REPORT,
            root=None,
            phase=Phase.LOAD,
            step=0,
            evidence_ns=now_ns,
            message="the ranks restored different states",
        )

    def deadline_ns(self) -> int | None:
        """When suspicion becomes a fault."""
        return None if self._suspicion is None else self._suspicion.until_ns

    def on_tick(self, now_ns: int) -> RootFault | None:
        """The suspected communication error, if nothing better explained it in time."""
        suspicion = self._suspicion
        if suspicion is None or now_ns < suspicion.until_ns:
            return None
        # Root unknown: the one that reports is as likely a victim.
        return self._from_report(FaultClass.COLLECTIVE_ERROR, None, suspicion.message)

    def detect(self, fault: RootFault, now_ns: int) -> Decision:
        """Record the root fault of this attempt and the policy's decision on it."""
        job = self._job
        self._suspicion = None
        self._commits.flush()
        generation = job.pending if job.stage is Stage.FORMING else job.generation
        rank = None if fault.root is None else fault.root.rank
        mark = fingerprint(fault.fault, fault.exception_type, fault.frame, fault.step)
        job.emit(self._event(fault, mark), rank, generation)
        decision = decide(
            job.history,
            PolicyFault(
                fault=fault.fault,
                fingerprint=mark,
                high_water=self._commits.high_water,
                exception_type=fault.exception_type,
                device=job.device(rank),
                hot_sealed_step=self._sealed_step(),
                min_layer=fault.min_layer,
                can_exclude=job.can_exclude(job.device(rank)),
            ),
            job.wall_ns(now_ns),
            job.config.limits.caps,
        )
        job.emit(decision.event(), rank, generation)
        job.fault_serial += 1
        if decision.action is Action.RESTART:
            self._commits.incident_high_water = self._commits.high_water
        return decision

    def preempted(self, now_ns: int) -> Decision:
        """What the policy says of a preemption: it is no fault, and has a budget of its own."""
        fault = PolicyFault(
            fault=FaultClass.PREEMPTION,
            fingerprint="",
            high_water=self._commits.high_water,
            hot_sealed_step=self._sealed_step(),
        )
        return decide(self._job.history, fault, self._job.wall_ns(now_ns), self._job.config.limits.caps)

    def _sealed_step(self) -> int:
        return -1 if self._commits.sealed is None else self._commits.sealed.step

    def _from_report(self, kind: FaultClass, root: Child | None, message: Fault) -> RootFault:
        try:
            phase = Phase(message.phase)
        except ValueError:
            phase = Phase.STEP
        return RootFault(
            fault=kind,
            detector=Detector.EXCEPTION,
            root=root,
            phase=phase,
            step=message.step,
            evidence_ns=message.mono_ns,
            exception_type=message.exception_type,
            frame=message.frame,
            message=message.message,
        )

    def _event(self, fault: RootFault, mark: str) -> FaultDetected:
        rank = None if fault.root is None else fault.root.rank
        return FaultDetected(
            fault=fault.fault,
            detector=fault.detector,
            phase=fault.phase,
            step=fault.step,
            high_water=self._commits.high_water,
            evidence_ns=self._job.wall_ns(fault.evidence_ns),
            exception_type=fault.exception_type,
            frame=fault.frame,
            message=fault.message,
            fingerprint=mark,
            exit_code=fault.exit_code,
            signal=fault.signal,
            pid=None if fault.root is None or not fault.root.pid else fault.root.pid,
            device=self._job.device(rank),
            hot_sealed_step=self._sealed_step(),
        )
