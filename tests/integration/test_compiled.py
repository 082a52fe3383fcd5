"""torch.compile under restarts: compiled anew in each generation, in the same process, with the cache on disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvrx_sre.events.schema import IncidentClosed, Layer
from tests.integration.launched import Ended, finish, start

SCRIPT = Path(__file__).parent / "compiled_script.py"


def launch(run_dir: Path, cache: Path, *faults: str) -> Ended:
    """The compiled script on two ranks."""
    specs = [argument for fault in faults for argument in ("--fault", fault)]
    arguments = [
        "launch",
        "--run-dir",
        str(run_dir),
        "--nproc-per-node",
        "2",
        "--metrics-linger",
        "0",
        *specs,
        str(SCRIPT),
    ]
    ended = finish(start(arguments, TORCHINDUCTOR_CACHE_DIR=str(cache), TORCHINDUCTOR_COMPILE_THREADS="2"), run_dir)
    assert ended.exit_code == 0, ended.explain()
    return ended


def losses(ended: Ended) -> dict[tuple[str, int], str]:
    """(rank, step) -> loss as last printed."""
    found = {}
    for path in sorted((ended.run_dir / "logs").glob("rank-0000?.log")):
        for step, loss in re.findall(r"step (\d+) loss (\S+)", path.read_text()):
            found[path.name, int(step)] = loss
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_blocks_recover_in_process_and_from_the_cache(tmp_path: Path) -> None:
    """Exceptions cost no process, a killed rank's standby finds in the cache what others compiled, no loss differs."""
    oracle = launch(tmp_path / "oracle", tmp_path / "cache")
    ended = launch(tmp_path / "run", tmp_path / "cache", "exception@1:5", "exception@0:10", "sigkill@1:16")
    layers = [event.layer for _, event in ended.events(IncidentClosed)]
    assert layers == [Layer.IN_PROCESS, Layer.IN_PROCESS, Layer.WORKER], ended.explain()
    expected, found = losses(oracle), losses(ended)
    assert found and all(expected[key] == loss for key, loss in found.items()), ended.explain()
    text = "".join(path.read_text() for path in sorted((ended.run_dir / "logs").glob("rank-0000?.log")))
    found_in_cache = re.findall(r"cache hit (\d+) missed (\d+)", text)
    assert len(found_in_cache) == 2 and all(int(hit) > 0 == int(missed) for hit, missed in found_in_cache), text
