"""What the machine can do, measured beside the contestants: disk reads and checksums.

Blocking: for the read. Must not: write, or load torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from nvrx_sre.checkpoint import manifest
from nvrx_sre.core.clock import SystemClock, seconds

BLOCK_BYTES = 4 << 20
BUFFER_BYTES = 64 << 20
"""Larger than the processor's caches, so that a checksum is of memory."""


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
