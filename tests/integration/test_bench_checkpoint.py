"""The checkpoint benchmark on a tiny state: real launcher, real torchrun, every case."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from nvrx_sre.bench.checkpoint_reading import NOTHING, OURS, SYNC, THREAD

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """(contestant, case) -> row of one quick run."""
    directory = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "nvrx_sre", "bench", "checkpoint", "--quick", "--json", "rows.json"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in directory.iterdir()] == ["rows.json"]
    found = json.loads((directory / "rows.json").read_text())
    return {(row["contestant"], row["case"]): row for row in found if row["bench"] == "checkpoint"}


def test_every_contestant_has_its_three_figures(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Blocked and inflation in seconds for each save, and what a SIGKILL left."""
    for contestant in (OURS, SYNC, THREAD):
        assert rows[contestant, "blocked"]["n"] == rows[contestant, "blocked inflation"]["n"] == 2
        assert rows[contestant, "blocked"]["median"] > 0
    assert rows[NOTHING, "blocked"]["note"].startswith("the noise")
    assert rows[OURS, "blocked committed"]["n"] == 1
    assert rows[SYNC, "blocked committed"]["median"] == 1.0
    assert rows["nvidia-resiliency-ext", "blocked"]["note"].startswith("does not run: ")


def test_ours_has_efficiency_restores_and_memory(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Efficiencies beside their control, restores beside their references, three slots."""
    assert rows[NOTHING, "efficiency"]["note"].startswith("the noise") and rows[NOTHING, "efficiency"]["median"] > 0
    for case in ("efficiency 0.1", "efficiency 1"):
        assert rows[OURS, case]["median"] > 0
        assert 0 <= rows[OURS, f"{case} commits"]["median"] <= 1
        assert rows[OURS, f"{case} freshness"]["n"] >= 1
    for case in ("restore warm slot", "restore fresh process", "restore durable"):
        assert rows[OURS, case]["median"] > 0
    for contestant in ("memcpy", "disk read", "xxh3_128"):
        assert rows[contestant, "restore reference"]["median"] > 0
    assert rows[OURS, "memory"]["median"] > 3
