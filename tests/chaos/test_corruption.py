"""Damage at random, on one small real checkpoint: none loads, each is refused with a reason of the closed set.

The checkpoint is made once; each damage is done to a copy. A seed reproduces its damage.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from nvrx_sre.checkpoint import discover, manifest
from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.commit import SaveRequest
from nvrx_sre.checkpoint.restore import DurableCandidate
from nvrx_sre.checkpoint.save import Saver, Source
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.checkpoint.storage import WriteOptions
from nvrx_sre.core.errors import CheckpointCorrupt
from nvrx_sre.events.schema import RejectReason

NUM_DAMAGES = 240
STEP = 7


def build(seed: int) -> dict[str, object]:
    """A model and its optimizer after a step."""
    torch.manual_seed(seed)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run directory with one good checkpoint."""
    run_dir = tmp_path_factory.mktemp("saved")
    capturer = Capturer(build(1))
    capturer.refresh()
    slots = SlotFile.create(*capturer.required_bytes(), name="nvrx-test")
    capturer.capture(slots, 0, generation=1, step=STEP, durable=True, now_mono_ns=1)
    request = SaveRequest(run="demo", step=STEP, epoch=1, generation=1, captured_ns=1, world_size=1)
    Saver(run_dir, WriteOptions()).save(request, Source(slot_files=[slots], slots=[0]))
    yield run_dir
    slots.close()


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage: the checkpoint's directory."""
    return damaged_copy(saved, tmp_path / "run")


def damaged_copy(saved: Path, run_dir: Path) -> Path:
    """Copy of the run directory; the path of its checkpoint."""
    shutil.copytree(saved, run_dir)
    return discover.checkpoints_path(run_dir) / manifest.directory_name(STEP, 1)


def refused(directory: Path) -> str:
    """Reason for which a restore refuses the checkpoint, without having changed the model or run anything."""
    state = build(2)
    before = [parameter.clone() for parameter in state["model"].parameters()]  # type: ignore[attr-defined]
    with pytest.raises(CheckpointCorrupt) as caught:
        DurableCandidate(directory, "demo", 0, 1, state).check()
    after = state["model"].parameters()  # type: ignore[attr-defined]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return caught.value.reason


def damage(directory: Path, generator: random.Random) -> str:
    """Change one thing; what was done."""
    path = directory / generator.choice(sorted(os.listdir(directory)))
    content = path.read_bytes()
    kind = generator.choice(("flip", "zero", "half", "empty", "minus_one", "append", "swap", "remove", "garbage"))
    at = generator.randrange(len(content))
    flipped = content[:at] + bytes([content[at] ^ 1 << generator.randrange(8)]) + content[at + 1 :]
    start = max(0, min(at, len(content) - 4096))
    holed = content[:start] + bytes(min(4096, len(content))) + content[start + 4096 :]
    changed = {
        "flip": flipped,
        "zero": holed,
        "half": content[: len(content) // 2],
        "empty": b"",
        "minus_one": content[:-1],
        "append": content + b"\0",
        "swap": content[at:] + content[:at] if content[at:] + content[:at] != content else flipped,
        "garbage": generator.randbytes(len(content)),
    }
    if kind == "remove":
        path.unlink()
    else:
        path.write_bytes(changed[kind] if changed[kind] != content else flipped)
    return f"{kind} at {at} of {path.name}"


def test_c03_c04_none_of_240_random_damages_loads(saved: Path, tmp_path: Path) -> None:
    """Bits, holes, truncations, garbage, missing files, in any file: every one is refused before anything changes."""
    reasons = set()
    for seed in range(NUM_DAMAGES):
        directory = damaged_copy(saved, tmp_path / str(seed))
        done = damage(directory, random.Random(seed))
        reason = refused(directory)
        assert reason in set(RejectReason), (seed, done)
        reasons.add(reason)
        shutil.rmtree(tmp_path / str(seed))
    assert {"checksum", "size", "manifest", "no_commit_marker"} <= reasons


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("is_listed", [False, True])
def test_c05_a_malicious_pickle_is_never_run(copied: Path, tmp_path: Path, is_listed: bool) -> None:
    """As `.metadata`: refused by checksum; with a manifest forged to fit, it is loaded around and still not run."""
    target = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(target))
    described = manifest.read(copied)
    (copied / ".metadata").write_bytes(bomb)
    if is_listed:
        size_bytes, checksum = manifest.checksum_file(copied / ".metadata")
        entry = manifest.FileEntry(size_bytes=size_bytes, xxh3_128=checksum)
        (copied / "manifest.json").unlink()
        manifest.write(copied, _with_file(described, ".metadata", entry))
        state = build(2)
        candidate = DurableCandidate(copied, "demo", 0, 1, state)
        candidate.check()
        candidate.load()
    else:
        assert refused(copied) in ("size", "checksum")
    assert not target.exists()


def _with_file(described: manifest.Manifest, name: str, entry: manifest.FileEntry) -> manifest.Manifest:
    return dataclasses.replace(described, files={**described.files, name: entry})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("missing", "no_commit_marker"),
        ("empty", "no_commit_marker"),
        ("garbage", "manifest"),
        ("another step", "manifest"),
        ("newer", "version"),
        ("other run", "other_run"),
    ],
)
def test_an_altered_manifest_is_refused(copied: Path, change: str, reason: str) -> None:
    """Missing, empty, garbage, of another step, of a newer release, of another run."""
    path = copied / "manifest.json"
    text = path.read_text()
    changed = {
        "empty": "",
        "garbage": "{not json",
        "another step": text.replace(f'"step":{STEP}', '"step":8'),
        "newer": text.replace('"schema":1', '"schema":2'),
        "other run": text,
    }
    path.unlink()
    if change != "missing":
        path.write_text(changed[change])
    if change == "other run":
        state = build(2)
        with pytest.raises(CheckpointCorrupt) as caught:
            DurableCandidate(copied, "another", 0, 1, state).check()
        assert caught.value.reason == reason
    else:
        assert refused(copied) == reason


def test_clock_jumps_change_nothing(saved: Path, tmp_path: Path) -> None:
    """Order and line come from steps, generations and fences: no time of a file or a manifest decides."""
    first = damaged_copy(saved, tmp_path / "run")
    later = first.with_name(manifest.directory_name(STEP + 1, 1))
    shutil.copytree(first, later)
    described = manifest.read(first)
    (later / "manifest.json").unlink()
    manifest.write(later, dataclasses.replace(described, step=STEP + 1, captured_ns=-(10**18)))
    for path in [later, *later.iterdir()]:
        os.utime(path, (0, 0))
    for path in [first, *first.iterdir()]:
        os.utime(path, (2**33, 2**33))
    found = discover.discover(tmp_path / "run", []).restorable
    assert [item.step for item in found] == [STEP + 1, STEP]
