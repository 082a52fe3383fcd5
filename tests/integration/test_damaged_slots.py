"""A run whose memory is damaged and that has nothing on the disk begins again, and not with what the damage left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nvrx_sre.events.schema import CheckpointRejected, FaultClass, FaultDetected
from tests.integration import damaged_slots_script as script
from tests.integration import launched


@pytest.mark.processes
@pytest.mark.slow
def test_c04_a_run_without_a_good_state_begins_again_with_a_model_of_its_own(tmp_path: Path) -> None:
    """The rejected state has gone into both ranks' parameters: one more generation, and the end is the usual one."""
    arguments = ["launch", "--run-dir", str(tmp_path / "run"), "--metrics-linger", "0", "--nproc-per-node", "2"]
    options = ["--hot-every", "1", "--save-every", "1000"]
    popen = launched.start([*arguments, *options, str(Path(script.__file__)), str(tmp_path)])
    ended = launched.finish(popen, tmp_path / "run")
    assert ended.exit_code == 0, ended.explain()
    faults = [event.fault for _, event in ended.events(FaultDetected)]
    assert faults == [FaultClass.EXCEPTION, FaultClass.CHECKPOINT_CORRUPT], ended.explain()
    assert ended.events(CheckpointRejected)
    begun = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("begun-*.json")}
    assert begun == {f"begun-{rank}-{generation}": 0 for rank in (0, 1) for generation in (1, 3)}
    model, optimizer = script.make()
    for _ in range(script.NUM_STEPS):
        script.step(model, optimizer)
    for rank in (0, 1):
        end = torch.load(tmp_path / f"end-{rank}.pt", weights_only=True)
        assert all(torch.equal(value, end[name]) for name, value in model.state_dict().items()), rank
