"""Ten thousand histories: attempts without progress stay within the caps, progress never stops a run."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.core.rng import Generator, seeded
from nvrx_sre.events.schema import DEVICE_FAULTS, Action, FaultClass, Layer
from nvrx_sre.policy.classify import RULES, RetryClass
from nvrx_sre.policy.ladder import Decision
from nvrx_sre.policy.rehearsal import Rehearsal, World

NUM_HISTORIES = 10_000
BATCH = 2_500
LIMITS = CapLimits()
CLASSES = tuple(FaultClass)
WAITING = frozenset(kind for kind, rule in RULES.items() if rule.retry in (RetryClass.TRANSIENT, RetryClass.NODE))
INCURABLE = frozenset({FaultClass.USER_ERROR})


@dataclass(kw_only=True)
class Recount:
    """What the design says of attempts and progress, counted again without the policy's own history."""

    least_world: int
    faults: list[tuple[FaultClass, int]] = field(default_factory=list)
    """(class, time in ns) of the faults since progress."""
    has_progress: bool = True
    is_hot_lost: bool = False
    """The last fault, or its cure, took the hot tier with it."""
    num_excluded: int = 0
    num_preempted: int = 0
    is_newer_saved: bool = True

    def train(self, *, is_sealed: bool, is_saved: bool) -> None:
        self.has_progress |= is_saved or (is_sealed and not self.is_hot_lost)
        self.is_newer_saved |= is_saved

    def preempted(self, decision: Decision) -> None:
        self.num_preempted = 1 if self.is_newer_saved else self.num_preempted + 1
        self.is_newer_saved = False
        is_over = self.num_preempted >= LIMITS.preemption_attempts
        assert decision.exit_code == (ExitCode.DO_NOT_RESTART if is_over else ExitCode.PREEMPTED)

    def faulted(self, kind: FaultClass, run: Rehearsal, at_ns: int, decision: Decision) -> None:
        if self.has_progress:
            self.faults.clear()
        self.faults.append((kind, at_ns))
        num_attempts = len(self.faults)
        assert decision.restarts_since_progress == num_attempts
        if self.has_progress:
            assert (decision.action is Action.STOP) == (kind in INCURABLE), "a run with progress was stopped"
            assert decision.backoff_s == 0.0
        age_ns = at_ns - self.faults[0][1]
        is_in_grace = kind in WAITING and age_ns < to_ns(LIMITS.transient_grace_s)
        if decision.action is Action.RESTART and num_attempts >= LIMITS.consecutive_attempts:
            assert is_in_grace or decision.is_excluding, f"restart after {num_attempts} attempts"
        if decision.is_excluding:
            self.num_excluded += 1
        assert len(run.devices) >= self.least_world
        assert len(set(run.history.excluded)) == len(run.history.excluded) == self.num_excluded
        assert (decision.layer is Layer.JOB) == (decision.action is Action.STOP)
        self.has_progress = False
        self.is_hot_lost = kind is FaultClass.NODE_LOST or decision.action is Action.STOP


def live(rng: Generator) -> Recount:
    """One run from its begin until it is stopped for good or long enough."""
    num_ranks = rng.choice((1, 2, 4, 8))
    multiple = rng.choice((1, 1, 2)) if num_ranks > 1 else 1
    least = multiple * rng.randint(1, num_ranks // multiple)
    run = Rehearsal(LIMITS, World(num_ranks=num_ranks, min_world_size=least, multiple=multiple))
    recount = Recount(least_world=least)
    enabled = [kind for kind in CLASSES if rng.random() < 0.4] or [FaultClass.KILLED]
    progress_rate = rng.choice((0.0, 0.1, 0.5))
    bad_device_rate = rng.choice((0.0, 0.8))
    for _ in range(rng.randint(3, 14)):
        if rng.random() < progress_rate:
            tiers = {"is_sealed": rng.random() < 0.5, "is_saved": rng.random() < 0.3}
            run.progress(rng.randint(1, 5), **tiers)
            recount.train(**tiers)
        run.wait(rng.choice((0.0, 0.1, 5.0, 60.0, 400.0, 2000.0)))
        kind, rank = rng.choice(enabled), rng.choice((None, *range(len(run.devices))))
        if rng.random() < bad_device_rate:
            kind, rank = rng.choice(sorted(DEVICE_FAULTS)), 0
        at_ns = run.now_ns
        decision = run.fault(kind, rank=rank, detail=rng.choice(("A", "B")))
        if kind is FaultClass.PREEMPTION:
            recount.preempted(decision)
        else:
            recount.faulted(kind, run, at_ns, decision)
        if decision.exit_code in (ExitCode.DO_NOT_RESTART, ExitCode.CONFIG):
            break
    return recount


@pytest.mark.parametrize("first", range(0, NUM_HISTORIES, BATCH))
def test_ten_thousand_histories_keep_the_caps(first: int) -> None:
    """No attempt without progress above a cap, no run with progress stopped; each number is a seed of its own."""
    num_excluded = 0
    for seed in range(first, first + BATCH):
        try:
            num_excluded += live(seeded(seed)).num_excluded
        except AssertionError as error:
            raise AssertionError(f"history of seed {seed}: {error}") from error
    assert num_excluded > 100, "the histories reach too few exclusions to say much about them"
