"""Keep freed memory in the process: a generation's model and optimizer take the pages of the one before.

glibc returns big blocks to the kernel at once, and gets them back as pages that must be cleared and mapped at the
first touch. In a restore that costs more than the copy (docs/adr/0019). With the heap kept, a restore after a fault
in the process writes to pages that are there. What it costs: the process stays as large as it ever was.

Process-wide, called once before user code. Other allocators (jemalloc, tcmalloc, musl's) are left as they are.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
"""From malloc.h."""
_NEVER = -1


def keep_freed_memory() -> bool:
    """True if the allocator is glibc's and keeps what is freed from now on."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
