"""The commands of the guides work as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_sre.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
BLOCK = re.compile(r"^```console(?P<mark>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ ", re.MULTILINE)
OPTION = "--metrics-linger 0"


def runnable_blocks() -> list[tuple[str, str]]:
    """(where, script) of every block marked `runnable`; a line that starts with `$ ` begins a command."""
    found = []
    for guide in GUIDES:
        for number, match in enumerate(BLOCK.finditer(guide.read_text(encoding="utf-8"))):
            if match["mark"].strip() == "runnable":
                found.append((f"{guide.name}-{number}", COMMAND.sub("", match["body"])))
    return found


def commands_shown() -> list[tuple[str, str]]:
    """(file, command) of every `nvrx-sre` command shown in a console block of README and guides."""
    shown = []
    for page in (ROOT / "README.md", *GUIDES):
        for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
            for line in match["body"].splitlines():
                if line.startswith("$ nvrx-sre "):
                    shown.append((page.name, line.removeprefix("$ ").split("#")[0].strip()))
    return shown


def _run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_there_are_runnable_commands() -> None:
    """The guides are not only read: an empty list would test nothing."""
    assert len(runnable_blocks()) >= 4


def test_no_command_shown_takes_the_end_of_a_run_from_its_scraper() -> None:
    """`--metrics-linger 0` pages for a run that ended well; one that nobody scrapes does not wait anyway."""
    pages = [ROOT / "README.md", *GUIDES]
    given = [page.name for page in pages for block in BLOCK.finditer(page.read_text()) if OPTION in block["body"]]
    assert given == []
    for alert in ("NvrxTargetMissing", "NvrxScrapesMissing", "NvrxCheckpointStale"):
        page = (ROOT / "runbooks" / f"{alert}.md").read_text(encoding="utf-8")
        assert OPTION in page.partition("## False alarms")[2], alert


@pytest.mark.processes
@pytest.mark.parametrize(("where", "script"), runnable_blocks(), ids=[where for where, _ in runnable_blocks()])
def test_runnable_block(where: str, script: str, tmp_path: Path) -> None:
    """Exit 0, in an empty directory."""
    done = _run(script, tmp_path)
    assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(("page", "command"), commands_shown())
def test_every_command_shown_exists(page: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its command and its flags are in the program's help, where it is not run for real."""
    words = command.split()[1:]
    name = [word for word in words[:2] if word.isalpha()]
    group = name if name[0] in ("bench", "checkpoint", "policy") else name[:1]
    assert main([*group, "--help"]) == 0, f"{page}: {command}"
    shown = capsys.readouterr().out
    flags = {word.split("=")[0] for word in words if word.startswith("--")}
    assert all(flag in shown for flag in flags), f"{page}: {command}"
