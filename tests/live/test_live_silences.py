"""The silence of each runbook, as it stands there, against a real Alertmanager: it holds for that alert of that run."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from nvrx_sre.monitoring import assets, query, runbooks
from nvrx_sre.monitoring.stack import MonitoringStack, StackConfig

pytestmark = pytest.mark.live

RUN = "a run's name"
PLACE = "ALERTMANAGER=http://127.0.0.1:9093 "
"""What a reader puts the site's address in."""
NEVER_SILENCED = "NvrxWatchdog"


def silence_of(name: str) -> str:
    """The shell block of the page that silences its alert; '' where it has none."""
    found = [block for block in runbooks.commands(assets.runbook_text(name)) if "amtool silence add" in block]
    assert len(found) <= 1, name
    return "".join(found)


def test_every_page_silences_its_alert_of_its_run_and_no_more() -> None:
    """With nothing set but the address and the label `run`, also where there is no USER."""
    blocks = {name: silence_of(name) for name in assets.runbook_names()}
    assert [name for name, block in blocks.items() if not block] == [NEVER_SILENCED]
    assert all(block.startswith(PLACE) for block in blocks.values() if block)
    environment = {name: value for name, value in os.environ.items() if name != "USER"}
    with MonitoringStack(StackConfig()) as stack:
        script = "".join(block.replace(PLACE, f"ALERTMANAGER={stack.alertmanager_url} ") for block in blocks.values())
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], env={**environment, "RUN": RUN}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        silences = json.loads(query.http_get(f"{stack.alertmanager_url}/api/v2/silences"))
    assert all(item["status"]["state"] == "active" and item["createdBy"] for item in silences)
    found = sorted(
        sorted(
            (matcher["name"], matcher["value"], matcher["isEqual"], matcher["isRegex"]) for matcher in item["matchers"]
        )
        for item in silences
    )
    assert found == [
        [("alertname", name, True, False), ("run", RUN, True, False)] for name, block in sorted(blocks.items()) if block
    ]
