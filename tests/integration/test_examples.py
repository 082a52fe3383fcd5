"""The two example scripts: how little is added, and that both do what they say."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_sre.events.schema import FaultInjected, IncidentClosed, Verdict
from tests.integration.launched import FINDS_HANGS, PATIENT, finish, start

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ROOT / "examples" / "plain_fsdp.py"
RESILIENT = ROOT / "examples" / "resilient_fsdp.py"
MAX_ADDED_LINES = 15
LIMIT_S = 300


def run(*command: str) -> list[float]:
    """Losses that a command printed; it must succeed."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]


def torchrun(script: Path) -> list[float]:
    """Losses of two ranks under torchrun."""
    return run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))


def code_lines(path: Path) -> list[str]:
    """Lines of a script without its module docstring and blank lines."""
    _, _, body = path.read_text(encoding="utf-8").split('"""', 2)
    return [line for line in body.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    """What the plain script prints on two ranks."""
    return torchrun(PLAIN)


def test_at_most_fifteen_lines_are_added() -> None:
    """A changed line counts as an added one."""
    difference = list(difflib.ndiff(code_lines(PLAIN), code_lines(RESILIENT)))
    added = [line for line in difference if line.startswith("+ ")]
    assert 0 < len(added) <= MAX_ADDED_LINES, "\n".join(added)


@pytest.mark.processes
def test_the_plain_script_learns_under_torchrun(plain_losses: list[float]) -> None:
    """Ten lines, the last far below the first."""
    assert len(plain_losses) == 10
    assert plain_losses[-1] < plain_losses[0] / 3


@pytest.mark.processes
def test_the_added_lines_change_nothing_without_a_launcher(plain_losses: list[float]) -> None:
    """Under torchrun both print the same losses."""
    assert torchrun(RESILIENT) == plain_losses


@pytest.mark.processes
def test_it_runs_alone() -> None:
    """Plain Python is a world of one."""
    losses = run(str(RESILIENT))
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 3


@pytest.mark.processes
def test_the_resilient_script_survives_faults(plain_losses: list[float], tmp_path: Path) -> None:
    """An exception, a SIGKILL and a hang later it ends with the loss of the undisturbed plain script.

    What was planned for a step beyond its last never struck, and is named.
    """
    faults = ["exception@1:40", "sigkill@0:90", "hang@1:150"]
    run_dir = tmp_path / "run"
    arguments = ["launch", "--nproc-per-node", "2", "--run-dir", str(run_dir), *PATIENT, *FINDS_HANGS]
    planned = [item for fault in (*faults, "exception@0:900") for item in ("--fault", fault)]
    ended = finish(start([*arguments, "--metrics-linger", "0", *planned, str(RESILIENT)]), run_dir)
    assert ended.exit_code == 0, ended.explain()
    assert [event.spec for _, event in ended.events(FaultInjected)] == faults
    verdicts = [event.verdict for _, event in ended.events(IncidentClosed)]
    assert verdicts == [Verdict.RECOVERED] * 3, ended.explain()
    assert round(ended.summary["final_loss"], 6) == plain_losses[-1]
    assert ended.summary["steps"] == 200
    assert ended.summary["faults_never_struck"] == ["exception@0:900"]
    assert "planned, never struck: exception@0:900 (the run came to step 200)\n" in ended.output
