"""`pip install .` gives the command line with runbooks, dashboards and alerts inside."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ("alerts", "dashboards", "runbooks")


def _run(*command: str, cwd: Path, path: Path | None = None) -> str:
    """Standard output; the assertion shows what went wrong."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    out = tmp_path_factory.mktemp("wheel")
    build = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(ROOT))
    _run(sys.executable, "-m", *build, cwd=out)
    return next(out.glob("nvrx_sre-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a directory of its own; dependencies come from the running environment."""
    target = tmp_path_factory.mktemp("installed")
    _run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)),
        str(wheel),
        cwd=target,
    )
    return target


def _installed_command(installed: Path, cwd: Path, *arguments: str) -> str:
    """Output of the installed program; PYTHONPATH stands before the checkout's editable entry."""
    return _run(sys.executable, "-m", "nvrx_sre", *arguments, cwd=cwd, path=installed)


def test_the_wheel_holds_package_and_assets_only(wheel: Path) -> None:
    """Every asset of the checkout is in it, and no test or script is."""
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"nvrx_sre"}
    for kind in ASSETS:
        files = {f"nvrx_sre/_assets/{kind}/{path.name}" for path in (ROOT / kind).iterdir() if path.is_file()}
        assert files and files <= names


def test_the_installed_package_is_the_one_that_runs(installed: Path, tmp_path: Path) -> None:
    """The test below would prove nothing if the checkout answered."""
    code = "import nvrx_sre; print(nvrx_sre.__file__)"
    assert str(installed) in _run(sys.executable, "-c", code, cwd=tmp_path, path=installed)


def test_runbooks_dashboards_and_alerts_come_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """A runbook is printed, and the generated files are those inside."""
    assert "NvrxCrashLooping" in _installed_command(installed, tmp_path, "runbook", "NvrxCrashLooping")
    _installed_command(installed, tmp_path, "generate", "--out", "out")
    for kind in ("alerts", "dashboards"):
        inside = installed / "nvrx_sre" / "_assets" / kind
        written = tmp_path / "out" / kind
        for path in written.iterdir():
            assert path.read_bytes() == (inside / path.name).read_bytes(), path.name


@pytest.mark.processes
def test_a_run_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Ranks, standby and writer find the package where the launcher found it."""
    said = _installed_command(
        installed,
        tmp_path,
        *("train", "--nproc", "1", "--steps", "3", "--standbys", "0", "--metrics-linger", "0"),
    )
    assert "exit 0, 3 of 3 steps" in said
    assert str(installed) in said
