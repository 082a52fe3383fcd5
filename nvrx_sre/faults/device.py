"""Faults of an accelerator, made on the device itself. What they break is this process's context, never the card.

- `out_of_memory` asks the allocator for twice the memory of the device: refused, as any request beyond what is left.
- `illegal_access` stores through an array that claims to be far longer than its memory, at an address that is mapped by
  nobody.
- `failed_assertion` has a kernel of torch look up an index that is out of range, which the kernel's own check finds.

The last two return at once: a kernel fails after its launch, and the error comes up at whatever call of the process
waits for the device next, as it does in the wild.

Must not: be loaded in a process without a plan; synchronise.
"""

from __future__ import annotations

from typing import Any

from nvrx_sre.core.errors import InternalError

CLAIMED_BYTES = 1 << 45
"""Length that an array of one byte claims: 32 TiB, beyond every mapping of a process (its devices' and its own)."""


class _Claim:
    """An array of one byte that claims to be of `CLAIMED_BYTES` (CUDA array interface, version 3)."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (CLAIMED_BYTES,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def out_of_memory() -> None:
    """Raises `torch.OutOfMemoryError`."""
    torch = _torch()
    _, total_bytes = torch.cuda.mem_get_info()
    torch.empty(2 * total_bytes, dtype=torch.uint8, device="cuda")


def illegal_access() -> None:
    """The device's next answer is `cudaErrorIllegalAddress`."""
    torch = _torch()
    memory = torch.zeros(1, dtype=torch.uint8, device="cuda")
    torch.as_tensor(_Claim(memory.data_ptr()), device="cuda")[-1].fill_(1)


def failed_assertion() -> None:
    """The device's next answer is `cudaErrorAssert`."""
    torch = _torch()
    table = torch.zeros(4, device="cuda")
    table[torch.full((1,), 1000, dtype=torch.int64, device="cuda")]


def _torch() -> Any:
    """torch, on a machine with a device. Raises `InternalError` elsewhere."""
    import torch

    if not torch.cuda.is_available():
        raise InternalError("a planned fault of a device, in a process that has none")
    return torch
