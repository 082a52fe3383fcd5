"""The demo, whole: five faults, four recoveries, and the same result as without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280.0


def _demo(tmp_path: Path, name: str, *arguments: str) -> tuple[dict[str, Any], str]:
    command = ["demo", "--run-dir", name, "--summary", f"{name}.json", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.patient_demo", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    summary: dict[str, Any] = json.loads((tmp_path / f"{name}.json").read_text())
    return summary, done.stdout


@pytest.mark.live
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_faulted_demo_ends_like_the_one_without_faults(tmp_path: Path) -> None:
    """Bit for bit the same losses, samples and state; each fault recovered in the layer that suits it."""
    faulted, said = _demo(tmp_path, "faulted")
    plain, _ = _demo(tmp_path, "plain", "--no-faults", "--no-monitoring")

    for digest in ("loss_digest", "samples_digest", "state_digest"):
        assert faulted[digest] == plain[digest], digest
    assert plain["incidents"] == [] and plain["redone_steps"] == 0

    incidents = [(item["fault"], item["layer"], item["rank"], item["step"]) for item in faulted["incidents"]]
    assert incidents == [
        ("exception", "in_process", 1, 40),
        ("killed", "worker", 0, 90),
        ("hang", "in_process", 1, 140),
        ("node_lost", "worker", 0, 240),
    ]
    assert {item["verdict"] for item in faulted["incidents"]} == {"recovered"}
    assert faulted["saves"]["durable"]["rejected"] == 1
    assert faulted["incidents"][-1]["rollback_steps"] >= 85

    assert faulted["final_loss"] < faulted["result"]["unigram_entropy"] - 0.3
    assert faulted["result"]["corpus_bytes"] >= 5_000_000
    assert "pages:         none" in said, said
    fired = next(line for line in said.splitlines() if line.startswith("alerts fired:"))
    assert "NvrxCheckpointRejected" in fired and "NvrxWatchdog" in fired
    assert "restored step 150 from durable" in said
