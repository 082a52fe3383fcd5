"""Scripts that go wrong, or look at their rank, before the training function is called."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.schema import FaultClass, FaultDetected, RestartDecided
from tests.integration.launched import Ended, finish, start


def launch(directory: Path, script: str) -> Ended:
    """Run a script that never gets to training on two ranks."""
    path = directory / "script.py"
    path.write_text(script)
    arguments = ["launch", "--run-dir", str(directory / "run"), "--nproc-per-node", "2", "--standbys", "0", str(path)]
    return finish(start(arguments), directory / "run")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import no_such_module_of_anybody", "'no_such_module_of_anybody', script.py:1;"),
        ("\ndef broken(:\n", "SyntaxError: invalid syntax, script.py:2;"),
        ("import torch.distributed as dist\ndist.init_process_group('gloo')\n", "call ctx.init_process_group() there;"),
    ],
)
def test_a_script_that_cannot_work_is_not_tried_again(tmp_path: Path, script: str, said: str) -> None:
    """No restart cures a missing module, a typing error or a plain script: one attempt, and whoever starts it is told.

    An orchestrator is told to give up.
    """
    ended = launch(tmp_path, script)
    assert ended.exit_code == ExitCode.CONFIG, ended.explain()
    assert [event.fault for _, event in ended.events(FaultDetected)] == [FaultClass.USER_ERROR]
    assert [event.exit_code for _, event in ended.events(RestartDecided)] == [ExitCode.CONFIG]
    # The last line says why, with the whole cure, and which log to read.
    last = ended.output.splitlines()[-1]
    assert said in last, ended.explain()
    log = re.search(r"see (\S+/logs/rank-0000[01]\.log)$", last)
    assert log is not None, last
    assert Path(log[1]).read_text(), "found by its rank, though it never got one"


def test_a_worker_finds_its_rank_in_the_environment(tmp_path: Path) -> None:
    """Scripts written for torchrun read RANK at import; only a standby cannot tell it."""
    code = "import os\nprint('I am', os.environ['RANK'], os.environ['LOCAL_RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    ended = launch(tmp_path, code)
    logs = sorted((ended.run_dir / "logs").glob("rank-0000?-epoch-*.log"))
    said = [line for path in logs for line in path.read_text().splitlines() if line.startswith("I am")]
    # The first to end stops the run, so the other may not get as far.
    assert said and set(said) <= {"I am 0 0 of 2", "I am 1 1 of 2"}, ended.explain()
