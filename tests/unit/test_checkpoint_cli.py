"""`nvrx-sre checkpoint list|verify|export|prune` on directories of a few bytes."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nvrx_sre.checkpoint import discover, manifest, retention
from nvrx_sre.cli.checkpoint import command
from nvrx_sre.core import processes
from nvrx_sre.core.errors import CheckpointCorrupt, RunDirectoryBusy, UserError
from nvrx_sre.events import codec, schema
from nvrx_sre.events.schema import Event, Record
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
    assert any("interrupted" in line and "never committed" in line for line in lines)
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


def test_what_retention_deletes_meanwhile_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older of two goes while the newer is read: said to be deleted, exit 0."""
    old, new = commit(tmp_path, 10), commit(tmp_path, 20)
    really = manifest.verify_files

    def verify_files(directory: Path, *arguments: Any, **options: Any) -> None:
        really(directory, *arguments, **options)
        if directory == new:
            retention.delete(old)

    monkeypatch.setattr(manifest, "verify_files", verify_files)
    code, output = invoke("verify", str(tmp_path))
    assert (code, [line.split()[:2] for line in output.splitlines()]) == (
        0,
        [["good", new.name], ["deleted", old.name]],
    )


def test_missing_or_foreign_directory_is_a_user_error(tmp_path: Path) -> None:
    """One line that names the path, exit 78."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match=str(path)) as caught:
            invoke("list", str(path))
        assert caught.value.exit_code == 78 and "\n" not in str(caught.value)


def test_verify_of_named_steps_looks_at_those_alone(run_dir: Path) -> None:
    """Step 30 is damaged, 20 is not; a step that is not there is a user error."""
    assert invoke("verify", str(run_dir), "20")[0] == 0
    code, output = invoke("verify", str(run_dir), "20", "30")
    assert code == 1 and [line.split()[0] for line in output.splitlines()] == ["damaged", "good"]
    with pytest.raises(UserError, match=r"step 21; restorable are: 20, 10"):
        invoke("verify", str(run_dir), "21")


def test_export_of_a_step_that_cannot_be_restored_is_refused(run_dir: Path, tmp_path: Path) -> None:
    """An abandoned step is no choice, nor a damaged one; nothing restorable says so."""
    for step in ("30", "40"):
        with pytest.raises(UserError, match=f"step {step}; restorable are: 20, 10"):
            invoke("export", str(run_dir), "--step", step, str(tmp_path / "out.pt"))
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="nothing is restorable"):
        invoke("export", str(tmp_path / "empty"), str(tmp_path / "out.pt"))


@pytest.mark.parametrize("where", ["nodir/foo.pt", "folder.pt"])
def test_export_to_where_no_file_can_be_is_refused_before_it_reads(
    run_dir: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's mistake, not one that another start would cure."""
    (tmp_path / "folder.pt").mkdir()
    monkeypatch.setattr(manifest, "verify_files", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(UserError, match=r"cannot write .*: (there is no folder|it is a folder)"):
        invoke("export", str(run_dir), str(tmp_path / where))


def names(run_dir: Path) -> list[str]:
    """Directories in `checkpoints/`."""
    return sorted(path.name for path in discover.checkpoints_path(run_dir).iterdir() if path.is_dir())


@pytest.fixture
def prunable(tmp_path: Path) -> Path:
    """Five verified commits, an abandoned one, an attempt, half a deletion and one moved aside."""
    for step in (10, 20, 30, 40, 50):
        commit(tmp_path, step)
    commit(tmp_path, 60, generation=0)
    discover.add_fence(tmp_path, 1, 50)
    root = discover.checkpoints_path(tmp_path)
    for leftover in (".tmp-step-00000070-g00001-7-ab", ".retired-step-00000005-g00001"):
        (root / leftover).mkdir()
        (root / leftover / "file").write_bytes(b"x" * 1000)
    commit(tmp_path, 5, verified=False)
    discover.move_aside(tmp_path, "step-00000005-g00001", "checksum")
    return tmp_path


def test_prune_says_what_it_would_delete_and_deletes_nothing(prunable: Path) -> None:
    """Each with its reason and size."""
    before = names(prunable)
    code, output = invoke("prune", str(prunable))
    assert code == 0 and names(prunable) == before
    assert [line.split(": ")[0].split()[-1] for line in output.splitlines()[:-1]] == [
        "step-00000010-g00001",
        "step-00000020-g00001",
        "step-00000060-g00000",
        ".tmp-step-00000070-g00001-7-ab",
        ".retired-step-00000005-g00001",
    ]
    assert "abandoned, the run went back before it" in output and "--yes" in output.splitlines()[-1]


def test_prune_and_list_tell_one_size(prunable: Path) -> None:
    """Of the files that the manifest names, also where the directory holds more."""
    listed = json.loads(invoke("list", str(prunable), "--json")[1])
    sizes = {item["directory"]: item["size_bytes"] for item in (*listed["restorable"], *listed["abandoned"])}
    planned = json.loads(invoke("prune", str(prunable), "--json")[1])["planned"]
    found = {item["directory"]: item["size_bytes"] for item in planned if item["directory"] in sizes}
    assert found and found == {name: sizes[name] for name in found}


def test_prune_deletes_what_it_said(prunable: Path) -> None:
    """The newest three stay, what was moved aside stays, the record of verified commits follows."""
    planned = json.loads(invoke("prune", str(prunable), "--json")[1])["planned"]
    value = json.loads(invoke("prune", str(prunable), "--yes", "--json")[1])
    assert value == {"planned": planned, "removed": [item["directory"] for item in planned]}
    kept = [f"step-{step:08d}-g00001" for step in (30, 40, 50)]
    assert names(prunable) == ["rejected", *kept]
    assert sorted(discover.read_verified(prunable)) == kept
    assert invoke("prune", str(prunable), "--yes")[1] == "nothing to delete\n"


def test_prune_keeps_two_verified_whatever_else_there_is(tmp_path: Path) -> None:
    """Unverified commits do not count, abandoned ones wait as well; a keep below two cannot be asked for."""
    for step in (10, 20, 30, 40):
        commit(tmp_path, step, generation=2, verified=step == 20)
    commit(tmp_path, 50)
    discover.add_fence(tmp_path, 2, 5)
    invoke("prune", str(tmp_path), "--keep", "2", "--yes")
    assert len(names(tmp_path)) == 5
    assert CliRunner().invoke(command, ["prune", str(tmp_path), "--keep", "1"]).exit_code == 2


def test_prune_deletes_no_commit_when_a_kept_one_is_damaged(prunable: Path) -> None:
    """The two newest are read back in full first."""
    path = discover.checkpoints_path(prunable) / "step-00000040-g00001" / "__0_0.distcp"
    path.write_bytes(b"y" * path.stat().st_size)
    before = names(prunable)
    with pytest.raises(CheckpointCorrupt, match="step-00000040"):
        invoke("prune", str(prunable), "--yes")
    assert names(prunable) == before


def take(run_dir: Path, node: str) -> None:
    """An epoch of this very process, said to run on `node`."""
    (run_dir / "epochs").mkdir()
    holder = {
        "node": node,
        "pid": os.getpid(),
        "start_ticks": processes.start_ticks(os.getpid()),
        "boot_id": processes.boot_id() if node == socket.gethostname() else "another",
    }
    (run_dir / "epochs" / "00000001.json").write_text(json.dumps(holder))


def record(run_dir: Path, *events: Event) -> None:
    """A journal of these events."""
    (run_dir / "journal").mkdir(exist_ok=True)
    lines = [json.dumps({"schema": 1, "run": "demo", "epoch": 1})]
    for seq, event in enumerate(events):
        item = Record(run="demo", epoch=1, generation=3, rank=None, seq=seq, time_ns=seq, event=event)
        lines.append(json.dumps(codec.to_dict(item)))
    (run_dir / "journal" / "00000001-000001.jsonl").write_text("\n".join(lines) + "\n")


def test_prune_refuses_a_run_that_a_launcher_owns(prunable: Path) -> None:
    """Of this host by its process; of another host until its records say that it stopped."""
    before = names(prunable)
    take(prunable, socket.gethostname())
    with pytest.raises(RunDirectoryBusy, match=f"process {os.getpid()}"):
        invoke("prune", str(prunable), "--yes")
    (prunable / "epochs" / "00000001.json").unlink()
    (prunable / "epochs").rmdir()
    take(prunable, "elsewhere")
    with pytest.raises(RunDirectoryBusy, match="elsewhere"):
        invoke("prune", str(prunable), "--yes")
    assert names(prunable) == before
    record(prunable, schema.LauncherStopped(exit_code=0, reason="finished"))
    assert invoke("prune", str(prunable), "--yes")[0] == 0 and names(prunable) != before


def test_list_shows_the_hot_state_of_a_live_run(run_dir: Path) -> None:
    """The newest step sealed on all ranks of the present generation, only while a launcher lives."""
    formed = schema.GenerationFormed(world_size=2, go_ns=0, pids=[1, 2])
    record(run_dir, formed, committed(90), formed, committed(70), committed(71))
    assert " hot " not in invoke("list", str(run_dir))[1]
    take(run_dir, socket.gethostname())
    lines = invoke("list", str(run_dir))[1].splitlines()
    assert lines[1].split()[:3] == ["71", "3", "hot"] and "only while the launcher" in lines[1]
    assert any(line.startswith("in progress") for line in lines)
    value = json.loads(invoke("list", str(run_dir), "--json")[1])
    assert value["hot"] == {"step": 71, "generation": 3, "launcher_pid": os.getpid()} and value["live"] is True


def committed(step: int) -> schema.StepsCommitted:
    """A step that every rank sealed."""
    return schema.StepsCommitted(
        kind=schema.StepKind.NEW,
        first_step=step,
        last_step=step,
        started_ns=0,
        committed_ns=1,
        step_s=0.0,
        data_s=0.0,
        checkpoint_block_s=0.0,
        evaluate_s=0.0,
        tokens=0,
        loss=None,
        hot_sealed_step=step,
        hot_captured=1,
        hot_skipped=0,
    )
