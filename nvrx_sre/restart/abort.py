"""Process groups of a generation: recorded as they are made, aborted from the side thread, cleared afterwards.

Every group goes through `torch.distributed.distributed_c10d._new_process_group_helper`, which is wrapped
once; so meshes and `new_group` calls of the user's are known too. Order of an interrupt: backends' abort
(NCCL), then the sockets (gloo).

Clearing keeps what is expensive and safe. DTensor caches how operators propagate sharding, about 120 ms of CPU
in the first optimizer step of a small model; its entries name groups, and a name resolves to the new
generation's group as long as groups are made in the same order with the same ranks. So the caches are kept
until a group is made that the generation before did not make at this place, and dropped at that moment.
Meshes that survive in them let go of their old groups.

The private names are those of torch 2.11 to 2.13. Thread safety: `abort` may be called repeatedly from one
side thread while the main thread builds a group; all else belongs to the main thread.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _unregister_all_process_groups
from torch.distributed.device_mesh import DeviceMesh

from nvrx_sre.restart.ended_groups import EndedGroups, abort_all
from nvrx_sre.restart.sockets import GroupSockets

GroupKey = tuple[int, int, tuple[int, ...], str]
"""Size, own rank, ranks (empty for the world) and name of a group."""
ANY_RANK = -1
"""Own rank in the key of a group whose plans are good for each of its ranks."""


class ProcessGroups:
    """Groups of the running generation. One a process: it wraps torch's constructors for good."""

    def __init__(self, *, aborts_beside: bool | None = None) -> None:
        """`aborts_beside`: do not wait for aborts; None: where there is CUDA, hence NCCL."""
        self._aborts_beside = torch.cuda.is_available() if aborts_beside is None else aborts_beside
        self.sockets = GroupSockets()
        self._ended = EndedGroups()
        self._groups: list[dist.ProcessGroup] = []
        self._meshes: list[weakref.ref[DeviceMesh]] = []
        self._formed: list[GroupKey] = []
        self._known: list[GroupKey] = []
        self._wrap_group_constructor()
        self._wrap_mesh_constructor()

    def abort(self) -> None:
        """Free every rank that is blocked in a collective or in the formation of a group. Never raises.

        NCCL's abort is begun, and ends on its own (`EndedGroups.abort`).
        """
        if self._aborts_beside:
            self._ended.abort(list(self._groups))
        else:
            abort_all(list(self._groups))
        self.sockets.cut()

    def clear(self) -> None:
        """Forget the generation in torch as well. Main thread only, after the training function has left.

        Its groups are freed by `let_go`.
        """
        self._ended.add(self._groups)
        self._groups = []
        if c10d.GroupMember.WORLD is not None and self._aborts_beside:
            _forget_groups()
        elif c10d.GroupMember.WORLD is not None:
            with contextlib.suppress(RuntimeError):
                c10d._abort_process_group()
        # A failed init leaves the counter raised, and a fresh standby would then look for other store keys.
        c10d._world.group_count = 0
        self.sockets.clear()
        self._formed = []
        self._release_meshes()

    def let_go(self) -> str:
        """Free the groups of what was cleared, beside this thread; '' or why this process is unfit for another.

        After the collection that finds what else holds them: the last reference ends them, and that takes a while.
        """
        return self._ended.let_go()

    def _wrap_group_constructor(self) -> None:
        original = c10d._new_process_group_helper

        def recorded(
            group_size: int, group_rank: int, ranks: Any, backend: Any, store: Any, name: Any, **more: Any
        ) -> Any:
            self._check_order((group_size, group_rank, tuple(ranks or ()), str(name)))
            with self.sockets.window():
                result = original(group_size, group_rank, ranks, backend, store, name, **more)
            if isinstance(result, tuple) and isinstance(result[0], dist.ProcessGroup):
                self._groups.append(result[0])
            return result

        c10d._new_process_group_helper = recorded  # type: ignore[assignment]  # the way to see groups

    def _wrap_mesh_constructor(self) -> None:
        original = DeviceMesh._setup_world_group_and_device

        def recorded(mesh: DeviceMesh) -> Any:
            self._meshes.append(weakref.ref(mesh))
            return original(mesh)  # type: ignore[no-untyped-call]  # torch's own

        DeviceMesh._setup_world_group_and_device = recorded  # type: ignore[method-assign]  # the way to see meshes

    def _check_order(self, key: GroupKey) -> None:
        """Drop DTensor's caches if this generation makes other groups than the ones they were filled under."""
        place = len(self._formed)
        self._formed.append(key)
        size, rank, *named = key
        if place == 0 and self._known[:1] == [(size, ANY_RANK, *named)]:
            self._known = [key]
            self._take_seats(rank)
        if place < len(self._known) and self._known[place] == key:
            return
        if self._known[:place] != self._formed[:place] or place < len(self._known):
            _clear_sharding_caches()
        self._known = list(self._formed)

    def hold_for_any_rank(self) -> None:
        """The generation that was cleared last made one group, of the whole world, and its plans depend on no rank.

        Then the next may be another rank of the same world and keep them. Only plans of even shards are like that.
        """
        if len(self._known) == 1 and hasattr(DeviceMesh, "_compute_coordinate_on_dim"):
            [(size, _, ranks, name)] = self._known
            self._known = [(size, ANY_RANK, ranks, name)]

    def _take_seats(self, rank: int) -> None:
        """Meshes in kept plans become those of new tensors: they must know which part of those is this rank's."""
        for reference in self._meshes:
            mesh = reference()
            if mesh is not None:
                mesh._rank = rank
                mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()

    def _release_meshes(self) -> None:
        alive = []
        for reference in self._meshes:
            mesh = reference()
            if mesh is not None:
                getattr(mesh, "_pg_registry", {}).clear()
                alive.append(reference)
        self._meshes = alive


def _forget_groups() -> None:
    """What `c10d._abort_process_group` does after its aborts, which are under way and would be waited for there."""
    c10d._update_default_pg(None)
    world = c10d._world
    for registered in (
        *(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config),
        *(world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state),
    ):
        registered.clear()
    _unregister_all_process_groups()


def _clear_sharding_caches() -> None:
    """Drop cached plans that hold an earlier mesh."""
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


def reset_interpreter_state() -> None:
    """Undo what an interrupt in mid-step may leave behind: grad mode, autocast, garbage that pins the model."""
    torch.set_grad_enabled(True)
    torch.clear_autocast_cache()
    gc.collect()
