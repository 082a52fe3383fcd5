"""Decisions: caps, back-off, layers; for any history, not only for chosen ones."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events.codec import from_dict, to_dict
from nvrx_sre.events.schema import (
    Action,
    BudgetReset,
    Cap,
    Detector,
    Event,
    FaultClass,
    FaultDetected,
    Layer,
    Phase,
    Record,
    RestartDecided,
    SaveVerified,
    StepKind,
    StepsCommitted,
    TelemetryDegraded,
)
from nvrx_sre.policy.classify import RULES, RetryClass
from nvrx_sre.policy.history import History
from nvrx_sre.policy.ladder import Decision, PolicyFault, decide

LIMITS = CapLimits()
S = 1_000_000_000
WAITING = (RetryClass.TRANSIENT, RetryClass.NODE)


class Story:
    """A run as its journal tells it."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * S
        self.high_water = 0
        self.sealed = -1
        self.records: list[Record] = []
        self.history = History()

    def tell(self, event: Event) -> None:
        record = Record(
            run="r", epoch=1, generation=1, rank=0, seq=len(self.records) + 1, time_ns=self.now_ns, event=event
        )
        self.records.append(record)
        self.history.apply(record)

    def train(self, num_steps: int, *, sealed: bool = True) -> None:
        """Commit new steps; `sealed`: the hot tier holds the last one on every rank."""
        first, self.high_water = self.high_water + 1, self.high_water + num_steps
        self.sealed = self.high_water if sealed else self.sealed
        self.now_ns += S
        self.tell(
            StepsCommitted(
                kind=StepKind.NEW,
                first_step=first,
                last_step=self.high_water,
                started_ns=self.now_ns,
                committed_ns=self.now_ns,
                step_s=1.0,
                data_s=0.0,
                checkpoint_block_s=0.0,
                evaluate_s=0.0,
                tokens=1,
                loss=1.0,
                hot_sealed_step=self.sealed,
                hot_captured=1,
                hot_skipped=0,
            )
        )

    def save(self) -> None:
        """A durable commit of the newest step is verified."""
        self.tell(SaveVerified(step=self.high_water, directory="d", seconds=1.0, captured_ns=self.now_ns))

    def fault(
        self, kind: FaultClass = FaultClass.EXCEPTION, *, mark: str = "f", device: str = "n/0", after_s: float = 0.1
    ) -> Decision:
        """A fault and the decision on it, both recorded."""
        self.now_ns += round(after_s * S)
        decision = decide(
            self.history,
            PolicyFault(
                fault=kind, fingerprint=mark, high_water=self.high_water, device=device, hot_sealed_step=self.sealed
            ),
            self.now_ns,
            LIMITS,
        )
        self.tell(
            FaultDetected(
                fault=kind,
                detector=Detector.EXCEPTION,
                phase=Phase.STEP,
                step=self.high_water + 1,
                high_water=self.high_water,
                evidence_ns=self.now_ns,
                exception_type="E",
                frame="f",
                message="",
                fingerprint=mark,
                exit_code=None,
                signal=None,
                pid=1,
                device=device,
            )
        )
        self.tell(
            RestartDecided(
                action=decision.action,
                layer=decision.layer,
                reason=decision.reason,
                backoff_s=decision.backoff_s,
                exit_code=decision.exit_code,
                restarts_since_progress=decision.restarts_since_progress,
                checkpoints_back=decision.checkpoints_back,
                budget_used=decision.budget_used,
                budget_limit=decision.budget_limit,
            )
        )
        return decision


def started() -> Story:
    story = Story()
    story.train(10)
    return story


def test_first_fault_restarts_in_its_first_layer() -> None:
    """With progress before it a fault is restarted at once, in the layer of its class."""
    for kind, rule in RULES.items():
        if rule.first_layer is Layer.JOB:
            continue
        decision = started().fault(kind)
        assert decision.action is Action.RESTART
        assert decision.layer is rule.first_layer
        assert decision.backoff_s == 0.0
        assert decision.restarts_since_progress == 1


def test_c35_three_attempts_at_one_fingerprint() -> None:
    """The third attempt goes one checkpoint further back and replaces the process; then the run stops."""
    story = started()
    first, second, third = story.fault(), story.fault(), story.fault()
    assert (first.checkpoints_back, second.checkpoints_back) == (0, 1)
    assert (first.layer, second.layer) == (Layer.IN_PROCESS, Layer.WORKER)
    assert third.action is Action.STOP
    assert (third.cap, third.exit_code) == (Cap.SAME_FINGERPRINT, 93)


def test_different_fingerprints_stop_at_the_consecutive_cap() -> None:
    """Three faults in a row without progress are enough, even if each is another one."""
    story = started()
    decisions = [story.fault(mark=str(number), device=f"n/{number}") for number in range(3)]
    assert [item.action for item in decisions] == [Action.RESTART, Action.RESTART, Action.STOP]
    assert decisions[-1].cap is Cap.CONSECUTIVE


def test_c39_faults_with_progress_never_stop_a_run() -> None:
    """Fifty faults at one place, each after a sealed new step, are all restarted."""
    story = started()
    for _ in range(50):
        decision = story.fault(FaultClass.KILLED)
        assert (decision.action, decision.backoff_s) == (Action.RESTART, 0.0)
        story.train(1)


def test_c39_without_a_save_between_the_run_stops() -> None:
    """New steps that no tier holds are no progress: they are lost again at the next fault."""
    story = started()
    decisions = []
    for number in range(3):
        decisions.append(story.fault(mark=str(number)))
        story.train(5, sealed=False)
    assert decisions[-1].action is Action.STOP


def test_verified_durable_commit_is_progress_without_the_hot_tier() -> None:
    """A verified save above H-at-the-fault refills the budgets."""
    story = started()
    story.fault()
    story.fault()
    story.train(5, sealed=False)
    story.save()
    assert story.fault().restarts_since_progress == 1


def test_hot_slots_are_no_progress_after_a_lost_node() -> None:
    """What was sealed hot would not survive the same fault again; a verified save would."""
    story = started()
    story.fault(FaultClass.NODE_LOST)
    story.train(5)
    assert story.fault(FaultClass.NODE_LOST).restarts_since_progress == 2
    story.train(5)
    story.save()
    assert story.fault(FaultClass.NODE_LOST).restarts_since_progress == 1


def test_progress_that_is_not_in_the_journal_yet_counts() -> None:
    """The live sealed step is taken from the fault itself."""
    story = started()
    story.fault()
    story.high_water += 1
    story.sealed = story.high_water
    assert story.fault().restarts_since_progress == 1


def test_transient_faults_back_off_and_trip_only_after_the_grace() -> None:
    """0, 5, 30, 120, 120 s; a cap trips at the first fault five minutes after the first one."""
    story = started()
    waits: list[float] = []
    decision = story.fault(FaultClass.KILLED)
    while decision.action is Action.RESTART:
        waits.append(decision.backoff_s)
        decision = story.fault(FaultClass.KILLED, after_s=decision.backoff_s + 0.1)
    assert waits == [0.0, 5.0, 30.0, 120.0, 120.0, 120.0]
    assert decision.exit_code == 93


def test_link_flap_cannot_burn_the_caps() -> None:
    """Twenty recoveries within two seconds do not stop the run."""
    story = started()
    decisions = [story.fault(FaultClass.COLLECTIVE_ERROR) for _ in range(20)]
    assert all(item.action is Action.RESTART for item in decisions)


def test_nonfinite_is_retried_once_from_an_older_checkpoint() -> None:
    """One retry, from further back; the next one without progress stops the run."""
    story = started()
    first, second = story.fault(FaultClass.NONFINITE), story.fault(FaultClass.NONFINITE)
    assert (first.action, first.checkpoints_back) == (Action.RESTART, 1)
    assert (second.action, second.cap) == (Action.STOP, Cap.NONFINITE)


def test_a_step_back_is_told_as_what_it_is() -> None:
    """To an older checkpoint, to step 0 where none is durable, and not at all where nothing was trained."""
    fault = PolicyFault(fault=FaultClass.NONFINITE, fingerprint="f", high_water=10)
    durable = started()
    durable.history.durable_step = 8
    reasons = [decide(story.history, fault, 2_000 * S, LIMITS).reason for story in (durable, started())]
    assert reasons[0].endswith("; from an older checkpoint")
    assert reasons[1].endswith("; from step 0, no checkpoint is durable yet")
    nothing = decide(Story().history, dataclasses.replace(fault, high_water=0), 2_000 * S, LIMITS)
    assert nothing.reason == "nonfinite: first attempt since progress"


@pytest.mark.parametrize(("kind", "exit_code"), [(FaultClass.USER_ERROR, 78), (FaultClass.PREEMPTION, 143)])
def test_classes_that_no_restart_cures(kind: FaultClass, exit_code: int) -> None:
    """A user error and a preemption stop at once, without any cap."""
    decision = started().fault(kind)
    assert (decision.action, decision.layer, decision.exit_code) == (Action.STOP, Layer.JOB, exit_code)
    assert decision.cap is None


def test_c17_nothing_restorable_stops_for_good() -> None:
    """Commits on record and none loadable: 93, never a silent restart from scratch."""
    fault = PolicyFault(
        fault=FaultClass.CHECKPOINT_CORRUPT, fingerprint="f", high_water=10, exception_type="NothingRestorable"
    )
    decision = decide(started().history, fault, 2_000 * S, LIMITS)
    assert (decision.action, decision.exit_code) == (Action.STOP, 93)


def test_startup_failures_end_retryable() -> None:
    """Before the first step ever: a bounded back-off, then 75, and at once again after a new launcher."""
    story = Story()
    decisions = [story.fault(FaultClass.STARTUP) for _ in range(3)]
    assert [item.backoff_s for item in decisions[:2]] == [0.0, 5.0]
    assert (decisions[2].action, decisions[2].exit_code, decisions[2].cap) == (Action.STOP, 75, Cap.STARTUP)
    assert story.fault(FaultClass.STARTUP).action is Action.STOP


def test_exception_before_the_first_step_ends_the_job() -> None:
    """A bug that shows at every start is no matter of the node: 93."""
    story = Story()
    decisions = [story.fault() for _ in range(3)]
    assert (decisions[2].exit_code, decisions[2].cap) == (93, Cap.SAME_FINGERPRINT)


def test_unknown_progress_has_its_own_cap() -> None:
    """Where the journal lost records ten attempts are allowed, not three."""
    story = started()
    decisions = []
    for number in range(10):
        if number:
            story.tell(TelemetryDegraded(component="journal", dropped=number, errors=0))
        decisions.append(story.fault())
    assert [item.action for item in decisions] == [Action.RESTART] * 9 + [Action.STOP]
    assert decisions[-1].cap is Cap.UNKNOWN_PROGRESS


def test_resume_refills_the_budgets() -> None:
    """An operator's reset is the one other thing that refills."""
    story = started()
    for _ in range(3):
        story.fault()
    story.tell(BudgetReset(reason="looked at it"))
    assert story.fault().restarts_since_progress == 1


def test_replayed_journal_refills_nothing() -> None:
    """A new launcher reads the journal and stands where the old one stood."""
    story = started()
    story.fault()
    story.fault()
    story.history = History()
    for record in story.records:
        story.history.apply(from_dict(to_dict(record)))
    assert story.fault().action is Action.STOP


KINDS = st.sampled_from(list(FaultClass))
HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(st.just("fault"), KINDS, st.sampled_from(["a", "b"]), st.floats(0.0, 400.0)),
        st.tuples(st.just("train"), st.booleans()),
        st.tuples(st.just("save")),
        st.tuples(st.just("reset")),
    ),
    max_size=25,
)


def happen(story: Story, happenings: list[tuple[object, ...]]) -> None:
    for name, *details in happenings:
        if name == "fault":
            kind, mark, after_s = details
            story.fault(kind, mark=mark, after_s=after_s)  # type: ignore[arg-type]  # hypothesis draws them typed
        elif name == "train":
            story.train(3, sealed=bool(details[0]))
        elif name == "save":
            story.save()
        else:
            story.tell(BudgetReset(reason="r"))


@settings(max_examples=150, deadline=None)
@given(happenings=HAPPENINGS, kind=KINDS, layer=st.sampled_from(list(Layer)), can_exclude=st.booleans())
def test_decide_is_total(
    happenings: list[tuple[object, ...]], kind: FaultClass, layer: Layer, can_exclude: bool
) -> None:
    """Any class in any layer after any history gets one decision that makes sense, and the same one again."""
    story = Story()
    happen(story, happenings)
    fault = PolicyFault(
        fault=kind,
        fingerprint="a",
        high_water=story.high_water,
        device="n/0",
        min_layer=layer,
        can_exclude=can_exclude,
    )
    decision = decide(story.history, fault, story.now_ns, LIMITS)
    assert decision == decide(story.history, fault, story.now_ns, LIMITS)
    assert decision.reason
    assert (decision.exit_code is None) == (decision.action is Action.RESTART)
    assert (decision.layer is Layer.JOB) == (decision.action is Action.STOP)
    assert set(decision.budget_used) == set(decision.budget_limit) == {cap.value for cap in Cap} - {Cap.LIFETIME.value}
    assert decision.cap is None or decision.action is Action.STOP
    assert decision.event().is_capped is (decision.cap is not None)
    assert not decision.is_excluding or (can_exclude and decision.layer is Layer.WORKER)


@settings(max_examples=150, deadline=None)
@given(happenings=HAPPENINGS, kind=KINDS)
def test_decide_never_restarts_past_a_cap(happenings: list[tuple[object, ...]], kind: FaultClass) -> None:
    """A restart has room in every budget, unless it is a transient fault within its grace."""
    story = Story()
    happen(story, happenings)
    earlier = list(story.history.attempts)
    fresh = story.history.has_progress(story.sealed)
    decision = story.fault(kind)
    if decision.action is Action.STOP or fresh:
        return
    in_grace = RULES[kind].retry in WAITING and story.now_ns - earlier[0].time_ns < LIMITS.transient_grace_s * S
    over = {cap for cap, used in decision.budget_used.items() if used >= decision.budget_limit[cap]}
    assert not over or in_grace


@settings(max_examples=150, deadline=None)
@given(happenings=HAPPENINGS, kind=KINDS)
def test_decide_never_stops_a_run_with_progress(happenings: list[tuple[object, ...]], kind: FaultClass) -> None:
    """After a sealed and verified new step any curable fault is restarted without a wait."""
    story = Story()
    happen(story, happenings)
    story.train(1)
    story.save()
    decision = story.fault(kind)
    if RULES[kind].first_layer is not Layer.JOB:
        assert (decision.action, decision.backoff_s) == (Action.RESTART, 0.0)
        assert decision.restarts_since_progress == 1


@settings(max_examples=60, deadline=None)
@given(kinds=st.lists(KINDS, min_size=8, max_size=20))
def test_attempts_without_progress_are_bounded(kinds: list[FaultClass]) -> None:
    """Whatever the mix of classes, waiting as told, a run without progress ends after few attempts."""
    story = started()
    num_restarts = 0
    wait_s = 0.0
    for kind in kinds * 3:
        decision = story.fault(kind, after_s=wait_s + 1.0)
        if decision.action is Action.STOP:
            break
        num_restarts += 1
        wait_s = decision.backoff_s
    assert num_restarts <= 8
