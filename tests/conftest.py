"""Fixtures for every kind of test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example took says how busy the machine was.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

CommandLine = Callable[..., subprocess.CompletedProcess[str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the chaos matrix leaves what came of its cells."""
    parser.addoption("--chaos-results", type=Path, metavar="DIR", help="write the results of the chaos matrix to DIR")


@pytest.fixture(scope="session")
def chaos_results(request: pytest.FixtureRequest) -> Path | None:
    """Directory for the results of the chaos matrix, None if nobody wants them."""
    directory: Path | None = request.config.getoption("--chaos-results")
    return directory


@pytest.fixture
def nvrx_sre_command(tmp_path: Path) -> CommandLine:
    """Runs `nvrx-sre` with arguments in `tmp_path`, as a process of its own, and returns what it said."""

    def run(*arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nvrx_sre", *arguments],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run
