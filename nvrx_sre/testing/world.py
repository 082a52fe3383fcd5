"""A simulated world around real machines: one thread, manual time, seeded.

Model: a queue of (time, action). Actions are deliveries of messages, deaths, delays of simulated processes; between
them the machines' deadlines are ticked. Commands act on simulated children, network and disk; emitted events become
records and are folded before the next input, exactly as the real shell does. The same seed gives the same journal,
byte for byte.

    World ── disk, hosts, nodes, records   outlive launchers (a node is a launcher that does not lead)
      └─ SimLauncher ── Machine, folds     one an epoch; a stopped one lives on beside its successor
           └─ SimWorker, SimWriter         processes on a host

`run` drives one launcher to its end; `run_job` plays the orchestrator and the operator too: it starts again
after 75 and 143, and resumes after 93, until the run has finished. What must never happen is noted in
`violations`; `testing.checkers` finds the rest in the records.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Sequence

from nvrx_sre.checkpoint.agree import Fence
from nvrx_sre.core.clock import seconds, to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.rng import seeded
from nvrx_sre.events.codec import to_dict
from nvrx_sre.events.schema import BudgetReset, Phase, Record, RolledBack
from nvrx_sre.launcher import commands as c
from nvrx_sre.testing.checkers_blame import Strike
from nvrx_sre.testing.clock import ManualClock
from nvrx_sre.testing.world_disk import Commit, Disk
from nvrx_sre.testing.world_launcher import RUN, SimLauncher
from nvrx_sre.testing.world_network import Host
from nvrx_sre.testing.world_nodes import SimNode
from nvrx_sre.testing.world_plan import SimFault, SimKind, WorldConfig
from nvrx_sre.testing.world_ranks import SimWorker, state_after

RESTART_S = 1.0
"""The orchestrator starts the job again after this."""
JOURNAL_LAG_S = 1.0
"""Longest time for which a record may not be on the disk yet, unless somebody waited for it."""
_OF_DISK = frozenset({SimKind.STORAGE, SimKind.SLOW_DISK})
"""Faults that wait for the writer, not for a rank."""


class World:
    """Launchers, processes, network, disk and time."""

    def __init__(self, seed: int, config: WorldConfig, faults: Sequence[SimFault] = ()) -> None:
        self.rng = seeded(seed)
        self.clock = ManualClock()
        self.config = config
        self.disk = Disk()
        self.hosts = [Host(number=number) for number in range(config.num_hosts)]
        self.nodes: list[SimNode] = []
        """Launchers of the hosts beside the leader's."""
        self.records: list[Record] = []
        self.violations: list[str] = []
        self.reached: set[str] = set()
        """Rare states that this seed has been through."""
        self.kills_ns: dict[int, int] = {}
        """Processes that a launcher killed, and when (wall time)."""
        self.strikes: list[Strike] = []
        """Planned faults that have struck, in order."""
        self.num_bad_starts = 0
        """Processes that will die while they import."""
        self.launchers: list[SimLauncher] = []
        self._left = {fault: fault.times for fault in faults}
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._pids = itertools.count(1000)
        self._num_synced = 0
        self._rollbacks: list[tuple[int, int, int]] = []
        """(epoch, generation, step) of every rollback there ever was."""
        self._final_state = state_after(config.num_steps)
        self.nodes = [SimNode(self, host) for host in self.hosts[1:]]

    # --- driving --------------------------------------------------------------------------------------------

    def run_job(self, *, max_launchers: int = 20, max_s: float = 36_000.0) -> int:
        """Run until finished, as orchestrator and operator; the last exit code, -1 if it never ended."""
        while len(self.launchers) < max_launchers:
            exit_code = self.run(max_s=max_s)
            if exit_code == ExitCode.FINISHED or self.violations:
                self._settle()
                return exit_code
            if exit_code == ExitCode.DO_NOT_RESTART:
                self._resume()
            self._drive(lambda: False, self.now_ns + to_ns(RESTART_S))
        return -1

    def run(self, *, max_s: float = 36_000.0) -> int:
        """Run a launcher, and whoever takes over from it, to the end; the exit code, -1 if it was killed or hung."""
        self._begin_launcher()
        if not self._drive(lambda: self.newest.is_over, self.now_ns + to_ns(max_s)):
            self.violation(f"the run did not end within {max_s:g} s")
            return -1
        return -1 if self.newest.exit_code is None else self.newest.exit_code

    @property
    def newest(self) -> SimLauncher:
        """The launcher of the highest epoch."""
        return self.launchers[-1]

    def journal(self) -> bytes:
        """The records as the journal would hold them."""
        return b"".join(json.dumps(to_dict(record)).encode() + b"\n" for record in self.records)

    def violation(self, text: str) -> None:
        """Something that must never happen."""
        self.violations.append(f"at {seconds(self.now_ns):.3f} s: {text}")

    def reach(self, state: str) -> None:
        """A rare state that the seeds together must go through."""
        self.reached.add(state)

    # --- what the simulated parts use -----------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        """Monotonic now."""
        return self.clock.monotonic_ns()

    def schedule(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do `action` after `delay_s`."""
        self.schedule_at(self.now_ns + to_ns(delay_s), action)

    def schedule_at(self, at_ns: int, action: Callable[[], None]) -> None:
        """Do `action` at a time."""
        heapq.heappush(self._queue, (at_ns, next(self._order), action))

    def new_pid(self) -> int:
        """A process number that no other process had."""
        return next(self._pids)

    def append(self, record: Record) -> None:
        """A launcher's journal takes a record."""
        self.records.append(record)
        if isinstance(record.event, RolledBack):
            self._rollbacks.append((record.epoch, record.generation, record.event.step))

    def check_offer(self, commits: Sequence[Commit]) -> None:
        """What a generation may restore was not abandoned by a later one, whatever number that one had."""
        for commit in commits:
            line = (commit.epoch, commit.generation)
            if any(line < (epoch, generation) and commit.step > step for epoch, generation, step in self._rollbacks):
                self.violation(f"an abandoned line came back: {commit.directory} of epoch {commit.epoch}")

    def check_save(self, epoch: int, generation: int, step: int) -> None:
        """What is to be saved was not abandoned before."""
        line = (epoch, generation)
        if any(line < (later, at) and step > back for later, at, back in self._rollbacks):
            self.violation(f"a save of step {step} was started although its line was abandoned")

    def sync(self, epoch: int) -> None:
        """Somebody waited until what is recorded is on the disk."""
        if self.newest.epoch == epoch:
            self._num_synced = len(self.records)

    def lose_records(self, epoch: int) -> None:
        """The launcher died: of its newest records some were not on the disk."""
        since_ns = self.clock.wall_ns() - to_ns(self.rng.uniform(0.0, JOURNAL_LAG_S))
        kept = len(self.records)
        while kept > self._num_synced and self.records[kept - 1].time_ns > since_ns:
            if self.records[kept - 1].epoch != epoch:
                break
            kept -= 1
        if kept < len(self.records):
            self.reach("records were lost with their launcher")
            del self.records[kept:]

    def add_fence(self, generation: int, step: int) -> None:
        """Abandon what lies above `step` of earlier generations, for ever."""
        self.disk.fences.append(Fence(generation=generation, step=step))

    def take_over_after(self, launcher: SimLauncher, delay_s: float) -> None:
        """Another launcher takes the run if this one still stands still then."""

        def take_over() -> None:
            if launcher.is_stalled and launcher is self.newest:
                self.reach("a launcher took over from one that stood still")
                self._begin_launcher()

        self.schedule(delay_s, take_over)

    def planned(self, worker: SimWorker, step: int, phase: Phase) -> SimKind | None:
        """The fault that is due here, used up by one."""
        for fault, left in self._left.items():
            is_due = step == fault.step if fault.phase is Phase.STEP else step >= fault.step
            is_left = left > 0 or fault.times == 0
            is_here = fault.rank == worker.rank and fault.phase is phase and fault.kind not in _OF_DISK
            if is_here and is_due and is_left:
                self._left[fault] = left - 1
                self.strikes.append(Strike(kind=fault.kind, rank=worker.rank, generation=worker.generation))
                return fault.kind
        return None

    def fires(self, kind: SimKind, step: int) -> bool:
        """True once for each planned fault of `kind` whose step has been reached."""
        for fault, left in self._left.items():
            if fault.kind is kind and left > 0 and step >= fault.step:
                self._left[fault] = left - 1
                return True
        return False

    def check_final_state(self, worker: SimWorker) -> None:
        """The state after the last step must be that of an uninterrupted run."""
        if worker.state != self._final_state:
            self.violation(f"rank {worker.rank} finished with another state than the uninterrupted run")

    # --- inside ---------------------------------------------------------------------------------------------

    def _begin_launcher(self) -> None:
        self.launchers.append(SimLauncher(self, self.disk.take_epoch()))
        self.newest.begin()

    def _resume(self) -> None:
        """The operator refills the budgets, under an epoch of its own."""
        record = Record(
            run=RUN,
            epoch=self.disk.take_epoch(),
            generation=self.newest.machine.generation,
            rank=None,
            seq=1,
            time_ns=self.clock.wall_ns(),
            event=BudgetReset(reason="simulated operator"),
        )
        self.append(record)
        self._num_synced = len(self.records)

    def _settle(self) -> None:
        """After the end: launchers that were superseded wake up, notice, and leave nothing behind."""
        self._drive(lambda: all(item.is_over for item in self.launchers), self.now_ns + to_ns(100.0))
        if any(not item.is_over for item in self.launchers):
            self.violation("a superseded launcher lived on")

    def _drive(self, is_done: Callable[[], bool], end_ns: int) -> bool:
        """Let the world turn until `is_done`, or until `end_ns`; True if it was done."""
        while not is_done():
            due_ns, launcher = self._due()
            action_ns = self._queue[0][0] if self._queue else None
            is_action = action_ns is not None and (due_ns is None or action_ns <= due_ns)
            next_ns = action_ns if is_action else due_ns
            if next_ns is None or next_ns > end_ns:
                self.clock.advance_to(max(end_ns, self.now_ns))
                return is_done()
            self.clock.advance_to(max(next_ns, self.now_ns))
            if launcher is None or is_action:
                heapq.heappop(self._queue)[2]()
            else:
                self._tick(launcher)
            if len(self.violations) > _MAX_VIOLATIONS:
                return is_done()
        return True

    def _due(self) -> tuple[int | None, SimLauncher | None]:
        """The tick that comes first, and whose it is; of launchers that live and do not stand still."""
        first_ns: int | None = None
        first: SimLauncher | None = None
        for item in self.launchers:
            if item.due_ns is None or item.is_over or item.is_stalled:
                continue
            if first_ns is None or item.due_ns < first_ns:
                first_ns, first = item.due_ns, item
        return first_ns, first

    def _tick(self, launcher: SimLauncher) -> None:
        launcher.feed(c.Tick())
        if not launcher.is_over and launcher.due_ns is not None and launcher.due_ns <= self.now_ns:
            self.violation("a deadline stays due after its tick: the loop would spin")
            launcher.crash()


_MAX_VIOLATIONS = 20
"""A world that breaks this often has shown enough."""
