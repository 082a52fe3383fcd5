"""`nvrx-sre exporter` as a process of its own: what it serves, that it follows, changes nothing and ends cleanly."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nvrx_sre.core.errors import ExitCode, UserError
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import Scope
from tests.conftest import CommandLine
from tests.stories import crash_loop_story, exception_story
from tests.unit.test_telemetry_archive import write_run

pytestmark = pytest.mark.processes

WAIT_S = 60.0
A_CENTURY_H = "876000"
"""The stories are of another year than the clock."""
ENDS = ("", "_total", "_count")
"""What a sample's name has beyond that of its family."""


@dataclass
class ExporterProcess:
    """A serving exporter."""

    popen: subprocess.Popen[str]
    url: str

    def get(self, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
        """Status and body."""
        request = urllib.request.Request(self.url.removesuffix("/metrics") + path, method=method)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def runs(self) -> set[str]:
        """Runs that a scrape shows now."""
        return set(re.findall(r'^nvrx_steps_total\{.*run="([^"]+)"', self.get()[1], flags=re.MULTILINE))

    def wait_for_run(self, run: str) -> None:
        """Scrape until the run is there: the endpoint lets nobody scrape without a rest."""
        while run not in self.runs():
            assert self.popen.poll() is None, "the exporter has ended"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two runs that have ended, and a directory that is none."""
    write_run(tmp_path / "runs", "recovered", exception_story().records, run="recovered")
    write_run(tmp_path / "runs", "looped", crash_loop_story().records, run="looped")
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def exporter(root: Path) -> Iterator[ExporterProcess]:
    """The command, serving `root`."""
    arguments = ["exporter", str(root), "--keep-hours", A_CENTURY_H]
    popen = subprocess.Popen(
        [sys.executable, "-m", "nvrx_sre", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert popen.stdout is not None
        line = popen.stdout.readline()
        assert line.startswith("serving http://127.0.0.1:"), (line, popen.poll())
        yield ExporterProcess(popen=popen, url=line.removeprefix("serving ").strip())
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.communicate()


def content(root: Path) -> dict[str, bytes]:
    """All files below `root`."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_it_serves_all_runs_follows_new_ones_and_leaves_no_trace(exporter: ExporterProcess, root: Path) -> None:
    """Families of the job alone, GET alone; a run that comes is shown; SIGTERM ends it with 0; no file was touched."""
    before = content(root)
    assert exporter.runs() == {"recovered", "looped"}
    names = re.findall(r"^# TYPE (nvrx_\w+)", exporter.get()[1], flags=re.MULTILINE)
    found = {metric.name for name in names for end in ENDS if (metric := catalog.metric_of(name + end))}
    assert found == {metric.name for metric in catalog.CATALOG.values() if metric.scope is Scope.JOB}
    assert 'nvrx_halted_timestamp_seconds{reason="cap",run="looped"}' in exporter.get()[1]
    assert [exporter.get(path)[0] for path in ("/healthz", "/readyz", "/elsewhere")] == [200, 200, 404]
    assert exporter.get(method="POST")[0] == 405
    assert content(root) == before

    write_run(root, "new", exception_story().records, run="new")
    exporter.wait_for_run("new")
    exporter.popen.send_signal(signal.SIGTERM)
    assert exporter.popen.wait(WAIT_S) == ExitCode.FINISHED
    with pytest.raises(urllib.error.URLError):
        exporter.get()


def test_a_busy_port_is_one_clear_line(exporter: ExporterProcess, root: Path, nvrx_sre_command: CommandLine) -> None:
    """The second exporter says so and ends; the first goes on."""
    port = exporter.url.rpartition(":")[2].removesuffix("/metrics")
    second = nvrx_sre_command("exporter", str(root), "--port", port)
    assert second.returncode == UserError.exit_code
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
    assert "Traceback" not in second.stderr
    assert exporter.get("/healthz")[0] == 200
