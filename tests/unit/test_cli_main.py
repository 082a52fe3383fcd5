"""The entry point: one line and the right exit code for every way to end."""

from __future__ import annotations

import importlib
from pathlib import Path

import click
import pytest

from nvrx_sre import __version__
from nvrx_sre.cli import main as entry
from nvrx_sre.core.errors import CheckpointCorrupt, ExitCode, StorageError, UserError


@pytest.mark.parametrize(
    "words", ["events", "checkpoint list", "checkpoint verify", "monitor", "policy explain", "resume --reason x"]
)
def test_a_missing_run_directory_is_named_in_one_way(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that reads a run says the same, exit 78; a file is not called missing."""
    file = tmp_path / "mine.py"
    file.touch()
    for path, says in (
        (tmp_path / "no", "is not there: name the run directory (--run-dir of the run)"),
        (file, "is a file, not a run directory"),
    ):
        assert entry.main([*words.split(), str(path)]) == ExitCode.CONFIG
        assert capsys.readouterr().err == f"nvrx-sre: {path} {says}\n"


@pytest.mark.parametrize(
    "words", ["runs --root", "monitor --root", "exporter", "brake --alert A --token-file token --root"]
)
def test_a_missing_root_is_named_in_one_way(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that reads all runs below a directory says the same, exit 78."""
    file = tmp_path / "mine.py"
    file.touch()
    for path in (tmp_path / "no", file):
        assert entry.main([*words.split(), str(path)]) == ExitCode.CONFIG
        says = f"nvrx-sre: {path} is no directory: name the directory of the run directories\n"
        assert capsys.readouterr().err == says


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """A command `doctor` that raises the one error that the test puts into the list."""
    errors: list[BaseException] = []

    @click.command("doctor")
    def command() -> None:
        raise errors[0]

    monkeypatch.setattr(importlib.import_module("nvrx_sre.cli.doctor"), "command", command)
    return errors


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UserError("the data is\nmissing"), ExitCode.CONFIG),
        (StorageError("disk"), ExitCode.RETRYABLE),
        (CheckpointCorrupt("bad", reason="size"), ExitCode.DO_NOT_RESTART),
        (click.UsageError("what?"), ExitCode.USAGE),
        (click.ClickException("oh"), ExitCode.USAGE),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (click.Abort(), ExitCode.INTERRUPTED),
        (ZeroDivisionError("ours"), ExitCode.INTERNAL),
        (BrokenPipeError(), ExitCode.FINISHED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line_and_its_exit_code(
    error: BaseException,
    exit_code: int,
    failing: list[BaseException],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No traceback, whatever the error."""
    monkeypatch.setattr(entry, "_discard_stdout", lambda: None)
    failing.append(error)
    assert entry.main(["doctor"]) == exit_code
    said = capsys.readouterr().err
    assert said.strip().count("\n") == 0 and "Traceback" not in said
    assert not said or said.strip().startswith("nvrx-sre: ")


def test_the_traceback_is_there_for_who_asks(failing: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    """`--traceback` before the command shows it, fit for a bug report: without secrets."""
    failing.append(ZeroDivisionError("ours, with token=abcdef"))
    assert entry.main(["--traceback", "doctor"]) == ExitCode.INTERNAL
    said = capsys.readouterr().err
    assert "Traceback" in said and said.count("ours, with token=***") == 2


def test_a_value_of_a_file_is_refused_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody typed `--steps`: the line says where it stands, and the exit code is that of a key which is wrong."""
    file = tmp_path / "run.toml"
    file.write_text('[train]\nsteps = "x"\n')
    assert entry.main(["train", "--config", str(file)]) == ExitCode.CONFIG
    assert f"nvrx-sre: {file}: --steps is 'x': use a whole number of 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "--ranks", "20000"], "--ranks is 20000: use a whole number from 1 to 16384 ("),
        (["simulate", "--ranks", "many"], "--ranks is 'many': use a whole number from 1 to 16384 ("),
        (["train", "--nproc", "0"], "--nproc is 0: use a whole number of 1 or more ("),
        (["exporter", "runs", "--keep-hours", "0"], "--keep-hours is 0.0: use a number above 0 ("),
        (["checkpoint", "verify", "runs", "x"], "STEP is 'x': use a whole number of 0 or more ("),
    ],
)
def test_a_number_out_of_its_range_is_told_the_range(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line: the option, what was given, what may be given."""
    assert entry.main(arguments) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1 and "integer range" not in told


@pytest.mark.parametrize(
    ("command", "unknown", "meant"),
    [
        ("launch", "--nprocs", "--nproc-per-node"),
        ("launch", "--nproc", "--nproc-per-node"),
        ("train", "--nprocs", "--nproc"),
    ],
)
def test_an_unknown_option_names_the_one_that_begins_like_it(
    command: str, unknown: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the one that has as many letters."""
    assert entry.main([command, unknown, "2", "mine.py"]) == ExitCode.USAGE
    assert f"No such option '{unknown}'. Did you mean '{meant}'? (see " in capsys.readouterr().err


def test_where_several_options_begin_alike_the_most_similar_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """No guess at the first of many."""
    assert entry.main(["train", "--metricss", "2"]) == ExitCode.USAGE
    assert "'--metrics-users'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the package's version."""
    assert entry.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"nvrx-sre {__version__}"


@pytest.mark.parametrize("arguments", [["nonsense"], ["doctor", "--nonsense"], ["doctor", "extra"]])
def test_a_command_line_that_cannot_be_parsed_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Usage errors name the help."""
    assert entry.main(arguments) == ExitCode.USAGE
    assert "--help" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(entry.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with a sentence that says what it does."""
    assert entry.main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"nvrx-sre {name}" in shown and len(shown.splitlines()[2].strip()) > 20


def test_the_list_of_commands_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """`nvrx-sre --help` names all of them."""
    assert entry.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in entry.COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["checkpoint"], ["bench"]])
def test_a_group_without_a_command_shows_its_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As lines, as `--help` does, and still as a usage error."""
    assert entry.main(arguments) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said.startswith("Usage: ") and "\nCommands:\n" in said


@pytest.mark.parametrize("name", sorted(entry.COMMANDS))
def test_the_list_of_commands_fits_a_narrow_terminal(name: str) -> None:
    """No summary is cut short at 80 columns."""
    command = entry.group.get_command(click.Context(entry.group), name)
    assert command is not None
    assert not command.get_short_help_str(limit=80 - len("  checkpoint  ")).endswith("...")
