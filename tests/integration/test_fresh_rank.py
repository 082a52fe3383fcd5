"""A standby has everything imported before it is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration import launched

SCRIPT = Path(__file__).with_name("fresh_rank_script.py")


@pytest.mark.processes
@pytest.mark.slow
def test_a_replacement_imports_nothing_inside_a_recovery(tmp_path: Path) -> None:
    """From its assignment to its third step; an import there is time that the survivors wait."""
    arguments = ["launch", "--run-dir", str(tmp_path / "run"), "--metrics-linger", "0", "--nproc-per-node", "2"]
    popen = launched.start([*arguments, "--fault", "sigkill@1:20", str(SCRIPT), str(tmp_path)])
    ended = launched.finish(popen, tmp_path / "run")
    assert ended.exit_code == 0, ended.explain()
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("generation-*.json")}
    assert found == {"generation-1-rank-0": [], "generation-1-rank-1": [], "generation-2-rank-1": []}
