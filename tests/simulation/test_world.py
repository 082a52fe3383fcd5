"""One fault, or a few, in a simulated world: what the machines make of them. Fault mixes: `test_swarm`."""

from __future__ import annotations

import pytest

from nvrx_sre.events.schema import (
    Action,
    FaultClass,
    FaultDetected,
    FaultInjected,
    HotIntervalChosen,
    Layer,
    Phase,
    RankReplaced,
    Record,
    RestartDecided,
    RolledBack,
    RunFinished,
    SaveCommitted,
    SaveFailed,
    SaveVerified,
    StateRestored,
    StepsCommitted,
    WorkerExited,
)
from nvrx_sre.testing.checkers import check_liveness, check_safety
from nvrx_sre.testing.world import World
from nvrx_sre.testing.world_plan import SimFault, SimKind, WorldConfig


def run_with(*faults: SimFault, seed: int = 1, **config: object) -> World:
    """One launcher with these faults."""
    world = World(seed, WorldConfig(**config), faults)  # type: ignore[arg-type]  # keyword arguments of the config
    world.run()
    assert world.violations == []
    assert check_safety(world.records) == []
    assert check_liveness(world.records) == []
    return world


def of_type(world: World, kind: type) -> list[Record]:
    """Records of an event type."""
    return [record for record in world.records if isinstance(record.event, kind)]


def end(world: World) -> int:
    """Exit code of the run."""
    finished = of_type(world, RunFinished)[-1].event
    assert isinstance(finished, RunFinished)
    return finished.exit_code


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_in_mid_copy_costs_one_step(rank: int) -> None:
    """The rank dies with its slot half filled: the step before is restored; once the copy is done, none is lost."""
    lost = []
    for seed in range(12):
        world = run_with(SimFault(kind=SimKind.SIGKILL, rank=rank, step=20), seed=seed, drop_rate=0.0, save_every=1000)
        restored = [record.event for record in of_type(world, StateRestored)][-1]
        assert isinstance(restored, StateRestored)
        assert restored.source == "hot"
        lost.append(19 - restored.step)
    assert set(lost) == {0, 1}


@pytest.mark.parametrize("kind", [SimKind.EXCEPTION, SimKind.HANG])
def test_an_interrupt_lets_the_copy_finish(kind: SimKind) -> None:
    """Nobody died: the newest committed step is sealed by the time the ranks are ready, and nothing is redone."""
    for seed in range(12):
        world = run_with(SimFault(kind=kind, rank=1, step=20), seed=seed, drop_rate=0.0, save_every=1000)
        assert not of_type(world, RolledBack), f"seed {seed}"


@pytest.mark.parametrize("kind", [SimKind.EXCEPTION, SimKind.SIGKILL])
def test_a_step_sealed_by_a_rank_that_never_reported_it_is_counted_once(kind: SimKind) -> None:
    """The fault ends a peer between its seal and its report: the step is restored, so it is committed before that."""
    num_proven = 0
    for seed in range(16):
        world = run_with(SimFault(kind=kind, rank=1, step=20), seed=seed, late_report_rate=1.0, save_every=1000)
        steps = [record for record in of_type(world, StepsCommitted) if record.event.kind == "new"]  # type: ignore[attr-defined]  # of_type filters by class
        counted = [
            step
            for record in steps
            for step in range(record.event.first_step, record.event.last_step + 1)  # type: ignore[attr-defined]  # of_type filters by class
        ]
        assert counted == list(range(1, 41)), f"seed {seed}"
        for record in steps:
            if record.event.proven_by_restore:  # type: ignore[attr-defined]  # of_type filters by class
                num_proven += 1
                assert isinstance(world.records[record.seq].event, StateRestored), f"seed {seed}"
                assert not of_type(world, RolledBack), f"seed {seed}"
    assert num_proven > 0


@pytest.mark.parametrize(("cost_s", "every"), [(0.0, 1), (0.0004, 1), (0.0009, 2), (0.005, 10), (0.02, 40)])
def test_the_hot_interval_follows_the_cost_of_a_capture(cost_s: float, every: int) -> None:
    """A step takes 50 ms: the interval is the smallest over which a capture costs at most 1 %."""
    world = run_with(num_steps=160, hot_every=None, capture_cost_s=cost_s, save_every=1000)
    chosen = [record.event for record in of_type(world, HotIntervalChosen)]
    assert chosen[-1].every_steps == every  # type: ignore[attr-defined]  # of_type filters by class
    assert end(world) == 0


def test_c34_steps_that_nothing_keeps_are_no_progress() -> None:
    """Nothing is captured and each start fails at step 30: H stays at 29, further steps are redone, the run stops."""
    world = run_with(SimFault(kind=SimKind.EXCEPTION, rank=0, step=30, times=0), hot_every=0, save_every=1000)
    assert end(world) == 93
    decisions = [record.event for record in of_type(world, RestartDecided)]
    assert [item.restarts_since_progress for item in decisions if isinstance(item, RestartDecided)] == [1, 2, 3]
    steps = [record.event for record in of_type(world, StepsCommitted)]
    assert sum(item.last_step - item.first_step + 1 for item in steps if item.kind == "new") == 29  # type: ignore[attr-defined]  # of_type filters by class
    assert sum(item.last_step - item.first_step + 1 for item in steps if item.kind == "redone") == 58  # type: ignore[attr-defined]  # of_type filters by class


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "fault", "layer"),
    [
        (SimKind.EXCEPTION, FaultClass.EXCEPTION, Layer.IN_PROCESS),
        (SimKind.SIGKILL, FaultClass.KILLED, Layer.WORKER),
        (SimKind.HANG, FaultClass.HANG, Layer.IN_PROCESS),
        (SimKind.HANG_NATIVE, FaultClass.HANG, Layer.IN_PROCESS),
        (SimKind.SIGSTOP, FaultClass.HANG, Layer.WORKER),
        (SimKind.NODE_KILL, FaultClass.NODE_LOST, Layer.WORKER),
    ],
)
def test_c47_c48_one_fault_has_one_root(kind: SimKind, fault: FaultClass, layer: Layer, rank: int) -> None:
    """Whatever the victims report, the fault is the culprit's, once; rank 0 is like any other rank."""
    world = run_with(SimFault(kind=kind, rank=rank, step=12), num_ranks=3, drop_rate=0.0)
    detected = of_type(world, FaultDetected)
    assert [(record.rank, record.event.fault) for record in detected] == [(rank, fault)]  # type: ignore[attr-defined]  # of_type filters by class
    decided = of_type(world, RestartDecided)[0].event
    assert isinstance(decided, RestartDecided)
    assert decided.layer is layer
    assert end(world) == 0


@pytest.mark.parametrize(("kind", "num_replaced"), [(SimKind.EXCEPTION, 0), (SimKind.HANG, 0), (SimKind.SIGKILL, 1)])
def test_processes_are_kept_or_exactly_one_is_new(kind: SimKind, num_replaced: int) -> None:
    """In process: every pid stays. A death: exactly one rank gets a new process."""
    world = run_with(SimFault(kind=kind, rank=1, step=12), num_ranks=4)
    assert len(of_type(world, RankReplaced)) == num_replaced


def test_c30_stopped_peer_is_noticed_by_its_silence() -> None:
    """A SIGSTOPped rank is the root and is replaced; the others are kept."""
    world = run_with(SimFault(kind=SimKind.SIGSTOP, rank=1, step=12), num_ranks=3)
    replaced = of_type(world, RankReplaced)
    assert [record.rank for record in replaced] == [1]


def test_hang_in_native_code_escalates_that_rank_only() -> None:
    """No acknowledgement within the grace: the one rank is killed, its peers go on in process."""
    world = run_with(SimFault(kind=SimKind.HANG_NATIVE, rank=2, step=12), num_ranks=3)
    assert [record.rank for record in of_type(world, RankReplaced)] == [2]


def test_our_own_kills_are_never_faults() -> None:
    """No fault names a process that the launcher killed."""
    for kind in (SimKind.HANG_NATIVE, SimKind.NODE_KILL, SimKind.UNFIT):
        world = run_with(SimFault(kind=kind, rank=0, step=12), SimFault(kind=SimKind.EXCEPTION, rank=1, step=20))
        blamed = {record.event.pid for record in of_type(world, FaultDetected)}  # type: ignore[attr-defined]  # of_type filters by class
        deaths = {
            record.event.pid  # type: ignore[attr-defined]  # of_type filters by class
            for record in of_type(world, WorkerExited)
            if record.event.expected  # type: ignore[attr-defined]  # of_type filters by class
        }
        assert len(of_type(world, FaultDetected)) == (1 if kind is SimKind.UNFIT else 2)
        assert deaths and world.kills_ns.keys() & deaths
        assert blamed


@pytest.mark.parametrize("phase", [Phase.RENDEZVOUS, Phase.REBUILD, Phase.LOAD, Phase.FIRST_STEP])
@pytest.mark.parametrize("kind", [SimKind.SIGKILL, SimKind.EXCEPTION, SimKind.HANG])
def test_c37_second_fault_during_recovery(phase: Phase, kind: SimKind) -> None:
    """A fault before the new generation has progressed is a further attempt of one continuing job."""
    world = run_with(
        SimFault(kind=SimKind.SIGKILL, rank=0, step=12),
        SimFault(kind=kind, rank=1, step=2, phase=phase)
        if phase is Phase.FIRST_STEP
        else SimFault(kind=kind, rank=1, step=1, phase=phase, times=2),
        num_ranks=3,
    )
    assert end(world) == 0
    assert len(of_type(world, FaultDetected)) >= 2 or phase in (Phase.REBUILD, Phase.FIRST_STEP)


def test_c35_crash_loop_stops_at_the_cap() -> None:
    """An exception on every pass ends the run with 93 after few attempts."""
    world = run_with(SimFault(kind=SimKind.EXCEPTION, rank=1, step=12, times=0))
    assert end(world) == 93
    assert len(of_type(world, FaultDetected)) <= 6


def test_kill_on_every_pass_backs_off_and_ends() -> None:
    """A transient class is given five minutes of back-off before the run is stopped."""
    world = run_with(SimFault(kind=SimKind.SIGKILL, rank=1, step=12, times=0))
    decisions = [record.event for record in of_type(world, RestartDecided)]
    waits = [item.backoff_s for item in decisions if isinstance(item, RestartDecided)]
    assert end(world) == 93
    assert max(waits) == 120.0
    assert len(waits) <= 9


def test_c39_six_faults_with_progress_all_recover() -> None:
    """Faults far apart never add up, and neither the hot tier nor the durable one loses a step."""
    faults = [SimFault(kind=SimKind.SIGKILL, rank=step // 5 % 2, step=step) for step in range(5, 40, 6)]
    world = run_with(*faults)
    assert end(world) == 0
    decisions = [record.event for record in of_type(world, RestartDecided)]
    assert all(item.action is Action.RESTART for item in decisions if isinstance(item, RestartDecided))
    assert len(decisions) == len(faults)


def test_restart_of_the_launcher_refills_no_budget() -> None:
    """Two attempts under one launcher, the launcher killed: the next fault is the third attempt."""
    world = World(
        3,
        WorldConfig(drop_rate=0.0, save_every=100),
        [
            SimFault(kind=SimKind.EXCEPTION, rank=0, step=1, times=2),
            SimFault(kind=SimKind.LAUNCHER_KILL, rank=0, step=1, times=1),
            SimFault(kind=SimKind.EXCEPTION, rank=0, step=1, phase=Phase.STEP, times=0),
        ],
    )
    codes = [world.run(), world.run()]
    assert codes[-1] == 93
    assert len([record for record in world.records if isinstance(record.event, FaultDetected)]) == 3


def test_preemption_saves_the_newest_sealed_step() -> None:
    """SIGTERM in mid-run: the newest step sealed by all is durable at the end, exit 143."""
    world = run_with(SimFault(kind=SimKind.SIGTERM, rank=0, step=13), save_every=100)
    assert end(world) == 143
    committed = [record.event for record in of_type(world, SaveCommitted)]
    steps = [record.event.hot_sealed_step for record in of_type(world, StepsCommitted)]  # type: ignore[attr-defined]  # of_type filters by class
    assert isinstance(committed[-1], SaveCommitted)
    assert committed[-1].step == steps[-1]
    assert of_type(world, SaveVerified)


def test_halt_drains_and_stays_stopped() -> None:
    """A halt request: the newest sealed step is saved, exit 93."""
    world = run_with(SimFault(kind=SimKind.HALT, rank=0, step=13), save_every=100)
    assert end(world) == 93
    assert of_type(world, SaveVerified)


def test_writer_death_redoes_the_held_save() -> None:
    """The slots are still held, so the same step is written again by the next writer."""
    world = run_with(SimFault(kind=SimKind.WRITER_KILL, rank=0, step=22), save_every=20)
    failed = [record.event for record in of_type(world, SaveFailed)]
    committed = [record.event for record in of_type(world, SaveCommitted)]
    assert [item.step for item in failed if isinstance(item, SaveFailed)] == [20]
    assert isinstance(committed[0], SaveCommitted)
    assert committed[0].step == 20


def test_handed_over_save_survives_the_death_of_every_worker() -> None:
    """All ranks are killed right after the hand-over; the save still commits."""
    world = run_with(SimFault(kind=SimKind.SIGKILL_ALL, rank=0, step=22), num_ranks=3, save_every=20)
    committed = [record.event for record in of_type(world, SaveCommitted)]
    assert isinstance(committed[0], SaveCommitted)
    assert committed[0].step == 20
    assert len(of_type(world, FaultDetected)) == 1


def test_node_kill_falls_back_to_the_durable_tier() -> None:
    """Every hot slot is lost: the run goes back, says so, and still ends in the same state."""
    world = run_with(SimFault(kind=SimKind.NODE_KILL, rank=1, step=79), num_steps=90)
    rolled_back = of_type(world, RolledBack)[0].event
    assert isinstance(rolled_back, RolledBack)
    assert rolled_back.source == "durable"
    assert rolled_back.step < rolled_back.high_water


def test_broken_links_without_a_death_have_no_root() -> None:
    """Communication errors that nothing explains are one collective error of unknown origin."""
    world = run_with(SimFault(kind=SimKind.LINK_FLAP, rank=0, step=12), num_ranks=3)
    detected = of_type(world, FaultDetected)
    assert [(record.rank, record.event.fault) for record in detected] == [(None, FaultClass.COLLECTIVE_ERROR)]  # type: ignore[attr-defined]  # of_type filters by class
    assert not of_type(world, RankReplaced)


def test_user_error_ends_at_once() -> None:
    """Exit 78 without a restart."""
    world = run_with(SimFault(kind=SimKind.USER_ERROR, rank=0, step=3))
    assert end(world) == 78
    assert len(of_type(world, FaultDetected)) == 1
    assert not of_type(world, FaultInjected)
