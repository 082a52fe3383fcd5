"""Records what Prometheus would have scraped of real runs: `python -m tests.recordings.record [NAME ...]`.

Each recording is a JSON file beside this one: the command, and every series that the rules read, as it was scraped
once a second from the real endpoint of a real launcher (null where the scrape failed), changes only. Times are seconds
since the recording's beginning; the host's name and paths are taken out. The runs take a few minutes; they are recorded
once, so that the tests replay the same samples on any machine.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.monitoring import generate
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import Unit
from tests.integration import launched

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SCRAPE_S = 1.0
SCRAPE_TIMEOUT_S = 0.9
LEFT_S = 5
"""How long it goes on after the launcher has left."""
CLOCK = SystemClock()
FLAPS = [part for step in range(8, 56, 8) for part in ("--fault", f"exception@1:{step}")]
UNSAVED = ["--save-every", "50", "--fault", "no_space@0:50/writex2", "--fault", "exception@1:210x2"]
SLOW = ["--fault", "slow_storage@0:4=4", "--save-every", "8"]


def _leave(popen: subprocess.Popen[str], _: int) -> None:
    """Nothing is done to the launcher."""


def _stop(popen: subprocess.Popen[str], index: int) -> None:
    """SIGSTOP the launcher for a while once it trains."""
    if index == STOP_AT:
        popen.send_signal(signal.SIGSTOP)
    elif index == CONTINUE_AT:
        popen.send_signal(signal.SIGCONT)
    elif index == CONTINUE_AT + 8:
        popen.terminate()


STOP_AT, CONTINUE_AT = 12, 30
JOURNALS = ("crash_loop",)
"""Runs whose journal is kept too: the runbooks' commands are tried on it."""
RUNS: dict[str, tuple[list[str], Callable[[subprocess.Popen[str], int], None]]] = {
    "recovery": (["--steps", "300", "--fault", "exception@1:20"], _leave),
    "crash_loop": (["--steps", "40", "--fault", "exception@1:20x*"], _leave),
    "flapping": (["--steps", "300", *FLAPS], _leave),
    "slow_storage": (["--steps", "400", *SLOW], _leave),
    "unsaved": (["--steps", "260", *UNSAVED], _leave),
    "stopped": (["--steps", "1000000"], _stop),
}
"""Name -> (options of the trainer, what is done to the launcher at each second)."""


def record(name: str) -> dict[str, Any]:
    """Run it and scrape it once a second until its launcher has left, and five seconds more."""
    options, act = RUNS[name]
    with tempfile.TemporaryDirectory() as root:
        run_dir = Path(root) / name
        arguments = ["train", "--run-dir", str(run_dir), "--name", name, "--nproc", "2", "--seq-len", "32"]
        arguments += ["--step-deadline", "5", "--metrics-linger", "5", *options]
        begin_s = seconds(CLOCK.wall_ns())
        popen = launched.start(arguments)
        scrapes = _scrapes(popen, run_dir, act, begin_s)
        journal = [
            line for path in sorted((run_dir / "journal").glob("*.jsonl")) for line in path.read_text().splitlines()
        ]
    if name in JOURNALS:
        _keep_journal(name, journal, root)
    command = " ".join(["nvrx-sre", *arguments]).replace(str(run_dir), name)
    return {"command": command, "interval_s": SCRAPE_S, "until_s": max(scrapes), "series": _series(scrapes, begin_s)}


def _keep_journal(name: str, journal: list[str], root: str) -> None:
    text = json.dumps(journal).replace(str(ROOT), ".").replace(root, ".").replace(socket.gethostname(), "node-1")
    (HERE / f"{name}.jsonl").write_text("\n".join(json.loads(text)) + "\n")


def _scrapes(
    popen: subprocess.Popen[str], run_dir: Path, act: Callable[[subprocess.Popen[str], int], None], begin_s: float
) -> dict[int, dict[str, float]]:
    """Second -> what was scraped; a scrape takes the place of an earlier one of the same second."""
    found: dict[int, dict[str, float]] = {}
    left = LEFT_S
    while left:
        at = round(seconds(CLOCK.wall_ns()) - begin_s)
        act(popen, len(found))
        found[at] = _scrape(run_dir)
        if popen.poll() is not None:
            left -= 1
        subprocess.run(["sleep", str(SCRAPE_S)], check=True)
    popen.communicate()
    return found


def _scrape(run_dir: Path) -> dict[str, float]:
    try:
        url = json.loads((run_dir / "metrics.json").read_text())["url"]
        accept = {"Accept": "application/openmetrics-text"}
        with urllib.request.urlopen(urllib.request.Request(url, headers=accept), timeout=SCRAPE_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {_key(sample.name, sample.labels): sample.value for sample in samples if sample.name in wanted()}


@functools.cache
def wanted() -> frozenset[str]:
    """Series that the rules read."""
    text = generate.rules_file(Values())
    return frozenset(name for name in catalog.sample_names() if re.search(rf"(?<![:\w]){name}\b", text))


def _key(name: str, labels: dict[str, str]) -> str:
    kept = {key: value for key, value in labels.items() if key in ("priority", "catalog") or not name.endswith("_info")}
    named = ((key, value.replace(socket.gethostname(), "node-1")) for key, value in sorted(kept.items()))
    inner = ",".join(f'{key}="{value}"' for key, value in named if key != "run")
    return f"{name}{{{inner}}}"


def _series(scrapes: dict[int, dict[str, float]], begin_s: float) -> dict[str, list[list[float | None]]]:
    """Series -> [[second, value], ..]: changes only."""
    found: dict[str, list[list[float | None]]] = {}
    for key in sorted({key for scrape in scrapes.values() for key in scrape}):
        metric = catalog.CATALOG[key.split("{")[0]]
        points: list[list[float | None]] = []
        for at, scrape in scrapes.items():
            value = scrape.get(key)
            if value and metric.unit is Unit.TIMESTAMP:
                value = round(value - begin_s, 6)
            if (points[-1][1] if points else None) != value:
                points.append([at, value])
        found[key] = points
    return found


def main() -> None:
    """Record the runs that are named, or all."""
    for name in sys.argv[1:] or RUNS:
        value = record(name)
        text = json.dumps(value, indent=None, separators=(",", ":")).replace('],"nvrx', '],\n"nvrx')
        (HERE / f"{name}.json").write_text(text + "\n")
        print(name, value["until_s"], len(value["series"]))


if __name__ == "__main__":
    main()
