"""Manifest, discovery, fences, moving aside and retention, on directories of a few bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvrx_sre.checkpoint import discover, manifest, retention
from nvrx_sre.checkpoint.agree import Fence
from nvrx_sre.core.errors import CheckpointCorrupt, StorageError
from nvrx_sre.events.schema import RejectReason
from tests.checkpoint_directories import FILES, commit


def steps(found: discover.Discovery) -> list[int]:
    """Steps of what is restorable."""
    return [item.step for item in found.restorable]


def reason_of(path: Path, *, deep: bool = True, run: str | None = None) -> str:
    """Why `verify` refuses a directory."""
    with pytest.raises(CheckpointCorrupt) as caught:
        manifest.verify(path, deep, run=run)
    return caught.value.reason


def test_a_good_directory_verifies(tmp_path: Path) -> None:
    """Manifest comes back as it was written, deep or shallow."""
    path = commit(tmp_path, 10)
    described = manifest.verify(path, deep=True, run="demo")
    assert described == manifest.verify(path, deep=False)
    assert described.size_bytes == sum(len(content) for content in FILES.values())


@pytest.mark.parametrize("variant", ["half", "zero", "minus_one"])
def test_c03_short_shard_is_refused_for_its_size(tmp_path: Path, variant: str) -> None:
    """A truncated shard is found without reading it."""
    path = commit(tmp_path, 10)
    size = len(FILES["__1_0.distcp"])
    os.truncate(path / "__1_0.distcp", {"half": size // 2, "zero": 0, "minus_one": size - 1}[variant])
    assert reason_of(path, deep=False) == RejectReason.SIZE
    found = discover.discover(tmp_path, [])
    assert found.restorable == [] and found.rejected[0].reason == RejectReason.SIZE


@pytest.mark.parametrize("variant", ["flip", "zeroed"])
def test_c04_right_length_wrong_bytes_is_refused_by_checksum(tmp_path: Path, variant: str) -> None:
    """A flipped bit and a zeroed page are found by the deep check, and only there."""
    path = commit(tmp_path, 10) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[3000:3001] = bytes([content[3000] ^ 4]) if variant == "flip" else content[3000:3001]
    if variant == "zeroed":
        content[500:4596] = bytes(4096)
    path.write_bytes(bytes(content))
    manifest.verify(path.parent, deep=False)
    assert reason_of(path.parent) == RejectReason.CHECKSUM


@pytest.mark.parametrize("name", ["manifest.json", ".metadata"])
@pytest.mark.parametrize("variant", ["missing", "empty"])
def test_c05_no_marker_means_never_committed(tmp_path: Path, name: str, variant: str) -> None:
    """Without (or with an empty) marker, ours or DCP's, a directory is skipped in discovery."""
    commit(tmp_path, 5)
    path = commit(tmp_path, 10)
    if variant == "missing":
        (path / name).unlink()
    else:
        (path / name).write_bytes(b"")
    found = discover.discover(tmp_path, [])
    assert steps(found) == [5]
    assert [(item.step, item.reason) for item in found.rejected] == [(10, RejectReason.NO_COMMIT_MARKER)]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_manifest_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """To read a pipe would wait for ever for somebody who writes."""
    directory = commit(tmp_path, 10)
    (directory / manifest.MANIFEST_NAME).unlink()
    make(directory / manifest.MANIFEST_NAME)
    assert reason_of(directory) == RejectReason.UNREADABLE


def test_missing_and_surplus_files_are_refused(tmp_path: Path) -> None:
    """The manifest lists exactly the files there are."""
    path = commit(tmp_path, 10)
    (path / "__2_0.distcp").write_bytes(b"of another save")
    assert reason_of(path) == RejectReason.MANIFEST
    (path / "__2_0.distcp").unlink()
    (path / "rank-00001.json").unlink()
    assert reason_of(path) == RejectReason.MISSING_FILE


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    """A copied directory does not become ours; the run's name comes from run.json by default."""
    path = commit(tmp_path, 10, run="other")
    assert reason_of(path, run="demo") == RejectReason.OTHER_RUN
    (tmp_path / "run.json").write_text('{"run": "demo"}')
    assert discover.discover(tmp_path, []).rejected[0].reason == RejectReason.OTHER_RUN


def test_newer_schema_is_refused_as_version(tmp_path: Path) -> None:
    """A manifest of a later release is not guessed at."""
    path = commit(tmp_path, 10)
    body = json.loads((path / "manifest.json").read_text())
    body["schema"] += 1
    (path / "manifest.json").write_text(json.dumps(body))
    assert reason_of(path) == RejectReason.VERSION


def test_manifest_of_another_directory_is_refused(tmp_path: Path) -> None:
    """Step and generation in the name are those in the manifest."""
    path = commit(tmp_path, 10)
    moved = path.rename(path.with_name(manifest.directory_name(20, 1)))
    assert reason_of(moved) == RejectReason.MANIFEST


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", "manifest.json", ""])
def test_names_that_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    """A manifest cannot make a reader look outside its directory."""
    path = commit(tmp_path, 10)
    described = manifest.read(path)
    described.files[name] = described.files["__0_0.distcp"]
    manifest.write(path, described)
    assert reason_of(path) == RejectReason.MANIFEST


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_of_a_manifest_is_read_as_good(tmp_path: Path, position: int, bit: int) -> None:
    """Every bit of manifest.json is guarded."""
    path = discover.checkpoints_path(tmp_path) / manifest.directory_name(10, 1)
    if not path.exists():
        commit(tmp_path, 10)
    good = (path / "manifest.json").read_bytes()
    content = bytearray(good)
    content[position % len(content)] ^= 1 << bit
    (path / "manifest.json").write_bytes(bytes(content))
    assert reason_of(path) in set(RejectReason)
    (path / "manifest.json").write_bytes(good)


def test_verify_files_parts_cover_every_file_once(tmp_path: Path) -> None:
    """Rank i of n checks files[i::n]; between them all."""
    path = commit(tmp_path, 10)
    described = manifest.read(path)
    seen: list[str] = []
    for part in range(3):
        manifest.verify_files(path, described, part, 3, on_file=lambda name, _: seen.append(name))
    assert sorted(seen) == sorted(FILES)


def test_discovery_is_newest_first_and_tells_leftovers_apart(tmp_path: Path) -> None:
    """Commits by (step, generation); attempts, foreign names and rejected/ are not checkpoints."""
    for step, generation in ((10, 1), (20, 1), (20, 2)):
        commit(tmp_path, step, generation=generation, verified=generation == 1)
    for name in (".tmp-step-00000030-g00002-1-ab", ".retired-step-00000001-g00001", "notes", "rejected"):
        (discover.checkpoints_path(tmp_path) / name).mkdir()
    found = discover.discover(tmp_path, [])
    assert [(item.step, item.generation, item.verified) for item in found.restorable] == [
        (20, 2, False),
        (20, 1, True),
        (10, 1, True),
    ]
    assert found.interrupted == [".tmp-step-00000030-g00002-1-ab"]
    assert found.rejected == []


def test_c01_an_unfinished_save_is_interrupted_and_not_a_checkpoint(tmp_path: Path) -> None:
    """A torn attempt never becomes the newest checkpoint; it is counted and cleared."""
    commit(tmp_path, 10)
    torn = discover.checkpoints_path(tmp_path) / ".tmp-step-00000020-g00001-1-ab"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"sho")
    assert steps(discover.discover(tmp_path, [])) == [10]
    assert discover.clear_interrupted(tmp_path) == [torn.name]
    assert discover.discover(tmp_path, []).interrupted == []


def test_what_retention_takes_away_meanwhile_is_not_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gone between the listing and the look: neither restorable nor damaged."""
    old = commit(tmp_path, 10)
    commit(tmp_path, 20)
    really = manifest.verify

    def verify(directory: Path, deep: bool, **options: Any) -> manifest.Manifest:
        if directory == old:
            retention.delete(old)
        return really(directory, deep, **options)

    monkeypatch.setattr(manifest, "verify", verify)
    found = discover.discover(tmp_path, [])
    assert (steps(found), found.rejected) == ([20], [])


def test_fences_survive_and_cut_off_for_ever(tmp_path: Path) -> None:
    """After a rollback to 10 for generation 3, step 20 of generation 2 is abandoned and generation 3's is not."""
    commit(tmp_path, 10, generation=1)
    commit(tmp_path, 20, generation=2)
    commit(tmp_path, 20, generation=3)
    discover.add_fence(tmp_path, 3, 10)
    discover.add_fence(tmp_path, 3, 10)
    fences = discover.read_fences(tmp_path)
    assert fences == [Fence(generation=3, step=10)]
    found = discover.discover(tmp_path, fences)
    assert [(item.step, item.generation) for item in found.restorable] == [(20, 3), (10, 1)]
    assert [(item.step, item.generation) for item in found.abandoned] == [(20, 2)]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_dropping_covered_fences_changes_nothing(tmp_path: Path, added: list[tuple[int, int]]) -> None:
    """The stored fences abandon exactly what all fences ever added abandon."""
    (tmp_path / "fences.json").unlink(missing_ok=True)
    for generation, step in added:
        discover.add_fence(tmp_path, generation, step)
    stored = discover.read_fences(tmp_path)
    for generation in range(7):
        for step in range(8):
            expected = any(generation < g and step > s for g, s in added)
            assert discover.is_abandoned(stored, generation, step) == expected


def test_unreadable_fences_are_an_error_and_not_no_fences(tmp_path: Path) -> None:
    """Losing fences would bring an abandoned line back."""
    (tmp_path / "fences.json").write_text("[{")
    with pytest.raises(StorageError, match=r"fences\.json"):
        discover.read_fences(tmp_path)


def test_move_aside_keeps_everything(tmp_path: Path) -> None:
    """Twice the same name gives two places; nothing is deleted or overwritten."""
    commit(tmp_path, 10)
    first = discover.move_aside(tmp_path, "step-00000010-g00001", "size")
    commit(tmp_path, 10)
    second = discover.move_aside(tmp_path, "step-00000010-g00001", "size")
    assert first != second
    assert sorted(os.listdir(tmp_path / first)) == sorted(os.listdir(tmp_path / second))
    assert discover.discover(tmp_path, []).restorable == []
    assert discover.move_aside(tmp_path, "step-00000010-g00001", "size") == ""


def test_c17_a_commit_stays_on_record_when_none_is_loadable(tmp_path: Path) -> None:
    """A run that committed once never silently begins again at step 0."""
    assert not discover.commits_on_record(tmp_path)
    path = commit(tmp_path, 10)
    assert discover.commits_on_record(tmp_path)
    (path / "manifest.json").unlink()
    assert discover.commits_on_record(tmp_path)
    discover.move_aside(tmp_path, path.name, "no_commit_marker")
    assert discover.commits_on_record(tmp_path)
    assert discover.discover(tmp_path, []).restorable == []


def test_an_attempt_is_no_commit_on_record(tmp_path: Path) -> None:
    """Before the first rename a run may begin at step 0."""
    (discover.checkpoints_path(tmp_path) / ".tmp-step-00000020-g00001-1-ab").mkdir(parents=True)
    assert not discover.commits_on_record(tmp_path)


def retained(run_dir: Path, keep: int) -> list[str]:
    """What a round of retention deletes."""
    deleted: list[str] = []
    retention.retain(run_dir, "demo", keep, 1, lambda item: deleted.append(item.directory))
    return deleted


def test_retention_keeps_the_newest_verified(tmp_path: Path) -> None:
    """Only what is older than the kept verified commits goes; the next record of verification forgets it."""
    for step in (10, 20, 30, 40):
        commit(tmp_path, step)
    assert retained(tmp_path, 3) == ["step-00000010-g00001"]
    assert steps(discover.discover(tmp_path, [])) == [40, 30, 20]
    discover.record_verified(tmp_path, manifest.directory_name(40, 1), 2)
    assert sorted(discover.read_verified(tmp_path)) == [manifest.directory_name(step, 1) for step in (20, 30, 40)]


def test_retention_counts_only_verified_and_never_keeps_less_than_two(tmp_path: Path) -> None:
    """Unverified commits do not push verified ones out, and `keep` below 2 is 2."""
    for step in (10, 20):
        commit(tmp_path, step)
    for step in (30, 40):
        commit(tmp_path, step, verified=False)
    assert retained(tmp_path, 1) == []
    commit(tmp_path, 50)
    assert retained(tmp_path, 1) == ["step-00000010-g00001"]


def test_retention_deletes_nothing_when_the_newest_kept_is_damaged(tmp_path: Path) -> None:
    """Before a delete the newest kept one is read back."""
    for step in (10, 20, 30):
        path = commit(tmp_path, step)
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[7] ^= 1
    (path / "__0_0.distcp").write_bytes(bytes(content))
    with pytest.raises(CheckpointCorrupt):
        retained(tmp_path, 2)
    assert steps(discover.discover(tmp_path, [])) == [30, 20, 10]


def test_abandoned_commits_go_once_the_new_line_has_two_good_ones(tmp_path: Path) -> None:
    """They are not counted as kept; what was damaged is left alone; a person's fresh start loses nothing."""
    commit(tmp_path, 15, generation=1)
    commit(tmp_path, 10, generation=2)
    (commit(tmp_path, 5, generation=2) / ".metadata").unlink()
    discover.add_fence(tmp_path, 2, 10)
    assert retained(tmp_path, 2) == []
    commit(tmp_path, 20, generation=2)
    assert retained(tmp_path, 2) == ["step-00000015-g00001"]
    commit(tmp_path, 30, generation=2)
    assert retained(tmp_path, 2) == ["step-00000010-g00002"]
    names = set(os.listdir(discover.checkpoints_path(tmp_path)))
    assert "step-00000005-g00002" in names
    discover.add_fence(tmp_path, 3, 0)
    for step in (1, 2, 3):
        commit(tmp_path, step, generation=3)
    assert retained(tmp_path, 2) == ["step-00000001-g00003"]
    assert {item.step for item in discover.discover(tmp_path, discover.read_fences(tmp_path)).abandoned} == {20, 30}


def test_a_superseded_writer_deletes_nothing(tmp_path: Path) -> None:
    """Which checkpoints stay is for the launcher that leads."""
    for step in (10, 20, 30):
        commit(tmp_path, step)
    (tmp_path / "epochs").mkdir()
    (tmp_path / "epochs" / "00000002.json").write_text("{}")
    assert retained(tmp_path, 2) == []
