"""Bad input ends in one clear line and exit 78 or 2, and nothing is lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from nvrx_sre.cli.main import main
from tests.conftest import CommandLine

SHORT = ("train", "--nproc", "1", "--steps", "2", "--metrics-linger", "0", "--standbys", "0")


@pytest.fixture
def in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line without a process of its own, for what is refused before anything starts."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        exit_code = main(arguments)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, exit_code, said.out, said.err)

    return run


def _expect_refusal(nvrx_sre_command: CommandLine, arguments: tuple[str, ...], *, says: str) -> None:
    """The command must end with 2 or 78, one line that says why, and no run directory content touched."""
    done = nvrx_sre_command(*arguments)
    line = done.stderr.strip()
    assert done.returncode in (2, 78), (done.returncode, done.stdout, done.stderr)
    assert "\n" not in line and line.startswith("nvrx-sre: ") and "Traceback" not in line, line
    assert says in line, line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--fault", "explosion@0:1"), "explosion"),
        (("--fault", "exception@7:1"), "rank 7"),
        (("--fault", "exception@0"), "exception@0"),
        (("--fault", "exception@0:99"), "step 99"),
        (("--fault-plan", "missing.yaml"), "missing.yaml"),
        (("--data", "no/such/text"), "no/such/text"),
        (("--metrics-port", "70000"), "70000"),
        (("--metrics-port", "0"), "0"),
        (("--nproc", "0"), "--nproc"),
        (("--steps", "-3"), "--steps"),
        (("--steps", "many"), "--steps"),
        (("--model", "gigantic"), "gigantic"),
        (("--grad-accum", "0"), "--grad-accum"),
        (("--save-every", "0"), "--save-every"),
        (("--step-deadline", "0"), "--step-deadline"),
        (("--config", "missing.toml"), "missing.toml"),
        (("--name", "No Such Name"), "No Such Name"),
        (("--nonsense",), "--nonsense"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_an_argument_that_cannot_work(
    in_this_process: CommandLine, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    """Each is refused before anything starts: no run directory appears."""
    _expect_refusal(in_this_process, (*SHORT, *arguments), says=says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[train\nsteps = 1", "cannot be parsed"),
        ("[train]\nstesp = 1\n", "did you mean 'steps'"),
        ("[train]\nseed = 'x'\n", "--seed"),
        ("[nonsense]\n", "nonsense"),
        ("[deadlines]\nstep_s = -1\n", "step_s"),
    ],
)
def test_a_broken_config(in_this_process: CommandLine, tmp_path: Path, content: str, says: str) -> None:
    """A configuration file that does not fit is refused by name of section and key."""
    (tmp_path / "run.toml").write_text(content)
    _expect_refusal(in_this_process, (*SHORT, "--config", "run.toml"), says=says)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_empty_data(nvrx_sre_command: CommandLine, tmp_path: Path, kind: str) -> None:
    """Nothing to learn from: an empty file, and a folder without text."""
    data = tmp_path / "data"
    data.touch() if kind == "file" else data.mkdir()
    _expect_refusal(nvrx_sre_command, (*SHORT, "--data", str(data)), says="data")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("mode", "says"), [(0o644, "chmod 600"), (0o600, "user:password")])
def test_a_file_of_passwords_that_cannot_be_used(
    in_this_process: CommandLine, tmp_path: Path, mode: int, says: str
) -> None:
    """The refused start takes no epoch: the next one, with the file put right, is the run's first."""
    users = tmp_path / "users"
    users.write_text("only-a-name\n")
    users.chmod(mode)
    _expect_refusal(in_this_process, (*SHORT, "--run-dir", "r", "--metrics-users", str(users)), says=says)
    assert not (tmp_path / "r").exists()


def test_an_explicit_metrics_port_that_is_busy(nvrx_sre_command: CommandLine, tmp_path: Path) -> None:
    """At the run's first start a busy port is an error: somebody expects the metrics there."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        _expect_refusal(nvrx_sre_command, (*SHORT, "--run-dir", "r", "--metrics-port", port), says=port)


@pytest.mark.parametrize("place", ["file", "below a file"])
def test_an_unusable_run_directory(nvrx_sre_command: CommandLine, tmp_path: Path, place: str) -> None:
    """A file where the directory should be, for every user (root may write anywhere)."""
    (tmp_path / "taken").write_text("mine")
    run_dir = "taken" if place == "file" else "taken/run"
    _expect_refusal(nvrx_sre_command, (*SHORT, "--run-dir", run_dir), says="taken")
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_run_directory_that_may_not_be_written(nvrx_sre_command: CommandLine) -> None:
    """/proc takes no directories, not even root's."""
    _expect_refusal(nvrx_sre_command, (*SHORT, "--run-dir", "/proc/nvrx-sre-run"), says="/proc/nvrx-sre-run")


@pytest.mark.processes
def test_a_run_directory_of_another_configuration(nvrx_sre_command: CommandLine, tmp_path: Path) -> None:
    """The run that lies there is named with what differs, and stays as it is."""
    first = nvrx_sre_command(*SHORT, "--run-dir", "r", "--seed", "1")
    assert first.returncode == 0, first.stderr
    before = _content(tmp_path / "r")
    _expect_refusal(nvrx_sre_command, (*SHORT, "--run-dir", "r", "--seed", "2"), says="seed")
    assert _content(tmp_path / "r") == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("launch", "missing.py"), "missing.py"),
        (("launch",), "SCRIPT"),
        (("launch", "--nnodes", "2", "x.py"), "--nnodes"),
        (("launch", "--nproc-per-node", "0", "x.py"), "0"),
        (("launch", "--nproc-per-node", "many", "x.py"), "many"),
        (("checkpoint", "list", "missing"), "missing"),
        (("halt", "missing", "--reason", "x"), "missing"),
        (("resume", "missing", "--reason", "x"), "missing"),
        (("halt", "missing"), "--reason"),
        (("bench", "recovery", "--faults", "0"), "--faults"),
        (("bench", "recovery", "--json", "no/such/folder/rows.json"), "rows.json"),
        (("demo", "--run-dir", "x.py"), "x.py"),
        (("nonsense",), "nonsense"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_other_commands_refuse_what_cannot_work(
    in_this_process: CommandLine, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    """Every command keeps the same contract, and touches nothing."""
    script = tmp_path / "x.py"
    script.write_text("raise SystemExit(0)\n")
    _expect_refusal(in_this_process, arguments, says=says)
    assert [path.name for path in tmp_path.iterdir()] == ["x.py"]


def test_the_demo_replaces_only_run_directories(nvrx_sre_command: CommandLine, tmp_path: Path) -> None:
    """A folder that is no run directory is never removed."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    _expect_refusal(nvrx_sre_command, ("demo", "--run-dir", "precious"), says="precious")
    assert (precious / "file").read_text() == "mine"


def _content(run_dir: Path) -> dict[str, str]:
    """Identity and checkpoints of a run: what a refused start must not change."""
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    return {"identity": json.dumps(json.loads((run_dir / "run.json").read_text())), "checkpoints": os.sep.join(names)}
