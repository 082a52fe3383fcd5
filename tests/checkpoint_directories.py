"""Committed checkpoint directories made of a few bytes: enough for discovery, retention and the command line."""

from __future__ import annotations

from pathlib import Path

import xxhash

from nvrx_sre.checkpoint import discover, manifest
from nvrx_sre.checkpoint.manifest import FileEntry, Manifest

FILES = {
    "__0_0.distcp": b"shard of rank 0" * 400,
    "__1_0.distcp": b"shard of rank 1" * 400,
    ".metadata": b"pickle",
    "rank-00000.json": b"{}",
    "rank-00001.json": b"{}",
}


def commit(run_dir: Path, step: int, *, generation: int = 1, run: str = "demo", verified: bool = True) -> Path:
    """A good checkpoint of `step`; `verified` also puts it on record as read back."""
    name = manifest.directory_name(step, generation)
    path = discover.checkpoints_path(run_dir) / name
    path.mkdir(parents=True)
    for file, content in FILES.items():
        (path / file).write_bytes(content)
    listed = {
        file: FileEntry(size_bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))
        for file, content in FILES.items()
    }
    described = Manifest(
        run=run,
        step=step,
        epoch=1,
        generation=generation,
        world_size=2,
        captured_ns=step * 1_000_000_000,
        layout_hashes=["ab" * 32, "cd" * 32],
        torch_version="2.13.0",
        files=listed,
        dcp={"tensors": {}, "items": [], "paths": {}},
    )
    manifest.write(path, described)
    if verified:
        discover.write_verified(run_dir, {**discover.read_verified(run_dir), name: 1})
    return path
