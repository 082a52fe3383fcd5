"""One run with two faults and every failure of telemetry at once, beside the same run without any."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.launched import PATIENT, Ended, finish, start, train, train_arguments

DIGESTS = ("loss_digest", "samples_digest", "state_digest")
NUM_SCRAPERS = 20
SCRAPE_TIMEOUT_S = 30.0


class Storm:
    """Scrapers that never stop, and some that never read."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._scrape) for _ in range(NUM_SCRAPERS)]
        self._lock = threading.Lock()
        self.num_answers = self.num_asked = 0
        self.newest = (0, "")
        """Number and text of the scrape that was asked for last of those that were answered."""
        host, port = url.removeprefix("http://").removesuffix("/metrics").rsplit(":", 1)
        self._slow = [socket.create_connection((host, int(port))) for _ in range(4)]
        for index, item in enumerate(self._slow):
            item.sendall(b"GET /metrics HTTP/1.1\r\n" + (b"\r\n" if index % 2 else b""))
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """No more scrapes."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        for item in self._slow:
            item.close()

    def _scrape(self) -> None:
        while not self._over.is_set():
            with self._lock:
                self.num_asked += 1
                number = self.num_asked
            with contextlib.suppress(OSError, urllib.error.HTTPError):
                with urllib.request.urlopen(self._url, timeout=SCRAPE_TIMEOUT_S) as response:
                    body = response.read().decode()
                with self._lock:
                    self.num_answers += 1
                    self.newest = max(self.newest, (number, body))


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """What the attacked run left, and what its scrapers saw last."""

    ended: Ended
    unfaulted: Ended
    num_scrapes: int
    series: dict[str, float]

    @property
    def log(self) -> str:
        """The launcher's own log."""
        return (self.ended.run_dir / "logs" / "launcher.log").read_text()


def wait_for_url(run_dir: Path, popen: subprocess.Popen[str]) -> str:
    """Where the run serves its metrics."""
    path = run_dir / "metrics.json"
    while not path.exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(timeout=0.05)
            raise AssertionError(f"the run ended before it served metrics:\n{popen.communicate()[0][-4000:]}")
    return str(json.loads(path.read_text())["url"])


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """The journal on a full disk, a collector that never answers, spans' file, metrics and log that raise at every
    record, 10,000 messages a second from each rank, twenty scrapers at a time and four that do not read.
    """
    unfaulted = train(tmp_path_factory.mktemp("oracle") / "run", "--standbys", "0")
    run_dir = tmp_path_factory.mktemp("attacked") / "run"
    (run_dir / "journal").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as collector:
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}/v1/traces"
        faults = ("--fault", "exception@1:5", "--fault", "sigkill@0:10")
        # Each answer that the collector owes, and the exit with it, is waited for as long as in any run.
        limits = run_dir.parent / "limits.toml"
        limits.write_text(re.sub("^exporter_timeout_s.*", "", Path(PATIENT[1]).read_text(), flags=re.MULTILINE))
        # It stays until two of the scrapes that were asked for after its end are answered.
        options = ("--otlp-endpoint", endpoint, "--config", str(limits), "--metrics-linger", "600")
        arguments = train_arguments(run_dir, *faults, *options)
        mount = f"mount -t tmpfs -o size=8k none {run_dir / 'journal'}"
        popen = start(arguments, "tests.integration.broken_telemetry", prefix=mounted(mount))
        storm = Storm(wait_for_url(run_dir, popen))
        try:
            ended = finish(popen, run_dir)
        finally:
            storm.end()
    lines = (line.rpartition(" ") for line in storm.newest[1].splitlines() if not line.startswith("#"))
    series = {name: float(value) for name, _, value in lines}
    yield Attacked(ended=ended, unfaulted=unfaulted, num_scrapes=storm.num_answers, series=series)


def mounted(mount: str) -> list[str]:
    """Command prefix: a mount namespace in which `mount`, a shell command, has been done."""
    return ["unshare", "--mount", "--map-root-user", "sh", "-c", f'{mount} && exec "$@"', "sh"]


def test_c52_c61_training_and_recovery_are_as_they_were(attacked: Attacked) -> None:
    """Same digests as the run that nothing happened to, both faults recovered in their layer, exit 0."""
    ended = attacked.ended
    assert ended.exit_code == 0, ended.explain()
    assert [ended.summary[name] for name in DIGESTS] == [attacked.unfaulted.summary[name] for name in DIGESTS]
    recovered_in = [(item["layer"], item["verdict"]) for item in ended.summary["incidents"]]
    assert recovered_in == [("in_process", "recovered"), ("worker", "recovered")], ended.explain()


def test_every_failure_is_a_metric(attacked: Attacked) -> None:
    """What failed is counted by its part, while it fails, at the endpoint that still answers."""
    assert attacked.num_scrapes > NUM_SCRAPERS
    errors = {
        match[1]: value
        for name, value in attacked.series.items()
        if (match := re.search(r'nvrx_telemetry_errors_total\{component="(\w+)"', name))
    }
    for component in ("journal", "otlp", "spans", "metrics", "log"):
        assert errors[component] >= 1, (component, errors)


def test_c62_every_failure_is_one_line_of_the_log(attacked: Attacked) -> None:
    """Hundreds of failures in a run of seconds: one line for each part, which says that training goes on."""
    notes = [line for line in attacked.log.splitlines() if "failed, training goes on" in line]
    parts = [re.search(r"telemetry: (\w+) failed", line) for line in notes]
    named = [match[1] for match in parts if match]
    assert len(named) == len(set(named)) == len(notes), notes
    assert {"journal", "otlp", "spans", "metrics", "log"} <= set(named), notes
