"""The files of a durable checkpoint on one rank: each byte is read once, and checked before it is used.

    share()     this rank's share of the files, whole, into memory; checksums on the way
    pieces()    the stored tensors that a load plan needs: from that memory, or by a short read from a peer's share

Shares are disjoint and cover all files, so the ranks between them check everything; in the world that saved it a
rank's share is its own shards. What lies in a peer's share (a replicated tensor, a shard after a change of the
world size) is read alone and checked by a digest of its own. Nothing is unpickled: a piece is an
uncompressed zip archive of torch's, and its one data record is the tensor's bytes (`write` stores contiguous ones).

Memory: this rank's share once, until the load. Several reads are in flight and a share is hashed in order while
they arrive. Thread safety: one thread; reads run in threads of their own. Must not: use a byte before its check.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from nvrx_sre.checkpoint.manifest import Manifest
from nvrx_sre.core.errors import CheckpointCorrupt
from nvrx_sre.events.schema import RejectReason

NUM_READERS = 4
"""Reads in flight: one stream alone leaves a networked or striped disk idle between requests."""
BLOCK_BYTES = 8 << 20
_OF_RANK = re.compile(r"(?:__|rank-)(\d+)(?:_\d+)?\.(?:distcp|json)")

_END = struct.Struct("<4s4HIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
"""Records of the zip format: APPNOTE.TXT 6.3.10, sections 4.3.7 to 4.3.16."""
_IN_ZIP64 = 0xFFFFFFFF


@dataclass(frozen=True)
class Place:
    """Where a stored piece of a tensor lies. `xxh3_64`: of the tensor's bytes, 16 hex digits."""

    file: str
    position: int
    length: int
    xxh3_64: str


class CheckpointFiles:
    """Files of one checkpoint as `rank` of `world_size` reads them. Raises `CheckpointCorrupt` from every method."""

    def __init__(self, directory: Path, described: Manifest, rank: int, world_size: int) -> None:
        self._directory = directory
        self._described = described
        self._rank = rank
        self._world_size = world_size
        self._held: dict[str, memoryview] = {}

    def share(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Read and check this rank's share; `meanwhile` is called while the disk works. Blocks for the disk."""
        names = [name for name in sorted(self._described.files) if self._owner(name) == self._rank]
        self._read(names, NUM_READERS, meanwhile)

    def content(self, name: str) -> memoryview:
        """A whole file, checked; of a peer's share it is read now."""
        if name not in self._held:
            self._read([name], 1)
        return self._held[name]

    def pieces(self, places: Iterable[Place]) -> dict[Place, memoryview]:
        """Bytes of the tensors at these places."""
        wanted = set(places)
        far: dict[str, list[Place]] = {}
        found = {}
        for place in wanted:
            if place.file in self._held:
                archive = self._held[place.file][place.position : place.position + place.length]
                found[place] = self._record(place, archive)
            else:
                far.setdefault(place.file, []).append(place)
        for name, group in far.items():
            with self._reported(name), open(self._directory / name, "rb", buffering=0) as file:
                for place in sorted(group, key=lambda item: item.position):
                    archive = memoryview(bytearray(place.length))
                    _read_block(file.fileno(), archive, place.position)
                    found[place] = self._record(place, archive)
                    if xxhash.xxh3_64_hexdigest(found[place]) != place.xxh3_64:
                        raise self._corrupt(
                            RejectReason.CHECKSUM, f"{name} at {place.position} does not match its digest"
                        )
        return found

    def release(self) -> None:
        """Give the memory of the share back, once no tensor over it is needed any more."""
        self._held = {}

    def _owner(self, name: str) -> int:
        """Rank whose share a file is; in another world neighbours stay together."""
        match = _OF_RANK.fullmatch(name)
        saved_rank = min(int(match[1]), self._described.world_size - 1) if match else 0
        return saved_rank * self._world_size // self._described.world_size

    def _read(self, names: Sequence[str], num_readers: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Hold these files, whole and checked."""
        with ExitStack() as opened, ThreadPoolExecutor(num_readers, thread_name_prefix="nvrx-read") as pool:
            begun = [(name, self._begin(opened, pool, name)) for name in names]
            meanwhile()
            for name, (content, reads) in begun:
                with self._reported(name):
                    digest = _hash_in_order(reads)
                if digest != self._described.files[name].xxh3_128:
                    raise self._corrupt(RejectReason.CHECKSUM, f"{name} does not match its checksum")
                self._held[name] = content

    def _begin(
        self, opened: ExitStack, pool: ThreadPoolExecutor, name: str
    ) -> tuple[memoryview, list[Future[memoryview]]]:
        """Memory for a file, and the reads into it that are on their way."""
        listed = self._described.files[name]
        with self._reported(name):
            descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            size_bytes = os.fstat(descriptor).st_size
        if size_bytes != listed.size_bytes:
            raise self._corrupt(RejectReason.SIZE, f"{name} has {size_bytes} bytes, not {listed.size_bytes}")
        content = memoryview(mmap.mmap(-1, size_bytes) if size_bytes else b"")
        starts = range(0, size_bytes, BLOCK_BYTES)
        blocks = [(content[start : start + BLOCK_BYTES], start) for start in starts]
        return content, [pool.submit(_read_block, descriptor, block, start) for block, start in blocks]

    def _record(self, place: Place, archive: memoryview) -> memoryview:
        try:
            return find_record(archive)
        except (struct.error, ValueError) as error:
            raise self._corrupt(RejectReason.CHECKSUM, f"{place.file} at {place.position}: {error}") from error

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise self._corrupt(RejectReason.MISSING_FILE, f"{name} is missing") from None
        except OSError as error:
            raise self._corrupt(RejectReason.UNREADABLE, f"{name}: {error.strerror or error}") from error

    def _corrupt(self, reason: RejectReason, message: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"checkpoint {self._directory.name} is not usable: {message}", reason=reason.value)


def find_record(archive: memoryview) -> memoryview:
    """Bytes of the data record of one tensor that `torch.save` wrote. Raises `ValueError`, `struct.error`."""
    end = len(archive) - _END.size
    if end < 0:
        raise ValueError("a piece is too short for an archive")
    signature, *_, num_entries, _, start, _ = _END.unpack_from(archive, end)
    if signature != b"PK\x05\x06":
        raise ValueError("a piece is not an archive")
    if start == _IN_ZIP64 or num_entries == 0xFFFF:
        _, _, end64, _ = _LOCATOR.unpack_from(archive, end - _LOCATOR.size)
        *_, num_entries, _, start = _END64.unpack_from(archive, end64)
    for _ in range(num_entries):
        *_, method, _, _, _, _, size_bytes, name_bytes, extra_bytes, comment_bytes, _, _, _, position = (
            _ENTRY.unpack_from(archive, start)
        )
        name = bytes(archive[start + _ENTRY.size :][:name_bytes])
        if name.endswith(b"/data/0"):
            extra = archive[start + _ENTRY.size + name_bytes :][:extra_bytes]
            size_bytes, position = _from_zip64(extra, size_bytes, position)
            return _stored(archive, method, size_bytes, position)
        start += _ENTRY.size + name_bytes + extra_bytes + comment_bytes
    raise ValueError("an archive has no data record")


def _from_zip64(extra: memoryview, size_bytes: int, position: int) -> tuple[int, int]:
    """Sizes beyond 4 GiB are in an extra field, in the order of the fields that they replace."""
    if _IN_ZIP64 not in (size_bytes, position):
        return size_bytes, position
    start = 0
    while start + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, start)
        if kind == 1:
            wide = list(struct.unpack_from(f"<{length // 8}Q", extra, start + 4))
            if size_bytes == _IN_ZIP64:
                size_bytes = wide.pop(0)
                wide = wide[1:]  # the compressed size, equal to it
            return size_bytes, wide.pop(0) if position == _IN_ZIP64 else position
        start += 4 + length
    raise ValueError("an archive lacks a size")


def _stored(archive: memoryview, method: int, size_bytes: int, position: int) -> memoryview:
    local = _LOCAL.unpack_from(archive, position)
    start = position + _LOCAL.size + local[9] + local[10]
    content = archive[start : start + size_bytes]
    if method != 0 or len(content) != size_bytes:
        raise ValueError("an archive's data record is not whole and plain")
    return content


def _read_block(descriptor: int, block: memoryview, start: int) -> memoryview:
    """Fill `block` from this place of a file; the block."""
    done = 0
    while done < len(block):
        count = os.preadv(descriptor, [block[done:]], start + done)
        if count == 0:
            raise OSError(0, "it became shorter while it was read")
        done += count
    return block


def _hash_in_order(reads: list[Future[memoryview]]) -> str:
    state = xxhash.xxh3_128()
    for read in reads:
        state.update(read.result())
    return state.hexdigest()
