"""The corpus: what is in it, in which order, what is refused."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from nvrx_sre.core.errors import UserError
from nvrx_sre.trainer import corpus as corpus_module
from nvrx_sre.trainer.corpus import MIN_DEFAULT_CORPUS_BYTES, load_corpus


def write(root: Path, files: dict[str, bytes]) -> Path:
    """Create files below `root` in the order given."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def test_the_default_corpus_is_real_text_in_quantity() -> None:
    """At least 5 MB of Python source, with the library's own words in it."""
    corpus = load_corpus()
    assert corpus.data.size >= MIN_DEFAULT_CORPUS_BYTES
    text = corpus.data.tobytes()
    assert text.startswith(b"# ")
    assert b"class OrderedDict(dict):" in text
    assert b"site-packages/" not in text[:200] and b"\n# test/" not in text


def test_the_default_corpus_is_the_same_in_another_process() -> None:
    """Another interpreter with another hash seed reads the same bytes."""
    code = "from nvrx_sre.trainer.corpus import load_corpus; print(load_corpus().digest)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert result.stdout.strip() == load_corpus().digest


def test_it_is_loaded_once_a_process() -> None:
    """A restart inside the process gets the very same array."""
    assert load_corpus() is load_corpus()


def test_the_library_is_read_in_order_without_caches_tests_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only sources of the library itself, by name, whatever was created first or beside them."""
    write(
        tmp_path,
        {
            "z.py": b"last",
            "a/b.py": b"first",
            "a.py": b"second",
            "a/__pycache__/b.cpython-311.pyc": b"no",
            "__pycache__/old.py": b"no",
            "site-packages/other.py": b"no",
            "test/test_a.py": b"no",
            "a/tests/test_b.py": b"no",
            "_sysconfigdata__linux.py": b"no",
            "a/data.txt": b"no",
        },
    )
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(corpus_module, "MIN_DEFAULT_CORPUS_BYTES", 1)
    data = corpus_module._standard_library()
    assert data.tobytes() == b"# a/b.py\nfirst\n# a.py\nsecond\n# z.py\nlast\n"


def test_a_stripped_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sources are missing the message names the way out."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match="give --data a file or folder"):
        corpus_module._standard_library()


def test_a_folder_is_its_text_files_in_order(tmp_path: Path) -> None:
    """Hidden and binary files stay out; the order does not depend on creation."""
    write(
        tmp_path,
        {
            "b.txt": b"two",
            "a.md": b"one",
            ".hidden": b"no",
            ".git/config": b"no",
            "image.png": b"\x89P\0G",
            "c/d": b"3",
        },
    )
    assert load_corpus(tmp_path).data.tobytes() == b"# a.md\none\n# b.txt\ntwo\n# c/d\n3\n"


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    """Byte for byte, the digest following the content and not the name."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"same words")
    two.write_bytes(b"same words")
    assert load_corpus(one).data.tobytes() == b"same words"
    assert load_corpus(one).digest == load_corpus(two).digest
    two.write_bytes(b"Same words")
    assert corpus_module._load.__wrapped__(two).digest != load_corpus(one).digest


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_empty_data_is_refused(tmp_path: Path, kind: str) -> None:
    """One clear line that says what to give."""
    path = tmp_path / kind
    path.write_bytes(b"") if kind == "file" else path.mkdir()
    with pytest.raises(UserError, match="holds no text") as raised:
        load_corpus(path)
    assert "\n" not in str(raised.value)


def test_missing_and_unreadable_data_are_named(tmp_path: Path) -> None:
    """The path that failed is in the message."""
    with pytest.raises(UserError, match=r"cannot read .*none"):
        load_corpus(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="cannot read"):
        load_corpus(tmp_path / "loop" / "x")


def test_unigram_entropy_is_that_of_the_bytes(tmp_path: Path) -> None:
    """Two bytes, even: ln 2. One byte: 0. All bytes alike: ln 256."""
    for name, content, expected in (
        ("two", b"ab" * 50, math.log(2)),
        ("one", b"a" * 50, 0.0),
        ("all", bytes(range(256)) * 3, math.log(256)),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert load_corpus(path).unigram_entropy == pytest.approx(expected)


def test_the_array_cannot_be_changed() -> None:
    """Ranks of one process lifetime share it, so nobody may write to it."""
    with pytest.raises(ValueError, match="read-only"):
        load_corpus().data[0] = np.uint8(hashlib.md5(b"x").digest()[0])
