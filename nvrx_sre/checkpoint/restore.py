"""State back into the tracked objects of a rank: from a hot slot, or from a durable checkpoint of any world size.

Two steps, so that ranks can agree between them:
    check()  reads and verifies this rank's part without touching the model; `CheckpointCorrupt` if it is bad
    load()   copies; cannot fail for reasons of data any more

Neither step runs a collective or an optimizer step: parameters are filled in place, optimizer state is made
with `empty_like` and filled. Nothing is unpickled before its file's checksum matched, and `.metadata` never is.
A checkpoint that is sound but does not fit the tracked objects is the user's matter (`UserError`), except in
the hot tier, where it only means that the slot belongs to another model or world.

Into another world size, rank r takes the small state of rank r modulo the old world; a rank that had no random
stream of its own derives one. Thread safety: main thread of the rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from nvrx_sre.checkpoint import encoding, manifest, rng
from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.checkpoint.capture import layout_item, parse_blob, slot_views
from nvrx_sre.checkpoint.dcp_metadata import ManifestReader, StoredTensor, from_json, stored_tensors
from nvrx_sre.checkpoint.fit import Mismatch, check_fit
from nvrx_sre.checkpoint.layout import Layout
from nvrx_sre.checkpoint.manifest import Manifest
from nvrx_sre.checkpoint.slots import SlotFile, SlotHeader
from nvrx_sre.core.errors import CheckpointCorrupt, UserError
from nvrx_sre.events.schema import RejectReason

Fill = Callable[[dict[str, torch.Tensor]], None]
"""Fills tensors (DTensor or plain) in place with what is stored under their keys."""


def check_hot(
    slot_file: SlotFile | None, candidate: Mapping[str, Any], tracked: Mapping[str, object] | None = None
) -> SlotHeader:
    """Header of the candidate's slot if it still holds that state, undamaged and fitting `tracked`.

    `candidate`: {"step", "slot", "layout_hash"} and maybe "generation". Reads the whole slot.
    Raises `CheckpointCorrupt`: unreadable, layout or digest.
    """
    step, slot = int(candidate["step"]), int(candidate["slot"])
    if slot_file is None:
        raise _hot_corrupt(step, RejectReason.UNREADABLE, "this rank has no hot slots")
    header = slot_file.header(slot)
    generation = candidate.get("generation", header.generation if header else None)
    if header is None or (header.step, header.generation) != (step, generation):
        raise _hot_corrupt(step, RejectReason.UNREADABLE, f"slot {slot} no longer holds it")
    if header.layout_hash != candidate["layout_hash"]:
        raise _hot_corrupt(step, RejectReason.LAYOUT, f"slot {slot} was sealed with another layout")
    try:
        layout, state = parse_blob(slot_file, slot, header)
    except ValueError as error:
        raise _hot_corrupt(step, RejectReason.DIGEST, f"slot {slot}: {error}") from error
    if tracked is not None:
        try:
            _check_hot_fit(tracked, layout, state)
        except Mismatch as error:
            raise _hot_corrupt(step, RejectReason.LAYOUT, str(error)) from error
    return header


def check_durable(
    directory: Path, rank: int, world_size: int, run: str, tracked: Mapping[str, object] | None = None
) -> Manifest:
    """The manifest, after this rank's share of the files matched their checksums (all of them over all ranks).

    Raises `CheckpointCorrupt`, or `UserError` if the checkpoint is of another model than `tracked`.
    """
    described = manifest.verify(directory, deep=False, run=run)
    manifest.verify_files(directory, described, rank, world_size)
    name = manifest.rank_file_name(rank % described.world_size)
    if name not in described.files:
        raise CheckpointCorrupt(
            f"checkpoint {directory.name} is not usable: it has no {name}", reason=RejectReason.MISSING_FILE.value
        )
    if tracked is not None:
        state = _rank_state(directory, described, rank)
        try:
            check_fit(tracked, _visible(described, rank, world_size), state)
        except Mismatch as error:
            raise UserError(
                f"checkpoint {directory.name} does not fit this script's state: {error}; "
                "use the model and track() names it was saved with, or another run directory"
            ) from error
    return described


@torch.no_grad()
def restore_durable(
    tracked: Mapping[str, object], directory: Path, rank: int, world_size: int, described: Manifest
) -> dict[str, Any]:
    """Load a checkpoint that `check_durable` passed on every rank; values that cannot change in place, by name.

    Reads only this rank's shards, also when `world_size` is not the one it was saved with.
    """
    stored = _visible(described, rank, world_size)
    state = _rank_state(directory, described, rank)
    own = _own_keys(described, rank, world_size)
    reader = ManifestReader(directory, described.dcp)
    metadata = from_json(described.dcp)

    def fill(targets: dict[str, torch.Tensor]) -> None:
        renamed: dict[str, Any] = {own.get(key, key): tensor for key, tensor in targets.items()}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(renamed, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = planner.create_global_plan([planner.create_local_plan()])[0]
        reader.read_data(planner.finish_plan(plan), planner).wait()

    derive_for = rank if rank >= described.world_size else None
    return _install(tracked, stored, state, fill, derive_for)


class HotCandidate:
    """A hot slot that this rank may restore from. `values`: plain values, after `load`."""

    def __init__(
        self, slot_file: SlotFile | None, slot: int, step: int, layout_hash: str, tracked: Mapping[str, object]
    ) -> None:
        self._slot_file = slot_file
        self._candidate: dict[str, Any] = {"slot": slot, "step": step, "layout_hash": layout_hash}
        self._tracked = tracked
        self._header: SlotHeader | None = None
        self.values: dict[str, Any] = {}

    def check(self) -> None:
        """Raise `CheckpointCorrupt` if the slot is not that state any more. Reads the whole slot."""
        self._header = check_hot(self._slot_file, self._candidate, self._tracked)

    def load(self) -> None:
        """Copy the slot into the tracked objects. Only after `check`."""
        assert self._slot_file is not None and self._header is not None
        with torch.no_grad():
            self.values = _load_hot(self._tracked, self._slot_file, self._candidate["slot"], self._header)


class DurableCandidate:
    """A durable checkpoint that this rank may restore from. `values`: plain values, after `load`."""

    def __init__(self, directory: Path, run: str, rank: int, world_size: int, tracked: Mapping[str, object]) -> None:
        self._directory = directory
        self._run = run
        self._rank = rank
        self._world_size = world_size
        self._tracked = tracked
        self._described: Manifest | None = None
        self.values: dict[str, Any] = {}

    def check(self) -> None:
        """Raise `CheckpointCorrupt` if this rank's share of the files is damaged."""
        self._described = check_durable(self._directory, self._rank, self._world_size, self._run, self._tracked)

    def load(self) -> None:
        """Read this rank's shards into the tracked objects. Only after `check` passed on every rank."""
        assert self._described is not None
        self.values = restore_durable(self._tracked, self._directory, self._rank, self._world_size, self._described)


def _check_hot_fit(tracked: Mapping[str, object], layout: Layout, state: dict[str, Any]) -> None:
    """Raise `Mismatch` unless the slot's layout is that of `tracked`, the sharding included."""
    check_fit(tracked, _stored_of(layout), state)
    for source in tracking.fixed_sources(tracked):
        mine, saved = layout_item(source), layout.by_fqn[source.fqn]
        if (mine.local_shape, mine.global_offset) != (saved.local_shape, saved.global_offset):
            raise Mismatch(f"{source.fqn} is sharded differently")


def _stored_of(layout: Layout) -> dict[str, StoredTensor]:
    return {item.fqn: StoredTensor(item.dtype, item.global_shape) for item in layout.items}


def _load_hot(tracked: Mapping[str, object], slot_file: SlotFile, slot: int, header: SlotHeader) -> dict[str, Any]:
    layout, state = parse_blob(slot_file, slot, header)
    views = slot_views(slot_file, slot, layout)

    def fill(targets: dict[str, torch.Tensor]) -> None:
        for key, tensor in targets.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.copy_(views[key])

    return _install(tracked, _stored_of(layout), state, fill, None)


def _install(
    tracked: Mapping[str, object],
    stored: Mapping[str, StoredTensor],
    state: dict[str, Any],
    fill: Fill,
    derive_rng_for: int | None,
) -> dict[str, Any]:
    """Build all targets, fill them at once, then hand small state and random streams to their owners."""
    targets = {source.fqn: source.tensor.detach() for source in tracking.fixed_sources(tracked)}
    names = tracking.parameter_names(tracked)
    moments = {
        name: _optimizer_targets(name, optimizer, names, stored) for name, optimizer in tracking.optimizers(tracked)
    }
    for made in moments.values():
        targets.update({key: tensor for states in made.values() for key, tensor in states.values()})
    big = {key: torch.empty(stored[key].shape, dtype=_dtype(stored[key])) for key in encoding.big_names(state)}
    targets.update(big)
    fill(targets)
    for name, optimizer in tracking.optimizers(tracked):
        _install_optimizer(optimizer, names, moments[name], state["optimizers"][name], big.__getitem__)
    for name, module in tracking.modules(tracked):
        for path, inner in tracking.extra_states(module):
            inner.set_extra_state(encoding.decode(state["extra"][name][path], big.__getitem__))
    for name, value in tracking.objects(tracked):
        value.load_state_dict(encoding.decode(state["objects"][name], big.__getitem__))
    fixed = _install_values(tracked, state["values"], big.__getitem__)
    if derive_rng_for is None:
        rng.set_state(state["rng"])
    else:
        rng.set_derived_state(state["rng"], derive_rng_for)
    return fixed


def _optimizer_targets(
    name: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    stored: Mapping[str, StoredTensor],
) -> dict[str, dict[str, tuple[str, torch.Tensor]]]:
    """Parameter name -> state key -> (checkpoint key, empty tensor of the right kind)."""
    parameters = {
        names[parameter]: (parameter, group) for group in optimizer.param_groups for parameter in group["params"]
    }
    made: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    prefix = f"{name}.state."
    for key, tensor in stored.items():
        if not key.startswith(prefix):
            continue
        parameter_name, _, state_key = key.removeprefix(prefix).rpartition(".")
        parameter, group = parameters[parameter_name]
        made.setdefault(parameter_name, {})[state_key] = (key, _empty_state(parameter, group, tensor))
    return made


def _empty_state(parameter: torch.Tensor, group: dict[str, Any], stored: StoredTensor) -> torch.Tensor:
    """What the optimizer would have made: sharded like the parameter, or plain where the shape is its own."""
    if stored.shape == tuple(parameter.shape) and parameter.dim() > 0:
        return torch.empty_like(parameter, dtype=_dtype(stored), memory_format=torch.preserve_format).detach()
    # torch keeps scalar state on the CPU unless the implementation reads it on the device.
    on_device = bool(stored.shape) or group.get("capturable") or group.get("fused")
    return torch.empty(stored.shape, dtype=_dtype(stored), device=parameter.device if on_device else "cpu")


def _install_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    made: Mapping[str, Mapping[str, tuple[str, torch.Tensor]]],
    state: dict[str, Any],
    big: Callable[[str], torch.Tensor],
) -> None:
    scalars = encoding.decode(state["scalars"], big)
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(encoding.decode(saved["options"], big))
        for parameter in group["params"]:
            name = names[parameter]
            own = {key: tensor for key, (_, tensor) in made.get(name, {}).items()} | scalars.get(name, {})
            optimizer.state.pop(parameter, None)
            if own:
                optimizer.state[parameter] = own


def _install_values(
    tracked: Mapping[str, object], state: dict[str, Any], big: Callable[[str], torch.Tensor]
) -> dict[str, Any]:
    """Dicts and lists are changed in place; the rest is returned, because it cannot be."""
    fixed = {}
    for name, value in tracking.values(tracked):
        saved = encoding.decode(state[name], big)
        if isinstance(value, dict):
            value.clear()
            value.update(saved)
        elif isinstance(value, list):
            value[:] = saved
        else:
            fixed[name] = saved
    return fixed


def _rank_state(directory: Path, described: Manifest, rank: int) -> dict[str, Any]:
    """Small state for `rank`, its file checked against the manifest first: another rank's share may hold it."""
    name = manifest.rank_file_name(rank % described.world_size)
    listed = Manifest(**{**vars(described), "files": {name: described.files[name]}})
    manifest.verify_files(directory, listed)
    content: dict[str, Any] = json.loads((directory / name).read_bytes())
    state: dict[str, Any] = content["state"]
    return state


def _own_keys(described: Manifest, rank: int, world_size: int) -> dict[str, str]:
    """Key -> this rank's own copy of it, where it has one and the world is the one it was saved in."""
    if world_size != described.world_size:
        return {}
    suffix = manifest.own_key("", rank)
    return {key.removesuffix(suffix): key for key in described.dcp["tensors"] if key.endswith(suffix)}


def _visible(described: Manifest, rank: int, world_size: int) -> dict[str, StoredTensor]:
    """Stored tensors as this rank sees them: under plain keys, its own copies instead of the common ones."""
    stored = stored_tensors(described.dcp)
    visible = {key: tensor for key, tensor in stored.items() if not manifest.is_own_key(key)}
    visible.update({key: stored[own] for key, own in _own_keys(described, rank, world_size).items()})
    return visible


def _dtype(stored: StoredTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    return dtype


def _hot_corrupt(step: int, reason: RejectReason, message: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"hot state of step {step} is not usable: {message}", reason=reason.value)
