"""The configuration file: sections, conversion, limits, and every way it can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_sre.cli import config_file
from nvrx_sre.cli.launch import command as launch
from nvrx_sre.cli.train import command as train
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.limits import Limits

PARAMETERS = [str(parameter.name) for parameter in train.params]


def _write(tmp_path: Path, text: str, name: str = "run.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    """Both forms give equal options and limits."""
    toml = _write(tmp_path, '[train]\nsteps = 12\n[faults]\nspecs = ["exception@1:4"]\n[deadlines]\nstep_s = 3\n')
    yaml = _write(
        tmp_path, "train: {steps: 12}\nfaults: {specs: ['exception@1:4']}\ndeadlines: {step_s: 3}\n", "run.yaml"
    )
    loaded = config_file.load(toml, PARAMETERS)
    assert loaded == config_file.load(yaml, PARAMETERS)
    assert loaded.options == {"steps": "12", "fault": ["exception@1:4"]}
    assert loaded.limits == {"deadlines": {"step_s": 3.0}}


def test_every_key_of_the_table_is_a_parameter_of_train() -> None:
    """The table can not name an option that does not exist."""
    named = {name for keys in config_file.OPTION_KEYS.values() for name in keys.values()}
    assert named <= set(PARAMETERS)


def test_every_parameter_of_train_can_be_set_in_a_file() -> None:
    """No option is left out of the table."""
    named = {name for keys in config_file.OPTION_KEYS.values() for name in keys.values()}
    assert set(PARAMETERS) - named == {"config"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[trian]\nsteps = 1\n", "did you mean 'train'"),
        ("[train]\nstesp = 1\n", "did you mean 'steps'"),
        ("[deadlines]\nstep = 1\n", "did you mean 'step_s'"),
        ("[deadlines]\nstep_s = 'long'\n", "must be a number"),
        ("[deadlines]\nstep_s = -1\n", "must be a number"),
        ("[caps]\nwindow_attempts = 2.5\n", "whole number"),
        ("[caps]\nwindow_attempts = true\n", "whole number"),
        ("[caps]\nbackoff_s = 3\n", "list of seconds"),
        ("[train]\nsteps = {a = 1}\n", "must be text"),
        ("train = 3\n", "must be a section"),
        ("[train\n", "cannot be parsed"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    """One line that says where and what."""
    with pytest.raises(UserError, match=complaint):
        config_file.load(_write(tmp_path, text), PARAMETERS)


def test_a_missing_file_and_one_that_is_no_text_are_errors(tmp_path: Path) -> None:
    """Neither is an empty configuration."""
    with pytest.raises(UserError, match="No such file"):
        config_file.load(tmp_path / "missing.toml", PARAMETERS)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
        config_file.load(binary, PARAMETERS)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    """Defaults stay."""
    loaded = config_file.load(_write(tmp_path, "", "empty.yaml"), PARAMETERS)
    assert (loaded.options, loaded.limits) == ({}, {})
    assert config_file.build_limits(loaded.limits) == Limits()


def test_an_explicit_deadline_beats_the_file() -> None:
    """Arguments stand above the file."""
    limits = config_file.build_limits({"deadlines": {"step_s": 5.0, "data_s": 7.0}}, step_deadline_s=2.0)
    assert (limits.deadlines.step_s, limits.deadlines.data_s) == (2.0, 7.0)


def test_limits_are_checked_in_relation() -> None:
    """A grace longer than the teardown it belongs to is refused."""
    with pytest.raises(UserError, match="interrupt_grace_s"):
        config_file.build_limits({"deadlines": {"interrupt_grace_s": 20.0}})


def test_a_list_becomes_a_tuple_of_seconds(tmp_path: Path) -> None:
    """Back-off is a sequence of waits."""
    loaded = config_file.load(_write(tmp_path, "[caps]\nbackoff_s = [0, 1.5]\n"), PARAMETERS)
    assert config_file.build_limits(loaded.limits).caps.backoff_s == (0.0, 1.5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[train]\nsteps = 1\n", r"\[train\] is for `nvrx-sre train`$"),
        ("[run]\nnproc = 2\n", r"'nproc' in \[run\] is for `nvrx-sre train`$"),
        ("[run]\nnprox = 2\n", r"unknown key 'nprox' in \[run\]"),
    ],
)
def test_a_key_of_another_command_says_whose_it_is(tmp_path: Path, text: str, complaint: str) -> None:
    """It is no unknown one: the same file is good for `train`."""
    with pytest.raises(UserError, match=complaint):
        config_file.load(_write(tmp_path, text), [str(parameter.name) for parameter in launch.params])
