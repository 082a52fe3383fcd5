"""A process that goes on talking when its output cannot be written."""

from __future__ import annotations

import subprocess
import sys

SAYS = """
import sys, traceback
from nvrx_sre.core.output import survive_a_full_disk
survive_a_full_disk()
print("one", flush=True)
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
sys.stdout.write("two\\n")
sys.exit(7)
"""


def test_what_the_disk_refuses_is_lost_and_nothing_else() -> None:
    """Both streams onto /dev/full, where every write is ENOSPC: the process comes to its own end."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", SAYS], stdout=full, stderr=full, check=False)
    assert done.returncode == 7


def test_what_the_disk_takes_is_written_at_once() -> None:
    """Nothing is held back: every line is there although the process does not end orderly."""
    code = SAYS.replace("sys.exit(7)", "import os; os._exit(7)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "one\ntwo\n")
    assert "ZeroDivisionError" in done.stderr
