"""One process, many generations: run the training function, leave it on an interrupt, make ready, go again.

The loop of a rank:

    wait for 'go' -> arm -> training function -> disarm -> report -> teardown -> ready for the next generation

A fault of this rank is reported as text and then waits for the launcher's interrupt, like every other rank.
No sleep anywhere: each wait is on the launcher's answer. The exception object and its traceback are dropped
before teardown, since they hold the model and the groups.

Runs in the main thread only; a training function elsewhere could not be interrupted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvrx_sre.core.errors import Interrupted
from nvrx_sre.core.output import print_masked
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import FaultClass, Phase
from nvrx_sre.restart import abort, compiled, flight_recorder, health, torch_errors
from nvrx_sre.restart.control import RankControl
from nvrx_sre.restart.leftovers import Leftovers
from nvrx_sre.restart.stacks import other_threads
from nvrx_sre.restart.unwaited import wait_for_the_unwaited


def write_to_log(fault: torch_errors.Description) -> None:
    """The traceback, where people look for one: in the rank's log. That of a lost peer is not this rank's doing."""
    lost = f"{fault.exception_type} in communication with other ranks: {fault.message}"
    text = lost if fault.communication else fault.stack
    # The disk may be full, or the script have closed its stderr: neither may cost the recovery.
    with contextlib.suppress(OSError, ValueError):
        print_masked(text.rstrip("\n"))


@dataclass(kw_only=True)
class Outcome:
    """How a generation ended on this rank. None of the fields set: it was interrupted."""

    finished: bool = False
    fault: torch_errors.Description | None = None


@dataclass(kw_only=True)
class GenerationBody:
    """What one generation executes: the user's function bound to its context."""

    function: Callable[[], Any]
    result: Callable[[], dict[str, Any]]
    discard: Callable[[], None]


class Restarter:
    """Runs generations until the launcher says leave."""

    def __init__(self, control: RankControl, groups: abort.ProcessGroups) -> None:
        self.control = control
        self.groups = groups
        self.leftovers = Leftovers()
        self._device_memory = health.DeviceMemory()
        control.groups = groups
        control.on_interrupt = self._keep_trace

    def run(self, first_generation: int, body_for: Callable[[wire.Go], GenerationBody]) -> None:
        """Never returns normally: raises `RestartAborted` when the launcher says leave."""
        next_generation = first_generation
        self.control.report_ready(next_generation, fit=True, reason="")
        while True:
            go = self.control.wait_go(next_generation)
            self.groups.sockets.release()
            self._check_handler()
            self.leftovers.begin()
            body = body_for(go)
            outcome = self._run_generation(go.generation, body.function)
            self._report(go.generation, outcome, body)
            self.control.wait_interrupted(go.generation)
            self.control.send(wire.Acked(generation=go.generation, mono_ns=self.control.clock.monotonic_ns()))
            body.discard()
            was_out_of_memory = outcome.fault is not None and outcome.fault.fault is FaultClass.CUDA_OOM
            del body, outcome
            reason = self._tear_down(empties_cache=was_out_of_memory)
            next_generation = self.control.interrupted + 1
            self.control.report_ready(next_generation, fit=not reason, reason=reason)

    def _check_handler(self) -> None:
        if not self.control.handler_in_place():
            print("nvrx-sre: the interrupt's signal handler had been replaced; installed again", flush=True)
            self.control.reinstall_handler()

    def _run_generation(self, generation: int, function: Callable[[], Any]) -> Outcome:
        outcome = Outcome()
        try:
            try:
                self.control.arm(generation)
                function()
                outcome.finished = True
            except Interrupted:
                raise
            except BaseException as error:  # the boundary of the user's code: everything it raises is a fault
                self.control.armed = None
                outcome.fault = torch_errors.describe(error)
            self.control.armed = None
        except Interrupted:
            # Plain attribute store, no call: the interpreter cannot run the handler before it is done.
            self.control.armed = None
            outcome = Outcome()
        return outcome

    def _report(self, generation: int, outcome: Outcome, body: GenerationBody) -> None:
        control = self.control
        now_ns = control.clock.monotonic_ns()
        if outcome.finished:
            control.send(wire.Finished(generation=generation, step=control.step, result=body.result(), mono_ns=now_ns))
        elif outcome.fault is not None:
            fault = outcome.fault
            control.stacks.raised(fault.stack)
            control.send(
                wire.Fault(
                    generation=generation,
                    fault=fault.fault,
                    communication=fault.communication,
                    exception_type=fault.exception_type,
                    frame=fault.frame,
                    message=fault.message,
                    stack=fault.stack,
                    step=control.step + 1,
                    phase=control.phase,
                    mono_ns=now_ns,
                )
            )
            write_to_log(fault)

    def _keep_trace(self, interrupt: wire.Interrupt) -> None:
        """In the monitor thread: the groups are as the fault left them."""
        trace = flight_recorder.take(with_entries=interrupt.is_traced)
        self.control.stacks.noted(trace, other_threads() if interrupt.is_traced else "")

    def _tear_down(self, *, empties_cache: bool) -> str:
        """Leave the old generation for good; '' or why this process is unfit for another."""
        self.control.enter(Phase.TEARDOWN, tell=False)
        self.groups.abort()
        wait_for_the_unwaited()
        self.groups.clear()
        compiled.reset()
        reason = self.leftovers.end()
        abort.reset_interpreter_state()
        stuck = self.groups.let_go()
        empties_cache = empties_cache or self._device_memory.has_grown()
        return reason or stuck or health.process_fitness(empties_cache=empties_cache)
