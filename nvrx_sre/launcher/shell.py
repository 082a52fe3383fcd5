"""The launcher's loop: inputs in, commands out, records to every view.

    selector (channels, pidfds, signals) -> inputs -> Machine (pure) -> commands -> Effects
                                                       |-> Emit -> Record -> history, telemetry, sinks

Order matters and is fixed: a child's packets are drained before its death is told; all sockets are drained
before a deadline is judged or a fault is told, so that every step reported by then counts; a record reaches
history and telemetry before the next input. The loop never blocks on disk or network of telemetry.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nvrx_sre.core.clock import Clock, seconds, to_ns
from nvrx_sre.core.signals import SignalPipe
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import (
    DecisionUnrecorded,
    Event,
    Record,
    RestartDecided,
    TelemetryDegraded,
    Verdict,
)
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.child_watch import ChildWatch
from nvrx_sre.launcher.config import RunConfig
from nvrx_sre.launcher.effects import OWN_NODE, Effects
from nvrx_sre.launcher.leader_link import LeaderLink, LinkConfig
from nvrx_sre.launcher.machine import Machine
from nvrx_sre.launcher.past import LauncherFolds
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.telemetry.boundary import Boundary
from nvrx_sre.telemetry.hub import Telemetry
from nvrx_sre.telemetry.node_board import RankReading

HOUSEKEEPING_S = 0.5
"""Longest sleep of the loop: halt requests are seen within a second, the loop's own heartbeat stays fresh."""

DECISION_SYNC_S = 0.5
"""Longest wait of a restart for its decision's place on disk."""
DEGRADED_INTERVAL_S = 60.0
"""Shortest time between two records of telemetry's own losses (failure case C52: at most one a minute)."""


_FAULTS = (c.Exited, c.NodeLost, wire.Fault, wire.NodeKill)
"""Inputs, and messages of a child, that end a generation."""


def is_fault(item: c.Input) -> bool:
    """The input ends a generation: what is told of it afterwards no longer counts."""
    return isinstance(item.message if isinstance(item, c.FromChild) else item, _FAULTS)


def faults_last(inputs: Iterable[c.Input]) -> list[c.Input]:
    """The same inputs with faults, and what the same child sent after them, at the end; else in their order."""
    first: list[c.Input] = []
    last: list[c.Input] = []
    faulty: set[int] = set()
    for item in inputs:
        if isinstance(item, c.NodeLost):
            last.append(item)
        elif isinstance(item, c.Exited | c.FromChild) and (is_fault(item) or item.child in faulty):
            faulty.add(item.child)
            last.append(item)
        else:
            first.append(item)
    return first + last


class Recorder:
    """Stamps events and feeds them to history, telemetry and what follows from them."""

    def __init__(self, config: RunConfig, epoch: int, clock: Clock, folds: LauncherFolds, telemetry: Telemetry) -> None:
        self.folds = folds
        """The launcher's own folds; they have seen the journal of earlier epochs."""
        self._run = config.run
        self.epoch = epoch
        self._clock = clock
        self._telemetry = telemetry
        telemetry.companions = folds.parts
        self._seq = 0
        self._next_degraded_ns = 0
        self._degraded: dict[str, tuple[int, int]] = {}
        self._decision_is_new = False

    def emit(self, event: Event, generation: int, rank: int | None = None) -> None:
        """Record an event now, and the events that follow from it."""
        pending: deque[tuple[Event, int | None]] = deque([(event, rank)])
        while pending:
            item, of_rank = pending.popleft()
            self._seq += 1
            record = Record(
                run=self._run,
                epoch=self.epoch,
                generation=generation,
                rank=of_rank,
                seq=self._seq,
                time_ns=self._clock.wall_ns(),
                event=item,
            )
            self.folds.apply(record)
            self._decision_is_new |= isinstance(item, RestartDecided)
            pending.extend(self._telemetry.record(record))

    @property
    def boundary(self) -> Boundary:
        """Where failures of telemetry end."""
        return self._telemetry.boundary

    def incident(self) -> int:
        """Number of the incident that is open, or that ended with the run; 0 if there is none."""
        tracker = self._telemetry.tracker
        if tracker.open is not None:
            return tracker.open.number
        newest = tracker.closed[-1] if tracker.closed else None
        return 0 if newest is None or newest.verdict is not Verdict.EXHAUSTED else newest.number

    def traceparent(self) -> str:
        """Span that the children's own belong under, '' while there is none."""
        return self._telemetry.traceparent

    def await_decision(self, generation: int) -> None:
        """Wait until the newest restart decision is on disk, so that no lost launcher refills a budget.

        Bounded: if the disk does not take it in time, that is recorded, and counted against a cap, and the restart
        goes on.
        """
        if self._decision_is_new:
            self._decision_is_new = False
            if not self.sync():
                self.emit(DecisionUnrecorded(waited_s=DECISION_SYNC_S), generation)

    def sync(self) -> bool:
        """Wait, bounded, until what was recorded is on disk; False if it is not."""
        return self._telemetry.sync(DECISION_SYNC_S)

    def note_channel(self, num_unsent: int, num_bad: int) -> None:
        """Messages to and from children that found no room, and packets of theirs that were none."""
        self._telemetry.channel_losses = (num_unsent, num_bad)

    def note_degradation(self, generation: int) -> None:
        """Record what telemetry dropped or failed at since the last time; at most once a minute."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._next_degraded_ns:
            return
        dropped, failed = self._telemetry.num_dropped(), self._telemetry.num_errors()
        for component in dropped.keys() | failed.keys():
            counts = (dropped.get(component, 0), failed.get(component, 0))
            if counts != self._degraded.get(component, (0, 0)):
                self._degraded[component] = counts
                self._next_degraded_ns = now_ns + to_ns(DEGRADED_INTERVAL_S)
                error = self._telemetry.last_error(component)
                event = TelemetryDegraded(component=component, dropped=counts[0], errors=counts[1], error=error)
                self.emit(event, generation)


class Shell:
    """Runs one machine against the real world until it says stop."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        clock: Clock,
        machine: Machine,
        recorder: Recorder,
        signals: SignalPipe,
    ) -> None:
        self.loop_turned: Callable[[], None] = lambda: None
        self.tell_ranks: Callable[[Mapping[int, RankReading], int], None] = lambda _, __: None
        """Hears, twice a second, of each rank's process and of the bytes of all hot slots."""
        self.unfit_devices: Callable[[], Mapping[int, str]] = dict
        """Devices of this node that should have no rank: index -> why. Asked twice a second."""
        self.say: Callable[[str], None] = lambda _: None
        """Takes a line for whoever watches the launcher, of what is no record."""
        self._refused: dict[int, str] = {}
        """Last said of each node that was sent away."""
        self._unfit_told: set[int] = set()
        self._config = config
        self._directory = directory
        self._clock = clock
        self._machine = machine
        self._recorder = recorder
        self._inputs: deque[c.Input] = deque()
        self._selector = selectors.DefaultSelector()
        self._signals = signals
        self._halt_told = False
        self._next_housekeeping_ns = 0
        self._epoch = recorder.epoch
        self._next_look_ns = 0
        self.effects = Effects(config, directory, clock, recorder.epoch, recorder.emit, self._inputs.append)
        self.effects.node.slots.num_ranks = machine.ranks_on(OWN_NODE)
        self.effects.passes = recorder.folds.past.passes
        self.effects.await_decision = recorder.await_decision
        self.effects.incident = recorder.incident
        self.effects.node.traceparent = recorder.traceparent
        self.effects.node.stacks.boundary = recorder.boundary
        self._watch = ChildWatch(
            self._selector, self.effects.node, clock, self._inputs.append, lambda: machine.world_size
        )
        self._selector.register(self._signals, selectors.EVENT_READ, ("signals", None))

    def listen(self, config: LinkConfig) -> None:
        """Let the other nodes in."""
        link = LeaderLink(config, self._selector, self._clock, self._take_remote)
        link.traceparent = self._recorder.traceparent
        self.effects.lead(link)

    def run(self) -> c.Stop:
        """Block until the run ends; the terminal command. Ends every child, also on an unexpected error."""
        try:
            self.effects.restorables.clear_interrupted(self._recorder.folds.saves)
            self._apply(self._machine.start(self._clock.monotonic_ns()))
            while self.effects.stop is None:
                self._turn()
            return self.effects.stop
        finally:
            self._selector.close()
            self._watch.close()
            self.effects.close()

    def _turn(self) -> None:
        started_ns = self._clock.monotonic_ns()
        self._flush_inputs()
        if self.effects.stop is not None:
            return
        if self.effects.link is not None:
            self.effects.link.flush()
        timeout_s = 0.0 if self._inputs else self._timeout_s()
        before_ns = self._clock.monotonic_ns()
        ready = self._watch.select(timeout_s)
        slept_ns = self._clock.monotonic_ns() - before_ns
        overslept_s = seconds(slept_ns) - timeout_s
        self._check_leads()
        for what, data in ready:
            self._handle_ready(what, data)
        if overslept_s > self._config.limits.deadlines.loop_stall_s:
            self._inputs.append(c.Stalled(seconds=overslept_s))
        self._put_faults_last()
        self._flush_inputs()
        self._housekeeping()
        self._excuse(started_ns + slept_ns)
        deadline_ns = self._machine.next_deadline_ns()
        if deadline_ns is not None and self._clock.monotonic_ns() >= deadline_ns:
            self._drain_all()
            self._put_faults_last()
            self._flush_inputs()
            self._feed(c.Tick())
        self.loop_turned()
        if self._watch.is_to_die:
            self._recorder.sync()
            os.kill(os.getpid(), signal.SIGKILL)  # planned: `launcher_kill`, on record by now so that it fires once

    def _excuse(self, since_ns: int) -> None:
        """If the work of this turn took long (torch is loaded for the first store, a disk is slow), no rank is late."""
        worked_s = seconds(self._clock.monotonic_ns() - since_ns)
        if worked_s > self._config.limits.deadlines.loop_stall_s:
            self._feed(c.Stalled(seconds=worked_s))

    def _check_leads(self) -> None:
        """Raise `Superseded` if another launcher has taken the run; looked at twice a second.

        Before anything that arrived meanwhile is taken in: after a stall, what this launcher would decide of it no
        longer counts.
        """
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + to_ns(HOUSEKEEPING_S)
            self._directory.check_leads(self._epoch)

    def _timeout_s(self) -> float:
        deadline_ns = self._machine.next_deadline_ns()
        if deadline_ns is None:
            return HOUSEKEEPING_S
        until_ns = deadline_ns - self._clock.monotonic_ns()
        return min(HOUSEKEEPING_S, max(0.0, seconds(until_ns)))

    def _flush_inputs(self) -> None:
        while self._inputs and self.effects.stop is None:
            self._feed(self._inputs.popleft())

    def _put_faults_last(self) -> None:
        """A fault ends its generation: take in what the other ranks have sent by now before it is told."""
        if any(map(is_fault, self._inputs)):
            self._drain_all()
            ordered = faults_last(self._inputs)
            self._inputs.clear()
            self._inputs.extend(ordered)

    def _feed(self, item: c.Input) -> None:
        self._apply(self._machine.handle(item, self._clock.monotonic_ns()))
        if isinstance(item, c.Exited):
            self.effects.forget(item.child)

    def _apply(self, commands: Sequence[c.Command]) -> None:
        self.effects.commits_ever = self._recorder.folds.past.commits_ever
        for command in commands:
            self.effects.apply(command)
            if isinstance(command, c.Spawn):
                self._watch.take_forks()

    def _handle_ready(self, what: str, data: Any) -> None:
        if what == "signals":
            self._handle_signals()
        elif what == "link":
            assert self.effects.link is not None, "only a link registers as one"
            self.effects.link.handle_ready(data)
        else:
            self._watch.handle_ready(what, data)

    def _take_remote(self, item: c.Input) -> None:
        """A fact of another node. A refusal is said once, however often the node's orchestrator starts it again."""
        if isinstance(item, c.NodeRefused):
            place = min(max(item.node, 0), self._config.num_nodes)  # whoever errs in the number shares one
            if self._refused.get(place) != item.reason:
                self._refused[place] = item.reason
                self.say(f"node {item.node} was refused: {item.reason}")
        elif isinstance(item, c.NodeJoined):
            self._refused.pop(item.node, None)
        if isinstance(item, c.FromChild) and isinstance(item.message, wire.Step | wire.Alive):
            self._watch.intake.note(item.child, item.message)
        self._inputs.append(item)

    def _handle_signals(self) -> None:
        for number in self._signals.received():
            self._inputs.append(c.SignalReceived(signal=number, by_person=number == signal.SIGINT))

    def _drain_all(self) -> None:
        self._watch.drain_all()
        if self.effects.link is not None:
            self.effects.link.drain()

    def _tell_ranks(self) -> None:
        """What was last heard of each rank's process, and what the hot slots take, for the metrics."""
        readings = {
            child.rank: RankReading(
                pid=child.pid,
                heard_ns=self._clock.to_wall_ns(child.heard_ns),
                step=child.step,
                lateness_s=self._watch.intake.lateness.of(child.rank),
                gpu_s=self._watch.intake.gpu_times.of(child.rank),
            )
            for child in self._machine.seated()
            if child.rank is not None and self._watch.is_watched(child.number) and child.heard_ns
        }
        self.effects.tell_lateness(self._watch.intake.lateness.of)
        self.tell_ranks(readings, sum(file.size_bytes for file in self.effects.node.slots.files().values()))

    def _tell_unfit(self) -> None:
        unfit = self.unfit_devices()
        for index in unfit.keys() - self._unfit_told:
            self._unfit_told.add(index)
            self._inputs.append(c.DeviceUnfit(node=OWN_NODE, index=index, reason=unfit[index]))

    def _housekeeping(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._next_housekeeping_ns:
            return
        self._next_housekeeping_ns = now_ns + to_ns(HOUSEKEEPING_S)
        self._watch.tend()
        if self.effects.link is not None:
            self.effects.link.drain()
            self.effects.link.tend()
        intake = self._watch.intake
        self._recorder.note_channel(self.effects.node.num_unsent + intake.num_dropped, intake.num_bad_packets)
        self._recorder.note_degradation(self._machine.generation)
        self._tell_ranks()
        self._tell_unfit()
        request = None if self._halt_told else self._directory.halt_request()
        if request is not None:
            self._halt_told = True
            self._inputs.append(c.HaltSeen(reason=request[0], by=request[1]))
