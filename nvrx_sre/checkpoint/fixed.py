"""The tensors that objects hold for a whole generation, and whether they still hold the same ones.

    sources()    parameters, buffers and tracked tensors as the modules hold them now, the same list while they are
    names        parameter -> its name in optimizer state, as of then

Listing is dear and reshards FSDP modules, so it is done once, and what a module holds is compared by identity: a
buffer that `forward` replaces (`self.mean = 0.9 * self.mean + ...`) is another tensor at each step, and a parameter
may be exchanged as well. FSDP puts gathered parameters in the place of shards: whoever holds a DTensor is looked at for
the number of parameters alone.

Thread safety: main thread. Must not: copy data, run a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.checkpoint.layout import ItemRole
from nvrx_sre.checkpoint.tracked import Source

_Held = list[tuple[dict[str, Any], tuple[Any, ...]]]
"""Dicts of modules with the values they had."""


class Fixed:
    """Of the tracked objects of one generation."""

    def __init__(self, tracked: Mapping[str, object]) -> None:
        self._tracked = tracked
        self._sources: list[Source] | None = None
        self._parameters: _Held = []
        self._sharded: list[tuple[dict[str, Any], int]] = []
        """Dicts with DTensors among their values, and how many values they had."""
        self._buffers: _Held = []
        self.names: dict[torch.Tensor, str] = {}

    def sources(self) -> list[Source]:
        """One a tensor."""
        sources = self._sources
        if sources is None or not self._are_parameters_held():
            sources = self._list()
        elif not _are_held(self._buffers):
            sources = self._with_new_buffers(sources)
        self._sources = sources
        return sources

    def _list(self) -> list[Source]:
        sources = tracking.fixed_sources(self._tracked)
        self.names = tracking.parameter_names(self._tracked)
        held = [inner._parameters for inner in self._inner() if inner._parameters]
        self._sharded = [(now, len(now)) for now in held if _has_sharded(now)]
        self._parameters = [(now, tuple(now.values())) for now in held if not _has_sharded(now)]
        self._remember_buffers()
        return sources

    def _with_new_buffers(self, sources: list[Source]) -> list[Source]:
        """The same list with other buffers in it; all of it anew where their names are others."""
        fresh = {source.fqn: source for source in tracking.buffer_sources(self._tracked)}
        known = {source.fqn: source.aliases for source in sources if source.role is ItemRole.BUFFER}
        if known != {fqn: source.aliases for fqn, source in fresh.items()}:
            return self._list()
        self._remember_buffers()
        return [fresh.get(source.fqn, source) for source in sources]

    def _remember_buffers(self) -> None:
        self._buffers = [(inner._buffers, tuple(inner._buffers.values())) for inner in self._inner() if inner._buffers]

    def _inner(self) -> Iterator[nn.Module]:
        return (inner for _, module in tracking.modules(self._tracked) for inner in module.modules())

    def _are_parameters_held(self) -> bool:
        return all(len(now) == number for now, number in self._sharded) and _are_held(self._parameters)


def _are_held(held: _Held) -> bool:
    """True if every dict has the values that it had."""
    return all(len(now) == len(before) and all(map(is_, now.values(), before)) for now, before in held)


def _has_sharded(now: Mapping[str, Any]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in now.values())
