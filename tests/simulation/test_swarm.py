"""Swarms of seeds: whatever mix of faults a seed draws, no rule breaks and the job ends as if nothing had happened."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_sre.testing.simulation import (
    RARE_STATES,
    RARE_STATES_OF_HOSTS,
    RAREST_STATES,
    RAREST_STATES_OF_HOSTS,
    Outcome,
    simulate,
    simulate_seed,
)
from nvrx_sre.testing.world_plan import Scenario, SimFault, SimKind, SwarmOptions, WorldConfig, draw_scenario

ONE_HOST = SwarmOptions(num_ranks=8)
HOSTS = SwarmOptions(num_ranks=8, num_hosts=4)
NUM_SEEDS = 200
NUM_SEEDS_OF_HOSTS = 120
BATCH = 40
ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def swarm(first: int, options: SwarmOptions) -> tuple[Outcome, ...]:
    """Outcomes of a batch of seeds."""
    return tuple(simulate_seed(seed, options) for seed in range(first, first + BATCH))


def failed(outcomes: tuple[Outcome, ...]) -> dict[int, tuple[str, ...]]:
    """Problems by seed."""
    return {outcome.scenario.seed: outcome.problems for outcome in outcomes if outcome.problems}


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_fault_mixes_on_one_host(first: int) -> None:
    """Safety on every journal, and every job finishes with the state of an uninterrupted run."""
    assert failed(swarm(first, ONE_HOST)) == {}


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_OF_HOSTS, BATCH))
def test_fault_mixes_on_several_hosts(first: int) -> None:
    """The same with hosts that die, are cut off or have a slow link."""
    assert failed(swarm(first, HOSTS)) == {}


def test_rare_states_are_reached() -> None:
    """The seeds together pass through every state that matters; else the mixes above prove little."""
    reached: set[str] = set()
    for first in range(0, NUM_SEEDS, BATCH):
        reached.update(*(outcome.reached for outcome in swarm(first, ONE_HOST)))
    for first in range(0, NUM_SEEDS_OF_HOSTS, BATCH):
        reached.update(*(outcome.reached for outcome in swarm(first, HOSTS)))
    assert [state for state in (*RARE_STATES, *RARE_STATES_OF_HOSTS) if state not in reached] == []


@pytest.mark.slow
def test_the_rarest_states_are_reached_by_thousands_of_seeds() -> None:
    """As many seeds as it takes, each of them sound."""
    missing = {*RAREST_STATES, *RAREST_STATES_OF_HOSTS}
    for seed in range(10_000, 14_000):
        outcome = simulate_seed(seed, HOSTS if seed % 2 else ONE_HOST)
        assert outcome.problems == (), f"seed {seed}"
        missing -= outcome.reached
        if not missing:
            break
    assert missing == set()


def test_each_seed_enables_its_own_kinds() -> None:
    """A swarm: no kind is in all seeds, every kind is in some, and a seed's faults are of its kinds alone."""
    scenarios = [draw_scenario(seed, HOSTS) for seed in range(200)]
    enabled = [set(scenario.kinds) for scenario in scenarios]
    assert set.union(*enabled) == set(SimKind) - {SimKind.USER_ERROR}
    assert set.intersection(*enabled) == set()
    assert all({fault.kind for fault in item.faults} <= set(item.kinds) for item in scenarios)
    assert any(not item.faults for item in scenarios), "some seeds run undisturbed"


@pytest.mark.processes
def test_same_seed_gives_the_same_journal_byte_for_byte() -> None:
    """In this process and in another one with other hashes; another seed gives another journal."""
    here = [simulate_seed(seed, HOSTS).journal_sha256 for seed in (7, 8, 9)]
    assert [simulate_seed(seed, HOSTS).journal_sha256 for seed in (7, 8, 9)] == here
    assert len(set(here)) == 3
    program = (
        "from nvrx_sre.testing.simulation import simulate_seed as run\n"
        "from nvrx_sre.testing.world_plan import SwarmOptions\n"
        "print(*[run(seed, SwarmOptions(num_ranks=8, num_hosts=4)).journal_sha256 for seed in (7, 8, 9)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == here


def test_hundreds_of_ranks_recover() -> None:
    """Size changes nothing: one death among 512 ranks on 64 hosts replaces one process."""
    config = WorldConfig(num_ranks=512, num_hosts=64, num_steps=6, num_standbys=0)
    faults = (SimFault(kind=SimKind.SIGKILL, rank=350, step=4),)
    outcome, world = simulate(Scenario(seed=1, config=config, kinds=(SimKind.SIGKILL,), faults=faults))
    assert outcome.problems == ()
    replaced = [record.rank for record in world.records if type(record.event).__name__ == "RankReplaced"]
    assert replaced == [350]
    assert outcome.num_faults == 1
