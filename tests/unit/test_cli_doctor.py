"""The doctor's checks: findings, cures, exit code."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from nvrx_sre.cli import doctor
from nvrx_sre.cli.doctor import Finding, Status
from tests.checkpoint_stored import Part, commit_tensors


def test_a_missing_torch_fails_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cure is the command to run."""

    def version(name: str) -> str:
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    finding = doctor.check_torch()
    assert finding.status is Status.FAIL and "pip install torch" in finding.cure


@pytest.mark.parametrize(("version", "status"), [("2.13.0+cpu", Status.OK), ("2.9.1", Status.WARN)])
def test_other_releases_of_torch_warn(version: str, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that was not tested is not a failure."""
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: version)
    assert doctor.check_torch().status is status


def test_a_directory_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check really writes, links and syncs where the runs would lie."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    assert doctor.check_storage(tmp_path / "runs").status is Status.OK
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", refuse)
    assert doctor.check_storage(tmp_path).status is Status.FAIL


def test_little_free_space_warns_then_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thresholds."""
    for free_bytes, status in ((10**9, Status.WARN), (10**8, Status.FAIL)):
        usage = doctor.shutil.disk_usage(tmp_path)._replace(free=free_bytes)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _, usage=usage: usage)
        assert doctor.check_storage(tmp_path).status is status
        monkeypatch.undo()


def test_a_missing_tool_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus is for the demo and the tests; a run works without it."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    finding = doctor.check_tool("prometheus", ("prometheus",), "prometheus")
    assert finding.status is Status.WARN and "apt-get install" in finding.cure


@pytest.mark.parametrize(
    ("num_devices", "library", "binding", "status", "cure"),
    [
        (0, None, None, Status.OK, ""),
        (2, "libnvidia-ml.so.1", object(), Status.OK, ""),
        (2, None, object(), Status.WARN, "libnvidia-ml"),
        (2, "libnvidia-ml.so.1", None, Status.WARN, "pip install 'nvrx-sre[gpu]'"),
    ],
)
def test_devices_without_their_health_warn(
    num_devices: int,
    library: str | None,
    binding: object | None,
    status: Status,
    cure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine with GPUs wants NVML and its binding; one without is as good as it is."""
    monkeypatch.setattr(doctor, "num_nvidia_devices", lambda: num_devices)
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: library)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: binding)
    finding = doctor.check_gpu()
    assert finding.status is status
    assert cure in finding.cure


def test_gloo_failure_shows_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason stands at the end of what the process said."""
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nRuntimeError: no host name\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: failed)
    finding = doctor.check_gloo()
    assert finding.status is Status.FAIL and finding.detail == "RuntimeError: no host name"


def test_checks_of_the_kernel_pass_here() -> None:
    """What the package needs of Linux is there where its tests run."""
    checks = (doctor.check_memfd, doctor.check_pidfd, doctor.check_seqpacket, doctor.check_pdeathsig)
    assert [check().status for check in checks] == [Status.OK] * 4


@pytest.mark.parametrize(("status", "exit_code"), [(Status.OK, 0), (Status.WARN, 0), (Status.FAIL, 1)])
def test_only_a_failure_changes_the_exit_code(status: Status, exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings do not."""
    finding = Finding(name="x", status=status, detail="d", cure="c")
    monkeypatch.setattr(doctor, "examine", lambda *_: [finding])
    result = CliRunner().invoke(doctor.command, [], standalone_mode=False)
    assert result.return_value == exit_code
    assert result.output.split() == [str(status), "x", "d;", "c"]


def test_findings_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a machine: name, status, detail, cure."""
    monkeypatch.setattr(doctor, "examine", lambda *_: [Finding(name="x", status=Status.OK, detail="d")])
    result = CliRunner().invoke(doctor.command, ["--json"], standalone_mode=False)
    assert json.loads(result.output) == [{"name": "x", "status": "ok", "detail": "d", "cure": ""}]


def test_shm_bounds_loader_workers_and_not_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free counts, and the finding says for whom."""
    usage = doctor.shutil.disk_usage("/")._replace(total=64_000_000, free=1_000_000)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    finding = doctor.check_shm()
    assert finding.status is Status.WARN
    assert "1.0 MB of 64.0 MB free" in finding.detail and "not hot slots" in finding.detail


def test_slots_of_a_given_state_fit_or_do_not(tmp_path: Path) -> None:
    """Three times the state; more than any memory warns with the cures; nothing known is no failure."""
    fits = doctor.check_slots(10_000_000, tmp_path)
    assert fits.status is Status.OK and "3 slots of 10.0 MB of state are 30.2 MB" in fits.detail
    finding = doctor.check_slots(1 << 50, tmp_path)
    assert finding.status is Status.WARN and "--hot-slots 2" in finding.cure
    assert "not known" in doctor.check_slots(None, tmp_path).detail


def test_slots_are_those_of_the_newest_checkpoint_of_the_runs_below(tmp_path: Path) -> None:
    """`doctor` alone looks at ./runs, where runs lie and no checkpoint does."""
    for age_s, (name, size) in enumerate((("new", 4096), ("old", 8192))):
        run = tmp_path / name
        run.mkdir()
        part = Part(torch.ones(8), [((0, 8),)], ("m", "w"))
        path = commit_tensors(run, 10, {"m.w": part}, {}, rank_bytes=[size])
        (run / "run.json").write_text(json.dumps({"run": json.loads((path / "manifest.json").read_bytes())["run"]}))
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    assert "3 slots of 4.1 kB of state" in doctor.check_slots(None, tmp_path).detail


def test_slots_of_a_run_are_those_of_its_newest_checkpoint(tmp_path: Path) -> None:
    """The layout of each rank says what its slots hold; a checkpoint that cannot be read is left to verify."""
    path = commit_tensors(
        tmp_path, 10, {"m.w": Part(torch.ones(8), [((0, 8),)], ("m", "w"))}, {}, rank_bytes=[4096, 8192]
    )
    assert "3 slots of 12.3 kB of state" in doctor.check_slots(None, tmp_path).detail
    (path / "rank-00000.json").write_bytes(b"x" * (path / "rank-00000.json").stat().st_size)
    assert "not known" in doctor.check_slots(None, tmp_path).detail
