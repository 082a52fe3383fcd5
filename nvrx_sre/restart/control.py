"""The rank's side of the restart machinery: a monitor thread, and interrupts for the main thread.

Model: the monitor thread owns receiving. It tells how far the rank is, regularly and when asked, hands
assignments and 'go' to the main thread, and when the launcher says `Interrupt(generation)` it aborts the
groups and signals the main thread until that has left the generation. The signal's Python handler runs
in the main thread, checks the armed generation and the atomic depth, and raises `Interrupted`; so an
interrupt is never delivered into another generation, never inside `atomic`, and wakes sleeps and locks (no
SA_RESTART).

Invariants: `armed` is written by the main thread alone; an interrupt of generation g is pending from its
arrival until `armed` is no longer g. The handler raises at most once per `REDELIVERY_S`, so that the
frames that catch it are not hit again before they disarm.

Must not: send anything from the signal handler, hold a lock while the handler may run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

from nvrx_sre.core.clock import Clock, to_ns
from nvrx_sre.core.errors import Interrupted, RestartAborted
from nvrx_sre.events import messages as wire
from nvrx_sre.events.channel import Channel
from nvrx_sre.events.schema import Phase
from nvrx_sre.restart.stacks import OwnStacks

ALIVE_INTERVAL_S = 0.25
"""Liveness period: a quarter of the shortest sensible progress deadline (1 s)."""
REDELIVERY_S = 0.003
"""Pause between two deliveries of one interrupt: prototypes needed 1 to 3 deliveries, 1 ms apart at least."""

SLOTS_POLL_S = 0.01
"""Between two looks at what the launcher publishes in slots; only the last capture of a run ever waits for it."""


class Abortable(Protocol):
    """What the monitor aborts when a generation is interrupted."""

    def abort(self) -> None:
        """Free ranks blocked in collectives. Called repeatedly, from the monitor thread."""


class RankControl:
    """State shared by the main thread and the monitor thread of a rank."""

    def __init__(self, channel: Channel, clock: Clock, interrupt_signal: int) -> None:
        self.channel = channel
        self.clock = clock
        self.groups: Abortable | None = None
        self.stacks = OwnStacks(None)
        self.on_interrupt: Callable[[wire.Interrupt], None] | None = None
        """Called before anything is aborted, in the monitor thread."""
        self.step = 0
        self.progress = 0
        self.on_slots: Callable[[wire.SlotsGranted, int], None] | None = None
        self.on_interval: Callable[[wire.HotInterval], None] | None = None
        self.on_map: Callable[[wire.MapSlots, int], None] | None = None
        self.on_dropped: Callable[[], None] | None = None
        self._signal = interrupt_signal
        self._main_thread_id = threading.main_thread().ident or 0
        self.armed: int | None = None
        """Generation whose interrupt may be raised in the main thread; written by the main thread alone."""
        self._atomic_depth = 0
        self._interrupted = -1
        self._last_raise_ns = 0
        self._changed = threading.Condition()
        self._assign: tuple[wire.Assign, int | None] | None = None
        self._go: wire.Go | None = None
        self._rehearsal: wire.Rehearse | None = None
        self._leave = False
        self._turn = (0, 0)
        self._phase: tuple[str, int] = (Phase.INIT, clock.monotonic_ns())
        self._phase_told: str = ""
        self._point_ns = 0
        """When a point inside a phase was passed last."""
        self._generation = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._monitor, name="nvrx-monitor", daemon=True)

    # --- main thread --------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the handler and start the monitor. Main thread only."""
        signal.signal(self._signal, self._on_signal)
        signal.siginterrupt(self._signal, True)
        self._thread.start()

    def stop(self) -> None:
        """End the monitor; waits for its current turn. Only for a process that goes on without a launcher."""
        self._stopped = True
        self._thread.join()

    def handler_in_place(self) -> bool:
        """False if user code replaced the interrupt's signal handler."""
        return signal.getsignal(self._signal) == self._on_signal

    def reinstall_handler(self) -> None:
        signal.signal(self._signal, self._on_signal)
        signal.siginterrupt(self._signal, True)

    def wait_called(self) -> wire.Rehearse | None:
        """Block until this standby has something to rehearse; None once it was given a rank, or is to leave."""
        with self._changed:
            self._changed.wait_for(lambda: self._assign is not None or self._leave or self._rehearsal is not None)
            if self._assign is not None or self._leave:
                return None
            message, self._rehearsal = self._rehearsal, None
            return message

    def wait_assigned(self) -> tuple[wire.Assign, int | None]:
        """Block until the launcher gives this process a rank; (message, memfd of its slots or None)."""
        with self._changed:
            self._changed.wait_for(lambda: self._assign is not None or self._leave)
            if self._assign is None:
                raise RestartAborted
            return self._assign

    def wait_go(self, generation: int) -> wire.Go:
        """Block until the launcher opens a generation >= `generation`.

        An interrupt of a generation that this rank was about to enter moves it on: it reports ready for the
        next one and goes on waiting.
        """
        while True:
            with self._changed:
                while not (self._leave or self._pending_go(generation) or self._interrupted >= generation):
                    self._changed.wait()
                if self._leave:
                    raise RestartAborted
                if self._interrupted < generation:
                    go = self._go
                    assert go is not None
                    # Counted from the same point on every rank, old process or new: the launcher compares them.
                    self.step = self.progress = 0
                    # What comes before the group is the training function's own, not the teardown that ended before.
                    self._phase, self._phase_told = (Phase.INIT, self.clock.monotonic_ns()), ""
                    self._generation = go.generation  # last, and read first: what is told of it is its own
                    return go
                skipped, generation = self._interrupted, self._interrupted + 1
            self.send(wire.Acked(generation=skipped, mono_ns=self.clock.monotonic_ns()))
            self.report_ready(generation, fit=True, reason="")

    def _pending_go(self, generation: int) -> bool:
        return self._go is not None and self._go.generation >= generation

    def wait_interrupted(self, generation: int) -> None:
        """Block until `generation` is interrupted; the launcher answers every fault with that, or a kill."""
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted >= generation or self._leave)
            if self._leave:
                raise RestartAborted

    def wait_turn(self, step: int) -> None:
        """Block until the launcher says that the durable save due at `step` was taken or will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn >= (self._generation, step) or self._leave)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Block until `condition` holds, or the launcher says leave.

        Asked again at each message of the launcher's, and every 10 ms: what it publishes in slots has no message.
        """
        with self._changed:
            while not (condition() or self._leave):
                self._changed.wait(SLOTS_POLL_S)

    def arm(self, generation: int) -> None:
        """From now on an interrupt of `generation` is raised here. Raises it if it has already come."""
        self.armed = generation
        if self._interrupted >= generation:
            self._last_raise_ns = self.clock.monotonic_ns()
            raise Interrupted(generation)

    @property
    def interrupted(self) -> int:
        """Highest generation that was interrupted, -1 if none."""
        return self._interrupted

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """Interrupts wait until the outermost `atomic` is left."""
        self._atomic_depth += 1
        try:
            yield
        finally:
            self._atomic_depth -= 1

    def enter(self, phase: Phase, *, tell: bool = True) -> int:
        """The main thread is in `phase` now, monotonic ns. Without `tell` the monitor reports it if it lasts."""
        now_ns = self.clock.monotonic_ns()
        self._phase = (phase, now_ns)
        self.progress += 1
        if tell:
            self._phase_told = phase
            self.send(wire.Entered(generation=self._generation, phase=phase, step=self.step, mono_ns=now_ns))
        return now_ns

    def pass_point(self) -> int:
        """The main thread makes progress inside its phase; the time, monotonic ns."""
        self._point_ns = now_ns = self.clock.monotonic_ns()
        self.progress += 1
        return now_ns

    @property
    def phase(self) -> str:
        return self._phase[0]

    def report_ready(self, generation: int, *, fit: bool, reason: str) -> None:
        """Tell the launcher that this rank left everything before `generation`."""
        self.send(wire.Ready(generation=generation, fit=fit, reason=reason[:500], mono_ns=self.clock.monotonic_ns()))

    def send(self, message: wire.Message) -> None:
        """Send and wait for room. A launcher that is gone ends this process through the monitor."""
        self.channel.send(message)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        generation = self.armed
        if generation is None or self._interrupted < generation or self._atomic_depth:
            return
        now_ns = self.clock.monotonic_ns()
        if now_ns - self._last_raise_ns < to_ns(REDELIVERY_S):
            return
        self._last_raise_ns = now_ns
        self.stacks.interrupted(frame)
        raise Interrupted(generation)

    # --- monitor thread -----------------------------------------------------------------------------------

    def _monitor(self) -> None:
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLIN)
        next_alive_ns = 0
        while not self._stopped:
            delivering = self._deliver()
            now_ns = self.clock.monotonic_ns()
            if now_ns >= next_alive_ns:
                self._tell_alive()
                next_alive_ns = now_ns + to_ns(ALIVE_INTERVAL_S)
            wait_ms = REDELIVERY_S * 1000 if delivering else max(1.0, (next_alive_ns - now_ns) / 1e6)
            if poller.poll(wait_ms):
                self._receive()

    def _deliver(self) -> bool:
        """One delivery of a pending interrupt; True while it has not arrived."""
        generation = self.armed
        if generation is None or self._interrupted < generation:
            return False
        signal.pthread_kill(self._main_thread_id, self._signal)
        if self.groups is not None:
            self.groups.abort()
        return True

    def _tell_alive(self, probe: int = 0) -> None:
        # Armed when all else of a generation is set, and read first: nothing of the one before is told as its own.
        armed = self.armed
        # Progress is stamped before it is counted, and read the other way round: what is counted is no older.
        generation, step, progress = self._generation, self.step, self.progress
        phase, entered_ns = self._phase
        newest_ns = max(entered_ns, self._point_ns)
        now_ns = self.clock.monotonic_ns()
        if armed is not None and phase != self._phase_told:
            self._phase_told = phase
            entered = wire.Entered(
                generation=generation,
                phase=phase,
                step=step,
                mono_ns=entered_ns,
                age_ns=now_ns - entered_ns,
            )
            if not self.channel.send_nowait(entered) and self._phase_told == phase:
                self._phase_told = ""  # no room: with the next sign of life, if the phase lasts until then
        self.channel.send_nowait(
            wire.Alive(
                generation=generation,
                step=step,
                progress=progress,
                mono_ns=now_ns,
                num_dropped=self.channel.num_dropped,
                age_ns=now_ns - newest_ns,
                probe=probe,
            )
        )

    def _receive(self) -> None:
        try:
            received = self.channel.receive()
        except ValueError as error:
            print(f"nvrx-sre: ignored a packet of the launcher: {error}", file=sys.stderr)
            return
        if received is None:
            leave_with_launcher()
            return
        message, descriptors = received
        if isinstance(message, wire.SlotsGranted):
            if self.on_slots is not None:
                self.on_slots(message, descriptors[0])
        elif isinstance(message, wire.MapSlots):
            if self.on_map is not None:
                self.on_map(message, descriptors[0])
        elif isinstance(message, wire.SlotsDropped):
            if self.on_dropped is not None:
                self.on_dropped()
        elif isinstance(message, wire.HotInterval):
            self._tell_interval(message)
        elif isinstance(message, wire.Probe):
            self._tell_alive(message.number)
            self.channel.ring_bell()  # a launcher that takes in steps would find it with its next look
        elif isinstance(message, wire.Doorbell):
            self.channel.take_over(descriptors)
        else:
            if isinstance(message, wire.Go):
                self._tell_interval(wire.HotInterval(every=message.hot_every, from_step=0))
            elif isinstance(message, wire.Interrupt) and self.on_interrupt is not None:
                self.on_interrupt(message)
            self._hand_over(message, descriptors)

    def _tell_interval(self, message: wire.HotInterval) -> None:
        if self.on_interval is not None:
            self.on_interval(message)

    def _hand_over(self, message: wire.Message, descriptors: list[int]) -> None:
        with self._changed:
            if isinstance(message, wire.Assign):
                self._assign = (message, descriptors[0] if descriptors else None)
            elif isinstance(message, wire.Go):
                self._go = message
            elif isinstance(message, wire.Interrupt):
                self._interrupted = max(self._interrupted, message.generation)
            elif isinstance(message, wire.SaveTurn):
                self._turn = max(self._turn, (message.generation, message.step))
            elif isinstance(message, wire.Rehearse):
                self._rehearsal = message
            elif isinstance(message, wire.Leave):
                self._leave = True
            self._changed.notify_all()


def keep_finalizers_quiet() -> None:
    """From now on nothing is printed of an interrupt that arrives in a finalizer. Once a process, main thread.

    Raised there it goes nowhere but to `sys.unraisablehook`, and comes again behind it. It has to be raised all the
    same: the finalizer of a loader waits for its workers. Whatever else a finalizer raises is the hook's of before.
    """
    before = sys.unraisablehook

    def hook(ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_type is not Interrupted:
            before(ignored)

    sys.unraisablehook = hook


def leave_with_launcher() -> None:
    """The launcher is gone: end this process and what it started, at once."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
