"""What a rank tells of its steps: where its time went since the generation entered the step loop, tokens, loss.

Model: the rank keeps sums, whose copy at each step boundary is the report. Time inside a phase is booked to it, that
between a step's end and its report to saves; what is booked nowhere was the steps' own, and is left to the launcher.

Reports are made at a boundary, where nothing of this is in the processor's caches: see `step_ring`. So what is called
and lies in a slot is fetched before it is called: to call it where it lies has the interpreter look for a method first.

Thread safety: main thread only. Must not: block, call the kernel for a step.
"""

from __future__ import annotations

from typing import Protocol

from nvrx_sre.core.clock import Clock, seconds
from nvrx_sre.events.schema import Phase
from nvrx_sre.events.step_ring import StepRing


class Saver(Protocol):
    """What captures the steps: how many it has, and how many were due and not captured."""

    num_captured: int
    num_skipped: int


class Captured(Protocol):
    """What became of a step at its boundary."""

    @property
    def slot(self) -> int:
        """The hot slot that takes it, -1 for none."""

    @property
    def durable(self) -> bool:
        """A durable save of it is due."""


class StepReports:
    """Reports of the steps of `generation`, from now on, into `ring`."""

    __slots__ = (
        *("now_ns", "tokens", "save_ns", "arrived_ns", "gpu_ns"),
        *("_ring", "_generation", "_saver", "_begun_ns", "_data_ns", "_evaluate_ns", "_phase", "_entered_ns"),
    )

    def __init__(self, ring: StepRing, clock: Clock, generation: int, saver: Saver) -> None:
        self.now_ns = clock.monotonic_ns
        self.tokens = 0
        """Trained so far, over all ranks."""
        self.save_ns = 0
        """Booked to saves so far."""
        self.arrived_ns = 0
        """When this rank came to the first collective of the step in hand, 0 if it has not."""
        self.gpu_ns = 0
        """What the GPU took for a stretch that was over since the report before, 0 for none (`gpu_time`)."""
        self._ring = ring
        self._generation = generation
        self._saver = saver
        self._begun_ns = clock.monotonic_ns()
        self._data_ns = self._evaluate_ns = 0
        self._phase = Phase.STEP
        self._entered_ns = 0
        """When the phase was entered, 0 for the step itself."""

    def tell(self, step: int, boundary_ns: int, now_ns: int, loss: float, captured: Captured) -> bool:
        """`step` is over, and was at `boundary_ns`; True if the launcher is to be called.

        `now_ns`: the boundary's end. `loss`: `step_record.UNKNOWN_LOSS` if there is none.
        """
        if self._entered_ns:
            self._leave(boundary_ns)
        saver = self._saver
        self.save_ns = save_ns = self.save_ns + now_ns - boundary_ns
        is_wanted = self._ring.put(
            (
                self._generation,
                step,
                now_ns,
                self._begun_ns,
                self._data_ns,
                save_ns,
                self._evaluate_ns,
                self.tokens,
                captured.slot,
                captured.durable,
                saver.num_captured,
                saver.num_skipped,
                self.arrived_ns,
                self.gpu_ns,
                loss,
            )
        )
        self.arrived_ns = self.gpu_ns = 0
        return is_wanted

    def enter(self, phase: Phase, now_ns: int) -> None:
        """`phase` begins, and the one before ends: data, save, evaluate, or step for the step itself."""
        self._leave(now_ns)
        if phase is not Phase.STEP:
            self._phase, self._entered_ns = phase, now_ns

    def waited(self, waited_ns: int) -> None:
        """The time up to now was a wait for a capture: a save's, also inside a phase, which is not booked it."""
        self.save_ns += waited_ns
        if self._entered_ns:
            self._entered_ns += waited_ns

    def step_s(self) -> float:
        """Seconds so far that were the steps' own."""
        return seconds(self.now_ns() - self._begun_ns - self._data_ns - self.save_ns - self._evaluate_ns)

    def _leave(self, until_ns: int) -> None:
        if not self._entered_ns:
            return
        spent_ns, self._entered_ns = until_ns - self._entered_ns, 0
        if self._phase is Phase.DATA:
            self._data_ns += spent_ns
        elif self._phase is Phase.EVALUATE:
            self._evaluate_ns += spent_ns
        else:
            self.save_ns += spent_ns
