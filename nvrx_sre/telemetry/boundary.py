"""The one place where a telemetry failure ends: counted, noted at most once a minute, never passed on.

`Boundary.call` runs a part of telemetry and swallows whatever `Exception` it raises; `SinkThread` gives a
sink a thread and a bounded queue, so that a slow terminal, disk or collector costs the launcher's loop one
append. Thread safety: all methods from any thread. Must not: change control flow (failure case C52).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from nvrx_sre.core.clock import Clock, to_ns
from nvrx_sre.telemetry.catalog import Component

NOTE_INTERVAL_S = 60.0
"""Failures of one component are noted at most this often (failure cases C52 and C62)."""
GATHER_S = 0.2
"""A sink's batch is this old at most when its work begins; longer than a recovery in process takes."""
QUEUE_ITEMS = 4096
"""Items that may wait for a sink; beyond it they are dropped and counted."""

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class Boundary:
    """Counts what telemetry drops and what fails in it. `note` gets a line now and then; it only queues it."""

    def __init__(self, clock: Clock, note: Callable[[str], None] | None = None) -> None:
        self._clock = clock
        self._note = note
        self._lock = threading.Lock()
        self._dropped = dict.fromkeys(Component, 0)
        self._errors = dict.fromkeys(Component, 0)
        self._last_errors: dict[Component, str] = {}
        self._noted_ns: dict[tuple[Component, bool], int] = {}
        self._failing: set[Component] = set()

    def call(self, component: Component, function: Callable[..., _Result], *arguments: object) -> _Result | None:
        """`function(*arguments)`, or None if it raised an `Exception` (counted for `component`)."""
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  # the boundary of telemetry: nothing passes it
            self.failed(component, f"{type(error).__name__}: {error}")
            return None

    def handle(self, component: Component, function: Callable[[Sequence[_Item]], None], batch: Sequence[_Item]) -> None:
        """`function(batch)`; if it raises, the batch is dropped and counted. Notes when a part works again."""

        def take() -> bool:
            function(batch)
            return True

        if not self.call(component, take):
            self.dropped(component, len(batch))
            with self._lock:
                self._failing.add(component)
        elif component in self._failing:
            with self._lock:
                self._failing.discard(component)
            self._note_rarely(component, "works again", is_failure=False)

    def failed(self, component: Component, message: str) -> None:
        """Count one failure of `component`; note it unless that was done within the last minute."""
        with self._lock:
            self._errors[component] += 1
            self._last_errors[component] = message
        self._note_rarely(component, f"failed, training goes on: {message}", is_failure=True)

    def _note_rarely(self, component: Component, text: str, *, is_failure: bool) -> None:
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            last_ns = self._noted_ns.get((component, is_failure))
            if self._note is None or (last_ns is not None and now_ns - last_ns < to_ns(NOTE_INTERVAL_S)):
                return
            self._noted_ns[component, is_failure] = now_ns
            num_errors = self._errors[component]
        self._note(f"telemetry: {component} {text} ({num_errors} failed so far)")

    def dropped(self, component: Component, count: int = 1) -> None:
        """Count items of `component` that were dropped."""
        with self._lock:
            self._dropped[component] += count

    def num_dropped(self) -> dict[Component, int]:
        """Items dropped so far by component."""
        with self._lock:
            return dict(self._dropped)

    def last_error(self, component: Component) -> str:
        """What the newest failure of `component` said, '' if there was none."""
        with self._lock:
            return self._last_errors.get(component, "")

    def num_errors(self) -> dict[Component, int]:
        """Failures swallowed so far by component."""
        with self._lock:
            return dict(self._errors)


class SinkThread(Generic[_Item]):
    """Hands items in order, in batches, to `handle` on a thread of its own (started at the first item).

    After the first item it gathers for `GATHER_S` before it works, so that rendering does not compete for the
    interpreter with the recovery that the items tell of. `flush` and `close` do not wait for that.
    """

    def __init__(
        self,
        component: Component,
        handle: Callable[[Sequence[_Item]], None],
        boundary: Boundary,
        *,
        capacity: int = QUEUE_ITEMS,
    ) -> None:
        self._component = component
        self._handle = handle
        self._boundary = boundary
        self._capacity = capacity
        self._queue: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._num_taken = 0
        self._num_queued = 0
        self._num_wanted = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    def submit(self, item: _Item) -> None:
        """Queue `item`; never blocks. Dropped and counted if the queue is full or closed."""
        with self._changed:
            if self._closing or len(self._queue) >= self._capacity:
                self._boundary.dropped(self._component)
                return
            self._queue.append(item)
            self._num_queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name=f"nvrx-{self._component}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Everything submitted so far was handled."""
        return self._num_taken == self._num_queued

    def hurry(self) -> None:
        """Work on what was submitted so far without gathering more. Does not wait."""
        with self._changed:
            self._num_wanted = self._num_queued
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything submitted so far was handled; False if that took longer than `timeout_s`."""
        with self._changed:
            wanted = self._num_wanted = self._num_queued
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._num_taken >= wanted, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush and end the thread; what is left after `timeout_s`, or under way, is dropped and counted. Once."""
        if self._closing:
            return self.is_idle
        done = self.flush(max(0.0, timeout_s))
        with self._changed:
            self._closing = True
            if not self.is_idle:
                self._boundary.dropped(self._component, self._num_queued - self._num_taken)
                self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None and done:
            self._thread.join(timeout_s)
        return done

    def _is_urgent(self) -> bool:
        return self._closing or self._num_wanted > self._num_taken or len(self._queue) > self._capacity // 2

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closing)
                self._changed.wait_for(self._is_urgent, GATHER_S)
                if not self._queue:
                    return
                batch = list(self._queue)
                self._queue.clear()
            self._boundary.handle(self._component, self._handle, batch)
            with self._changed:
                self._num_taken += len(batch)
                self._changed.notify_all()
