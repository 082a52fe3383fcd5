"""Fixtures for every kind of test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CommandLine = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def nvrx_sre_command(tmp_path: Path) -> CommandLine:
    """Runs `nvrx-sre` with arguments in `tmp_path`, as a process of its own, and returns what it said."""

    def run(*arguments: str, timeout_s: float = 150.0) -> subprocess.CompletedProcess[str]:
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
