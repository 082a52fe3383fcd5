"""Nodes that come, go, and come back: what the world does meanwhile.

Model: node 0 is the leader's own and always there; another one joins, and may be lost with everything on it. While a
node is awaited its ranks' seats stay vacant, so no generation is opened. If the others are enough, the world does
without it once it has had its time (`nodes.grace_s`, at the start of the run and after a loss alike); if they are not,
the run waits for it (`nodes.join_s`) and then ends retryable; not so if its launcher was refused in the meantime, since
that would be refused again. A node that comes back while the world does without it is taken in at the next formation.

Which device is never used again is the policy's (`history.excluded`); that a node is left out is forgotten with the
launcher. Pure.
"""

from __future__ import annotations

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.schema import NodeJoined, NodeLost, Role
from nvrx_sre.launcher.machine_job import Job, Stage
from nvrx_sre.launcher.machine_recovery import Recovery
from nvrx_sre.launcher.machine_roster import Child, Roster
from nvrx_sre.launcher.machine_saves import Saves


class Nodes:
    """Who is there, and who is waited for."""

    def __init__(self, job: Job, roster: Roster, saves: Saves, recovery: Recovery) -> None:
        self._job = job
        self._roster = roster
        self._saves = saves
        self._recovery = recovery
        self._since_ns = 0
        """When the set of nodes changed last."""
        self._num_changes = 0
        self._rests_on: tuple[int, ...] = ()
        self._devices: tuple[str, ...] | None = None
        self._answer_s: float | None = None
        """The newest answer of `_wait_s`, with what it rests on."""
        self._refused: dict[int, str] = {}
        """Nodes whose launcher was refused while they were not there, and why."""

    def start(self, now_ns: int) -> None:
        """The launcher begins to wait."""
        self._since_ns = now_ns

    def join(self, node: int, name: str, now_ns: int, gpu_uuids: tuple[str, ...] = ()) -> str:
        """The node is there; why the run cannot go on with it, '' if it can."""
        job = self._job
        self._changed(now_ns)
        job.absent.discard(node)
        self._refused.pop(node, None)
        called = job.name_node(node, name, gpu_uuids)
        job.emit(NodeJoined(node=called, node_rank=node, missing=len(job.absent)), generation=job.pending)
        if job.stage is Stage.STOPPING:
            return ""
        self._saves.start_writer(now_ns, node)
        self._recovery.refill_standbys(now_ns)
        if job.stage is Stage.FORMING:
            # An earlier launcher may have excluded a device of it, or it be another host than the planned world has.
            brings_less = not job.is_enough(job.num_devices_of(job.left_out))
            if brings_less:
                job.left_out = set()  # whom the world was enough without is waited for again
            if brings_less or job.left_out or job.history.excluded or self._recovery.is_changing_world:
                self._recovery.take_back_nodes(now_ns)
            self._recovery.fill(now_ns, job.ranks_on(node))
        num_devices = job.num_devices_of(job.left_out)
        if job.is_enough(num_devices):
            return ""
        excluded = ", ".join(job.history.excluded)
        return f"{num_devices} ranks are too few without excluded devices ({excluded}); `nvrx-sre resume` takes them in"

    def refuse(self, node: int, reason: str) -> None:
        """A launcher that came as this node was sent away. Of a node that is there it says nothing."""
        if node in self._job.absent:
            self._refused[node] = reason

    def lose(self, node: int, reason: str, now_ns: int) -> list[Child]:
        """The node is gone; the children that are lost with it, workers first, by rank."""
        job = self._job
        self._changed(now_ns)
        job.absent.add(node)
        lost = [child for child in self._roster if child.node == node]
        name = job.node_name(node)
        job.emit(NodeLost(node=name, node_rank=node, reason=reason, ranks=job.num_ranks_on(node)))
        for child in lost:
            self._roster.kill(child, "its node is lost", now_ns)
        return sorted(lost, key=lambda child: (child.role is not Role.WORKER, child.rank or 0))

    def deadline_ns(self) -> int | None:
        """When waiting for nodes ends, None if none is waited for."""
        if self._job.stage is not Stage.FORMING or self._recovery.is_changing_world:
            return None
        wait_s = self._wait_s()
        return None if wait_s is None else self._since_ns + to_ns(wait_s)

    def on_tick(self, now_ns: int) -> tuple[ExitCode, str] | None:
        """Go on without the nodes that had their time; how the run ends if it cannot, and why."""
        due_ns = self.deadline_ns()
        if due_ns is None or now_ns < due_ns:
            return None
        if not self._is_enough_there():
            return self._given_up()
        self._job.left_out |= self._job.absent
        self._recovery.plan(self._job.devices_without(""), now_ns)
        return None

    def _given_up(self) -> tuple[ExitCode, str]:
        awaited = sorted(self._awaited())
        reason = f"node {', '.join(map(str, awaited))} did not come within {self._patience_s():g} s"
        refused = [f"node {node} was refused: {self._refused[node]}" for node in awaited if node in self._refused]
        if refused:
            return ExitCode.CONFIG, "; ".join([reason, *refused])
        return ExitCode.RETRYABLE, reason

    def _changed(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self._num_changes += 1

    def _wait_s(self) -> float | None:
        """How long nodes are waited for, None if none is.

        The loop asks at every turn, and the answer looks at every device: it is worked out when something has changed.
        """
        job = self._job
        rests_on = (self._num_changes, len(job.left_out), len(job.history.excluded))
        if self._rests_on != rests_on or self._devices is not job.devices:
            self._rests_on, self._devices = rests_on, job.devices
            self._answer_s = self._patience_s() if self._awaited() else None
        return self._answer_s

    def _awaited(self) -> set[int]:
        """Nodes of the world that are not there."""
        job = self._job
        return {node for node in job.absent if job.num_ranks_on(node)}

    def _is_enough_there(self) -> bool:
        job = self._job
        return job.is_enough(job.num_devices_of(job.left_out | job.absent))

    def _patience_s(self) -> float:
        limits = self._job.config.limits.nodes
        return limits.grace_s if self._is_enough_there() else limits.join_s
