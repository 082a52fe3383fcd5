"""Who holds how much memory while a state is saved, and how much of that is there without saving.

Model: two runs of ours, the same steps in both, one saves and one never does; in both malloc gives back at once what
is freed (`HELD_ONLY`), so that the figure is what is held and not what the allocator's holes happen to be. The peak of
each process, its private memory alone, of the one less that of the other is what saving takes; beside it the slots,
which are shared memory.

Process safety: reads /proc of our own descendants; a process that ends meanwhile counts as nothing.
Thread safety: `MemorySampler` has a thread of its own. Must not: write, or load torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from nvrx_sre.core.errors import InternalError

SAMPLE_EVERY_S = 0.1
HELD_ONLY = ("env", "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1048576")
"""Command under which a block of 1 MiB and more comes from the kernel and goes back to it (mallopt(3))."""


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """Private memory by process, and shared slots, at a moment."""

    anonymous_bytes: dict[int, int]
    slot_bytes: int


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Of one run: slots, and private memory of its ranks and of its writer, each process at its own peak."""

    slot_bytes: int
    rank_bytes: int
    writer_bytes: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What saving takes: shared slots, and private memory beyond that of the run that never saves."""

    slot_bytes: int
    rank_bytes: int
    writer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.slot_bytes + self.rank_bytes + self.writer_bytes


def peaks_of(samples: Sequence[MemorySample], ranks: Collection[int], writers: Collection[int]) -> Peaks:
    """Peaks of the processes `ranks` and `writers`. Raises `InternalError` if one of them was never seen."""

    def peak_bytes(pids: Collection[int]) -> int:
        peaks = [max((sample.anonymous_bytes.get(pid, 0) for sample in samples), default=0) for pid in pids]
        if not peaks or not all(peaks):
            raise InternalError("the benchmark's run took no sample of the memory of a rank or of the writer")
        return sum(peaks)

    return Peaks(
        slot_bytes=max(sample.slot_bytes for sample in samples),
        rank_bytes=peak_bytes(ranks),
        writer_bytes=peak_bytes(writers),
    )


def taken_by_saving(saving: Peaks, without: Peaks) -> Memory:
    """Difference of the two runs, never below nothing."""
    return Memory(
        slot_bytes=saving.slot_bytes,
        rank_bytes=max(0, saving.rank_bytes - without.rank_bytes),
        writer_bytes=max(0, saving.writer_bytes - without.writer_bytes),
    )


class MemorySampler:
    """Samples the memory of all descendants while it is entered. `on_sample` is called in its thread after each."""

    def __init__(self, on_sample: Callable[[], None] = lambda: None) -> None:
        self.samples: list[MemorySample] = []
        self._on_sample = on_sample
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            pids = [process.pid for process in psutil.Process().children(recursive=True)]
            slots: dict[int, int] = {}
            for pid in pids:
                slots.update(_slot_sizes(pid))
            self.samples.append(
                MemorySample(
                    anonymous_bytes={pid: _anonymous_bytes(pid) for pid in pids},
                    slot_bytes=sum(slots.values()),
                )
            )
            self._on_sample()


def _anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def _slot_sizes(pid: int) -> dict[int, int]:
    """Inode -> bytes in memory of the hot slots that a process has open."""
    found: dict[int, int] = {}
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if "memfd:nvrx-hot" in os.readlink(link):
                status = link.stat()
                found[status.st_ino] = status.st_blocks * 512
    except OSError:
        return found
    return found
