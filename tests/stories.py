"""Hand-written journals with known answers, in seconds after an arbitrary start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nvrx_sre.core.clock import to_ns
from nvrx_sre.events.schema import (
    Action,
    CheckpointRejected,
    Detector,
    Event,
    FaultClass,
    FaultDetected,
    GenerationFormed,
    InterruptRaised,
    LauncherStarted,
    LauncherStopped,
    Layer,
    Phase,
    PhaseEntered,
    Record,
    RejectReason,
    RestartDecided,
    RestoredFrom,
    RolledBack,
    RunFinished,
    RunStarted,
    SaveCommitted,
    SaveFailed,
    SaveFailure,
    SaveSealed,
    SaveStarted,
    SaveVerified,
    SaveWritten,
    StateRestored,
    StepKind,
    StepsCommitted,
    TeardownFinished,
    Tier,
)
from nvrx_sre.goodput.incidents import IncidentTracker

RUN = "demo"
START_S: float = 1_700_000_000


def ns(at_s: float) -> int:
    """Wall time (ns) of a moment of the story."""
    return to_ns(START_S) + to_ns(at_s)


class Story:
    """Collects records. Live, the follow-ups of the incident tracker are recorded where they arise."""

    def __init__(self, *, live: bool = True) -> None:
        self.records: list[Record] = []
        self.epoch = 1
        self.generation = 0
        self.high_water = 0
        self._live = live
        self._seq = 0
        self._tracker = IncidentTracker(RUN)

    def add(self, at_s: float, event: Event, rank: int | None = None) -> None:
        """Record `event` at `at_s`."""
        self._seq += 1
        record = Record(
            run=RUN,
            epoch=self.epoch,
            generation=self.generation,
            rank=rank,
            seq=self._seq,
            time_ns=ns(at_s),
            event=event,
        )
        self.records.append(record)
        for follow_up, root in self._tracker.apply(record):
            if self._live:
                self.add(at_s, follow_up, root)

    def start(self, at_s: float, *, world: int = 2) -> None:
        """A launcher took the next epoch, its workers are starting."""
        if self.records:
            self.epoch += 1
            self._seq = 0
        self.add(at_s, LauncherStarted(node="n1", pid=7, start_ticks=1, metrics_port=9))
        self.add(
            at_s,
            RunStarted(
                nproc=world,
                min_world_size=1,
                save_every_steps=10,
                hot_every_steps=1,
                config_digest="abc",
                versions={"nvrx_sre": "0", "python": "3", "torch": "2"},
                limits={"deadlines.step_s": 45.0},
                resumed=self.epoch > 1,
                fresh=False,
            ),
        )
        self.phase(at_s, Phase.INIT)

    def phase(self, at_s: float, phase: Phase, ranks: tuple[int, ...] = (0, 1)) -> None:
        """The ranks entered `phase` at once."""
        for rank in ranks:
            self.add(at_s, PhaseEntered(phase=phase, entered_ns=ns(at_s)), rank)

    def form(self, go_s: float, step: int, source: RestoredFrom, *, world: int = 2) -> float:
        """Go, 0.1 s rendezvous, 0.1 s rebuild, 0.2 s load; returns when the first step begins."""
        self.generation += 1
        self.phase(go_s, Phase.RENDEZVOUS, tuple(range(world)))
        formed_s = go_s + 0.1
        self.add(formed_s, GenerationFormed(world_size=world, go_ns=ns(go_s), pids=list(range(world))))
        self.phase(formed_s, Phase.REBUILD, tuple(range(world)))
        self.phase(formed_s + 0.1, Phase.LOAD, tuple(range(world)))
        if source is not RestoredFrom.FRESH:
            self.add(formed_s + 0.1, RolledBack(step=step, high_water=self.high_water, source=source))
        begin_s = formed_s + 0.3
        self.add(begin_s, StateRestored(step=step, source=source, restored_ns=ns(begin_s), seconds=0.2))
        self.phase(begin_s, Phase.FIRST_STEP, tuple(range(world)))
        return begin_s

    def steps(self, started_s: float, committed_s: float, first: int, last: int, **changes: Any) -> None:
        """Steps `first..last` were committed, sealed hot, 100 tokens each."""
        event = StepsCommitted(
            kind=StepKind.NEW if first > self.high_water else StepKind.REDONE,
            first_step=first,
            last_step=last,
            started_ns=ns(started_s),
            committed_ns=ns(committed_s),
            step_s=committed_s - started_s,
            data_s=0.0,
            checkpoint_block_s=0.0,
            evaluate_s=0.0,
            tokens=100 * (last - first + 1),
            loss=1.0 / last,
            hot_sealed_step=last,
            hot_captured=last - first + 1,
            hot_skipped=0,
        )
        self.high_water = max(self.high_water, last)
        self.add(committed_s, replace(event, **changes))

    def fault(
        self,
        evidence_s: float,
        detected_s: float,
        fault: FaultClass,
        rank: int | None,
        *,
        layer: Layer = Layer.IN_PROCESS,
        **changes: Any,
    ) -> None:
        """A fault was detected and a restart decided; survivors are interrupted."""
        detector = {FaultClass.KILLED: Detector.DEATH, FaultClass.HANG: Detector.DEADLINE}
        event = FaultDetected(
            fault=fault,
            detector=detector.get(fault, Detector.EXCEPTION),
            phase=Phase.STEP,
            step=self.high_water + 1,
            high_water=self.high_water,
            evidence_ns=ns(evidence_s),
            exception_type="RuntimeError" if fault is FaultClass.EXCEPTION else "",
            frame="train.py:7 train",
            message="boom",
            fingerprint="f",
            exit_code=None,
            signal=9 if fault is FaultClass.KILLED else None,
            pid=4,
            device="n1/0",
        )
        self.add(detected_s, replace(event, **changes), rank)
        self.decide(detected_s, layer)
        self.add(detected_s, InterruptRaised(ranks=[0, 1]))

    def decide(self, at_s: float, layer: Layer, action: Action = Action.RESTART, **changes: Any) -> None:
        """The policy decided."""
        event = RestartDecided(
            action=action,
            layer=layer,
            reason="because",
            backoff_s=0.0,
            exit_code=None,
            restarts_since_progress=1,
            checkpoints_back=0,
            budget_used={"consecutive": 1},
            budget_limit={"consecutive": 3},
        )
        self.add(at_s, replace(event, **changes))

    def torn_down(self, at_s: float) -> None:
        """Every rank has left the generation."""
        self.add(at_s, TeardownFinished(kept=[0], killed=[]))

    def save(self, at_s: float, step: int) -> None:
        """A durable save from seal to verification, 0.1 s a stage."""
        self.add(at_s, SaveSealed(step=step, sealed_ns=ns(at_s - 0.1)))
        self.add(at_s, SaveStarted(step=step, tier=Tier.DURABLE, captured_ns=ns(at_s - 0.1)))
        self.add(at_s + 0.1, SaveWritten(step=step, size_bytes=10, seconds=0.1))
        directory = f"step-{step:08d}-g00001"
        self.add(
            at_s + 0.2,
            SaveCommitted(step=step, directory=directory, size_bytes=10, seconds=0.2, captured_ns=ns(at_s - 0.1)),
        )
        self.add(at_s + 0.3, SaveVerified(step=step, directory=directory, seconds=0.1, captured_ns=ns(at_s - 0.1)))

    def fail_save(self, at_s: float, step: int) -> None:
        """A durable save found no room."""
        self.add(at_s, SaveStarted(step=step, tier=Tier.DURABLE, captured_ns=ns(at_s - 0.1)))
        failed = SaveFailed(
            step=step, tier=Tier.DURABLE, reason=SaveFailure.NO_SPACE, message="no space left on device"
        )
        self.add(at_s + 0.1, failed)

    def reject(self, at_s: float, step: int) -> None:
        """A durable checkpoint was found broken."""
        self.add(
            at_s,
            CheckpointRejected(
                step=step,
                tier=Tier.DURABLE,
                directory="d",
                reason=RejectReason.SIZE,
                message="truncated",
                moved_to="rejected/d",
            ),
        )

    def finish(self, at_s: float, exit_code: int = 0) -> None:
        """The run reached a terminal state and the launcher left."""
        result = {"loss_digest": "aa", "samples_digest": "bb", "state_digest": "cc", "final_loss": 0.5}
        self.add(at_s, RunFinished(exit_code=exit_code, reason="end", step=self.high_water, result=result))
        self.add(at_s, LauncherStopped(exit_code=exit_code, reason="end"))


def begin(*, live: bool = True) -> tuple[Story, float]:
    """Two ranks: 2 s init, 0.5 s to the first step; returns the story and that moment (2.4)."""
    story = Story(live=live)
    story.start(0.0)
    return story, story.form(2.0, 0, RestoredFrom.FRESH)


def exception_story(*, live: bool = True) -> Story:
    """Ten steps in 10 s, rank 1 raises 0.5 s into step 11, detected 0.1 s later, one step of 1 s, the end."""
    story, begin_s = begin(live=live)
    story.steps(begin_s, 12.4, 1, 10, data_s=1.0, checkpoint_block_s=0.5, step_s=8.5)
    story.fault(12.9, 13.0, FaultClass.EXCEPTION, 1)
    story.torn_down(13.2)
    again_s = story.form(13.2, 10, RestoredFrom.HOT)
    story.steps(again_s, 14.6, 11, 11)
    story.finish(15.0)
    return story


def fallback_story(*, live: bool = True) -> Story:
    """Durable saves at 10 and 20; all ranks are killed at 25; 20 is broken, so 11..25 are done again."""
    story, begin_s = begin(live=live)
    story.steps(begin_s, 12.4, 1, 10)
    story.save(12.5, 10)
    story.steps(12.4, 22.4, 11, 20)
    story.save(22.5, 20)
    story.steps(22.4, 27.4, 21, 25)
    story.fault(27.5, 27.6, FaultClass.KILLED, None, layer=Layer.WORKER)
    story.torn_down(27.7)
    story.phase(27.7, Phase.INIT)
    story.reject(30.0, 20)
    again_s = story.form(30.0, 10, RestoredFrom.DURABLE)
    story.steps(again_s, 45.4, 11, 25)
    story.steps(45.4, 46.4, 26, 26)
    story.finish(47.0)
    return story


def crash_loop_story(*, live: bool = True) -> Story:
    """Rank 1 raises at step 11 three times; the third time the policy stops the run."""
    story, begin_s = begin(live=live)
    story.steps(begin_s, 12.4, 1, 10)
    at_s = 12.4
    for _ in range(2):
        story.fault(at_s + 0.2, at_s + 0.3, FaultClass.EXCEPTION, 1)
        story.torn_down(at_s + 0.4)
        at_s = story.form(at_s + 0.4, 10, RestoredFrom.HOT)
    story.fault(at_s + 0.2, at_s + 0.3, FaultClass.EXCEPTION, 1)
    story.decide(at_s + 0.3, Layer.JOB, Action.STOP, exit_code=93)
    story.torn_down(at_s + 0.4)
    story.finish(at_s + 0.5, exit_code=93)
    return story


def lost_launcher_story(*, live: bool = True) -> Story:
    """Ten steps, a launcher that vanishes 0.5 s into step 11 and is back 100 s later; durable step 10."""
    story, begin_s = begin(live=live)
    story.steps(begin_s, 12.4, 1, 10)
    story.save(12.6, 10)
    story.start(112.9)
    again_s = story.form(114.9, 10, RestoredFrom.DURABLE)
    story.steps(again_s, 116.3, 11, 11)
    story.finish(117.0)
    return story


STORIES = {
    "exception": exception_story,
    "fallback": fallback_story,
    "crash_loop": crash_loop_story,
    "lost_launcher": lost_launcher_story,
}
