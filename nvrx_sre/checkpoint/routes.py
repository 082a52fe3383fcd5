"""Which part of which tensor lies where, when state passes through a ring of pieces (`ring`).

    pieces_of(layout)     the data area of a slot in pieces at fixed places, and the cuts of tensors in each
    routes_of(...)        views on both sides of each piece: its place in the ring, the tensors

Invariants: each element is in one cut; a piece begins where a block of sums does. Must not: synchronise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from nvrx_sre.checkpoint.layout import Layout
from nvrx_sre.checkpoint.slots import BLOCK_BYTES

PIECE_BYTES = 512 << 20
"""A multiple of `BLOCK_BYTES`. Large enough that what is queued for each costs next to nothing."""
WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A part of one tensor that lies in a piece: elements `start` to `end` of it, at a byte of the piece."""

    index: int
    start: int
    end: int
    offset_bytes: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Bytes `start` to `end` of the data area, and which parts of tensors they are."""

    start: int
    end: int
    cuts: tuple[Cut, ...]


def pieces_of(layout: Layout, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The data area of a layout in pieces; `Cut.index` counts its items. Pure."""
    cuts: dict[int, list[Cut]] = {}
    for index, item in enumerate(layout.items):
        itemsize: int = getattr(torch, item.dtype).itemsize
        start, end = item.offset_bytes, item.offset_bytes + item.size_bytes
        while start < end:
            piece = start // piece_bytes
            until = min(end, (piece + 1) * piece_bytes)
            first = (start - item.offset_bytes) // itemsize
            last = (until - item.offset_bytes) // itemsize
            offset_bytes = start - piece * piece_bytes
            cuts.setdefault(piece, []).append(Cut(index=index, start=first, end=last, offset_bytes=offset_bytes))
            start = until
    total = layout.data_bytes
    return [
        Piece(start=start, end=min(total, start + piece_bytes), cuts=tuple(cuts.get(start // piece_bytes, ())))
        for start in range(0, total, piece_bytes)
    ]


@dataclass(frozen=True, kw_only=True)
class Route:
    """How a piece gets into its place in the ring, or out of it: views on both sides, one list for each number type."""

    piece: Piece
    place: torch.Tensor
    in_ring: tuple[list[torch.Tensor], ...]
    in_tensors: tuple[list[torch.Tensor], ...]

    def gather(self) -> None:
        """Tensors into the ring."""
        for mine, theirs in zip(self.in_ring, self.in_tensors, strict=True):
            torch._foreach_copy_(mine, theirs)

    def scatter(self) -> None:
        """The ring into the tensors."""
        for mine, theirs in zip(self.in_ring, self.in_tensors, strict=True):
            torch._foreach_copy_(theirs, mine)

    def add_up(self, sums: torch.Tensor) -> None:
        """Sums of its blocks into their places among all."""
        first = self.piece.start // BLOCK_BYTES
        words = self.place.view(torch.int64)
        num_whole = words.numel() * WORD_BYTES // BLOCK_BYTES
        whole = words[: num_whole * (BLOCK_BYTES // WORD_BYTES)]
        if num_whole:
            blocks = whole.view(num_whole, BLOCK_BYTES // WORD_BYTES)
            torch.sum(blocks, dim=1, out=sums[first : first + num_whole])
        if whole.numel() < words.numel():
            torch.sum(words[whole.numel() :].view(1, -1), dim=1, out=sums[first + num_whole :][:1])


def routes_of(pieces: Sequence[Piece], places: Sequence[torch.Tensor], flat: Mapping[int, torch.Tensor]) -> list[Route]:
    """Routes of all pieces between their places and those tensors, flat, that are there."""
    routes = []
    for piece, place in zip(pieces, places, strict=True):
        by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for cut in piece.cuts:
            tensor = flat.get(cut.index)
            if tensor is None:
                continue
            part = tensor[cut.start : cut.end]
            size_bytes = part.numel() * part.element_size()
            mine, theirs = by_type.setdefault(part.dtype, ([], []))
            mine.append(place[cut.offset_bytes : cut.offset_bytes + size_bytes].view(part.dtype))
            theirs.append(part)
        lists = by_type.values()
        in_ring, in_tensors = tuple(mine for mine, _ in lists), tuple(theirs for _, theirs in lists)
        routes.append(Route(piece=piece, place=place, in_ring=in_ring, in_tensors=in_tensors))
    return routes


def places_of(memory: torch.Tensor, pieces: Sequence[Piece], piece_bytes: int) -> list[torch.Tensor]:
    """Where each piece lies in the ring while it is there."""
    depth = max(1, -(-memory.numel() // piece_bytes))
    return [memory[number % depth * piece_bytes :][: piece.end - piece.start] for number, piece in enumerate(pieces)]


def num_blocks(num_bytes: int) -> int:
    """Blocks of so many bytes, the last of which may be shorter."""
    return -(-num_bytes // BLOCK_BYTES)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part. Call under no_grad: the local tensor itself then, not a view of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
