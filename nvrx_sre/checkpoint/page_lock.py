"""Slots whose pages are locked for a device, which then copies to and from them by itself, seven times as fast.

    lock(slot_file)          register the mapping with CUDA, piece by piece; '' or why that was refused
    slot_file.close()        gives it up again, before the pages are unmapped

To register 11 GB takes 0.5 s once they are mapped, and no process launches anything on a device meanwhile: hence in
pieces, with rests between them, and ahead of the first capture (docs/adr/0034). Every process that copies
registers for itself; one whose registration is refused copies through the driver's own buffers, as from any memory.

What is locked in pieces must be copied in pieces: CUDA refuses a copy that crosses from one to the next
(`SlotFile.cuts`). Thread safety: any thread that has its device set. Blocking: while it registers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch

from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.core.clock import SystemClock, seconds

PIECE_BYTES = 256 << 20
"""Registered by one call: 8 to 12 ms, 35 at the worst, in which no launch gets through."""
RESTS = 2.0
"""How much longer than a piece took the rest after it is."""
_PORTABLE = 1
"""cudaHostRegisterPortable (driver_types.h): for every device that the process comes to use."""


class Runtime(Protocol):
    """The part of the CUDA runtime that locks pages. Results are `cudaError_t`, 0 for success."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...


def lock(slot_file: SlotFile, runtime: Runtime | None = None, rest: Callable[[float], object] = lambda _: None) -> str:
    """Lock all pages of mapped slots for the devices of this process; '' or why they are not.

    `rest` is called with seconds after each piece, for what else waits for the device.
    """
    clock = SystemClock()
    cuda = torch.cuda.cudart() if runtime is None else runtime  # type: ignore[no-untyped-call]  # torch has none
    first = ctypes.addressof(ctypes.c_char.from_buffer(slot_file.mapping))
    done: list[int] = []

    def release() -> None:
        """A device that is lost answers with an error, and its process is about to end."""
        while done:
            cuda.cudaHostUnregister(done.pop())

    for start in range(0, slot_file.size_bytes, PIECE_BYTES):
        size_bytes = min(PIECE_BYTES, slot_file.size_bytes - start)
        started_ns = clock.monotonic_ns()
        error = int(cuda.cudaHostRegister(first + start, size_bytes, _PORTABLE))
        if error:
            release()
            return f"CUDA refused to lock {slot_file.size_bytes >> 20:,} MiB of slots (error {error})"
        done.append(first + start)
        rest(RESTS * seconds(clock.monotonic_ns() - started_ns))
    slot_file.locked(PIECE_BYTES, release)
    return ""
