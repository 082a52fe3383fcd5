"""Which tensors must be equal on several ranks, so that a restore can compare them before it loads them.

Two kinds say so themselves: a DTensor that is replicated over a dimension of its mesh (HSDP), whose local part is
that of every rank with the same offset; and a parameter under `DistributedDataParallel`, unless a communication
hook replaces its gradient average (local SGD lets replicas drift). Everything else may differ by right: buffers
that each rank updates, parameters that a script shards by hand.

Pure but for reading placements. Must not: run a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.checkpoint.capture import layout_item
from nvrx_sre.checkpoint.tracked import Source


def replica_names(tracked: Mapping[str, object], sources: Iterable[Source]) -> dict[str, str]:
    """Name that a replica has on all ranks which hold it -> fqn of the tensor here. `sources`: the fixed ones."""
    averaged = set(_averaged(tracked))
    found = {}
    for source in sources:
        if _is_replicated(source.tensor):
            found[f"{source.fqn} at {list(layout_item(source).global_offset)}"] = source.fqn
        elif id(source.tensor) in averaged:
            found[source.fqn] = source.fqn
    return found


def differing(digests: Iterable[Mapping[str, str]]) -> str:
    """The first replica of which two ranks have different bytes, '' if there is none. `digests[rank][name]`."""
    first: dict[str, tuple[int, str]] = {}
    for rank, mine in enumerate(digests):
        for name, digest in mine.items():
            other_rank, other = first.setdefault(name, (rank, digest))
            if other != digest:
                return f"{name} differs between rank {other_rank} and rank {rank}, which hold copies of it"
    return ""


def _is_replicated(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    sizes = tensor.device_mesh.shape
    return any(place.is_replicate() and size > 1 for place, size in zip(tensor.placements, sizes, strict=True))


def _averaged(tracked: Mapping[str, object]) -> Iterable[int]:
    """Identities of the parameters whose gradients `DistributedDataParallel` averages itself."""
    for _, module in tracking.modules(tracked):
        for inner in module.modules():
            if isinstance(inner, DistributedDataParallel) and not inner._comm_hooks:
                ignored = inner.parameters_to_ignore
                yield from (id(value) for name, value in inner.module.named_parameters() if name not in ignored)
