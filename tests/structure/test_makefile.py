"""What make's targets say for themselves."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.structure.source import ROOT

READY = "echo 'ready: source .venv/bin/activate'"


@pytest.mark.parametrize(("goal", "is_said"), [("setup", True), ("demo", False), ("bench", False)])
def test_setup_alone_says_how_to_go_on(goal: str, is_said: bool) -> None:
    """Whoever asked for the environment is told how to enter it; a target that only needs it is not interrupted."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", "--no-print-directory", goal]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "scripts/setup.sh"
    assert (READY in lines) == is_said
