"""Functional collectives that nobody waited for: what an interrupt cuts off between the call and the wait.

Torch keeps the work of a functional collective (DTensor's are) in a registry until somebody waits for its result, and
with the work the group's connections and a thread. An interrupt in between makes the result unreachable, and torch has
no way to drop the work without it: four descriptors, those of its connections, and a thread for the life of the
process. So the tensors that are alive are kept while the interrupted frames still hold the result, and all
are waited for when the group is aborted, so that no wait lasts.

Main thread only: the registry is one a thread. The private name is that of torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import gc

import torch
from torch._C._distributed_c10d import _get_work_registry_size as num_unwaited


class UnwaitedCollectives:
    """Results that a generation left behind."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._num_lost = 0
        """Works whose results were gone before they could be kept."""

    def keep(self) -> None:
        """While the traceback of what ended the generation is alive. Costs a look unless there are such results."""
        if num_unwaited() > self._num_lost:
            self._tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor]

    def end(self) -> None:
        """The groups are aborted: wait for what was kept, whatever comes of it."""
        with torch.no_grad():
            for tensor in self._tensors:
                # That the collective failed is known, and most tensors are no result at all.
                with contextlib.suppress(RuntimeError):
                    torch.ops._c10d_functional.wait_tensor(tensor)
        self._tensors = []
        self._num_lost = num_unwaited()
