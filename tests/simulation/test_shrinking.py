"""Worlds that become smaller: the same machine, seeds, and a device that is bad for good."""

from __future__ import annotations

import pytest

from nvrx_sre.core.limits import CapLimits, Limits
from nvrx_sre.core.rng import seeded
from nvrx_sre.events.schema import GenerationFormed, Phase, RankExcluded, Record, SaveVerified, StateRestored
from nvrx_sre.testing.checkers import check_liveness, check_safety
from nvrx_sre.testing.world import World
from nvrx_sre.testing.world_plan import SIMULATED_LIMITS, SimFault, SimKind, SwarmOptions, WorldConfig, draw_scenario

NUM_SEEDS = 60
QUICK = Limits(deadlines=SIMULATED_LIMITS.deadlines, caps=CapLimits(backoff_s=(0.0, 1.0)))


def of_type(world: World, kind: type) -> list[Record]:
    """Records of an event type."""
    return [record for record in world.records if isinstance(record.event, kind)]


def bad_device(rank: int, step: int) -> SimFault:
    """The rank's process is killed each of three times it comes to the step."""
    return SimFault(kind=SimKind.SIGKILL, rank=rank, step=step, times=3)


def checked(seed: int, config: WorldConfig, plan: list[SimFault]) -> World:
    """A whole job, safe and alive to its end."""
    world = World(seed, config, plan)
    exit_code = world.run_job()
    assert world.violations == [], f"seed {seed}"
    assert check_safety(world.records, config.limits.caps) == [], f"seed {seed}"
    assert check_liveness(world.records) == [], f"seed {seed}"
    assert exit_code == 0, f"seed {seed}"
    return world


def test_smaller_world_ends_with_the_state_of_an_uninterrupted_run() -> None:
    """Every rank checks its last state against an oracle; what was sealed at the exclusion is what is restored."""
    config = WorldConfig(num_ranks=4, min_world_size=2, limits=QUICK, drop_rate=0.0)
    world = checked(1, config, [bad_device(1, 20)])
    assert [record.event.device for record in of_type(world, RankExcluded)] == ["host0/1"]
    assert [record.event.world_size for record in of_type(world, GenerationFormed)] == [4, 4, 4, 3]
    restored = of_type(world, StateRestored)[-1]
    saved = [record.event.step for record in of_type(world, SaveVerified) if record.seq < restored.seq]
    assert (restored.event.step, restored.event.source) == (saved[-1], "durable")
    assert saved[-1] >= 18, "at most the step whose copy the death cut short is lost"


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 20))
def test_shrinking_is_safe_under_fault_mixes(first: int) -> None:
    """A bad device, and whatever else the seed draws: before, during and after the world becomes smaller."""
    num_excluded = 0
    for seed in range(first, first + 20):
        rng = seeded(seed)
        num_ranks = rng.choice((2, 3, 4, 6))
        multiple = 2 if num_ranks % 2 == 0 and num_ranks > 2 and rng.random() < 0.5 else 1
        config = WorldConfig(
            num_ranks=num_ranks,
            min_world_size=multiple,
            world_multiple=multiple,
            num_standbys=rng.choice((0, 1, 2)),
            limits=QUICK,
        )
        bad = bad_device(rng.randrange(num_ranks), rng.randint(2, 30))
        plan = [bad, *draw_scenario(seed, SwarmOptions(num_ranks=num_ranks)).faults]
        num_excluded += len(of_type(checked(seed, config, plan), RankExcluded))
    assert num_excluded >= 10, "the seeds reach too few exclusions to say much about them"


@pytest.mark.parametrize("kind", [SimKind.SIGKILL, SimKind.HANG, SimKind.WRITER_KILL, SimKind.LAUNCHER_KILL])
@pytest.mark.parametrize("phase", [Phase.RENDEZVOUS, Phase.LOAD, Phase.FIRST_STEP, Phase.STEP])
def test_second_fault_around_the_exclusion(kind: SimKind, phase: Phase) -> None:
    """In the first generation of the smaller world something else breaks: it recovers, in a smaller world still."""
    config = WorldConfig(num_ranks=3, min_world_size=2, num_standbys=1, limits=QUICK)
    second = SimFault(kind=kind, rank=0, step=20, phase=phase, times=4)
    world = checked(5, config, [bad_device(2, 20), second])
    assert len(of_type(world, RankExcluded)) <= 1
