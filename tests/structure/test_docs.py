"""The documents name what is there: packages, commands, exit codes, dependencies; and their links lead somewhere."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from nvrx_sre import __version__
from nvrx_sre.cli.main import COMMANDS
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.schema import EVENT_TYPES
from tests.structure.source import PACKAGE, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "runbooks").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def _text(relative: str) -> str:
    return (ROOT / relative).read_text(encoding="utf-8")


def _project() -> dict[str, Any]:
    value: dict[str, Any] = tomllib.loads(_text("pyproject.toml"))["project"]
    return value


def test_every_dependency_has_a_decision() -> None:
    """A dependency says in docs/adr why it is worth having."""
    decisions = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "adr").glob("0*.md"))
    project = _project()
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = [re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in wanted]
    assert [name for name in names if name not in decisions] == []


def test_decisions_are_numbered_and_listed() -> None:
    """No number twice, none missing from the list."""
    names = sorted(path.name for path in (ROOT / "docs" / "adr").glob("0*.md"))
    numbers = [int(name[:4]) for name in names]
    assert numbers == list(range(1, len(numbers) + 1))
    listed = _text("docs/adr/README.md")
    assert [name for name in names if name not in listed] == []


def test_every_package_is_in_the_architecture() -> None:
    """A reader finds each package's role."""
    text = _text("docs/ARCHITECTURE.md")
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert [name for name in sorted(packages) if f"`{name}`" not in text] == []


def test_every_command_is_shown_somewhere() -> None:
    """README or a guide shows each command of the program."""
    text = _text("README.md") + "".join(path.read_text() for path in (ROOT / "docs" / "guides").glob("*.md"))
    text += _text("CHANGELOG.md")
    assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", text)] == []


def test_every_exit_code_is_in_the_contracts() -> None:
    """An orchestrator's author finds each of them."""
    text = _text("docs/reference/contracts.md")
    assert [code for code in ExitCode if f"| {code.value} |" not in text] == []


def test_this_version_is_in_the_changes() -> None:
    """A release says what is new."""
    assert f"## {__version__}" in _text("CHANGELOG.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Any) -> None:
    """Relative links of every page."""
    targets = [match["target"] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    local = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert [target for target in local if target and not (page.parent / target).exists()] == []


def test_events_are_in_the_past_tense() -> None:
    """An event says what happened, never what should."""
    past = re.compile(r"(ed|Lost|Written|Ready|Reset|RolledBack|Chosen)$")
    assert [name for name in EVENT_TYPES if not past.search(name)] == []


def test_the_tests_that_break_checkpoints_are_there() -> None:
    """Each test that the list of faults names is a test of this repository."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/reference/checkpoint-faults.md").read_text()))
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20 and [name for name in sorted(named) if f"def {name}(" not in sources] == []
