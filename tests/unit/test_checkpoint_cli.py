"""`nvrx-sre checkpoint list|verify` on directories of a few bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvrx_sre.checkpoint import discover
from nvrx_sre.cli.checkpoint import command
from nvrx_sre.core.errors import UserError
from tests.checkpoint_directories import commit


def invoke(*arguments: str) -> tuple[int, str]:
    """(what the command returned, its output)."""
    runner = CliRunner()
    result = runner.invoke(command, list(arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two good checkpoints, a damaged one, an abandoned one, an attempt and one moved aside."""
    commit(tmp_path, 10)
    commit(tmp_path, 20, verified=False)
    (commit(tmp_path, 30) / "__0_0.distcp").write_bytes(b"short")
    commit(tmp_path, 40, generation=0)
    discover.add_fence(tmp_path, 1, 10)
    (discover.checkpoints_path(tmp_path) / ".tmp-step-00000050-g00001-7-ab").mkdir()
    commit(tmp_path, 5)
    discover.move_aside(tmp_path, "step-00000005-g00001", "checksum")
    return tmp_path


def test_list_says_what_is_restorable_and_why_the_rest_is_not(run_dir: Path) -> None:
    """Newest first; each other directory with its reason."""
    code, output = invoke("list", str(run_dir))
    lines = output.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[1:3]] == ["20", "10"]
    assert lines[1].split()[-2:] == ["no", "step-00000020-g00001"]
    assert any("abandoned" in line and "step-00000040-g00000" in line for line in lines)
    assert any("step-00000030-g00001: size" in line and "__0_0.distcp" in line for line in lines)
    assert any("interrupted" in line for line in lines)
    assert any("rejected/step-00000005-g00001.checksum" in line for line in lines)


def test_list_as_json(run_dir: Path) -> None:
    """The same for programs."""
    value = json.loads(invoke("list", str(run_dir), "--json")[1])
    assert [item["step"] for item in value["restorable"]] == [20, 10]
    assert value["rejected"][0]["reason"] == "size"
    assert value["moved_aside"] == ["step-00000005-g00001.checksum"]


def test_verify_names_file_and_reason_and_exits_1(run_dir: Path) -> None:
    """A shallow finding and a deep one are both reported; good ones are said to be good."""
    path = discover.checkpoints_path(run_dir) / "step-00000010-g00001" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(bytes(content))
    code, output = invoke("verify", str(run_dir))
    assert code == 1
    assert any("good" in line and "step-00000020-g00001" in line for line in output.splitlines())
    assert any("checksum" in line and "__1_0.distcp" in line for line in output.splitlines())
    value = json.loads(invoke("verify", str(run_dir), "--json")[1])
    assert {item["reason"] for item in value["bad"]} == {"size", "checksum"}


def test_verify_of_good_checkpoints_exits_0(tmp_path: Path) -> None:
    """Nothing wrong, nothing to say but that."""
    commit(tmp_path, 10)
    code, output = invoke("verify", str(tmp_path))
    assert code == 0 and output.startswith("good ")


def test_missing_or_foreign_directory_is_a_user_error(tmp_path: Path) -> None:
    """One line that names the path, exit 78."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match=str(path)) as caught:
            invoke("list", str(path))
        assert caught.value.exit_code == 78 and "\n" not in str(caught.value)
