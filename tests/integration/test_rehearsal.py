"""A standby that has rehearsed plans nothing as a rank, and is that rank: `rehearsing_standby` says how it is done."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def become_rank(mode: str) -> dict[str, Any]:
    """What a process of its own found."""
    command = [sys.executable, "-m", "tests.integration.rehearsing_standby", mode]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.fixture(scope="module")
def rehearsed() -> dict[str, Any]:
    """A standby that rehearsed as rank 0 and became rank 1."""
    return become_rank("rehearse")


def test_what_was_rehearsed_is_not_planned_again(rehearsed: dict[str, Any]) -> None:
    """Build, optimizer state and its first step need no plan, where a standby that did not rehearse makes each."""
    fresh = become_rank("fresh")
    assert fresh["num_rehearsed"] == 0 and "aten._fused_adamw_.default" in fresh["planned"]
    assert rehearsed["num_rehearsed"] > 0 and rehearsed["planned"] == []


def test_a_rehearsal_as_another_rank_leaves_no_trace_of_it(rehearsed: dict[str, Any]) -> None:
    """Optimizer state that a kept plan made knows itself to be the shard of the rank that the standby became."""
    assert rehearsed["ranks"] == [1]


def test_no_plan_holds_a_group(rehearsed: dict[str, Any]) -> None:
    """The rehearsal's group is gone, and so is that of the generation after it, although its plans are kept."""
    assert rehearsed["is_captured_group_gone"] and rehearsed["is_group_gone"]
    assert not rehearsed["is_group_left"]


def test_a_rehearsal_draws_no_random_number(rehearsed: dict[str, Any]) -> None:
    """The script's first numbers are those of a process that never rehearsed."""
    assert rehearsed["is_generator_untouched"]
