"""State on its way between a device and a slot, piece by piece, without the device's main work standing still for it.

    slot's data area | piece 0 | piece 1 | ...            pieces of `PIECE_BYTES` at fixed places
    ring             memory of the device for all pieces, which makes a *snapshot*, or for a few that take turns

    capture   `Drain`   gather lane: tensors -> ring, its sums     drain lane: ring -> slot
    restore   `fill`    fetch lane: slot -> ring                   the usual stream: its sums, ring -> tensors

A lane is a stream of its own; on the CPU, where tests run this, everything happens at once. The host only queues all
of it. Of the bytes the device makes one sum a block while it has them (`slots.block_sums`): the digest of what is
restored costs no reading in the host's memory, which would take longer than the restore.

Invariants: what is gathered is what was in the tensors when the boundary was reached, if they are changed only after
`Drain.gathered`. Thread safety: one thread at a time. Must not: run a collective.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from nvrx_sre.checkpoint.layout import Layout
from nvrx_sre.checkpoint.slots import BLOCK_BYTES, SlotFile, SlotHeader

PIECE_BYTES = 256 << 20
"""A multiple of `BLOCK_BYTES`. Large enough that what is queued for each costs nothing."""
PIECES_MIN = 4
"""Without a snapshot: some are filled while the others are emptied."""
ROOM_BYTES = 2 << 30
"""What a snapshot leaves free on the device for whatever else a step may come to need."""
WORD_BYTES = 8


class Mark:
    """A place in a lane; done as soon as the device has got there."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has none
            self._event.record()

    def wait(self) -> None:
        """Block this thread until the device is there."""
        if self._event is not None:
            self._event.synchronize()

    def hold_back(self) -> None:
        """Have the current stream wait for it; the host does not."""
        if self._event is not None:
            self._event.wait()


class Lane:
    """A queue of a device's work beside the usual one."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has none

    def open(self) -> contextlib.AbstractContextManager[object]:
        """What is done inside is queued here."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


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


def snapshot_fits(data_bytes: int, free_bytes: int, num_out_of_memory: int) -> bool:
    """True if a device with so much free memory has room for a snapshot. Pure.

    Not in a process that has run out of memory once: it would again.
    """
    return num_out_of_memory == 0 and data_bytes + ROOM_BYTES <= free_bytes


class Ring:
    """Memory of a device through which state passes. One a process: the choice holds for its life, until it fails."""

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self.device = device
        self.piece_bytes = piece_bytes
        self.is_snapshot: bool | None = None
        """All pieces fit at once; None until that is known."""
        self._memory: torch.Tensor | None = None
        self.gather, self.drain = Lane(device), Lane(device)

    def choose(self, data_bytes: int) -> bool:
        """Snapshot or not, by the memory that is free. To be asked when torch holds what a step takes."""
        if self.is_snapshot is None:
            self.is_snapshot = self.device.type == "cpu" or snapshot_fits(data_bytes, *_memory_of(self.device))
        return self.is_snapshot

    def for_capture(self, data_bytes: int) -> torch.Tensor:
        """Memory for all pieces or for a few, as was chosen; the same at every call until `release`.

        Raises `torch.OutOfMemoryError` if there is not even enough for a few.
        """
        if self.choose(data_bytes):
            try:
                return self._get(data_bytes)
            except torch.OutOfMemoryError:
                self.is_snapshot = False
        return self.for_few(data_bytes)

    def for_few(self, data_bytes: int) -> torch.Tensor:
        """Memory for a few pieces. Raises as `for_capture`."""
        return self._get(min(data_bytes, PIECES_MIN * self.piece_bytes))

    def _get(self, size_bytes: int) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < size_bytes:
            self._memory = None
            self._memory = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        return self._memory[:size_bytes]

    def release(self) -> None:
        """The generation is over; torch keeps the memory for the next one, which asks for as much."""
        self._memory = None


def _memory_of(device: torch.device) -> tuple[int, int]:
    """(free bytes, how often this process ran out of them)."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes, torch.cuda.memory_stats(device)["num_ooms"]


@dataclass(frozen=True, kw_only=True)
class _Route:
    """How a piece gets into its place in the ring, or out of it: views on both sides, one list for each number type."""

    piece: Piece
    place: torch.Tensor
    in_ring: tuple[list[torch.Tensor], ...]
    in_tensors: tuple[list[torch.Tensor], ...]

    def gather(self) -> None:
        for mine, theirs in zip(self.in_ring, self.in_tensors, strict=True):
            torch._foreach_copy_(mine, theirs)

    def scatter(self) -> None:
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


def _routes(pieces: Sequence[Piece], places: Sequence[torch.Tensor], flat: Mapping[int, torch.Tensor]) -> list[_Route]:
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
        routes.append(_Route(piece=piece, place=place, in_ring=in_ring, in_tensors=in_tensors))
    return routes


def _places(memory: torch.Tensor, pieces: Sequence[Piece], piece_bytes: int) -> list[torch.Tensor]:
    """Where each piece lies in the ring while it is there."""
    depth = max(1, -(-memory.numel() // piece_bytes))
    return [memory[number % depth * piece_bytes :][: piece.end - piece.start] for number, piece in enumerate(pieces)]


class Drain:
    """One capture, queued: from the tensors through the ring to the slot, and the sums of its blocks to the host."""

    def __init__(self, ring: Ring, slot_file: SlotFile, slot: int, routes: Sequence[_Route], num_bytes: int) -> None:
        """Does not block where the slot's pages are locked."""
        area = torch.frombuffer(slot_file.data(slot), dtype=torch.uint8)
        self._sums = torch.empty(num_blocks(num_bytes), dtype=torch.int64, device=ring.device)
        boundary = Mark(ring.device)
        self.gathered = boundary
        emptied: dict[int, Mark] = {}
        with ring.gather.open():
            boundary.hold_back()
        for route in routes:
            piece, place = route.piece, route.place
            with ring.gather.open():
                if place.data_ptr() in emptied:
                    emptied[place.data_ptr()].hold_back()
                route.gather()
                route.add_up(self._sums)
                self.gathered = Mark(ring.device)
            with ring.drain.open():
                self.gathered.hold_back()
                for first, last in slot_file.cuts(slot, piece.start, piece.end):
                    area[first:last].copy_(place[first - piece.start : last - piece.start], non_blocking=True)
                emptied[place.data_ptr()] = Mark(ring.device)
        self._on_host = torch.empty(self._sums.shape, dtype=torch.int64, pin_memory=ring.device.type == "cuda")
        with ring.drain.open():
            self._on_host.copy_(self._sums, non_blocking=True)
            self._drained = Mark(ring.device)

    def wait(self) -> bytes:
        """Block until the slot holds everything; the sums of its blocks."""
        self._drained.wait()
        return self._on_host.numpy().tobytes()


class Gatherer:
    """Captures of one layout through a ring: remembers the routes, since making them takes longer than using them."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._layout: Layout | None = None
        self._tensors: list[torch.Tensor] = []
        self._routes: list[_Route] = []
        self._staged: dict[int, torch.Tensor] = {}
        self._memory_at = 0

    def begin(
        self, slot_file: SlotFile, slot: int, layout: Layout, tensors: Sequence[torch.Tensor], early: set[int]
    ) -> Drain:
        """Queue a capture. `tensors`: local ones by the layout's items; `early`: those that may change at any time.

        Call under no_grad. Blocks where they come from the host, and where the slot's pages are not locked.
        """
        if layout is not self._layout:
            self._staged, self._tensors = {}, []
        taken = [
            self._stage(index, tensor) if index in early or not self._is_plain(tensor) else tensor
            for index, tensor in enumerate(tensors)
        ]
        memory = self.ring.for_capture(layout.data_bytes)
        is_known = len(taken) == len(self._tensors) and all(map(operator.is_, taken, self._tensors))
        if not is_known or memory.data_ptr() != self._memory_at:
            pieces = pieces_of(layout, self.ring.piece_bytes)
            flat = {index: tensor.view(-1) for index, tensor in enumerate(taken)}
            self._routes = _routes(pieces, _places(memory, pieces, self.ring.piece_bytes), flat)
            self._layout, self._tensors, self._memory_at = layout, taken, memory.data_ptr()
        return Drain(self.ring, slot_file, slot, self._routes, layout.data_bytes)

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.ring.device and tensor.is_contiguous()

    def _stage(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """A copy as of now, in the order of the usual stream."""
        staged = self._staged.get(index)
        if staged is None or staged.shape != tensor.shape or staged.dtype != tensor.dtype:
            staged = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.ring.device)
            self._staged[index] = staged
        return staged.copy_(tensor)


@torch.no_grad()
def fill(
    ring: Ring, slot_file: SlotFile, slot: int, header: SlotHeader, layout: Layout, targets: Mapping[str, torch.Tensor]
) -> tuple[bytes, set[str]]:
    """(digest of a summed slot, keys of `targets` that were filled): those on the ring's device. Blocks until done."""
    flat: dict[int, torch.Tensor] = {}
    for index, item in enumerate(layout.items):
        target = targets.get(item.fqn)
        local = None if target is None else local_of(target).detach()
        if local is not None and _can_fill(local, ring.device, item.size_bytes):
            flat[index] = local.view(-1)
    area = torch.frombuffer(slot_file.data(slot), dtype=torch.uint8)
    pieces = pieces_of(layout, ring.piece_bytes)
    memory = ring.for_few(header.data_bytes)
    sums = torch.empty(num_blocks(layout.data_bytes), dtype=torch.int64, device=ring.device)
    used: dict[int, Mark] = {}
    ready = Mark(ring.device)
    with ring.drain.open():
        ready.hold_back()
    for route in _routes(pieces, _places(memory, pieces, ring.piece_bytes), flat):
        piece, place = route.piece, route.place
        with ring.drain.open():
            if place.data_ptr() in used:
                used[place.data_ptr()].hold_back()
            for first, last in slot_file.cuts(slot, piece.start, piece.end):
                place[first - piece.start : last - piece.start].copy_(area[first:last], non_blocking=True)
            fetched = Mark(ring.device)
        fetched.hold_back()
        route.add_up(sums)
        route.scatter()
        used[place.data_ptr()] = Mark(ring.device)
    found = sums.cpu().numpy().tobytes()
    return slot_file.digest_of_sums(slot, found, header.blob_bytes), {layout.items[index].fqn for index in flat}


def _can_fill(local: torch.Tensor, device: torch.device, size_bytes: int) -> bool:
    is_same = local.numel() * local.element_size() == size_bytes and size_bytes > 0
    return local.device == device and local.is_contiguous() and is_same


def num_blocks(num_bytes: int) -> int:
    """Blocks of so many bytes, the last of which may be shorter."""
    return -(-num_bytes // BLOCK_BYTES)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part. Call under no_grad: the local tensor itself then, not a view of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
