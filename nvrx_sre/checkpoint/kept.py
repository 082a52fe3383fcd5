"""A committed state that no slot takes: what is cheap to keep of it, and proof that the rest is still there.

    keep()          at the boundary: random states, positions of loaders, small buffers; counters of all other tensors
    has_changed()   at the end: something that was not kept is another

A capture can be too dear for each step, and which step was the last one shows only at the end. By then the script may
have fetched a batch more or looked at its model; what that changes is kept here, and `Capturer.refresh` takes it in the
place of what is there now. Parameters stay where they are. A change of their values is seen by their version
counters, so one through `.data` is not, nor one by `torch._foreach_` calls on DTensors, which do not count;
where values are known as well, one that was taken back is none. Other objects with a state and plain values are neither
kept nor looked at: to ask them at each boundary could cost any time.

Must not: copy parameters, run a collective. Thread safety: main thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from nvrx_sre.checkpoint import rng
from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.checkpoint.layout import ItemRole
from nvrx_sre.checkpoint.routes import local_of
from nvrx_sre.checkpoint.tracked import Source

COPIED_BYTES_MAX = 64 * 1024
"""Buffers up to this are copied: running statistics are below it; what is larger (masks, tables) hardly changes."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]


class Kept:
    """Of one generation's tracked objects; made once, kept again and again. `fixed`: their `tracking.fixed_sources`."""

    def __init__(self, tracked: Mapping[str, object], fixed: Sequence[Source]) -> None:
        self.fixed = fixed
        self._loaders = {name: item for name, item in tracking.objects(tracked) if _is_loader(item)}
        self._small = [source for source in fixed if _is_small(source)]
        self._copies = [
            torch.empty_like(source.tensor, requires_grad=source.tensor.requires_grad) for source in self._small
        ]
        self._alike = _alike(self._copies, [source.tensor for source in self._small])
        copied = {id(source.tensor) for source in self._small}
        self._watched = watched(source.tensor for source in fixed if id(source.tensor) not in copied)
        self._versions: list[int] = []
        self._values: bytes = b""
        self.random: dict[str, Any] | None = None
        self.positions: dict[str, Any] = {}
        """State of each tracked loader by name."""

    @torch.no_grad()
    def keep(self) -> None:
        """The state as it is now."""
        self.random = rng.get_state()
        self.positions = {name: loader.state_dict() for name, loader in self._loaders.items()}
        self._versions = [tensor._version for tensor in self._watched]
        self._values = b""
        for copies, tensors in self._alike:
            torch._foreach_copy_(copies, tensors)

    def know_values(self) -> None:
        """Values may be exchanged and put back from here on. Reads all of them, once, unless they have changed."""
        if not self._values and not self.has_changed():
            self._values = self._digests()

    def has_changed(self) -> bool:
        """True if a tensor that was not copied is known to be another."""
        if self._versions == [tensor._version for tensor in self._watched]:
            return False
        return not self._values or self._values != self._digests()

    def put_in(self) -> list[Source]:
        """`fixed` with the copies in the places of what they were made of."""
        copies = {id(source.tensor): copy for source, copy in zip(self._small, self._copies, strict=True)}
        return [
            source._replace(tensor=copies[id(source.tensor)]) if id(source.tensor) in copies else source
            for source in self.fixed
        ]

    @torch.no_grad()
    def _digests(self) -> bytes:
        """One of each tensor; those of a device are made there, and waited for together."""
        own = [tensor for tensor in self._watched if not isinstance(tensor, DTensor)]
        here = [_words(tensor).numpy().data for tensor in own if tensor.device.type == "cpu"]
        sums = [_words(tensor).sum(dtype=torch.int64) for tensor in own if tensor.device.type != "cpu"]
        there = torch.stack(sums).cpu().numpy().tobytes() if sums else b""
        return b"".join(map(xxhash.xxh3_128_digest, here)) + there


@torch.no_grad()
def watched(wholes: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors whose counters tell of a change to `wholes`: a DTensor's own and that of this rank's part."""
    listed = list(wholes)
    return [*listed, *(local_of(tensor) for tensor in listed if isinstance(tensor, DTensor))]


def _is_loader(item: object) -> bool:
    return isinstance(item, DataLoader)


def _is_small(source: Source) -> bool:
    tensor = source.tensor
    if source.role is ItemRole.PARAMETER or isinstance(tensor, DTensor):
        return False
    return tensor.numel() * tensor.element_size() <= COPIED_BYTES_MAX


def _alike(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[_Pairs]:
    """Copies and their tensors by type and device: only such are copied in one go."""
    found: dict[tuple[torch.dtype, torch.device], _Pairs] = {}
    for copy, tensor in zip(copies, tensors, strict=True):
        pair = found.setdefault((tensor.dtype, tensor.device), ([], []))
        pair[0].append(copy)
        pair[1].append(tensor)
    return list(found.values())


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of the elements as whole numbers, `[N]`."""
    flat = tensor.detach().contiguous().reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(_WORDS[flat.real.element_size()])
