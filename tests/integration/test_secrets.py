"""A run whose script fails with secrets in its error: nothing that we write of it holds one."""

from __future__ import annotations

from pathlib import Path

from nvrx_sre.events.schema import FaultDetected
from tests.integration.launched import PATIENT, finish, start

SECRETS = {
    "variable": "value-of-a-variable-1",
    "argument": "value-of-an-argument-2",
    "user info": "value-in-a-url-3",
    "header": "value-of-a-header-4",
    "thread": "value-in-a-thread-5",
}
SCRIPT = f"""
import os, threading
import torch
import nvrx_sre

def fetch(*, password):
    raise ConnectionError("s3://trainer:{SECRETS["user info"]}@store refused " + os.environ["STORE_TOKEN"])

def fail():
    raise ValueError("password={SECRETS["thread"]}")

@nvrx_sre.resilient
def train(ctx):
    ctx.init_process_group()
    ctx.track(model=torch.nn.Linear(2, 2))
    ctx.restore()
    if ctx.generation == 1:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        try:
            fetch(password="{SECRETS["argument"]}")
        except ConnectionError as cause:
            error = RuntimeError("no data")
            error.add_note("asked with Authorization: Bearer {SECRETS["header"]}")
            raise error from cause
    ctx.commit(loss=1.0)

train()
"""


def test_no_secret_of_an_error_is_in_anything_that_is_written(tmp_path: Path) -> None:
    """Its cause, its note, lines of source, a thread's end: in the run directory, the ranks' logs, on the terminal."""
    script, run_dir = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    options = ["--run-dir", str(run_dir), "--nproc-per-node", "1", "--standbys", "0", "--metrics-linger", "0", *PATIENT]
    ended = finish(start(["launch", *options, str(script)], STORE_TOKEN=SECRETS["variable"]), run_dir)
    assert ended.exit_code == 0, ended.explain()
    assert len(ended.events(FaultDetected)) == 1
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    written = {"terminal": ended.output, **{str(path): path.read_text(errors="replace") for path in files}}
    assert [
        (name, place) for name, secret in SECRETS.items() for place, text in written.items() if secret in text
    ] == []
    log = "".join(path.read_text() for path in (run_dir / "logs").glob("rank-00000-*.log"))
    for line in (
        "ConnectionError: s3://***@store refused ***",
        "RuntimeError: no data",
        "asked with Authorization: Bearer ***",
        "ValueError: password=***",
    ):
        assert f"{line}\n" in log, log
