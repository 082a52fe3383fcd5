"""The text that the reference trainer learns: a byte array, the same in every process of a run.

Model: the default corpus is the source (docstrings included) of the installed Python standard library, in the
order of the files' names; `--data` takes a file (memory-mapped) or a folder (its text files, in that order).
The content's digest is part of the run's identity, so a run never goes on with other text.

Invariants: order depends on relative names alone, never on the file system; nothing generated at run time
(`__pycache__`), installed beside the library (site-packages) or machine-specific is in it.
Process safety: read-only, loaded at most once a process, so that a restart inside the process reloads
nothing. Must not: load torch, write anything.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from nvrx_sre.core.errors import UserError

Bytes = npt.NDArray[np.uint8]

MIN_DEFAULT_CORPUS_BYTES = 5_000_000
"""The default corpus must be real text in quantity; a stripped library (zipped, sources removed) is refused."""
_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests"})
_SNIFF_BYTES = 8192


@dataclass(frozen=True)
class Corpus:
    """A byte array `[N] uint8` with its name and content digest (xxh3_128, hex)."""

    name: str
    data: Bytes
    digest: str

    def check_length(self, seq_len: int) -> None:
        """Raise `UserError` unless there is at least one sample of `seq_len` bytes and its next byte."""
        if self.data.size < seq_len + 1:
            raise UserError(f"{self.name} has {self.data.size} bytes: --seq-len {seq_len} needs at least {seq_len + 1}")

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the byte distribution in nats: the loss of the best model that ignores context."""
        counts = np.bincount(self.data, minlength=256).astype(np.float64)
        probabilities = counts[counts > 0] / counts.sum()
        return float(-(probabilities * np.log(probabilities)).sum())


def load_corpus(path: Path | None = None) -> Corpus:
    """Corpus of `path`, or the default one; loaded once a process. Blocks on the disk.

    Raises `UserError` if the path is missing, unreadable or holds no text.
    """
    return _load(None if path is None else path.absolute())


@functools.lru_cache(maxsize=2)
def _load(path: Path | None) -> Corpus:
    try:
        if path is None:
            name, data = "the Python standard library", _standard_library()
        elif path.is_dir():
            name, data = f"data folder {path}", _read_folder(path)
        else:
            name, data = f"data file {path}", _map_file(path)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
    if data.size == 0:
        raise UserError(f"{name} holds no text: give --data a file or folder of text")
    return Corpus(name, data, xxhash.xxh3_128_hexdigest(data.data))


def _standard_library() -> Bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    data = _join(root, _files(root, lambda path: path.suffix == ".py" and not path.name.startswith("_sysconfigdata")))
    if data.size < MIN_DEFAULT_CORPUS_BYTES:
        raise UserError(
            f"the Python standard library in {root} has only {data.size} bytes of source, "
            f"{MIN_DEFAULT_CORPUS_BYTES} are needed: give --data a file or folder of text"
        )
    return data


def _read_folder(root: Path) -> Bytes:
    return _join(root, _files(root, _is_text))


def _map_file(path: Path) -> Bytes:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def _files(root: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """Wanted files below `root` in the order of their relative names; hidden ones and links to folders are left out."""
    found: list[Path] = []
    for directory, subdirectories, names in os.walk(root, onerror=_raise):
        subdirectories[:] = [name for name in subdirectories if not _skipped(name)]
        paths = (Path(directory, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.is_file() and wanted(path)]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _raise(error: OSError) -> None:
    raise error


def _skipped(name: str) -> bool:
    return name in _SKIPPED_DIRECTORIES or name.startswith(".")


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(_SNIFF_BYTES)


def _join(root: Path, paths: list[Path]) -> Bytes:
    """Contents one after the other, each led by its relative name so that files do not run into each other."""
    parts: list[bytes] = []
    for path in paths:
        parts += [b"# ", os.fsencode(path.relative_to(root)), b"\n", path.read_bytes(), b"\n"]
    return np.frombuffer(b"".join(parts), dtype=np.uint8)
