"""What the machine can do, measured beside the contestants: disk reads, checksums, and who holds how much memory.

Blocking: for the read. Process safety: reads /proc of our own descendants; a process that ends meanwhile counts as
nothing. Must not: write, or load torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import xxhash

from nvrx_sre.bench.checkpoint_reading import MemorySample
from nvrx_sre.checkpoint import manifest
from nvrx_sre.core.clock import SystemClock, seconds

BLOCK_BYTES = 4 << 20
BUFFER_BYTES = 64 << 20
"""Larger than the processor's caches, so that a checksum is of memory."""
SAMPLE_EVERY_S = 0.25


def forget(directory: Path) -> None:
    """Drop the cached pages of all files of `directory`, so that the next read is from the disk."""
    manifest.drop_cached_pages(directory, os.listdir(directory))


def disk_read_s(directory: Path, num_threads: int) -> float:
    """Seconds to read all files of `directory` from the disk, by so many threads at once."""
    forget(directory)
    return _together(_read, sorted(directory.iterdir()), num_threads)


def checksum_s(num_bytes: int, num_threads: int) -> float:
    """Seconds to checksum `num_bytes` of memory with the manifest's checksum, by so many threads at once."""
    buffer = os.urandom(BUFFER_BYTES)
    num_rounds = max(1, round(num_bytes / BUFFER_BYTES))
    measured_s = _together(lambda _: _checksum(buffer), range(num_rounds), num_threads)
    return measured_s * num_bytes / (num_rounds * BUFFER_BYTES)


def _checksum(buffer: bytes) -> None:
    state = xxhash.xxh3_128()
    for start in range(0, len(buffer), BLOCK_BYTES):
        state.update(memoryview(buffer)[start : start + BLOCK_BYTES])


def _read(path: Path) -> None:
    block = bytearray(BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def _together(work: Callable[[Any], None], items: Sequence[Any], num_threads: int) -> float:
    clock = SystemClock()
    with ThreadPoolExecutor(num_threads) as pool:
        start_ns = clock.monotonic_ns()
        list(pool.map(work, items))
        return seconds(clock.monotonic_ns() - start_ns)


class MemorySampler:
    """Samples the memory of all descendants while it is entered. `on_sample` is called in its thread after each."""

    def __init__(self, on_sample: Callable[[], None] = lambda: None) -> None:
        self.samples: list[MemorySample] = []
        self._on_sample = on_sample
        self._clock = SystemClock()
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
                    at_ns=self._clock.monotonic_ns(),
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
