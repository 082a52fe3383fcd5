"""Series of the phase the job is in and of who takes part in its formation: one part of `telemetry.series`.

Model: the job is in the phase of the rank that is furthest behind; within the step loop, in the one entered last, and
in `step` only when no rank is in another phase of the loop: the watchdog does not judge ranks that wait for one whose
first step, evaluation or save may last. A fault puts it into `teardown` until every rank has left, then it is in
`rendezvous`. Invariants: those of `telemetry.series_part`; entry times rise strictly. Not thread-safe.
"""

from __future__ import annotations

from nvrx_sre.core.clock import seconds
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Phase, Record
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.catalog import NodeCount
from nvrx_sre.telemetry.series_part import SeriesPart
from nvrx_sre.telemetry.values import Values

STATE_TICK_S = 1e-6
"""Least distance of two entry times, so that the largest is unique (a float64 epoch resolves 0.24 us)."""
_LOOP = 4
_POSITION = {
    Phase.TEARDOWN: -1,
    Phase.INIT: 0,
    Phase.RENDEZVOUS: 1,
    Phase.REBUILD: 2,
    Phase.LOAD: 3,
    Phase.STEP: 5,
    Phase.FINALIZE: 6,
}
"""Order of the phases of a generation; the others are those of the step loop with a deadline of their own."""


def _position(phase: Phase) -> int:
    return _POSITION.get(phase, _LOOP)


class PhaseSeries(SeriesPart):
    """Where the job is in its generation."""

    STATE = ("_phases", "_phase", "_entered_s", "_tearing_down", "_num_nodes", "_world_size")

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self._phases: dict[int, Phase] = {}
        self._phase: Phase | None = None
        self._entered_s = 0.0
        self._tearing_down = False
        self._num_nodes = 1
        self._world_size = 1
        self.handlers = {
            schema.RunStarted: self._on_run_started,
            schema.LauncherStarted: self._on_launcher_started,
            schema.PhaseEntered: self._on_phase_entered,
            schema.GenerationFormed: self._on_generation_formed,
            schema.StepsCommitted: self._on_steps_committed,
            schema.FaultDetected: self._on_fault_detected,
            schema.TeardownFinished: self._on_teardown_finished,
        }

    def _enter(self, phase: Phase, time_ns: int) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._entered_s = max(seconds(time_ns), self._entered_s + STATE_TICK_S)
            self.values.set(catalog.PHASE_ENTERED, self._entered_s, phase)

    def _on_run_started(self, _: Record, event: schema.RunStarted) -> None:
        self._num_nodes = event.num_nodes
        self._world_size = event.nproc
        self._count_nodes()

    def _on_launcher_started(self, _: Record, __: schema.LauncherStarted) -> None:
        self._phases.clear()
        self._phase = None
        self._tearing_down = False

    def _on_phase_entered(self, record: Record, event: schema.PhaseEntered) -> None:
        if record.rank is None or (self._tearing_down and event.phase is not Phase.RENDEZVOUS):
            return
        self._tearing_down = False
        self._phases[record.rank] = event.phase
        behind = min(_position(phase) for phase in self._phases.values())
        if _position(event.phase) == behind:
            self._enter(event.phase, event.entered_ns)
        else:
            slowest = next(phase for phase in self._phases.values() if _position(phase) == behind)
            self._enter(slowest, event.entered_ns)
        self._count_nodes()

    def _on_generation_formed(self, record: Record, event: schema.GenerationFormed) -> None:
        self._tearing_down = False
        self._world_size = event.world_size
        for rank in range(event.world_size):
            if _position(self._phases.get(rank, Phase.INIT)) < _position(Phase.REBUILD):
                self._phases[rank] = Phase.REBUILD
        self._count_nodes()

    def _on_steps_committed(self, _: Record, event: schema.StepsCommitted) -> None:
        if self._tearing_down or event.proven_by_restore:
            return
        self._phases = dict.fromkeys(self._phases, Phase.STEP)
        self._enter(Phase.STEP, event.committed_ns)

    def _on_fault_detected(self, record: Record, __: schema.FaultDetected) -> None:
        self._phases.clear()
        self._tearing_down = True
        self._enter(Phase.TEARDOWN, record.time_ns)
        self._count_nodes()

    def _on_teardown_finished(self, record: Record, __: schema.TeardownFinished) -> None:
        self._tearing_down = False
        self._enter(Phase.RENDEZVOUS, record.time_ns)

    def _count_nodes(self) -> None:
        """A node has joined when all its ranks are in the rendezvous or beyond; ranks are contiguous on nodes."""
        per_node = max(1, self._world_size // self._num_nodes)
        there = [rank for rank, phase in self._phases.items() if _position(phase) >= _position(Phase.RENDEZVOUS)]
        joined = sum(
            all(rank in there for rank in range(node * per_node, (node + 1) * per_node))
            for node in range(self._num_nodes)
        )
        self.values.set(catalog.RENDEZVOUS_NODES, self._num_nodes, NodeCount.EXPECTED)
        self.values.set(catalog.RENDEZVOUS_NODES, joined, NodeCount.JOINED)
        self.values.set(catalog.RENDEZVOUS_NODES, self._num_nodes - joined, NodeCount.MISSING)
