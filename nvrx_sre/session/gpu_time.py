"""How long the GPU takes for a stretch of each step that is this rank's own: by events, and nothing waits for them.

Model: a stretch lies between two events on the stream of the script. Events are only asked whether they are over
(`query`), at step boundaries, so a stretch is known a step or a few after it was. On a stream, waiting for another rank
looks like work: a collective spins on the GPU, and what comes after it waits. So a stretch holds none:

    with FSDP2       forward of its last unit, the first time in a step: from when its parameters are there until it
                     gives them up; what every step gathers and reduces lies outside
    without          from the step's begin (its first batch, else the commit before) to `ctx.mark("collective")`

The time of a unit tells of the GPU alone: a stretch during which the host did not lead is left out, since the GPU may
have waited for the next kernel in it. The time to a mark holds such gaps.

Invariants: an event is recorded only in a process that has CUDA initialised, and not while its stream is captured; a
RuntimeError (a sticky error, above all) ends the measuring for the generation, and the script hears of it at its own
next call. Events and hooks are of one generation. Thread safety: main thread only. Must not: wait for a device,
initialise CUDA, raise.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from nvrx_sre.core.clock import NS_PER_S

MAX_WAITING = 8
"""Stretches whose end the GPU has not reached; while there are so many, none is begun."""
_NS_PER_MS = NS_PER_S // 1000


class Event(Protocol):
    """A point on a stream: `torch.cuda.Event` with timing."""

    def record(self) -> None:
        """The point is here, on the current stream."""

    def query(self) -> bool:
        """The device has passed it. Does not wait."""

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds from here to `other`, both passed."""


def timing_event() -> Event:
    """An event of the current device."""
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
    return event


def is_recordable() -> bool:
    """CUDA is in use in this process, and its current stream runs what it is given. Asks no device."""
    is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
    return is_in_use and not torch.cuda.is_current_stream_capturing()


class _Stretch:
    """Two events, used again and again."""

    __slots__ = ("begin", "end")

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self.begin, self.end = new_event(), new_event()


class GpuTimer:
    """Stretches of one rank in one generation. Of each step at most one is measured."""

    def __init__(
        self, *, new_event: Callable[[], Event] = timing_event, may_record: Callable[[], bool] = is_recordable
    ) -> None:
        self.is_on = True
        self.num_events = 0
        """Events that were ever made."""
        self._new_event = new_event
        self._may_record = may_record
        self._open: _Stretch | None = None
        """Begun in this step, and not ended."""
        self._waiting: deque[_Stretch] = deque()
        self._free: list[_Stretch] = []
        self._is_over = False
        """This step's stretch has ended."""
        self._has_batch = False
        self._has_marks = False
        self._unit_hooks: list[Any] = []
        self._is_unit_known = False
        """It has run, and its forward communicates with nobody."""

    def boundary(self) -> int:
        """A step is committed, and the next begins. Nanoseconds of the newest stretch that came to its end since the
        last call, 0 for none."""
        newest_ns = 0
        try:
            while self._waiting and self._may_record() and self._waiting[0].end.query():
                stretch = self._waiting.popleft()
                newest_ns = round(stretch.begin.elapsed_time(stretch.end) * _NS_PER_MS)
                self._free.append(stretch)
        except RuntimeError:  # what torch makes of every error of CUDA
            self.close()
        self._is_over = self._has_batch = False
        self._drop_open()
        self.begin_step()
        return newest_ns

    def begin_step(self) -> None:
        """What stood between the commit and the step is over."""
        if self._has_marks:
            self.begin()

    def batch(self) -> None:
        """The step has its batch: what went before was the host's. Only the step's first one counts."""
        if self._has_marks and not self._has_batch:
            self._has_batch = True
            self.begin()

    def mark(self) -> None:
        """The step's first collective comes next."""
        if self._unit_hooks:
            return
        self._has_marks = True
        self.end(is_led=False)

    def begin(self) -> None:
        """The step's stretch begins here; once more, if it had begun before."""
        if self._is_over or not self.is_on:
            return
        try:
            if not self._may_record():
                self._drop_open()
                return
            if self._open is None:
                self._open = self._take_free()
            if self._open is not None:
                self._open.begin.record()
        except RuntimeError:  # what torch makes of every error of CUDA
            self.close()

    def end(self, *, is_led: bool) -> None:
        """The step's stretch ends here. `is_led`: it counts only if the GPU has not begun it yet."""
        stretch, self._open = self._open, None
        if stretch is None or not self.is_on:
            return
        self._is_over = True
        try:
            if not self._may_record() or (is_led and stretch.begin.query()):
                self._free.append(stretch)
                return
            stretch.end.record()
            self._waiting.append(stretch)
        except RuntimeError:  # what torch makes of every error of CUDA
            self.close()

    def follow_unit(self, unit: nn.Module) -> None:
        """From now on the stretch is `unit`'s forward. Hooks of FSDP2, which gather and give up, lie around it."""
        me = weakref.ref(self)

        def before(module: nn.Module, _: Any) -> None:
            if _counts() and (timer := me()) is not None:
                timer._enter(module)

        def after(_: nn.Module, __: Any, ___: Any) -> None:
            if _counts() and (timer := me()) is not None:
                timer.end(is_led=True)

        self._unit_hooks = [
            unit.register_forward_pre_hook(before),
            unit.register_forward_hook(after, prepend=True),
        ]

    def close(self) -> None:
        """The generation is over on this rank: no event of it is asked or recorded again. Waits for no device."""
        self.is_on = False
        for hook in self._unit_hooks:
            hook.remove()
        self._unit_hooks = []
        self._open = None
        self._waiting.clear()
        self._free.clear()

    def _enter(self, unit: nn.Module) -> None:
        if not self._is_unit_known and _is_parallel_inside(unit):
            self.close()
            return
        self._is_unit_known = True
        self.begin()

    def _take_free(self) -> _Stretch | None:
        if len(self._waiting) >= MAX_WAITING:
            return None
        if self._free:
            return self._free.pop()
        self.num_events += 2
        return _Stretch(self._new_event)

    def _drop_open(self) -> None:
        if self._open is not None:
            self._free.append(self._open)
            self._open = None


def timer_for(tracked: Iterable[object]) -> GpuTimer:
    """A timer that follows the last FSDP2 unit of what a script tracks, or its marks if there is no unit."""
    timer = GpuTimer()
    unit = last_unit(tracked)
    if unit is not None:
        timer.follow_unit(unit)
    return timer


def last_unit(tracked: Iterable[object]) -> nn.Module | None:
    """The last of the most frequent kind of FSDP2 units that hold no others: a model's last block.

    The host is farthest ahead there, and no gathering runs beside it.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    modules = [part for item in tracked for module in _modules_of(item) for part in module.modules()]
    units: list[nn.Module] = [part for part in modules if isinstance(part, fsdp.FSDPModule)]
    leaves = [unit for unit in units if not any(isinstance(part, fsdp.FSDPModule) for part in list(unit.modules())[1:])]
    if not leaves:
        return None
    [(kind, _)] = Counter(map(type, leaves)).most_common(1)
    return next(unit for unit in reversed(leaves) if type(unit) is kind)


def _modules_of(item: object) -> Iterator[nn.Module]:
    """The module that is tracked, or those that a tracked object of the script's holds, by themselves or in a list."""
    held = [item] if isinstance(item, nn.Module) else list(getattr(item, "__dict__", {}).values())
    for value in held:
        yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, nn.Module))


def _counts() -> bool:
    """A forward of training, not an evaluation, and not one that is only traced."""
    return not torch.compiler.is_compiling() and torch.is_grad_enabled()


def _is_parallel_inside(unit: nn.Module) -> bool:
    """Gathered parameters that are still a part of something: the forward communicates by itself."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(item, tensor.DTensor) for item in unit.parameters())
