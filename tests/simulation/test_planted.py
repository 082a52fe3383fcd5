"""Mutation check of the simulation: bugs that are planted in the machines are found within a few seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_sre.testing.simulation import simulate_seed
from nvrx_sre.testing.world_plan import SwarmOptions
from tests.simulation.planted import PLANTED, Planted

MAX_SEEDS = 1000
"""Seeds within which each bug must show; most show within five, the rarest in one of about 200."""
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "simulation.md"


def seeds_until_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Seeds it takes, and the first problem of the one that finds it."""
    planted.plant(monkeypatch)
    options = SwarmOptions(num_ranks=4, num_hosts=planted.num_hosts)
    for seed in range(MAX_SEEDS):
        problems = simulate_seed(seed, options).problems
        if problems:
            return seed + 1, problems[0]
    return 0, ""


def name_of(planted: Planted) -> str:
    """Name of the case."""
    return f"{planted.machine}: {planted.bug}"


@pytest.mark.parametrize("planted", [item for item in PLANTED if item.is_quick], ids=name_of)
def test_a_bug_in_each_machine_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each machine."""
    assert seeds_until_found(planted, monkeypatch)[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("planted", [item for item in PLANTED if not item.is_quick], ids=name_of)
def test_every_planted_bug_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the others."""
    assert seeds_until_found(planted, monkeypatch)[0] > 0


def test_the_guide_lists_every_planted_bug() -> None:
    """A reader sees what the simulation is known to find."""
    rows = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    listed = {tuple(cell.strip() for cell in row.strip("|").split("|")[:2]) for row in rows}
    assert [name_of(item) for item in PLANTED if (item.machine, item.bug) not in listed] == []
