"""The brake on a real run: an alert halts it, what it had reached is durable, and only a resume lets it go on."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.schema import BudgetReset, HaltRequested, RunFinished, RunStarted, SaveVerified, StepsCommitted
from nvrx_sre.launcher.braking import read_consent
from nvrx_sre.launcher.rundir import RunDirectory
from tests.integration import launched

pytestmark = pytest.mark.processes

TOKEN = "a-token-of-the-site-0123456789"
WAIT_S = 60.0
ALERT = {
    "status": "firing",
    "labels": {"alertname": "NvrxCrashLooping", "action": "halt", "run": "braked", "cluster": "c1"},
    "annotations": {},
    "startsAt": "2099-01-01T00:00:00Z",
}
_LISTENS = re.compile(r"brake listens on (\S+), metrics on (\S+)")


@dataclass
class BrakeProcess:
    """A brake as a process of its own."""

    popen: subprocess.Popen[str]
    url: str
    metrics_url: str

    def post(self, *alerts: dict[str, Any], token: str = TOKEN) -> tuple[int, list[str]]:
        """Status, and the outcome of each alert."""
        body = {"receiver": "brake", "status": "firing", "alerts": list(alerts)}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, [item["outcome"] for item in json.load(answer)["alerts"]]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, []

    def metrics(self) -> str:
        """Its own metrics, from its other listener."""
        with urllib.request.urlopen(self.metrics_url, timeout=WAIT_S) as answer:
            text: str = answer.read().decode()
            return text


@pytest.fixture
def brake(tmp_path: Path) -> Iterator[BrakeProcess]:
    """`nvrx-sre brake` for the runs in `tmp_path`; SIGTERM ends it with exit 0."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    arguments = ["--root", str(tmp_path), "--alert", "NvrxCrashLooping", "--label", "cluster=c1"]
    popen = launched.start(["brake", *arguments, "--token-file", str(token), "--listen", "127.0.0.1:0"])
    assert popen.stdout is not None
    match = _LISTENS.search(popen.stdout.readline())
    assert match is not None
    yield BrakeProcess(popen, match[1], match[2])
    popen.terminate()
    output, _ = popen.communicate(timeout=WAIT_S)
    assert (popen.returncode, output.splitlines()[-1]) == (0, "brake stopped")


def start(run_dir: Path, *more: str, steps: int) -> subprocess.Popen[str]:
    """One rank that trains until it is stopped, or for `steps`."""
    small = ["--nproc", "1", "--standbys", "0", "--seq-len", "32", "--batch-size", "4", "--metrics-linger", "0"]
    small += launched.PATIENT
    identity = ["--run-dir", str(run_dir), "--name", "braked", "--steps", str(steps), "--save-every", "1000000"]
    return launched.start(["train", *identity, *small, *more])


def test_an_alert_halts_a_run_that_opted_in_until_it_is_resumed(brake: BrakeProcess, tmp_path: Path) -> None:
    """Exit 93 with the newest sealed step durable; no start before the resume; after it the old alert is stale."""
    run_dir = tmp_path / "run"
    popen = start(run_dir, "--allow-brake", steps=1_000_000)
    launched.wait_for(run_dir, popen, lambda record: isinstance(record.event, StepsCommitted))
    assert brake.post(ALERT, token="not-the-token-of-the-site") == (401, [])
    assert brake.post(ALERT) == (200, ["halted"])
    halted = launched.finish(popen, run_dir)

    assert halted.exit_code == ExitCode.DO_NOT_RESTART, halted.explain()
    ((_, started),) = halted.events(RunStarted)
    assert started.allow_brake
    ((_, request),) = halted.events(HaltRequested)
    assert request.reason == "brake: NvrxCrashLooping, firing since 2099-01-01T00:00:00Z"
    ((_, finish),) = halted.events(RunFinished)
    sealed = max(event.hot_sealed_step for _, event in halted.events(StepsCommitted))
    assert [event.step for _, event in halted.events(SaveVerified)][-1] == sealed > 0
    assert finish.exit_code == ExitCode.DO_NOT_RESTART
    assert 'nvrx_brake_alerts_total{outcome="halted"} 1.0' in brake.metrics()
    assert 'nvrx_brake_requests_total{outcome="unauthorized"} 1.0' in brake.metrics()

    refused = launched.finish(start(run_dir, steps=1_000_000), run_dir)
    assert refused.exit_code == ExitCode.DO_NOT_RESTART
    assert "was stopped: halted" in refused.output
    resumed = launched.finish(launched.start(["resume", str(run_dir), "--reason", "mended"]), run_dir)
    assert (resumed.exit_code, [event.reason for _, event in resumed.events(BudgetReset)]) == (0, ["mended"])
    assert not RunDirectory(run_dir).halt.exists()

    before = read_consent(RunDirectory(run_dir))
    again = start(run_dir, "--allow-brake", steps=1_000_000)
    launched.wait_for(
        run_dir, again, lambda record: isinstance(record.event, StepsCommitted) and record.event.first_step > sealed
    )
    assert read_consent(RunDirectory(run_dir)).since_ns > before.since_ns
    resumed_at = datetime.fromtimestamp(seconds(before.since_ns), UTC)
    assert brake.post({**ALERT, "startsAt": resumed_at.isoformat()}) == (200, ["stale"])
    again.terminate()
    assert launched.finish(again, run_dir).exit_code == ExitCode.PREEMPTED
