"""Is this process fit for another generation? Runs after an abort, in the main thread.

A failing probe means *process unfit* (replaced at layer `worker`), not *device unfit*.
"""

from __future__ import annotations

import torch


def process_fitness() -> str:
    """'' if the process can go on, else why not. Synchronises the device where CUDA is in use."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch
        return ""
    try:
        torch.cuda.synchronize()
        probe = torch.ones(1024, device="cuda").sum().item()
    except RuntimeError as error:
        return f"device probe failed: {str(error).splitlines()[0]}"
    return "" if probe == 1024.0 else f"device probe computed {probe} instead of 1024"
