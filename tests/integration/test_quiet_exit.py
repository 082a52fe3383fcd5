"""A script that has succeeded without a launcher exits with 0, however late torch's own threads are."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nvrx_sre.core import threads

ROOT = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 8
LIMIT_S = 400


@pytest.mark.processes
def test_threads_that_are_late_do_not_abort_the_exit() -> None:
    """CPython would end them where C++ allows no ending."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.late_gloo_script", str(NUM_PROCESSES)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
        cwd=ROOT,
    )
    assert json.loads(done.stdout) == [0] * NUM_PROCESSES, done.stderr[-2000:]


def test_a_thread_that_goes_on_is_told_from_one_that_sleeps() -> None:
    """The main thread of this process works as long as it is asked; a name that no thread has is asleep."""
    own = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()
    assert not threads.wait_until_asleep(own, limit_s=0.2)
    assert threads.wait_until_asleep("no-such-thread", limit_s=60)
