"""The guide's ways to scrape work as they stand there: the targets are made, and Prometheus accepts what names them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from nvrx_sre.core.clock import NS_PER_S, SystemClock
from nvrx_sre.events.codec import to_dict
from nvrx_sre.monitoring import lint
from tests import stories
from tests.stories import Story

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "monitoring.md"
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SITE = {"cluster": "c1", "namespace": "research"}


def blocks(language: str, word: str) -> list[str]:
    """The guide's blocks of this language with this word in them."""
    text = GUIDE.read_text(encoding="utf-8")
    return [body for _, found, body in BLOCK.findall(text) if found == language and word in body]


def trains(story: Story, _: float) -> None:
    """It goes on."""
    story.steps(2.0, 3.0, 1, 10)


def ends(story: Story, at_s: float) -> None:
    """In order, at its last step."""
    story.steps(2.0, 3.0, 1, 10)
    story.finish(at_s)


def write(root: Path, run: str, url: str, told: Callable[[Story, float], None], age_s: float) -> Path:
    """A run directory below `root` that says this address; its newest record is `age_s` old."""
    stories.START_S = SystemClock().wall_ns() / NS_PER_S - age_s - 10.0
    story = Story()
    story.start(0.0)
    told(story, 10.0)
    directory = root / f"dir of {run}"
    (directory / "journal").mkdir(parents=True)
    lines = [json.dumps({"schema": 1, "run": run, "epoch": 1}), *(json.dumps(to_dict(item)) for item in story.records)]
    (directory / "journal" / "00000001-000001.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "run.json").write_text(json.dumps({"run": run}))
    (directory / "metrics.json").write_text(json.dumps({"url": url, "pid": 4_194_305, "run": run, "password": False}))
    return directory


def make_targets(directory: Path) -> list[dict[str, object]]:
    """What the guide's script writes beside the run directories `runs`."""
    (script,) = blocks("sh", "metrics*.json")
    program = f'nvrx-sre() {{ "{sys.executable}" -m nvrx_sre "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program + script], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads((directory / "targets.json").read_text())
    return found


def target(address: str, scheme: str = "http") -> dict[str, object]:
    """As file discovery reads it."""
    return {"targets": [address], "labels": {"__scheme__": scheme, "__metrics_path__": "/metrics", **SITE}}


def test_targets_are_made_of_the_run_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live runs with their followers, and those that ended just now, whose last scrapes are to come; no older one."""
    monkeypatch.setattr(stories, "START_S", stories.START_S)
    root = tmp_path / "runs"
    root.mkdir()
    assert make_targets(tmp_path) == []
    live = write(root, "live", "https://node-1:40001/metrics", trains, 0.0)
    follower = {"url": "http://[::1]:40002/metrics", "pid": 7, "run": "live", "password": False, "epoch": 1}
    (live / "metrics-00001.json").write_text(json.dumps(follower))
    write(root, "silent", "http://node-2:40003/metrics", trains, 3_600.0)
    write(root, "just-ended", "http://node-3:40004/metrics", ends, 60.0)
    write(root, "ended", "http://node-3:40005/metrics", ends, 3_600.0)
    found = make_targets(tmp_path)
    wanted = [
        target("node-1:40001", "https"), target("[::1]:40002"), target("node-2:40003"), target("node-3:40004"),
    ]  # fmt: skip
    assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, wanted))
    assert not (tmp_path / "targets.json.new").exists()


def test_prometheus_accepts_the_scrape_jobs(tmp_path: Path) -> None:
    """Known hosts, and the file of targets; both with the interval and the labels that the rules expect."""
    promtool = shutil.which("promtool")
    assert promtool is not None, "install prometheus"
    (tmp_path / "targets.json").write_text(json.dumps([target("node-1:1")]))
    jobs = blocks("yaml", "scrape_configs:")
    assert len(jobs) == 2
    for job in jobs:
        file = tmp_path / "prometheus.yml"
        file.write_text(job)
        checked = subprocess.run([promtool, "check", "config", str(file)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        (config,) = yaml.safe_load(job)["scrape_configs"]
        assert config["scrape_interval"] == "15s"
        assert all(item["labels"] == SITE for item in config.get("static_configs", []))


def test_the_query_for_two_runs_of_one_name_reads_the_catalog() -> None:
    """A family that was renamed would find nothing, for ever."""
    (query,) = blocks("promql", "count by")
    assert lint.query_problems(query.strip(), lint.known_series([], ("cluster", "namespace", "run"))) == []
