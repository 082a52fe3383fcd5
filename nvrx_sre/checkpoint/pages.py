"""Pages of memory, fetched by one call instead of at each one's first touch.

A page that the kernel must fetch, clear and map at its first touch costs more than the copy into it; here it holds
neither the interpreter's lock nor, for long, that of the process's memory. Pages of 2 MiB would cost a third where the
machine has them at hand, and five times as much in a virtual machine that gives free memory back to its host, so they
are not asked for (docs/adr/0030).

Thread safety: all of it. Must not: look at what is in the memory, import torch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

PIECE_BYTES = 16 << 20
"""Fetched by one call: others that map memory wait for no more."""
_MADV_POPULATE_WRITE = 23
"""linux/mman.h, since 5.14; `mmap` has no name for it."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def fetch(address: int, num_bytes: int) -> bool:
    """Have the kernel map all whole pages of a range, writable; False if it does not know how. Blocks meanwhile.

    Raises `OSError` if there is no memory for them.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for start in range(first, end, PIECE_BYTES):
        size = ctypes.c_size_t(min(PIECE_BYTES, end - start))
        if _LIBC.madvise(ctypes.c_void_p(start), size, _MADV_POPULATE_WRITE) != 0:
            number = ctypes.get_errno()
            if number == errno.EINVAL:
                return False
            raise OSError(number, os.strerror(number))
    return True


def fetch_mapping(mapping: mmap.mmap) -> bool:
    """`fetch` of all of a writable mapping."""
    return fetch(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), len(mapping))
