"""Export to a torch file and to safetensors: shards joined, awkward tensors, damage, no overwriting."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from nvrx_sre.checkpoint import discover, export, manifest, safetensors_file
from nvrx_sre.checkpoint.discover import Found
from nvrx_sre.core.errors import CheckpointCorrupt, StorageError, UserError
from tests.checkpoint_stored import Cut, Part, commit_tensors


def parts() -> dict[str, Part]:
    """Rows over two ranks, columns, uneven and empty shards, bfloat16, 0-dim, nothing at all, tied, per rank."""
    rows, columns = torch.arange(60.0).reshape(10, 6), torch.arange(24).reshape(4, 6).to(torch.bfloat16)
    tied = torch.randn(3, 5)
    return {
        "model.rows": Part(rows, [((0, 5), (0, 6)), ((5, 10), (0, 6))], ("model", "rows")),
        "model.columns": Part(columns, [((0, 4), (0, 2)), ((0, 4), (2, 6))], ("model", "columns")),
        "model.blocks": Part(
            torch.arange(24.0).reshape(2, 3, 4),
            [((0, 2), (0, 2), (0, 4)), ((0, 2), (2, 3), (0, 4))],
            ("model", "blocks"),
        ),
        "model.gain": Part(torch.ones(1), [((0, 1),), None], ("model", "gain")),
        "model.seen": Part(torch.tensor(7), [(), None], ("model", "seen")),
        "model.none": Part(torch.empty(0, 3), [((0, 0), (0, 3)), None], ("model", "none")),
        "model.mask": Part(torch.tensor([True, False, True]), [((0, 3),), None], ("model", "mask")),
        "model.head": Part(tied, [((0, 2), (0, 5)), ((2, 3), (0, 5))], ("model", "head")),
        "model.embedding": Part(tied, [((0, 2), (0, 5)), ((2, 3), (0, 5))], ("model", "embedding")),
        "optimizer.state.rows.exp_avg": Part(
            rows / 2, [((0, 5), (0, 6)), ((5, 10), (0, 6))], ("optimizer", "state", "rows", "exp_avg")
        ),
        "model.seen@rank-00001": Part(torch.tensor(8), [None, ()], ("model", "seen@rank-00001")),
    }


STATE: dict[str, Any] = {
    "rng": {},
    "optimizers": {
        "optimizer": {
            "groups": [{"names": ["rows"], "options": {"lr": 0.5, "betas": {"$tuple": [0.9, 0.95]}}}],
            "scalars": {"rows": {"step": 3}},
            "shared": {"global": {"steps": 4}},
        }
    },
    "objects": {"scheduler": {"last_epoch": 3, "table": {"$ndarray": ["<f8", [2], "AAAAAAAA8D8AAAAAAAAAQA==", False]}}},
    "values": {
        "position": {"sample": 12},
        "odd": {"$default": ["int", {"$items": [[1, {"$bytearray": "MTI="}], [2, {"$ordered": {"a": 1}}]]}]},
    },
}


@pytest.fixture
def found(tmp_path: Path) -> Found:
    """A checkpoint of `parts` at step 20."""
    torch.manual_seed(0)
    commit_tensors(tmp_path / "run", 20, parts(), STATE)
    return discover.discover(tmp_path / "run", []).restorable[0]


def write(found: Found, out: Path, **options: bool) -> export.Exported:
    """Export without progress."""
    return export.export(found, out, on_file=lambda *_: None, **options)


def test_a_torch_file_holds_the_tracked_names(found: Found, tmp_path: Path) -> None:
    """Whole tensors by name, optimizer state and groups, small state; readable with weights_only."""
    torch.manual_seed(0)
    expected = parts()
    result = write(found, tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    for key, part in expected.items():
        if "@" not in key and key.startswith("model."):
            value = loaded["model"][key.removeprefix("model.")]
            assert torch.equal(value, part.whole) and value.dtype == part.whole.dtype, key
    assert torch.equal(loaded["optimizer"]["state"]["rows"]["exp_avg"], expected["model.rows"].whole / 2)
    assert loaded["optimizer"]["state"]["rows"]["step"] == 3
    assert loaded["optimizer"]["state"]["global"] == {"steps": 4}
    assert loaded["odd"] == {1: b"12", 2: {"a": 1}}
    assert loaded["optimizer"]["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.95), "params": ["rows"]}]
    assert loaded["scheduler"]["last_epoch"] == 3 and loaded["scheduler"]["table"].tolist() == [1.0, 2.0]
    assert loaded["position"] == {"sample": 12} and "rng" not in loaded
    assert (result.step, result.num_tensors, result.num_own) == (20, 10, 1)


def test_a_safetensors_file_is_read_back_by_the_library(found: Found, tmp_path: Path) -> None:
    """Every tensor bit for bit under its checkpoint key, with step and run in the header."""
    torch.manual_seed(0)
    out = tmp_path / "all.safetensors"
    write(found, out)
    loaded = load_file(out)
    expected = {key: part.whole for key, part in parts().items() if "@" not in key}
    assert loaded.keys() == expected.keys()
    for key, whole in expected.items():
        assert loaded[key].dtype == whole.dtype and torch.equal(loaded[key], whole), key
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "run": "demo", "step": "20"}
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_file_is_replaced_only_when_asked(found: Found, tmp_path: Path) -> None:
    """Refused by default; with force the old content goes at once. No temporary file stays in either case."""
    out = tmp_path / "all.safetensors"
    out.write_text("mine")
    with pytest.raises(UserError, match="--force"):
        write(found, out)
    assert out.read_text() == "mine"
    write(found, out, force=True)
    assert load_file(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.safetensors", "run"]


@pytest.mark.parametrize("name", ["all.pt", "all.safetensors"])
def test_a_damaged_checkpoint_is_refused_before_anything_of_it_is_read(
    name: str, found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that carries a program fails its checksum; the program never runs and no file appears."""
    marker = tmp_path / "ran"
    shard = next(found.path.glob("__1_*.distcp"))
    program = pickle.dumps(_Program(marker))
    shard.write_bytes(program.ljust(shard.stat().st_size, b"\0"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("something was read"))
    with pytest.raises(CheckpointCorrupt, match=r"__1_.*checksum"):
        write(found, tmp_path / name)
    assert not marker.exists() and not (tmp_path / name).exists()


class _Program:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self._marker,)


def test_parts_that_are_missing_are_noticed(tmp_path: Path) -> None:
    """Sound files that do not hold the whole tensor are no export."""
    whole = torch.ones(4, 2)
    commit_tensors(tmp_path, 1, {"m.w": Part(whole, [((0, 2), (0, 2)), ((2, 4), (0, 2))], ("m", "w"))}, STATE)
    found = discover.discover(tmp_path, []).restorable[0]
    del found.manifest.dcp["items"][0]
    with pytest.raises(CheckpointCorrupt, match=r"parts of m\.w are missing"):
        write(found, tmp_path / "out.safetensors")
    assert list(tmp_path.glob("*out*")) == []


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    """complex64 goes to a torch file only."""
    commit_tensors(tmp_path, 1, {"m.w": Part(torch.ones(2, dtype=torch.complex64), [((0, 2),)], ("m", "w"))}, STATE)
    found = discover.discover(tmp_path, []).restorable[0]
    with pytest.raises(UserError, match=r"m\.w is of type complex64.*\.pt"):
        write(found, tmp_path / "out.safetensors")
    write(found, tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["m"]["w"].dtype == torch.complex64


def test_unknown_endings_and_missing_folders_are_said(found: Found, tmp_path: Path) -> None:
    """Neither leaves anything behind."""
    with pytest.raises(UserError, match="end it in"):
        write(found, tmp_path / "model.bin")
    with pytest.raises(StorageError, match="No such file"):
        write(found, tmp_path / "none" / "model.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_memory_stays_that_of_one_chunk(tmp_path: Path) -> None:
    """16 chunks of 8 MB go into a safetensors file within 32 MB more than the imports take."""
    whole = torch.zeros(32 << 20)
    cuts: Sequence[Cut] = [((rank << 21, (rank + 1) << 21),) for rank in range(16)]
    commit_tensors(tmp_path, 1, {"m.w": Part(whole, cuts, ("m", "w"))}, STATE)
    done = subprocess.run(
        [sys.executable, "-c", _WITHIN, str(tmp_path), str(32 << 20)],
        capture_output=True,
        text=True,
        check=False,
        # What is freed is given back at once: else malloc's heap decides, which differs from run to run by 48 MB.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.safetensors").stat().st_size > 128 << 20


_WITHIN = """
import resource, sys
from pathlib import Path
from nvrx_sre.checkpoint import discover, export
import torch
torch.set_num_threads(1)
torch.ones(8).sum()
root = Path(sys.argv[1])
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
found = discover.discover(root, []).restorable[0]
export.export(found, root / "out.safetensors", on_file=lambda *_: None)
"""


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """A shape and a box inside it."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    box = []
    for size in shape:
        begin = draw(st.integers(0, size))
        box.append((begin, draw(st.integers(begin, size))))
    return shape, box


@given(boxes())
def test_runs_are_the_chunks_elements_in_order(case: tuple[tuple[int, ...], list[tuple[int, int]]]) -> None:
    """Compared with torch's own slicing of the elements' numbers."""
    shape, box = case
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    expected = numbers[tuple(slice(*ends) for ends in box)].reshape(-1).tolist()
    offset, sizes = [begin for begin, _ in box], [end - begin for begin, end in box]
    got = [start + index for start, count in safetensors_file.runs(offset, sizes, shape) for index in range(count)]
    assert got == expected


def test_the_header_aligns_the_data(found: Found, tmp_path: Path) -> None:
    """Data begins at a multiple of 8, wide tensors first."""
    write(found, tmp_path / "all.safetensors")
    content = (tmp_path / "all.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header["model.seen"]["data_offsets"] == [0, 8]
    assert manifest.is_own_key("model.seen@rank-00001") and "model.seen@rank-00001" not in header
