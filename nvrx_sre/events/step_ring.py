"""Steps of a rank on their way to its launcher: a ring in shared memory, written without a call into the kernel.

    0     counts: written (the rank's); on another cache line taken (the launcher's)
    4096  NUM_STEPS places of 128 bytes: the words of a `StepRecord`, Python's hash of (number, record)

Model: the rank stores a step in the next place, then the count; the launcher takes what lies between the two counts
when it looks. The memory is the launcher's, so what was stored survives the rank's SIGKILL. A full ring keeps the
newest step in the place of the one before it: a later report implies the earlier ones, so that H is never lost.

A place counts only if its digest fits: whatever order stores become visible in on another core, a step is read whole or
left for the next look. A place that does not fit before one that does is damaged, and skipped. The hash of numbers
is the same in every process of one Python, which both ends are, since the launcher forks its ranks.

A script may write over the counts as well. So each end goes by a count of its own, of which the one in memory is a copy
for the other end, made anew at each step and each look: damage lasts until then and no longer.

A step finds its rank's caches full of something else, so that it costs by how much code and memory it touches, not by
how long that runs: numbers are stored one by one by the interpreter itself, which is far less of both than a packed
text, its checksum and their copy were, and nothing of the launcher's is looked at before the ring may be half full.

Process safety: one writer a count. Thread safety: one thread of the rank writes, one of the launcher reads; any thread
may read `num_written`. Must not: block, call the kernel for a step.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

StepRecord = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, float]
"""What a rank stores of a step, see `step_record`. Integers of 64 bits with sign; the last is no NaN, whose hash
differs from one process to the next."""
NUM_STEPS = 16_384
"""Places: a launcher may be away for 2.6 s at 50,000 steps a second over 8 ranks. 2 MiB a rank."""
PLACE_BYTES = 128
"""Two cache lines."""
COUNTS_BYTES = 4096
RING_BYTES = COUNTS_BYTES + NUM_STEPS * PLACE_BYTES
_WORD_BYTES = 8
_FIRST_WORD, _PLACE_WORDS = COUNTS_BYTES // _WORD_BYTES, PLACE_BYTES // _WORD_BYTES
_WRITTEN, _TAKEN = 0, 16
"""Words of the counts."""
_MARK = struct.Struct("<cQ")
_MARKED = b"@"
"""First byte of a marked packet; no message begins with it."""
MARK_BYTES = _MARK.size
_PLACE = struct.Struct("=14qdq")
_NUM_FIELDS = 15


class StepRing:
    """One end of the ring. `create` (launcher) owns the descriptor, `map` (rank) takes it over and closes it."""

    __slots__ = (
        *("fd", "num_replaced", "num_damaged", "_mapping", "_view", "_words", "_floats"),
        *("_own_written", "_own_taken", "_lap", "_unchecked_until"),
    )

    def __init__(self, mapping: mmap.mmap, fd: int) -> None:
        self.fd = fd
        self.num_replaced = 0
        """Steps that were replaced by a later one, since there was no room (of this end, the rank's)."""
        self.num_damaged = 0
        """Places that held no step (of this end, the launcher's)."""
        self._mapping = mapping
        self._view = memoryview(mapping)
        self._words = self._view.cast("q")
        self._floats = self._view.cast("d")
        self._own_written = self._words[_WRITTEN]
        self._own_taken = self._words[_TAKEN]
        self._lap = _FIRST_WORD
        """Word at which the place of step 0 would begin, were the ring's lap the first one."""
        self._unchecked_until = self._own_written
        """Number of the step before which the rank looks at what was taken, and begins a lap."""

    @classmethod
    def create(cls) -> StepRing:
        """An empty ring, whose size nobody can change. Raises `OSError` if there is no descriptor or memory left.

        Has its pages mapped at once, as the other end: what a launcher holds does not grow with the steps it has read.
        """
        fd = os.memfd_create("nvrx-steps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, RING_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(mmap.mmap(fd, RING_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), fd)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def map(cls, fd: int) -> StepRing:
        """The ring behind `fd`, which is closed; its pages are mapped at once, so that no step pays for one.

        Raises `OSError` or `ValueError` if there is none.
        """
        try:
            return cls(mmap.mmap(fd, RING_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), -1)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unmap it; what nobody has taken is lost when the other end goes too."""
        self._words.release()
        self._floats.release()
        self._view.release()
        self._mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # --- the rank ---------------------------------------------------------------------------------------------

    @property
    def num_written(self) -> int:
        """Steps that were ever stored."""
        return self._words[_WRITTEN]

    @property
    def num_taken(self) -> int:
        """Steps that were taken so far, as the launcher says."""
        return self._words[_TAKEN]

    def mark(self, packet: bytes) -> bytes:
        """A packet for the channel, with the number of steps that are to be taken in before it."""
        return _MARK.pack(_MARKED, self._own_written) + packet

    def put(self, record: StepRecord) -> bool:
        """Store a step; True if the launcher is to be called, since the ring has become half full."""
        number = self._own_written
        if number >= self._unchecked_until:
            return self._put_after_look(record)
        words, at = self._words, self._lap + number * 16  # _PLACE_WORDS: a name is a line that the caches lack
        (
            words[at],
            words[at + 1],
            words[at + 2],
            words[at + 3],
            words[at + 4],
            words[at + 5],
            words[at + 6],
            words[at + 7],
            words[at + 8],
            words[at + 9],
            words[at + 10],
            words[at + 11],
            words[at + 12],
            words[at + 13],
            self._floats[at + 14],
        ) = record
        words[at + 15] = hash((number, record))
        words[0] = self._own_written = number + 1  # _WRITTEN
        return False

    def _put_after_look(self, record: StepRecord) -> bool:
        """`put` at the end of a lap, or of what is known to be free."""
        number = self._own_written
        num_waiting = number - self._words[_TAKEN]
        if num_waiting == NUM_STEPS and self._replace(number - 1, record):
            return True
        is_half_full = NUM_STEPS // 2 <= num_waiting <= NUM_STEPS
        num_waiting = num_waiting if 0 <= num_waiting <= NUM_STEPS else 0  # the count of what was taken is damaged
        self._store_next_at(number, num_sure=(NUM_STEPS if is_half_full else NUM_STEPS // 2) - num_waiting)
        self.put(record)
        return is_half_full

    def _replace(self, number: int, record: StepRecord) -> bool:
        """Store a step in the place of the newest; False if that has been taken meanwhile, so that there is room."""
        self._store_next_at(number, num_sure=1)
        self.put(record)
        if self._words[_TAKEN] > number:
            return False
        self.num_replaced += 1
        return True

    def _store_next_at(self, number: int, num_sure: int) -> None:
        """The next step has this number, and so many find room without a look, but for the end of the lap."""
        place = number % NUM_STEPS
        self._own_written, self._lap = number, _FIRST_WORD - (number - place) * _PLACE_WORDS
        self._unchecked_until = number + min(num_sure, NUM_STEPS - place)

    # --- the launcher -----------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Something was stored that was not taken."""
        return self.num_written > self._own_taken

    def take(self, until: int) -> list[StepRecord]:
        """Steps, in their order, of those with a number below `until` that were not taken yet."""
        words = self._words
        words[_TAKEN] = self._own_taken
        written = words[_WRITTEN]
        if written > self._own_taken + NUM_STEPS:
            self._skip_overwritten(written)
        records = []
        for number in range(self._own_taken, min(until, written, self._own_taken + NUM_STEPS)):
            record = self._read(number)
            if record is not None:
                records.append(record)
                self.num_damaged += number - self._own_taken
                words[_TAKEN] = self._own_taken = number + 1
        return records

    def _skip_overwritten(self, written: int) -> None:
        """The rank could not see for a while what was taken, and wrote over the rest; or its own count is damaged."""
        if self._read(written - 1) is not None:
            num_lost = written - NUM_STEPS - self._own_taken
            self.num_damaged += num_lost
            self._own_taken += num_lost

    def _read(self, number: int) -> StepRecord | None:
        values = _PLACE.unpack_from(self._view, COUNTS_BYTES + number % NUM_STEPS * PLACE_BYTES)
        record: StepRecord = values[:_NUM_FIELDS]
        return record if values[_NUM_FIELDS] == hash((number, record)) else None


def unmark(packet: bytes) -> tuple[bytes, int]:
    """What was marked, or was not, and how many steps come before it."""
    if packet.startswith(_MARKED) and len(packet) > MARK_BYTES:
        return packet[MARK_BYTES:], _MARK.unpack_from(packet)[1]
    return packet, 0
