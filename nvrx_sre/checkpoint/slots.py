"""Hot tier: two or three slots of shared memory a rank, in a memfd that the launcher owns.

    control page | slot 0: header page, data, blob | slot 1 | slot 2        (docs/reference/contracts.md)

The rank fills a slot (`begin`, copy, `seal`), the writer reads a sealed one, the launcher publishes what is
sealed on every rank (`sealed_step`) and what the writer holds (`held_slot`). A header counts only when its
state is sealed and its crc fits, so a process killed in mid-capture leaves an older slot as the newest. A step
that only some ranks captured is stranded: without `stranded` it would keep its slot, and ranks whose stranded
steps differ would never again capture the same one.

Process safety: one writer a word: the rank writes headers, data and blobs, the launcher the three control
words (aligned 8-byte stores). The launcher holds a slot before it lets `sealed_step` pass that slot's step;
`free_slot` never returns a slot that is held, or one at or above `sealed_step` that may still be sealed on
every rank, hence never one being read.
Thread safety: none. Must not: import torch, block, touch pages for the first time inside a step.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import xxhash

from nvrx_sre.checkpoint import pages
from nvrx_sre.checkpoint.memory import check_room
from nvrx_sre.core.errors import StorageError, UserError

MAGIC = b"NVRXHOT1"
VERSION = 1
NUM_SLOTS = 3
"""Usual number: while the writer holds one slot, a crash in mid-capture of another still leaves a recent third."""
NUM_SLOTS_MIN = 2
"""Fewest: one is filled while the other holds the newest common step. Captures are skipped while the writer reads."""
PAGE_BYTES = 4096
NONE = -1
"""`sealed_step` before the first seal and `held_slot` while the writer holds none."""

_CONTROL = struct.Struct("<8sIIQQ")
_SEALED_WORD = 32 // 8
_HELD_WORD = 40 // 8
_STRANDED_WORD = 48 // 8
_STRANDED_STEP_BITS = 40
"""Generation and step share a word, so that a reader never sees one without the other."""
_HEADER = struct.Struct("<IIQQQQQ32s16s")
_CRC = struct.Struct("<I")
_FILLING, _SEALED = 1, 2
_FLAG_DURABLE, _FLAG_SUMMED = 1, 2
BLOCK_BYTES = 64 << 10
"""What one sum is of, where a digest is one of sums: small enough to keep every core of a device busy."""


@dataclass(frozen=True, kw_only=True)
class SlotHeader:
    """Header of a sealed slot. `layout_hash` is 64 hex digits, `digest` 16 bytes (`SlotFile.digest`)."""

    generation: int
    step: int
    durable: bool
    sealed_mono_ns: int
    data_bytes: int
    blob_bytes: int
    layout_hash: str
    digest: bytes
    is_summed: bool = False
    """The digest is of the sums of the data's blocks, which a device makes faster than it hands them on."""


class SlotFile:
    """The mapped slots of one rank. Owns its descriptor. Build with `create` (launcher) or `map` (all others)."""

    def __init__(self, fd: int, num_slots: int, data_bytes: int, blob_bytes: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        self.num_slots = num_slots
        self.data_bytes = _round_up(data_bytes)
        self.blob_bytes = _round_up(blob_bytes)
        self._mapping = mapping
        self._view = memoryview(mapping)
        self._words = self._view[:PAGE_BYTES].cast("q")
        self._release_lock: Callable[[], None] | None = None
        self.lock_piece_bytes = 0
        """Where its pages are locked for a device: no copy of one may cross a multiple of this. 0: they are not."""

    @classmethod
    def create(
        cls,
        data_bytes: int,
        blob_bytes: int,
        *,
        num_slots: int = NUM_SLOTS,
        num_alike: int = 1,
        name: str = "nvrx-hot",
    ) -> SlotFile:
        """New slots with memory for every page; `name` shows in /proc/PID/maps. Blocks while the kernel finds it.

        Its pages are cleared by whoever maps all of them (`map`), so not by the launcher, which only reads headers.

        Sizes are of one slot, rounded up to pages. `num_alike`: files of this size that the node is about to need,
        this one included; there must be room for all of them. Raises `UserError` if memory limits leave none,
        `StorageError` if the kernel refuses.
        """
        total_bytes = total_size_bytes(num_slots, data_bytes, blob_bytes)
        check_room(total_bytes * num_alike)
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, total_bytes)
            os.posix_fallocate(fd, 0, total_bytes)
            slots = cls(fd, num_slots, data_bytes, blob_bytes, mmap.mmap(fd, total_bytes))
        except (OSError, ValueError) as error:
            os.close(fd)
            raise StorageError(f"cannot get {total_bytes} bytes of shared memory for hot slots: {error}") from error
        _CONTROL.pack_into(slots._mapping, 0, MAGIC, VERSION, num_slots, slots.data_bytes, slots.blob_bytes)
        slots.sealed_step = NONE
        slots.held_slot = NONE
        slots.strand(0, 0)
        return slots

    @classmethod
    def map(cls, fd: int, data_bytes: int, blob_bytes: int) -> SlotFile:
        """Map slots that another process created, all pages at once; takes over `fd`.

        Raises `UserError` if the memory behind `fd` is not a slot file of these sizes.
        """
        num_slots = _num_slots_in(fd)
        total_bytes = total_size_bytes(num_slots, data_bytes, blob_bytes)
        if os.fstat(fd).st_size != total_bytes:
            raise UserError(f"slots have {os.fstat(fd).st_size} bytes where {total_bytes} were announced")
        try:
            mapping = _map_all(fd, total_bytes)
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot map {total_bytes} bytes of hot slots: {error}") from error
        slots = cls(fd, num_slots, data_bytes, blob_bytes, mapping)
        if _CONTROL.unpack_from(mapping, 0)[3:] != (slots.data_bytes, slots.blob_bytes):
            raise UserError(f"descriptor {fd} is a slot file of other sizes than announced")
        return slots

    def close(self) -> None:
        """Close the descriptor and unmap. Memory stays mapped while tensors over it are alive."""
        if self.fd < 0:
            return
        if self._release_lock is not None:
            self._release_lock()
        os.close(self.fd)
        self.fd = NONE
        self._words.release()
        # A tensor or view over the slot keeps its pages until it is dropped; the mapping goes with the last one.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._mapping.close()

    @property
    def mapping(self) -> mmap.mmap:
        """The memory itself, for whoever locks its pages (`page_lock`)."""
        return self._mapping

    def locked(self, piece_bytes: int, release: Callable[[], None]) -> None:
        """Its pages are locked in pieces of so many bytes; `release` is called before they are unmapped."""
        self.lock_piece_bytes, self._release_lock = piece_bytes, release

    def cuts(self, slot: int, start: int, end: int) -> list[tuple[int, int]]:
        """Bytes `start` to `end` of a slot's data area in the portions that a device may copy at once."""
        if not self.lock_piece_bytes:
            return [(start, end)]
        first = self._start(slot) + PAGE_BYTES
        piece_bytes = self.lock_piece_bytes
        inner = range((first + start) // piece_bytes * piece_bytes + piece_bytes, first + end, piece_bytes)
        places = [start, *(place - first for place in inner), end]
        return list(pairwise(places))

    @property
    def size_bytes(self) -> int:
        """Memory of the whole file, control and header pages included."""
        return len(self._mapping)

    @property
    def sealed_step(self) -> int:
        """Newest step sealed on every rank, -1 at first. Only the launcher sets it."""
        return self._words[_SEALED_WORD]

    @sealed_step.setter
    def sealed_step(self, step: int) -> None:
        self._words[_SEALED_WORD] = step

    @property
    def held_slot(self) -> int:
        """Slot that the writer reads, -1 if none. Only the launcher sets it."""
        return self._words[_HELD_WORD]

    @held_slot.setter
    def held_slot(self, slot: int) -> None:
        self._words[_HELD_WORD] = slot

    def strand(self, generation: int, step: int) -> None:
        """No step of `generation` up to `step`, but for those sealed, will be common to all ranks. The launcher's."""
        self._words[_STRANDED_WORD] = generation << _STRANDED_STEP_BITS | step

    @property
    def stranded(self) -> tuple[int, int]:
        """(generation, step) of the last `strand`, (0, 0) at first."""
        word = self._words[_STRANDED_WORD]
        return word >> _STRANDED_STEP_BITS, word & ((1 << _STRANDED_STEP_BITS) - 1)

    def header(self, slot: int) -> SlotHeader | None:
        """Header of `slot` if it is sealed and its crc fits, else None. The digest is not checked here."""
        start = self._start(slot)
        raw = bytes(self._view[start : start + _HEADER.size + _CRC.size])
        state, flags, generation, step, sealed_mono_ns, data, blob, layout_hash, digest = _HEADER.unpack_from(raw)
        if state != _SEALED or _CRC.unpack_from(raw, _HEADER.size)[0] != zlib.crc32(raw[: _HEADER.size]):
            return None
        if data > self.data_bytes or blob > self.blob_bytes:
            return None
        return SlotHeader(
            generation=generation,
            step=step,
            durable=bool(flags & _FLAG_DURABLE),
            sealed_mono_ns=sealed_mono_ns,
            data_bytes=data,
            blob_bytes=blob,
            layout_hash=layout_hash.hex(),
            digest=digest,
            is_summed=bool(flags & _FLAG_SUMMED),
        )

    def headers(self) -> list[SlotHeader | None]:
        """`header` of each slot."""
        return [self.header(slot) for slot in range(self.num_slots)]

    def begin(self, slot: int, generation: int, step: int, durable: bool) -> None:
        """Mark `slot` as being filled: from here on it holds nothing for anyone."""
        flags = _FLAG_DURABLE if durable else 0
        self._put(slot, _HEADER.pack(_FILLING, flags, generation, step, 0, 0, 0, bytes(32), bytes(16)))

    def seal(self, slot: int, header: SlotHeader) -> None:
        """Publish `slot`. Data and blob are in place and `header.digest` is theirs."""
        flags = (_FLAG_DURABLE if header.durable else 0) | (_FLAG_SUMMED if header.is_summed else 0)
        packed = _HEADER.pack(
            _SEALED,
            flags,
            header.generation,
            header.step,
            header.sealed_mono_ns,
            header.data_bytes,
            header.blob_bytes,
            bytes.fromhex(header.layout_hash),
            header.digest,
        )
        self._put(slot, packed)

    def data(self, slot: int) -> memoryview:
        """The whole data area of `slot`, writable, no copy."""
        start = self._start(slot) + PAGE_BYTES
        return self._view[start : start + self.data_bytes]

    def blob(self, slot: int) -> memoryview:
        """The whole blob area of `slot`, writable, no copy."""
        start = self._start(slot) + PAGE_BYTES + self.data_bytes
        return self._view[start : start + self.blob_bytes]

    def digest(self, slot: int, data_bytes: int, blob_bytes: int, *, is_summed: bool = False) -> bytes:
        """xxh3_128 over the used part of data (or its sums, see `digest_of_sums`) and blob as they are now.

        About 23 GB/s.
        """
        if is_summed:
            return self.digest_of_sums(slot, block_sums(self.data(slot)[:data_bytes]), blob_bytes)
        state = xxhash.xxh3_128(self.data(slot)[:data_bytes])
        state.update(self.blob(slot)[:blob_bytes])
        return state.digest()

    def digest_of_sums(self, slot: int, sums: bytes, blob_bytes: int) -> bytes:
        """The digest of a summed slot: xxh3_128 over the sums (`block_sums`, wherever they were made) and the blob."""
        state = xxhash.xxh3_128(sums)
        state.update(self.blob(slot)[:blob_bytes])
        return state.digest()

    def free_slot(
        self, step: int | None = None, *, generation: int = 0, restored_step: int | None = None
    ) -> int | None:
        """A slot that may be overwritten (with `step`), or None. Prefers unsealed, then the oldest step.

        With `generation` and `restored_step`, slots that an older generation sealed above the restored step
        belong to an abandoned line and are free as well; so are its own stranded steps.
        """
        # Read in this order: the launcher publishes what is sealed before what is stranded above it.
        stranded = self.stranded
        # A word from before a rollback must not free what lies below the step that is now being taken.
        sealed_step = self.sealed_step if step is None else min(self.sealed_step, step - 1)
        held_slot = self.held_slot
        return choose_slot(
            [None if slot == held_slot else self.header(slot) for slot in range(self.num_slots)],
            held_slot=held_slot,
            sealed_step=sealed_step,
            stranded=stranded,
            generation=generation,
            restored_step=restored_step,
        )

    def _put(self, slot: int, packed: bytes) -> None:
        start = self._start(slot)
        self._view[start : start + len(packed) + _CRC.size] = packed + _CRC.pack(zlib.crc32(packed))

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        return PAGE_BYTES + slot * (PAGE_BYTES + self.data_bytes + self.blob_bytes)


def block_sums(data: memoryview) -> bytes:
    """Sum of each `BLOCK_BYTES` as little-endian 64-bit words that wrap around. `data` is whole words."""
    import numpy as np  # the launcher, which never needs it, saves the import

    words = np.frombuffer(data, dtype="<i8")
    whole = words.size * 8 // BLOCK_BYTES * (BLOCK_BYTES // 8)
    sums = words[:whole].reshape(-1, BLOCK_BYTES // 8).sum(axis=1)
    rest = words[whole:].sum(keepdims=True) if whole < words.size else words[:0]
    return bytes(np.concatenate([sums, rest]).astype("<i8").tobytes())


def choose_slot(
    headers: Sequence[SlotHeader | None],
    *,
    held_slot: int,
    sealed_step: int,
    stranded: tuple[int, int],
    generation: int,
    restored_step: int | None,
) -> int | None:
    """The slot to overwrite, None if each is needed. Pure; `SlotFile.free_slot` says what the words mean."""
    free: list[tuple[bool, int, int]] = []
    for slot, header in enumerate(headers):
        if slot == held_slot:
            continue
        if header is None:
            free.append((False, 0, slot))
        elif (
            header.step < sealed_step
            or _is_left_behind(header, generation, restored_step)
            or (header.generation == generation == stranded[0] and sealed_step < header.step <= stranded[1])
        ):
            free.append((True, header.step, slot))
    return min(free)[2] if free else None


def _is_left_behind(header: SlotHeader, generation: int, restored_step: int | None) -> bool:
    return restored_step is not None and header.generation < generation and header.step > restored_step


def _round_up(size_bytes: int) -> int:
    if size_bytes < 0:
        raise UserError(f"slot size is {size_bytes} bytes: use 0 or more")
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def total_size_bytes(num_slots: int, data_bytes: int, blob_bytes: int) -> int:
    """Memory of one rank's slots, control and header pages included."""
    return PAGE_BYTES + num_slots * (PAGE_BYTES + _round_up(data_bytes) + _round_up(blob_bytes))


def _map_all(fd: int, total_bytes: int) -> mmap.mmap:
    """Mapping with every page mapped; without the interpreter's lock where the kernel knows how."""
    mapping = mmap.mmap(fd, total_bytes)
    if pages.map_shared(mapping):
        return mapping
    mapping.close()
    return mmap.mmap(fd, total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _num_slots_in(fd: int) -> int:
    """Number of slots by the control page. Raises `UserError` if `fd` is not a slot file of this version."""
    page = os.pread(fd, _CONTROL.size, 0)
    magic, version, num_slots = _CONTROL.unpack(page)[:3] if len(page) == _CONTROL.size else (b"", 0, 0)
    if (magic, version) != (MAGIC, VERSION) or not NUM_SLOTS_MIN <= num_slots <= NUM_SLOTS:
        raise UserError(f"descriptor {fd} is not a slot file of version {VERSION}")
    return int(num_slots)
