"""A process that goes on talking when its output cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


NEEDLES = {
    "environment": "from-the-environment-1",
    "argument": "from-an-argument-2",
    "user info": "from-a-dsn-3",
    "header": "from-a-header-4",
}
TELLS = f"""
import os, sys, threading
from nvrx_sre.core.output import mask_errors_of_threads, print_error
os.environ["WANDB_API_KEY"] = "{NEEDLES["environment"]}"

def connect(password):
    raise ValueError("no " + os.environ["WANDB_API_KEY"])

def fail():
    try:
        connect(password="{NEEDLES["argument"]}")
    except ValueError as cause:
        error = RuntimeError("postgres://trainer:{NEEDLES["user info"]}@db/runs")
        error.add_note("sent Authorization: Bearer {NEEDLES["header"]}")
        raise error from cause
"""
TOLD = {
    "handed over": "try:\n    fail()\nexcept RuntimeError as error:\n    print_error(error)\n",
    "ends a thread": (
        "mask_errors_of_threads()\nthread = threading.Thread(target=fail, name='loader')\n"
        "thread.start()\nthread.join()\n"
    ),
}


@pytest.mark.parametrize("way", TOLD)
def test_no_secret_is_in_a_traceback_that_we_print(way: str, tmp_path: Path) -> None:
    """Of the environment, an argument, a DSN and a header; in the error, its cause, its note, and lines of source."""
    script = tmp_path / "script.py"
    script.write_text(TELLS + TOLD[way])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert [name for name, secret in NEEDLES.items() if secret in done.stderr] == []
    lines = done.stderr.splitlines()
    assert "ValueError: no ***" in lines and "RuntimeError: postgres://***@db/runs" in lines
    assert "The above exception was the direct cause of the following exception:" in lines
    assert lines[-1] == "sent Authorization: Bearer ***"
    assert any(line.strip().startswith("connect(password=***") for line in lines), done.stderr
    assert ("Exception in thread loader:" in lines) == (way == "ends a thread")


def test_a_thread_that_ends_itself_says_nothing() -> None:
    """`sys.exit()` in a thread is no error, as without us."""
    code = (
        "import sys, threading\nfrom nvrx_sre.core.output import mask_errors_of_threads\nmask_errors_of_threads()\n"
        "thread = threading.Thread(target=sys.exit)\nthread.start()\nthread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
