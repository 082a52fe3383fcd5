"""The runbooks' commands work as written: started from the alert's label, they name the culprit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from nvrx_sre.events.codec import to_dict
from nvrx_sre.monitoring import assets, runbooks
from tests.stories import RUN, crash_loop_story


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory of two runs; the one that is paged crash-looped on rank 1 at step 11."""
    for name in ("other", RUN):
        journal = tmp_path / f"dir-of-{name}" / "journal"
        journal.mkdir(parents=True)
        (journal.parent / "run.json").write_text(json.dumps({"run": name}))
    lines = [json.dumps({"schema": 1, "run": RUN, "epoch": 1})]
    lines += [json.dumps(to_dict(record)) for record in crash_loop_story().records]
    (journal / "00000001-000001.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def shell(name: str, runs: Path) -> str:
    """Output of the runbook's read-only blocks, run in order in one shell."""
    blocks = [item for item in runbooks.commands(assets.runbook_text(name)) if "nvrx-sre" not in item]
    script = "\n".join(blocks).replace("RUNS=runs ", f"RUNS='{runs}' ").replace("RUN=demo ", f"RUN={RUN} ")
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_crash_loop_runbook_names_the_culprit(runs: Path) -> None:
    """From the label `run`: directory, then rank, step, frame and device of each fault, and the decisions."""
    output = shell("NvrxCrashLooping", runs)
    assert output.splitlines()[0] == f"{runs}/dir-of-{RUN}"
    faults = [line for line in output.splitlines() if "RuntimeError" in line]
    assert len(faults) == 3
    assert all("rank 1\tstep 11\texception\tRuntimeError\ttrain.py:7 train\tn1/0" in line for line in faults)
    assert "2023-11-14T22:13:3" in faults[0]
    assert "\tstop\tjob\tbecause\t" in output


def test_halt_runbook_says_why_it_stopped(runs: Path) -> None:
    """The end's reason and exit code, the faults before it, and no rejected checkpoint."""
    output = shell("NvrxRunHalted", runs)
    (end,) = (json.loads(line) for line in output.splitlines() if '"type":"RunFinished"' in line)
    assert end["data"]["exit_code"] == 93
    assert output.count("rank 1\tstep 11") == 3
