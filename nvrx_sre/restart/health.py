"""Is this process fit for another generation? Runs after an abort, in the main thread.

A failing probe means *process unfit* (replaced at layer `worker`), not *device unfit*. It is what finds a context that
is lost: after a sticky error of the device every call of the process fails, whether its error was seen or not.
"""

from __future__ import annotations

import torch


def process_fitness(*, empties_cache: bool = False) -> str:
    """'' if the process can go on, else why not. Synchronises the device where CUDA is in use.

    `empties_cache`: give freed device memory back first. After an out-of-memory it lies in pieces of the sizes that the
    failed generation asked for; else keeping it saves the next generation its allocations.
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
