"""Pages of memory: fetched by one call instead of at each one's first touch, large ones where the kernel has them.

A page that the kernel must fetch, clear and map at its first touch costs more than the copy into it. `fetch` maps a
range at once; `new_private` is memory whose pages are of 2 MiB and come while they are filled, which is cheaper still
(docs/adr/0029). Neither holds the interpreter's lock.

Thread safety: all of it. Must not: look at what is in the memory, import torch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cache
from pathlib import Path

HUGE_BYTES = 2 << 20
"""A large page of x86-64, and of arm64 with pages of 4 KiB."""
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_POPULATE_WRITE = 23
"""linux/mman.h, since 5.14; `mmap` has no name for it."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def fetch(address: int, num_bytes: int) -> bool:
    """Have the kernel map all whole pages of a range, writable; False if it does not know how. Blocks meanwhile.

    Raises `OSError` if there is no memory for them.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    number = _advise(first, max(0, end - first), _MADV_POPULATE_WRITE)
    if number in (0, errno.EINVAL):
        return number == 0
    raise OSError(number, os.strerror(number))


def fetch_mapping(mapping: mmap.mmap) -> bool:
    """`fetch` of all of a writable mapping."""
    return fetch(address_of(mapping), len(mapping))


def address_of(mapping: mmap.mmap) -> int:
    """Where a writable mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


@cache
def has_huge() -> bool:
    """True if the kernel gives large pages to memory that asks for them."""
    try:
        return "[never]" not in _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return False


def new_private(num_bytes: int) -> tuple[mmap.mmap, int]:
    """(mapping, offset in it) of so many bytes of this process alone, on large pages but for the rest at the end.

    What lies before the offset and behind the bytes is never touched, and takes no memory.
    """
    mapping = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = address_of(mapping)
    offset = -start % HUGE_BYTES
    _advise(start + offset, num_bytes // HUGE_BYTES * HUGE_BYTES, mmap.MADV_HUGEPAGE)
    return mapping, offset


def _advise(address: int, num_bytes: int, advice: int) -> int:
    """Error number of madvise(2), 0 if it worked."""
    if _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) == 0:
        return 0
    return ctypes.get_errno()
