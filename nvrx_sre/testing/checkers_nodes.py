"""What must hold of nodes that come and go, recounted from the records alone.

No generation is formed with a node that is not there, nor with fewer ranks than the run may have; nobody is left out
before it had its time; whoever was back when a fault struck takes part in the generation after it; a run that gives up
for want of a node has waited for it. Shares no code with the machines. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvrx_sre.core.clock import seconds, to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events import schema
from nvrx_sre.events.schema import FaultClass, Record

_SLACK_NS = to_ns(0.001)
_STALL_NS = to_ns(30.0)
"""A launcher that stands still, or drains, gives up that much later."""


@dataclass(frozen=True, kw_only=True)
class NodeRules:
    """What the job says of its nodes. Seconds."""

    world_multiple: int
    grace_s: float
    join_s: float


def check_nodes(records: Sequence[Record], rules: NodeRules) -> list[str]:
    """Broken rules, each with the record's number; empty if all hold, and for a job of one node."""
    fold = _Nodes(rules=rules)
    for record in records:
        fold.apply(record)
    return fold.problems


@dataclass(kw_only=True)
class _Nodes:
    """Who is there, and who took part last."""

    rules: NodeRules
    problems: list[str] = field(default_factory=list)
    num_ranks: int = 0
    num_least: int = 0
    num_nodes: int = 1
    epoch: int = 0
    there: set[str] = field(default_factory=set)
    """Names of the other nodes that are there."""
    since_ns: int = 0
    """When a node came or went last, or the launcher began."""
    left_out: set[str] = field(default_factory=set)
    """Nodes that the newest generation does without."""
    excluded: set[str] = field(default_factory=set)
    due: set[str] = field(default_factory=set)
    """Nodes that were there when the newest fault was decided on."""
    backoff_until_ns: int = 0
    """Until then no generation is formed, which would tell that a node was given up."""

    def apply(self, record: Record) -> None:
        """Fold one record."""
        if record.epoch > self.epoch:
            self.epoch, self.there, self.left_out, self.due = record.epoch, set(), set(), set()
            self.since_ns = record.time_ns
        handler = _HANDLERS.get(type(record.event))
        if handler is not None:
            handler(self, record, record.event)

    def _problem(self, record: Record, text: str) -> None:
        self.problems.append(f"record {record.seq} ({type(record.event).__name__}): {text}")

    def on_started(self, record: Record, event: schema.RunStarted) -> None:
        self.num_ranks, self.num_least, self.num_nodes = event.nproc, event.min_world_size, event.num_nodes

    def on_joined(self, record: Record, event: schema.NodeJoined) -> None:
        waited_ns = record.time_ns - max(self.since_ns, self.backoff_until_ns)
        if (
            event.node not in self.left_out
            and waited_ns > to_ns(max(self.rules.grace_s, self.rules.join_s)) + _STALL_NS
        ):
            self._problem(record, f"{event.node} was waited for, {seconds(waited_ns):.1f} s")
        if event.node in self.there:
            self._problem(record, f"{event.node} joined and was there")
        self.there.add(event.node)
        self.since_ns = record.time_ns
        if event.missing != self.num_nodes - 1 - len(self.there):
            self._problem(record, f"says that {event.missing} nodes are missing, {sorted(self.there)} are there")

    def on_lost(self, record: Record, event: schema.NodeLost) -> None:
        if event.node not in self.there:
            self._problem(record, f"{event.node} was lost and was not there")
        self.there.discard(event.node)
        self.since_ns = record.time_ns

    def on_decided(self, record: Record, event: schema.RestartDecided) -> None:
        self.due = set(self.there)
        self.backoff_until_ns = record.time_ns + to_ns(event.backoff_s)

    def on_excluded(self, record: Record, event: schema.RankExcluded) -> None:
        self.excluded.add(event.device)

    def on_reset(self, record: Record, event: schema.BudgetReset) -> None:
        self.excluded.clear()

    def on_formed(self, record: Record, event: schema.GenerationFormed) -> None:
        present = {device.rpartition("/")[0] for device in event.devices} - {"host0"}
        if present - self.there:
            self._problem(record, f"{sorted(present - self.there)} take part and are not there")
        if event.world_size < self.num_least:
            self._problem(record, f"{event.world_size} ranks, {self.num_least} are the least")
        absent = {f"host{number}" for number in range(1, self.num_nodes)} - self.there - present
        waited_ns = event.go_ns - self.since_ns
        if absent - self.left_out and waited_ns < to_ns(self.rules.grace_s) - _SLACK_NS:
            self._problem(record, f"{sorted(absent - self.left_out)} had {seconds(waited_ns):.1f} s to come back")
        if event.world_size < self._least_world(self.due & self.there):
            self._problem(record, f"{event.world_size} ranks although {sorted(self.due & self.there)} are back")
        self.left_out = absent

    def _least_world(self, nodes: set[str]) -> int:
        """Ranks that the leader's node and these make."""
        per_node = self.num_ranks // self.num_nodes
        names = [f"{node}/{index}" for node in {"host0", *nodes} for index in range(per_node)]
        num_usable = len(set(names) - self.excluded)
        return num_usable - num_usable % self.rules.world_multiple

    def on_finished(self, record: Record, event: schema.RunFinished) -> None:
        is_want = event.exit_code == ExitCode.RETRYABLE and "did not come" in event.reason
        waited_ns = record.time_ns - self.since_ns
        if is_want and waited_ns < to_ns(self.rules.join_s) - _SLACK_NS:
            self._problem(record, f"gave up after {seconds(waited_ns):.1f} s: {event.reason}")

    def on_fault(self, record: Record, event: schema.FaultDetected) -> None:
        node = event.device.rpartition("/")[0]
        if event.fault is FaultClass.NODE_LOST and node in self.there and "silent" in event.message:
            self._problem(record, f"{node} is told lost and is there")


_HANDLERS: dict[type[schema.Event], Callable[[_Nodes, Record, Any], None]] = {
    schema.RunStarted: _Nodes.on_started,
    schema.NodeJoined: _Nodes.on_joined,
    schema.NodeLost: _Nodes.on_lost,
    schema.FaultDetected: _Nodes.on_fault,
    schema.RestartDecided: _Nodes.on_decided,
    schema.RankExcluded: _Nodes.on_excluded,
    schema.BudgetReset: _Nodes.on_reset,
    schema.GenerationFormed: _Nodes.on_formed,
    schema.RunFinished: _Nodes.on_finished,
}
