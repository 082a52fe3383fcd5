"""`nvrx-sre launch` against torchrun's own parser: nothing is silently lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from nvrx_sre.cli import launch
from nvrx_sre.cli.torchrun_flags import TORCHRUN_FLAGS, Treatment
from nvrx_sre.core.errors import UsageError, UserError
from nvrx_sre.core.limits import Limits
from nvrx_sre.launcher.rundir import RunDirectory

POSITIONAL = {"training_script", "training_script_args"}
ACTIONS = {action.dest: action for action in get_args_parser()._actions if action.dest not in {"help", *POSITIONAL}}


def test_every_flag_of_torchrun_is_in_the_table() -> None:
    """The installed torchrun is enumerated; a flag that it gains fails here until it is decided on."""
    assert {flag.parameter for flag in TORCHRUN_FLAGS} == set(ACTIONS)


@pytest.mark.parametrize("flag", TORCHRUN_FLAGS, ids=lambda flag: flag.parameter)
def test_a_flag_is_spelled_as_torchrun_spells_it(flag: Any) -> None:
    """Every spelling works, and a flag takes a value exactly when torchrun's does."""
    action = ACTIONS[flag.parameter]
    assert set(flag.names) == set(action.option_strings)
    assert flag.takes_value == (action.nargs != 0)
    assert flag.note


@pytest.mark.parametrize(
    "flag", [flag for flag in TORCHRUN_FLAGS if flag.treatment is Treatment.REFUSED], ids=lambda flag: flag.parameter
)
def test_a_refused_flag_says_why_and_lets_the_harmless_pass(flag: Any) -> None:
    """What happens anyway is accepted, everything else is refused by name."""
    for value in flag.harmless:
        launch.refuse({flag.parameter: value})
    launch.refuse({flag.parameter: None if flag.takes_value else False})
    with pytest.raises(UsageError, match=flag.option):
        launch.refuse({flag.parameter: "special" if flag.takes_value else True})


def test_torchruns_own_defaults_are_never_refused() -> None:
    """Spelling out a default changes nothing."""
    for flag in TORCHRUN_FLAGS:
        default = ACTIONS[flag.parameter].default
        if flag.treatment is Treatment.REFUSED and default not in (None, False, []):
            launch.refuse({flag.parameter: str(default)})
            assert str(default) in flag.harmless


def test_a_mapped_flag_says_what_it_does() -> None:
    """An option that does something else is announced, and only if it was given."""
    lines = launch.notices({"rdzv_backend": "c10d", "max_restarts": "3", "nproc_per_node": "2", "run_path": False})
    assert [line.split(":")[0] for line in lines] == ["--max-restarts", "--rdzv-backend"]


@pytest.mark.parametrize(("text", "wanted"), [(None, 1), ("1", 1), ("4", 4)])
def test_number_of_ranks(text: str | None, wanted: int) -> None:
    """A number is that number, none is torchrun's default."""
    assert launch.num_ranks(text) == wanted


def test_ranks_by_kind_of_device() -> None:
    """`cpu` is the number of cores; nonsense is a usage error."""
    assert launch.num_ranks("cpu") >= 1
    with pytest.raises(UsageError, match="neither a number"):
        launch.num_ranks("many")
    with pytest.raises(UsageError, match="--nproc-per-node is 0: use 1 or more"):
        launch.num_ranks("0")


def test_restarts_and_shutdown_become_limits() -> None:
    """N restarts are N + 1 attempts; the shutdown timeout is the teardown deadline."""
    limits = launch.mapped_limits(Limits(), "4", "12.5")
    assert limits.caps.consecutive_attempts == limits.caps.window_attempts == 5
    assert limits.deadlines.teardown_s == 12.5
    assert launch.mapped_limits(Limits(), None, None) == Limits()
    with pytest.raises(UsageError, match="--max-restarts"):
        launch.mapped_limits(Limits(), "-1", None)
    with pytest.raises(UsageError, match="--shutdown-timeout"):
        launch.mapped_limits(Limits(), None, "soon")


def test_the_workers_command(tmp_path: Path) -> None:
    """A script or a module with its own arguments; a script that is not there is refused before anything starts."""
    script = tmp_path / "train.py"
    script.touch()
    assert launch.worker_command(str(script), ("--lr", "1"), is_module=False) == (str(script), "--lr", "1")
    assert launch.worker_command("pack.train", ("x",), is_module=True) == ("-m", "pack.train", "x")
    with pytest.raises(UserError, match="no script"):
        launch.worker_command(str(tmp_path / "missing.py"), (), is_module=False)


def test_what_follows_the_script_belongs_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Flags after the script's name are the script's, with and without `--`."""
    script = tmp_path / "train.py"
    script.touch()
    seen: list[Any] = []
    monkeypatch.setattr(launch, "run_and_report", lambda config, **_: seen.append(config) or 0)
    for separator in ([], ["--"]):
        arguments = ["--nproc_per_node=2", "--run-dir", str(tmp_path / "r"), *separator, str(script), "--keep", "9"]
        result = CliRunner().invoke(launch.command, arguments, standalone_mode=False)
        assert result.exception is None, result.exception
    assert [config.command for config in seen] == [(str(script), "--keep", "9")] * 2
    assert seen[0].nproc == 2 and seen[0].keep == 3


def test_what_is_reported_of_a_script_holds_no_secret() -> None:
    """A secret among the arguments is masked, the rest is kept."""
    items = launch.reported(("--api-token", "s3cr3t-value", "--lr=0.1"))
    assert "s3cr3t" not in items["arguments"]
    assert items["arguments"].startswith("--api-token ") and items["arguments"].endswith(" --lr=0.1")


def test_a_script_that_is_told_to_train_longer_is_the_same_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its arguments are reported and do not identify it; another script is another run."""
    seen: list[Any] = []
    monkeypatch.setattr(launch, "run_and_report", lambda config, **_: seen.append(config) or 0)
    for name, steps in (("train.py", "100"), ("train.py", "200"), ("other.py", "200")):
        script = tmp_path / name
        script.touch()
        arguments = ["--run-dir", str(tmp_path / "r"), str(script), "--steps", steps]
        CliRunner().invoke(launch.command, arguments, standalone_mode=False)
    directory = RunDirectory(tmp_path / "r")
    assert [directory.prepare("r", config.config_items) for config in seen[:2]] == [False, True]
    assert seen[0].reported_items != seen[1].reported_items
    with pytest.raises(UserError, match="script: "):
        directory.prepare("r", seen[2].config_items)


def test_torchruns_variables_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun takes its flags from PET_ variables as well; an argument beats them."""
    script = tmp_path / "train.py"
    script.touch()
    seen: list[Any] = []
    monkeypatch.setattr(launch, "run_and_report", lambda config, **_: seen.append(config) or 0)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    base = ["--run-dir", str(tmp_path / "r")]
    CliRunner().invoke(launch.command, [*base, str(script)], standalone_mode=False)
    CliRunner().invoke(launch.command, [*base, "--nproc-per-node", "2", str(script)], standalone_mode=False)
    assert [config.nproc for config in seen] == [3, 2]
    assert seen[0].config_items == seen[1].config_items, "the same run in a world of another size"


def test_the_rendezvous_id_names_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unless `--name` does."""
    script = tmp_path / "train.py"
    script.touch()
    seen: list[Any] = []
    monkeypatch.setattr(launch, "run_and_report", lambda config, **_: seen.append(config) or 0)
    base = ["--run-dir", str(tmp_path / "r"), "--rdzv-id", "Job 7"]
    CliRunner().invoke(launch.command, [*base, str(script)], standalone_mode=False)
    CliRunner().invoke(launch.command, [*base, "--name", "mine", str(script)], standalone_mode=False)
    assert [config.run for config in seen] == ["job-7", "mine"]


@pytest.mark.parametrize(
    ("arguments", "run", "directory"),
    [
        ([], "my_script", "runs/my_script"),
        (["--rdzv-id", "7"], "7", "runs/7"),
        (["--name", "mine"], "mine", "runs/mine"),
        (["--run-dir", "there"], "there", "there"),
    ],
)
def test_two_scripts_do_not_share_a_directory(
    arguments: list[str], run: str, directory: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where neither name nor directory is given, the script names both."""
    monkeypatch.chdir(tmp_path)
    Path("my_script.py").touch()
    seen: list[Any] = []
    monkeypatch.setattr(launch, "run_and_report", lambda config, **_: seen.append(config) or 0)
    CliRunner().invoke(launch.command, [*arguments, "my_script.py"], standalone_mode=False)
    assert [(config.run, config.run_dir) for config in seen] == [(run, tmp_path / directory)]


def test_help_sorts_the_flags_of_torchrun_by_what_becomes_of_them() -> None:
    """What works comes first, what is refused last, each once."""
    said = CliRunner().invoke(launch.command, ["--help"]).output
    places = [said.index(word) for word in ("--nproc-per-node", "--save-every", "--max-restarts", "--log-dir")]
    assert places == sorted(places)
    assert "counts as hung. [default: 60]" in " ".join(said.split())
    assert "--log_dir" not in said
