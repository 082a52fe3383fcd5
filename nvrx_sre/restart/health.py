"""Is this process fit for another generation? Runs after an abort, in the main thread.

A failing probe means *process unfit* (replaced at layer `worker`), not *device unfit*. It is what finds a context that
is lost: after a sticky error of the device every call of the process fails, whether its error was seen or not.
"""

from __future__ import annotations

import torch

RESERVED_MAX_RATIO = 1.1


class DeviceMemory:
    """Whether torch has come to reserve more of the device from generation to generation.

    Streams come from a pool in turn, so each generation has others, and memory that was freed on one is not given to
    another: what torch keeps grows although nothing is in use. It is measured by a generation that began with an empty
    cache. One that ended before it had its model is that measure once: the cache is emptied after the next.
    """

    def __init__(self) -> None:
        self._first_bytes: int | None = None

    def has_grown(self) -> bool:
        """True if so much more is reserved that the cache is to be emptied. Call after each teardown."""
        if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch
            return False
        return self.is_above(torch.cuda.memory_reserved())

    def is_above(self, reserved_bytes: int) -> bool:
        """`has_grown` of so many reserved bytes."""
        if self._first_bytes is None:
            self._first_bytes = reserved_bytes
        is_above = reserved_bytes > RESERVED_MAX_RATIO * self._first_bytes
        if is_above:
            self._first_bytes = None
        return is_above


def process_fitness(*, empties_cache: bool = False) -> str:
    """'' if the process can go on, else why not. Synchronises the device where CUDA is in use.

    `empties_cache`: give freed device memory back first. After an out-of-memory it lies in pieces of the sizes that the
    failed generation asked for, and some of it grows (`DeviceMemory`); else keeping it saves the next generation its
    allocations.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch
        return ""
    try:
        torch.cuda.synchronize()
        if empties_cache:
            torch.cuda.empty_cache()
        probe = torch.ones(1024, device="cuda").sum().item()
    except RuntimeError as error:
        return f"device probe failed: {str(error).splitlines()[0]}"
    return "" if probe == 1024.0 else f"device probe computed {probe} instead of 1024"
