"""Functional collectives that nobody waited for: what an interrupt cuts off between the call and the wait.

Torch keeps the work of a functional collective (DTensor's are) in a registry until somebody waits for its result, and
with the work the group's connections and a thread, for the life of the process. It offers no way to drop one. But the
work keeps its result, which the collector finds among all tensors when nobody else has it any more, and waiting for
a tensor that is no such result does nothing.

Main thread only: the registry is one a thread. The private name is that of torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import gc

import torch
from torch._C._distributed_c10d import _get_work_registry_size as num_unwaited


def wait_for_the_unwaited() -> None:
    """Wait for all such results. Costs a look where there is none, else a look at every object of the process.

    Blocks like the collectives themselves, so their groups are aborted before.
    """
    if not num_unwaited():
        return
    with torch.no_grad():
        for item in gc.get_objects():
            if type(item) is torch.Tensor:
                # That the collective failed is known.
                with contextlib.suppress(RuntimeError):
                    torch.ops._c10d_functional.wait_tensor(item)
