"""Process groups of a generation: recorded as they are made, aborted from the side thread, cleared afterwards.

Every group goes through `torch.distributed.distributed_c10d._new_process_group_helper`, which is wrapped
once; so meshes and `new_group` calls of the user's are known too. Order of an interrupt: backends' abort
(NCCL), then the sockets (gloo). After the main thread is out, `clear` empties torch's world and the caches
that would pin the old mesh. The private names are those of torch 2.11 to 2.13 and guarded by `hasattr`.

Thread safety: `abort` may be called repeatedly from one side thread while the main thread builds a group.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nvrx_sre.restart.sockets import GroupSockets


class ProcessGroups:
    """Groups of the running generation."""

    def __init__(self) -> None:
        self.sockets = GroupSockets()
        self._groups: list[Any] = []
        self._install()

    def _install(self) -> None:
        original = c10d._new_process_group_helper

        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self.sockets.window():
                result = original(*args, **kwargs)
            if isinstance(result, tuple) and isinstance(result[0], dist.ProcessGroup):
                self._groups.append(result[0])
            return result

        c10d._new_process_group_helper = recorded

    def abort(self) -> None:
        """Free every rank that is blocked in a collective or in the formation of a group. Never raises."""
        for group in list(self._groups):
            # A group that is half built or already gone has nothing to abort; the sockets below still count.
            with contextlib.suppress(RuntimeError):
                group.abort()
        self.sockets.cut()

    def clear(self) -> None:
        """Forget the generation in torch as well. Main thread only, after the training function has left."""
        self._groups.clear()
        if c10d.GroupMember.WORLD is not None:
            with contextlib.suppress(RuntimeError):
                c10d._abort_process_group()
        # A failed init leaves the counter raised, and a fresh standby would then look for other store keys.
        c10d._world.group_count = 0
        self.sockets.clear()
        _clear_mesh_caches()


def _clear_mesh_caches() -> None:
    """Drop cached plans that hold the old generation's mesh."""
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    for owner, name in (
        (debug, "_clear_sharding_prop_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
    ):
        clear = getattr(owner, name, None)
        if clear is not None:
            clear()
    for cached in (
        getattr(_redistribute, "_gen_transform_infos", None),
        getattr(getattr(_collective_utils, "MeshTopoInfo", None), "build_from_mesh", None),
    ):
        cache_clear = getattr(cached, "cache_clear", None)
        if cache_clear is not None:
            cache_clear()


def reset_interpreter_state(*, grad_enabled: bool = True) -> None:
    """Undo what an interrupt in mid-step may leave behind: grad mode, autocast, garbage that pins the model."""
    torch.set_grad_enabled(grad_enabled)
    torch.clear_autocast_cache()
    gc.collect()
