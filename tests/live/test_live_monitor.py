"""`nvrx-sre monitor` as a process of its own: it finds the run, says what fires, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from nvrx_sre.core.atomic import write_json_atomically
from nvrx_sre.events.schema import FaultClass
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.monitoring import query
from nvrx_sre.telemetry.endpoint import EndpointSecurity
from tests.certificates import make_certificate
from tests.integration import launched
from tests.live.live_site import HERE
from tests.live.told import LiveRun, PolicyStory

pytestmark = pytest.mark.live

PASSWORD = "correct-horse"
_SERVERS = re.compile(r"Prometheus at (\S+) and Alertmanager at (\S+)")


def read_until(popen: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Block until a line of the output fits; a command that ends before has failed."""
    assert popen.stdout is not None
    lines = []
    for line in popen.stdout:
        lines.append(line)
        match = re.search(pattern, line)
        if match is not None:
            return match
    raise AssertionError(f"no line like {pattern!r} in:\n{''.join(lines)}")


def locked(directory: Path) -> tuple[EndpointSecurity, list[str]]:
    """TLS and a password for an endpoint, and what `monitor` is given to get at it."""
    made = make_certificate(directory)
    users, password = directory / "users", directory / "password"
    for file, text in ((users, f"prom:{PASSWORD}\n"), (password, f"{PASSWORD}\n")):
        file.write_text(text)
        file.chmod(0o600)
    security = EndpointSecurity(tls_cert=made.certificate, tls_key=made.key, users=users)
    keys = ["--metrics-ca", str(made.certificate), "--metrics-user", "prom", "--metrics-password-file", str(password)]
    return security, keys


def training_run(root: Path, security: EndpointSecurity | None = None, name: str = "demo") -> LiveRun:
    """A told run that trains, at the place where a launcher of this process would have put it."""
    run = LiveRun(name, story=PolicyStory(), security=security)
    run.at_s = run.train()
    run.tell()
    directory = RunDirectory(root / name)
    directory.prepare(name, {})
    where = {"url": run.server.url, "pid": directory.take_epoch().pid, "run": name, "password": security is not None}
    directory.metrics.write_text(json.dumps(where))
    return run


def test_monitor_says_what_fires_and_leaves_nothing_behind(tmp_path: Path, now: float) -> None:
    """A run that appears is watched through TLS and a password, its halt is told in a line, SIGTERM ends everything
    with exit 0; the password is in no file or argument of the servers."""
    root, scratch = tmp_path / "runs", tmp_path / "scratch"
    root.mkdir()
    scratch.mkdir()
    security, keys = locked(tmp_path)
    arguments = ["monitor", "--root", str(root), "--scrape-interval", "0.5", "--values", str(HERE / "values.yaml")]
    popen = launched.start([*arguments, *keys], TMPDIR=str(scratch))
    servers = read_until(popen, _SERVERS.pattern)
    read_until(popen, "watching no run yet")
    children = psutil.Process(popen.pid).children(recursive=True)
    written = [file.read_text(errors="replace") for file in scratch.rglob("*.y*ml")]
    assert any("password_file" in text for text in written)
    assert not any(PASSWORD in text for text in [*written, *(" ".join(child.cmdline()) for child in children)])
    run = training_run(root, security)
    try:
        read_until(popen, rf"watching demo \({re.escape(run.server.url)}\)")
        assert run.server.wait_for_scrapes(2, 150.0)
        for _ in range(2):
            run.at_s = run.fail(run.at_s, FaultClass.EXCEPTION)
        run.story.fault(run.at_s + 0.2, run.at_s + 0.3, FaultClass.EXCEPTION, 1)
        run.story.finish(run.at_s + 0.5, exit_code=93)
        run.tell()
        fired = read_until(popen, "Z firing critical NvrxRunHalted namespace=runs run=demo: ")
        assert "Run demo is halted" in fired.string
    finally:
        run.server.close()
        popen.send_signal(signal.SIGTERM)
    output, _ = popen.communicate(timeout=150)
    assert (popen.returncode, output.splitlines()[-1]) == (0, "stopped"), output
    assert len(children) >= 2
    assert not any(child.is_running() for child in children)
    assert list(scratch.iterdir()) == []
    for url in servers.groups():
        with pytest.raises(query.QueryError):
            query.http_get(f"{url}/-/ready")


@pytest.mark.slow
def test_an_end_that_no_scrape_saw_pages_nobody(tmp_path: Path, now: float) -> None:
    """Two endpoints go, as with `--metrics-linger 0`: of the run that left an exit code nothing is told, of the one
    that left none, and was scraped last, that it is missing; Prometheus itself takes both for missing."""
    root = tmp_path / "runs"
    ended, vanished = training_run(root, name="a-ended"), training_run(root, name="vanished")
    arguments = ["monitor", "--root", str(root), "--scrape-interval", "0.5", "--values", str(HERE / "values.yaml")]
    popen = launched.start(arguments, TMPDIR=str(tmp_path))
    try:
        prometheus = read_until(popen, _SERVERS.pattern).group(1)
        assert all(run.server.wait_for_scrapes(2, 150.0) for run in (ended, vanished))
        write_json_atomically(RunDirectory(root / "a-ended").summary, {"exit_code": 0})
        ended.server.close()
        assert vanished.server.wait_for_scrapes(1, 150.0)
        vanished.server.close()
        told = read_until(popen, "firing critical NvrxTargetMissing ")
        assert "run=vanished: " in told.string
        missing = {item["labels"]["run"] for item in query.alerts(prometheus) if item["state"] == "firing"}
        assert {"a-ended", "vanished"} <= missing
    finally:
        for run in (ended, vanished):
            run.server.close()
        popen.send_signal(signal.SIGTERM)
    output, _ = popen.communicate(timeout=150)
    assert (popen.returncode, "firing critical NvrxTargetMissing namespace=runs run=a-ended" in output) == (0, False)
