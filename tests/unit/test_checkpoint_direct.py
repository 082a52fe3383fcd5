"""Files past the page cache: every byte arrives in its place, whatever portions it came in, and damage is seen."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvrx_sre.checkpoint import direct
from nvrx_sre.checkpoint.direct import PIECE_BYTES, READ_BYTES, DirectFile
from nvrx_sre.checkpoint.manifest import checksum_file
from nvrx_sre.checkpoint.pacing import Pacer
from nvrx_sre.checkpoint.storage import ChecksumFileSystem, ChecksumStream, WriteOptions

IN_MEMORY = Path("/dev/shm")


@pytest.fixture(params=["disk", "memory", "no direct way"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where files may lie; a file system without the direct way is one whose kernel says EINVAL to the flag."""
    if request.param == "no direct way":
        original = fcntl.fcntl

        def refuse(descriptor: int, command: int, argument: int = 0) -> int:
            if command == fcntl.F_SETFL and argument & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return original(descriptor, command, argument)

        monkeypatch.setattr(fcntl, "fcntl", refuse)
    if request.param != "memory":
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="nvrx-test-", dir=IN_MEMORY))
    yield path
    for item in path.iterdir():
        item.unlink()
    path.rmdir()


SIZES = [0, 1, 511, 4096, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, READ_BYTES, 2 * READ_BYTES + 12345]


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_paced_file_holds_what_was_written(folder: Path, size_bytes: int) -> None:
    """In portions of any size; length and checksum are those of a read back."""
    content = random.Random(size_bytes).randbytes(size_bytes)
    path, portions = folder / "file", random.Random(1)
    files = ChecksumFileSystem(WriteOptions(bandwidth_bytes_s=1e12))
    with files.create_stream(path, "wb") as stream:
        start = 0
        while start < size_bytes:
            end = start + portions.choice([1, 100, 4096, 70_000, 3 * PIECE_BYTES])
            stream.write(content[start:end])
            start = min(end, size_bytes)
        os.fsync(stream.fileno())
    assert path.read_bytes() == content
    assert b"".join(bytes(piece) for piece in direct.read_pieces(path)) == content
    entry = files.sums["file"]
    assert (entry.size_bytes, entry.xxh3_128) == checksum_file(path)


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes a part of a piece gets the rest, which is not aligned any more."""
    content = random.Random(0).randbytes(3 * PIECE_BYTES)
    original: Callable[[int, memoryview, int], int] = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, view, place: original(descriptor, view[:69_632], place))
    with open(tmp_path / "file", "wb") as file:
        direct.make_direct(file.fileno())
        written = DirectFile(file.fileno())
        written.write(memoryview(content))
        written.finish()
    assert (tmp_path / "file").read_bytes() == content


def test_whole_pieces_go_past_the_cache_and_the_rest_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no whole block can only go through it."""
    seen: list[bool] = []
    original: Callable[[int, memoryview, int], int] = os.pwrite

    def pwrite(descriptor: int, view: memoryview, place: int) -> int:
        seen.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        return original(descriptor, view, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with open(tmp_path / "file", "wb") as file:
        knows_how = direct.make_direct(file.fileno())
        written = DirectFile(file.fileno())
        assert [written.write(memoryview(bytes(size))) for size in (2 * PIECE_BYTES, 100)] == [2 * PIECE_BYTES, 0]
        assert written.finish() == 100
    assert seen == [knows_how, knows_how, False]


def test_a_full_disk_is_told_with_its_number(tmp_path: Path) -> None:
    """The error of the piece that did not fit, remembered by the stream."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(tmp_path / "file", "wb", buffering=0) as file:
        stream = ChecksumStream(file, Pacer(1e12), lambda _: None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PIECE_BYTES, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                stream.write(bytes(4 * PIECE_BYTES))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert stream.error is not None and stream.error.errno == 27


@pytest.mark.parametrize("good", [0, 2])
def test_a_file_system_that_refuses_direct_pieces_gets_them_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    """It took the flag, and `good` pieces: EINVAL ends neither a save nor the read that verifies it."""
    content = random.Random(1).randbytes(3 * READ_BYTES + 777)
    path = tmp_path / "file"
    seen = {"write": 0, "read": 0}

    def refuse(kind: str, descriptor: int) -> None:
        seen[kind] += 1
        if seen[kind] > good and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")

    pwrite, readv = os.pwrite, os.readv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, place: [refuse("write", fd), pwrite(fd, view, place)][1])
    monkeypatch.setattr(os, "readv", lambda fd, views: [refuse("read", fd), readv(fd, views)][1])
    files = ChecksumFileSystem(WriteOptions(bandwidth_bytes_s=1e12))
    files.write_file(path, content)
    assert path.read_bytes() == content
    assert checksum_file(path) == (len(content), files.sums["file"].xxh3_128)


def test_another_refusal_of_a_piece_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EINVAL for a piece that goes through the cache is no question of alignment; an I/O error never is."""
    with open(tmp_path / "file", "wb") as file:
        for number, makes_direct in ((22, False), (5, True)):
            if makes_direct:
                direct.make_direct(file.fileno())
            monkeypatch.setattr(os, "pwrite", _raising(number))
            with pytest.raises(OSError, match=f"Errno {number}"):
                DirectFile(file.fileno()).write(memoryview(bytes(PIECE_BYTES)))


def _raising(number: int) -> Callable[..., int]:
    def pwrite(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return pwrite


def test_a_bit_that_flips_below_the_page_cache_is_seen(tmp_path: Path) -> None:
    """Pages that are cached and clean are no evidence: what is verified comes from the disk.

    Written past the cache of whoever holds the old pages, as a disk would change them.
    """
    path = tmp_path / "file"
    path.write_bytes(bytes(PIECE_BYTES))
    with open(path, "r+b", buffering=0) as file:
        os.fsync(file.fileno())
        whole = checksum_file(path)
        mapped = mmap.mmap(file.fileno(), PIECE_BYTES)
        assert mapped[5] == 0
        flipped = mmap.mmap(-1, mmap.PAGESIZE)
        flipped[5] = 1
        direct.make_direct(file.fileno())
        os.pwrite(file.fileno(), flipped, 0)
    assert checksum_file(path) != whole
    mapped.close()


@pytest.mark.parametrize("bandwidth_bytes_s", [1e-3, 1.0, 1e6, 1e15])
def test_a_pace_waits_for_what_the_rate_says_until_it_is_lifted(bandwidth_bytes_s: float) -> None:
    """Any rate; once there is no need for it the rest of the save goes as fast as it can."""
    waits: list[float] = []

    def wait(wait_s: float) -> bool:
        waits.append(wait_s)
        return len(waits) < 3

    pacer = Pacer(bandwidth_bytes_s, wait)
    for _ in range(5):
        pacer.wrote(1000)
    assert len(waits) == 3 and pacer.is_bounded
    assert waits[0] == pytest.approx(1000 / bandwidth_bytes_s, abs=1e-6)
