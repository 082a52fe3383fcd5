"""The recovery benchmark, small: real launcher, real torchrun, every question that needs no peer to be installed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from nvrx_sre.bench.recovery import OURS
from nvrx_sre.bench.recovery_peers import PEERS, TORCHRUN

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

Rows = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """(contestant, case) -> row of one quick run with two ranks; the simulated sizes by their number of ranks."""
    directory = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "nvrx_sre", "bench", "recovery", "--quick", "--json", "rows.json"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in directory.iterdir()] == ["rows.json"]
    found = json.loads((directory / "rows.json").read_text())
    return {(row["contestant"], row["case"]): row for row in found if row["bench"] == "recovery"}


def test_ours_recovers_from_every_fault(rows: Rows) -> None:
    """Four of each, none without a recovery; a total is never less than its overhead."""
    for case in ("exception", "sigkill", "collective, group timeout 2 s", "collective, group timeout 30 s"):
        assert rows[OURS, case]["n"] == rows[OURS, f"{case} total"]["n"] == 4
        assert 0 < rows[OURS, case]["median"] < rows[OURS, f"{case} total"]["median"]
    assert "of 4 replacements by a warm standby" in rows[OURS, "sigkill"]["note"]
    assert rows[OURS, "hang total"]["n"] == 4


def test_a_hang_is_not_found_before_its_deadline(rows: Rows) -> None:
    """However loaded the machine is, the deadline is a lower bound."""
    assert rows[OURS, "hang detection past the deadline"]["median"] > -0.05
    assert rows[OURS, "hang total"]["median"] > 1.0


def test_torchrun_runs_and_is_compared(rows: Rows) -> None:
    """Two faults each, restored from a save; what it cannot do is said."""
    for case in ("exception", "sigkill"):
        assert rows[TORCHRUN.name, case]["n"] == 2
        assert " x ours" in rows[TORCHRUN.name, case]["note"]
    assert rows[TORCHRUN.name, "hang"]["n"] == 0 and "no watch for hangs" in rows[TORCHRUN.name, "hang"]["note"]


def test_every_peer_has_a_row_for_every_case_it_was_asked(rows: Rows) -> None:
    """Measured, or with the reason why not: installed or not, nobody is left out silently."""
    for peer in PEERS:
        for case in {*peer.cases, *peer.cannot} - {"collective"}:
            assert rows[peer.name, case]["n"] or rows[peer.name, case]["note"], (peer.name, case)


def test_what_is_held_is_counted(rows: Rows) -> None:
    """Every resource of every process has a verdict."""
    for name in ("threads", "fds", "sockets", "shared", "rss"):
        row = rows[OURS, f"leak {name}"]
        assert row["n"] >= 3 and row["median"] > 0 and "target " in row["note"]


def test_cost_is_told_against_ranks(rows: Rows) -> None:
    """Measured and simulated, each with its law."""
    assert rows[OURS, "ranks"]["n"] == 4
    assert rows[OURS, "ranks simulated"]["ranks"] == 64
    assert "linear in hosts" in rows[OURS, "ranks simulated growth"]["note"]
    assert rows[OURS, "ranks growth"]["unit"] == "exponent"
