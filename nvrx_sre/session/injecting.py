"""Where planned faults fire on a rank. Without a plan this is one attribute test a point.

The injection code is loaded by name and only when a plan is in force, so that a run without one never
holds code that can kill it. Persistence of 'fires once' is the launcher's: it counts the passes that
`Injected` messages report, and hands them back with every 'go'.
"""

from __future__ import annotations

import importlib
import statistics
from collections import deque
from pathlib import Path

from nvrx_sre.events import messages as wire
from nvrx_sre.faults.plan import FaultPlan, FaultSpec
from nvrx_sre.session.process import RankProcess

NUM_NEWEST_STEPS = 15
"""Steps of which the median is the usual one."""


class Injector:
    """Planned faults of one generation on one rank; the actions that a fault may ask for."""

    def __init__(self, process: RankProcess, go: wire.Go, rank: int) -> None:
        self._process = process
        self._generation = go.generation
        self._passes = dict(go.passes)
        self._plan = FaultPlan.parse(process.settings.fault_specs)
        self.rank = rank
        self.run_dir = Path(process.settings.run_dir)
        self.launcher_pid = process.settings.launcher_pid
        self.poisoned = False
        self.usual_step_s = 0.1
        self._newest_s: deque[float] = deque(maxlen=NUM_NEWEST_STEPS)
        self._total_step_s = 0.0

    def step_committed(self, total_step_s: float) -> None:
        """Know how long a step usually takes, which `slow` stretches (median of the newest steps, seconds).

        Not the mean: steps that a fault has held would make the next one longer still. `total_step_s`: of all steps
        of this generation.
        """
        self._newest_s.append(total_step_s - self._total_step_s)
        self._total_step_s = total_step_s
        self.usual_step_s = statistics.median(self._newest_s)

    def at(self, step: int, point: str) -> None:
        """Fire what is due at `point` of `step` on this rank."""
        for spec in self._plan.due(self.rank, step, point, self._passes):
            self._announce(spec, step)
            importlib.import_module("nvrx_sre.faults.injection").fire(spec, self)

    def _announce(self, spec: FaultSpec, step: int) -> None:
        text = str(spec)
        self._passes[text] = self._passes.get(text, 0) + 1
        control = self._process.control
        control.send(
            wire.Injected(
                generation=self._generation,
                spec=text,
                step=step,
                passes=self._passes[text],
                mono_ns=control.clock.monotonic_ns(),
            )
        )

    def poison_loss(self) -> None:
        """The loss of the step in hand becomes not-a-number."""
        self.poisoned = True

    def request_node_kill(self) -> None:
        """Ask the launcher to lose the node."""
        control = self._process.control
        control.send(wire.NodeKill(generation=self._generation, mono_ns=control.clock.monotonic_ns()))
