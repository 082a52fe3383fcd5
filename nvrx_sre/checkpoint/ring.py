"""State on its way between a device and a slot, piece by piece, without the device's main work standing still for it.

    slot's data area | piece 0 | piece 1 | ...            pieces of `PIECE_BYTES` at fixed places
    ring             memory of the device for all pieces, which makes a *snapshot*, or for a few that take turns

    capture   `Drain`   gather lane: tensors -> ring, its sums     drain lane: ring -> slot
    restore   `fill`    drain lane: slot -> ring                   the usual stream: its sums, ring -> tensors
              `fetch_ahead` does the first half before there are tensors

A lane is a stream of its own; on the CPU, where tests run this, everything happens at once. The host only queues all
of it. Of the bytes the device makes one sum a block while it has them (`slots.block_sums`): the digest of what is
restored costs no reading in the host's memory, which would take longer than the restore.

Invariants: what is gathered is what was in the tensors when the boundary was reached, if they are changed only after
`Drain.gathered`. Thread safety: one thread at a time. Must not: run a collective.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from nvrx_sre.checkpoint.layout import Layout
from nvrx_sre.checkpoint.routes import PIECE_BYTES, Route, local_of, num_blocks, pieces_of, places_of, routes_of
from nvrx_sre.checkpoint.slots import SlotFile, SlotHeader

PIECES_MIN = 2
"""Without a snapshot: one is filled while the other is emptied."""
ROOM_BYTES = 2 << 30
"""What a snapshot leaves free on the device for whatever else a step may come to need."""


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


def snapshot_fits(data_bytes: int, free_bytes: int, num_out_of_memory: int) -> bool:
    """True if a device with so much free memory has room for a snapshot. Pure.

    Not in a process that has run out of memory once: it would again.
    """
    return num_out_of_memory == 0 and data_bytes + ROOM_BYTES <= free_bytes


class Ring:
    """Memory of a device through which state passes. One a process: the choice holds until memory runs out."""

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self.device = device
        self.piece_bytes = piece_bytes
        self.is_snapshot: bool | None = None
        """All pieces fit at once; None until that is known."""
        self.fetched: _Fetched | None = None
        """What `fetch_ahead` has begun and `fill` has not taken."""
        self.used: dict[int, Mark] = {}
        """Of a restore: when each place is free again."""
        self._memory: torch.Tensor | None = None
        self.gather, self.drain = Lane(device), Lane(device)

    def choose(self, data_bytes: int) -> bool:
        """Snapshot or not, by the memory that is free. To be asked when torch holds what a step takes."""
        if self.is_snapshot is None:
            self.is_snapshot = self.device.type == "cpu" or snapshot_fits(data_bytes, *_memory_of(self.device))
        return self.is_snapshot

    def can_fetch(self, data_bytes: int) -> bool:
        """True if a whole state fits the ring beside the state itself, of which nothing may be there yet."""
        if self.is_snapshot is not None or self.device.type == "cpu":
            return self.choose(data_bytes)
        return snapshot_fits(2 * data_bytes, *_memory_of(self.device))

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
        """The generation is over; torch keeps the memory for the next one, which asks for as much.

        For a few pieces if memory ran out: the snapshot's may be what was missing.
        """
        self._memory = self.fetched = None
        if self.is_snapshot and _num_out_of_memory(self.device):
            self.is_snapshot = False


def _memory_of(device: torch.device) -> tuple[int, int]:
    """(free bytes, how often this process ran out of them)."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes, _num_out_of_memory(device)


def _num_out_of_memory(device: torch.device) -> int:
    """Asks torch alone: the device itself may be lost."""
    return int(torch.cuda.memory_stats(device)["num_ooms"]) if device.type == "cuda" else 0


class Drain:
    """One capture, on its way from the tensors through the ring to the slot, with the sums of its blocks.

    Where all pieces fit the ring they are only gathered at first; `wait` queues the rest, in the thread that it blocks.
    Else pieces take turns, and all is queued at once.
    """

    def __init__(self, ring: Ring, slot_file: SlotFile, slot: int, routes: Sequence[Route], num_bytes: int) -> None:
        """Does not block where the slot's pages are locked."""
        self._ring = ring
        self._slot_file, self._slot = slot_file, slot
        self._sums = torch.empty(num_blocks(num_bytes), dtype=torch.int64, device=ring.device)
        self._left: list[Route] = []
        self._emptied: dict[int, Mark] = {}
        boundary = Mark(ring.device)
        with ring.drain.open():
            before = Mark(ring.device)  # what was fetched and not wanted may still be on its way into the ring
        with ring.gather.open():
            boundary.hold_back()
            before.hold_back()
            self.gathered = Mark(ring.device)
        takes_turns = len({route.place.data_ptr() for route in routes}) < len(routes)
        for route in routes:
            with ring.gather.open():
                if takes_turns and route.place.data_ptr() in self._emptied:
                    self._emptied[route.place.data_ptr()].hold_back()
                route.gather()
                if takes_turns:
                    self.gathered = Mark(ring.device)
            if takes_turns:
                self._empty(route)
        if not takes_turns:
            with ring.gather.open():
                self.gathered = Mark(ring.device)
            self._left = list(routes)

    def _empty(self, route: Route) -> None:
        piece, place = route.piece, route.place
        area = torch.frombuffer(self._slot_file.data(self._slot), dtype=torch.uint8)
        with self._ring.drain.open():
            self.gathered.hold_back()
            route.add_up(self._sums)
            for first, last in self._slot_file.cuts(self._slot, piece.start, piece.end):
                area[first:last].copy_(place[first - piece.start : last - piece.start], non_blocking=True)
            self._emptied[place.data_ptr()] = Mark(self._ring.device)

    @torch.no_grad()
    def wait(self) -> bytes:
        """Block until the slot holds everything; the sums of its blocks."""
        for route in self._left:
            self._empty(route)
        self._left = []
        with self._ring.drain.open():
            on_host = torch.empty(self._sums.shape, dtype=torch.int64, pin_memory=self._ring.device.type == "cuda")
            on_host.copy_(self._sums, non_blocking=True)
            drained = Mark(self._ring.device)
        drained.wait()
        return on_host.numpy().tobytes()


class Gatherer:
    """Captures of one layout through a ring: remembers the routes, since making them takes longer than using them."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._layout: Layout | None = None
        self._tensors: list[torch.Tensor] = []
        self._routes: list[Route] = []
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
            self._routes = routes_of(pieces, places_of(memory, pieces, self.ring.piece_bytes), flat)
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


@dataclass(frozen=True, kw_only=True)
class _Fetched:
    """A slot of which everything is in the ring, or on its way there."""

    slot_file: SlotFile
    slot: int
    header: SlotHeader
    memory: torch.Tensor
    marks: Sequence[Mark]
    """When each piece is there."""


@torch.no_grad()
def fetch_ahead(ring: Ring, slot_file: SlotFile, slot: int) -> None:
    """Begin to fetch a sealed slot that is about to be restored, if the device has room for all of it. Does not block.

    A restore takes it from the ring then, and finds it there: its group and its model are made meanwhile.
    """
    header = slot_file.header(slot)
    if header is None or not header.is_summed or not slot_file.lock_piece_bytes:
        return
    if not ring.can_fetch(header.data_bytes):
        return
    memory = ring.for_capture(header.data_bytes)
    if memory.numel() < header.data_bytes:
        return
    area = torch.frombuffer(slot_file.data(slot), dtype=torch.uint8)
    ready, marks = Mark(ring.device), []
    with ring.drain.open():
        ready.hold_back()
        for start in range(0, header.data_bytes, ring.piece_bytes):
            end = min(header.data_bytes, start + ring.piece_bytes)
            for first, last in slot_file.cuts(slot, start, end):
                memory[first:last].copy_(area[first:last], non_blocking=True)
            marks.append(Mark(ring.device))
    ring.fetched = _Fetched(slot_file=slot_file, slot=slot, header=header, memory=memory, marks=marks)


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
    sums = torch.empty(num_blocks(layout.data_bytes), dtype=torch.int64, device=ring.device)
    fetched, ring.fetched = ring.fetched, None
    is_ahead = fetched is not None and (fetched.slot_file, fetched.slot, fetched.header) == (slot_file, slot, header)
    memory = fetched.memory if fetched is not None and is_ahead else ring.for_few(header.data_bytes)
    pieces = pieces_of(layout, ring.piece_bytes)
    routes = routes_of(pieces, places_of(memory, pieces, ring.piece_bytes), flat)
    marks = fetched.marks if fetched is not None and is_ahead else _fetch(ring, slot_file, slot, routes)
    for route, mark in zip(routes, marks, strict=True):
        mark.hold_back()
        route.add_up(sums)
        route.scatter()
        ring.used[route.place.data_ptr()] = Mark(ring.device)
    ring.used.clear()
    found = sums.cpu().numpy().tobytes()
    return slot_file.digest_of_sums(slot, found, header.blob_bytes), {layout.items[index].fqn for index in flat}


def _fetch(ring: Ring, slot_file: SlotFile, slot: int, routes: Sequence[Route]) -> Iterator[Mark]:
    """Fetch piece after piece; each is in its place at its mark, and out of it once it was used (`Ring.used`)."""
    area = torch.frombuffer(slot_file.data(slot), dtype=torch.uint8)
    ready = Mark(ring.device)
    with ring.drain.open():
        ready.hold_back()
    for route in routes:
        piece, place = route.piece, route.place
        with ring.drain.open():
            if place.data_ptr() in ring.used:
                ring.used[place.data_ptr()].hold_back()
            for first, last in slot_file.cuts(slot, piece.start, piece.end):
                place[first - piece.start : last - piece.start].copy_(area[first:last], non_blocking=True)
            mark = Mark(ring.device)
        yield mark


def _can_fill(local: torch.Tensor, device: torch.device, size_bytes: int) -> bool:
    is_same = local.numel() * local.element_size() == size_bytes and size_bytes > 0
    return local.device == device and local.is_contiguous() and is_same
