"""Steps of a rank on their way to its launcher: a ring in shared memory, written without a call into the kernel.

    0     counts: written (the rank's); on another cache line taken, watched (the launcher's)
    4096  NUM_STEPS places of 128 bytes: a packed step (`messages.pack_step`), u64 xxh3_64 of it with its number as seed

Model: the rank stores a step in the next place, then the count; the launcher takes what lies between the two counts
when it looks. The memory is the launcher's, so what was stored survives the rank's SIGKILL. A full ring keeps the
newest step in the place of the one before it: a later report implies the earlier ones, so that H is never lost.

A place counts only if its digest fits: whatever order stores become visible in on another core, a step is read whole or
left for the next look. A place that does not fit before one that does is damaged, and skipped.

A script may write over the counts as well. So each end goes by a count of its own, of which the one in memory is a copy
for the other end, made anew at each step and each look: damage lasts until then and no longer.

Process safety: one writer a count. Thread safety: one thread of the rank writes, one of the launcher reads; any thread
may read `num_written`. Must not: block, allocate beyond a packet, call the kernel for a step.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

import xxhash

STEP_BYTES = 96
"""A packed step."""
NUM_STEPS = 16_384
"""Places: a launcher may be away for 2.6 s at 50,000 steps a second over 8 ranks. 2 MiB a rank, of which only what was
written takes memory."""
PLACE_BYTES = 128
"""Two cache lines."""
COUNTS_BYTES = 4096
RING_BYTES = COUNTS_BYTES + NUM_STEPS * PLACE_BYTES
_WRITTEN, _TAKEN, _WATCHED = 0, 16, 17
"""Words of the counts."""
_MARK = struct.Struct("<cQ")
_MARKED = b"@"
"""First byte of a marked packet; no message begins with it."""
MARK_BYTES = _MARK.size
_PLACE = struct.Struct(f"<{STEP_BYTES}sQ")
_pack_place = _PLACE.pack_into
_digest = xxhash.xxh3_64_intdigest


class StepRing:
    """One end of the ring. `create` (launcher) owns the descriptor, `map` (rank) takes it over and closes it."""

    def __init__(self, mapping: mmap.mmap, fd: int) -> None:
        self.fd = fd
        self.num_replaced = 0
        """Steps that were replaced by a later one, since there was no room (of this end, the rank's)."""
        self.num_damaged = 0
        """Places that held no step (of this end, the launcher's)."""
        self._mapping = mapping
        self._view = memoryview(mapping)
        self._counts = self._view[:COUNTS_BYTES].cast("Q")
        self._own_written = self._counts[_WRITTEN]
        self._own_taken = self._counts[_TAKEN]

    @classmethod
    def create(cls) -> StepRing:
        """An empty ring, whose size nobody can change. Raises `OSError` if there is no descriptor or memory left."""
        fd = os.memfd_create("nvrx-steps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, RING_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(mmap.mmap(fd, RING_BYTES), fd)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def map(cls, fd: int) -> StepRing:
        """The ring behind `fd`, which is closed. Raises `OSError` or `ValueError` if there is none."""
        try:
            return cls(mmap.mmap(fd, RING_BYTES), -1)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unmap it; what nobody has taken is lost when the other end goes too."""
        self._counts.release()
        self._view.release()
        self._mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # --- the rank ---------------------------------------------------------------------------------------------

    @property
    def num_written(self) -> int:
        """Steps that were ever stored."""
        return self._counts[_WRITTEN]

    @property
    def num_taken(self) -> int:
        """Steps that were taken so far, as the launcher says."""
        return self._counts[_TAKEN]

    def mark(self, packet: bytes) -> bytes:
        """A packet for the channel, with the number of steps that are to be taken in before it."""
        return _MARK.pack(_MARKED, self._own_written) + packet

    def put(self, packet: bytes) -> bool:
        """Store a packed step; True if the launcher does not look by itself soon enough.

        That is so while it waits for everything, and when the ring has become half full.
        """
        counts = self._counts
        number = self._own_written
        num_waiting = number - counts[_TAKEN]
        if num_waiting == NUM_STEPS and self._replace(number - 1, packet):
            return True
        begin = COUNTS_BYTES + number % NUM_STEPS * PLACE_BYTES
        _pack_place(self._view, begin, packet, _digest(packet, number))
        counts[_WRITTEN] = self._own_written = number + 1
        return not counts[_WATCHED] or num_waiting == NUM_STEPS // 2

    def _replace(self, number: int, packet: bytes) -> bool:
        """Store a step in the place of the newest; False if that has been taken meanwhile, so that there is room."""
        begin = COUNTS_BYTES + number % NUM_STEPS * PLACE_BYTES
        _pack_place(self._view, begin, packet, _digest(packet, number))
        if self._counts[_TAKEN] > number:
            return False
        self.num_replaced += 1
        return True

    # --- the launcher -----------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Something was stored that was not taken."""
        return self.num_written > self._own_taken

    def watch(self, is_watched: bool) -> None:
        """Tell the rank whether the launcher looks by itself soon."""
        self._counts[_WATCHED] = is_watched

    def take(self, until: int) -> list[bytes]:
        """Packed steps, in their order, of those with a number below `until` that were not taken yet."""
        counts = self._counts
        counts[_TAKEN] = self._own_taken
        written = counts[_WRITTEN]
        if written > self._own_taken + NUM_STEPS:
            self._skip_overwritten(written)
        packets = []
        for number in range(self._own_taken, min(until, written, self._own_taken + NUM_STEPS)):
            packet = self._read(number)
            if packet is not None:
                packets.append(packet)
                self.num_damaged += number - self._own_taken
                counts[_TAKEN] = self._own_taken = number + 1
        return packets

    def _skip_overwritten(self, written: int) -> None:
        """The rank could not see for a while what was taken, and wrote over the rest; or its own count is damaged."""
        if self._read(written - 1) is not None:
            num_lost = written - NUM_STEPS - self._own_taken
            self.num_damaged += num_lost
            self._own_taken += num_lost

    def _read(self, number: int) -> bytes | None:
        begin = COUNTS_BYTES + number % NUM_STEPS * PLACE_BYTES
        packet: bytes
        packet, digest = _PLACE.unpack_from(self._view, begin)
        return packet if digest == _digest(packet, number) else None


def unmark(packet: bytes) -> tuple[bytes, int]:
    """What was marked, or was not, and how many steps come before it."""
    if packet.startswith(_MARKED) and len(packet) > MARK_BYTES:
        return packet[MARK_BYTES:], _MARK.unpack_from(packet)[1]
    return packet, 0
