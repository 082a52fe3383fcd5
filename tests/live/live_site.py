"""A site for live tests: real launchers and told runs, scraped by a real Prometheus whose Alertmanager tells us.

Model: `Site` keeps the targets in step with the run directories, as `nvrx-sre monitor` does, and keeps what was
notified by run. A `TellRun` is a story of events behind a real fold and endpoint, for situations that take several
nodes.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvrx_sre.cli.watched import Watched
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.monitoring import generate, query
from nvrx_sre.monitoring.alertmanager import WATCHDOG
from nvrx_sre.monitoring.stack import MonitoringStack, ScrapeTarget, StackConfig
from nvrx_sre.monitoring.values import load_values
from nvrx_sre.monitoring.webhook import Notification
from tests.integration import launched

HERE = Path(__file__).resolve().parent
CLUSTER = "local"
REFRESH_S = 0.2
DEADLINE_S = 100.0
SCRAPE_S = 1.0


class Site:
    """Prometheus, Alertmanager and the runs below `root`. A context manager; methods may be called from any thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        rules = root / "rules.yaml"
        rules.write_text(generate.rules_file(load_values(HERE / "values.yaml")))
        config = StackConfig(scrape_interval_s=SCRAPE_S, rules=rules, group_wait_s=1.0, group_interval_s=2.0)
        self.stack = MonitoringStack(config)
        self.directories: list[Path] = []
        self.told: list[ScrapeTarget] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="targets")
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Site:
        self.stack.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        for child in self._children:
            if child.poll() is None:
                child.send_signal(signal.SIGCONT)
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        self.stack.stop()

    def _follow(self) -> None:
        before: list[ScrapeTarget] = []
        watched: dict[Path, Watched] = {}
        while not self._done.wait(REFRESH_S):
            with self._lock:
                for directory in self.directories:
                    watched.setdefault(directory, Watched([directory], None, SystemClock(), scrape_interval_s=SCRAPE_S))
                targets = [*self.told, *(item.target() for each in watched.values() for item in each.refresh())]
            if targets != before:
                self.stack.set_targets(targets)
                before = targets

    def tell(self, url: str, namespace: str = "live") -> None:
        """Scrape an endpoint of the test's own."""
        with self._lock:
            self.told.append(ScrapeTarget(url=url, labels={"cluster": CLUSTER, "namespace": namespace}))

    def forget(self, url: str) -> None:
        """Scrape it no longer."""
        with self._lock:
            self.told = [item for item in self.told if item.url != url]

    def run_dir(self, run: str, namespace: str = "live") -> Path:
        """Run directory of a real run; it is scraped from its first start on."""
        directory = self.root / namespace / run
        with self._lock:
            if directory not in self.directories:
                self.directories.append(directory)
        return directory

    def start(self, run: str, *more: str, namespace: str = "live", steps: int = 48) -> subprocess.Popen[str]:
        """Start the trainer with one rank, which is all these stories need."""
        directory = self.run_dir(run, namespace)
        arguments = ["train", "--run-dir", str(directory), "--name", run, "--nproc", "1", "--standbys", "0"]
        arguments += ["--steps", str(steps), "--save-every", "8", "--seq-len", "32", "--batch-size", "4"]
        popen = launched.start([*arguments, "--step-deadline", "30", *more])
        with self._lock:
            self._children.append(popen)
        return popen

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Block until `condition` holds; fails with `what` and all that was notified."""
        assert self.stack.wait_until(condition, DEADLINE_S), f"{what}: {self.told_of()}"

    def value(self, expression: str) -> float:
        """First sample of a query, 0 where there is none."""
        found = query.instant(self.stack.prometheus_url, expression)
        return found[0].value if found else 0.0

    def wait_for_value(self, expression: str) -> None:
        """Block until a query returns something above 0."""
        self.wait(lambda: self.value(expression) > 0, expression)

    def notified(self, run: str, namespace: str = "live") -> list[Notification]:
        """What all receivers were told of one run, oldest first."""
        return [
            item
            for item in self.stack.notifications()
            if item.alerts and item.alerts[0]["labels"].get("run") == run
            if item.alerts[0]["labels"].get("namespace") == namespace
        ]

    def wait_for_page(self, run: str, alert: str, status: str = "firing", namespace: str = "live") -> dict[str, Any]:
        """Block until `page` heard that the alert has this status; the alert as it was sent."""

        def heard() -> list[dict[str, Any]]:
            return [
                entry
                for item in self.notified(run, namespace)
                if item.receiver == "page"
                for entry in item.alerts
                if (entry["labels"]["alertname"], entry["status"]) == (alert, status)
            ]

        self.wait(lambda: bool(heard()), f"{alert} {status} for {namespace}/{run}")
        return heard()[0]

    def told_of(self) -> dict[str, dict[str, list[str]]]:
        """namespace/run -> receiver -> alerts that were told as firing."""
        found: dict[str, dict[str, set[str]]] = {}
        for item in self.stack.notifications():
            for entry in item.alerts:
                labels = entry["labels"]
                if entry["status"] == "firing" and labels["alertname"] != WATCHDOG:
                    by_receiver = found.setdefault(f"{labels['namespace']}/{labels['run']}", {})
                    by_receiver.setdefault(item.receiver, set()).add(labels["alertname"])
        return {
            run: {receiver: sorted(names) for receiver, names in sorted(told.items())}
            for run, told in sorted(found.items())
        }

    def evaluations(self, alert: str) -> float:
        """How many times any instance of the alert was seen firing."""
        return self.value(f'sum(count_over_time(ALERTS{{alertname="{alert}",alertstate="firing"}}[1h]))')
