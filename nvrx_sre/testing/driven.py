"""A machine driven by hand: a test says what children do and sees the commands and events that follow.

Unlike `testing.world` nothing happens by itself; each method is one fact or one obvious group of facts. Time
stands still unless the test moves it. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from nvrx_sre.core.limits import Limits
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import Event, Phase, Record, Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.machine import Machine, MachineConfig, MachineStart
from nvrx_sre.policy.history import History
from nvrx_sre.testing.clock import ManualClock

_Command = TypeVar("_Command", bound=c.Command)
_Event = TypeVar("_Event", bound=Event)


class DrivenMachine:
    """A machine with its history, its commands and its records in order."""

    def __init__(
        self,
        *,
        num_ranks: int = 2,
        num_standbys: int = 1,
        limits: Limits | None = None,
        start: MachineStart | None = None,
        history: History | None = None,
        **settings: Any,
    ) -> None:
        """`settings`: further fields of `MachineConfig`."""
        self.clock = ManualClock(start_ns=1_000_000_000)
        self.history = history or History()
        self.commands: list[c.Command] = []
        self.records: list[Record] = []
        config = MachineConfig(
            world_size=num_ranks,
            num_standbys=num_standbys,
            limits=limits or Limits(),
            **settings,
        )
        begin = MachineStart(
            generation=0, high_water=0, wall_offset_ns=self.clock.wall_offset_ns, commits_on_record=False
        )
        self.machine = Machine(config, self.history, start or begin)
        self.num_ranks = num_ranks
        self._take(self.machine.start(self.clock.monotonic_ns()))

    # --- facts ----------------------------------------------------------------------------------------------

    def feed(self, item: c.Input) -> None:
        """One input; what follows is in `commands` and `records`."""
        self._take(self.machine.handle(item, self.clock.monotonic_ns()))

    def say(self, child: int, *messages: wire.Message) -> None:
        """Messages of a child."""
        for message in messages:
            self.feed(c.FromChild(child=child, message=message))

    def wait(self, seconds: float) -> None:
        """Let time pass; ticks come at every deadline on the way."""
        end_ns = self.clock.monotonic_ns() + round(seconds * 1e9)
        for _ in range(1000):
            deadline_ns = self.machine.next_deadline_ns()
            if deadline_ns is None or deadline_ns > end_ns:
                break
            self.clock.advance_to(max(deadline_ns, self.clock.monotonic_ns()))
            self.feed(c.Tick())
        self.clock.advance_to(end_ns)

    def start_child(self, child: int, *, fit: bool = True) -> None:
        """The child was started and parked."""
        self.feed(c.Spawned(child=child, pid=100 + child, start_ticks=1))
        self.say(child, wire.Parked(fit=fit, note="", mono_ns=self.now_ns))

    def make_ready(self, child: int, generation: int | None = None, *, fit: bool = True) -> None:
        """The child is ready for `generation` (the pending one)."""
        number = self.machine.generation + 1 if generation is None else generation
        self.say(child, wire.Ready(generation=number, fit=fit, reason="", mono_ns=self.now_ns))

    def leave_generation(self, *ranks: int) -> None:
        """Interrupted ranks acknowledge and get ready."""
        for rank in ranks:
            self.say(self.child_of(rank), wire.Acked(generation=self.machine.generation, mono_ns=self.now_ns))
            self.make_ready(self.child_of(rank))

    def enter(self, rank: int, phase: Phase, step: int = 0) -> None:
        """The rank entered a phase of the open generation."""
        entered = wire.Entered(generation=self.machine.generation, phase=phase.value, step=step, mono_ns=self.now_ns)
        self.say(self.child_of(rank), entered)

    def restore(self, step: int = 0, source: str = "fresh", slot: int = -1) -> None:
        """Every rank goes from 'go' to its step loop with the state of `step`; `slot`: where generation 1 sealed it."""
        for phase in (Phase.RENDEZVOUS, Phase.REBUILD, Phase.LOAD):
            for rank in range(self.num_ranks):
                self.enter(rank, phase, step)
        for rank in range(self.num_ranks):
            restored = wire.Restored(
                generation=self.machine.generation,
                step=step,
                source=source,
                seconds=0.1,
                mono_ns=self.now_ns,
                slot=slot,
                slot_generation=int(slot >= 0),
            )
            self.say(self.child_of(rank), restored)
        for rank in range(self.num_ranks):
            self.enter(rank, Phase.FIRST_STEP, step)

    def begin(self) -> None:
        """From the start to the step loop of generation 1, writer and standbys parked."""
        for spawn in self.all(c.Spawn):
            self.start_child(spawn.child)
        for rank in range(self.num_ranks):
            self.make_ready(self.child_of(rank))
        self.restore()

    def step(self, step: int, ranks: Iterable[int] | None = None, **changes: Any) -> None:
        """Ranks report a step, sealed in slot `step % 3` and without a durable save unless told otherwise."""
        for rank in range(self.num_ranks) if ranks is None else ranks:
            slot = self.step_report(rank, step, **changes).slot
            if slot >= 0:
                self.seal(rank, step, slot)

    def step_report(self, rank: int, step: int, **changes: Any) -> wire.Step:
        """A rank reports a step and is not done copying it; the report."""
        message = wire.Step(
            generation=self.machine.generation,
            step=step,
            mono_ns=self.now_ns,
            step_s=0.1 * step,
            data_s=0.0,
            checkpoint_block_s=0.0,
            evaluate_s=0.0,
            tokens=100 * step,
            loss=1.0 / step,
            has_loss=True,
            slot=step % 3,
            durable=False,
            captured=step,
            skipped=0,
        )
        message = replace(message, **changes)
        self.say(self.child_of(rank), message)
        return message

    def seal(self, rank: int, step: int, slot: int) -> None:
        """The rank's capture of a step is over; slot -1: it was given up."""
        message = wire.Sealed(generation=self.machine.generation, step=step, slot=slot, mono_ns=self.now_ns)
        self.say(self.child_of(rank), message)

    def raise_in(self, rank: int, step: int, **changes: Any) -> None:
        """The rank's training function raised a ValueError."""
        message = wire.Fault(
            generation=self.machine.generation,
            fault="exception",
            communication=False,
            exception_type="ValueError",
            frame="train.py:10 train",
            message="",
            stack="",
            step=step,
            phase="step",
            mono_ns=self.now_ns,
        )
        self.say(self.child_of(rank), replace(message, **changes))

    def kill(self, child: int, *, exit_code: int | None = None, signal: int | None = 9) -> None:
        """The child is dead."""
        self.feed(
            c.Exited(child=child, exit_code=exit_code, signal=signal, exited_ns=self.now_ns, oom=False, last_line="")
        )

    def join(self, node: int) -> None:
        """The node is there."""
        self.feed(c.NodeJoined(node=node, name=f"host{node}"))

    def lose(self, node: int) -> None:
        """The node is gone, and every child that ever started on it is dead."""
        self.feed(c.NodeLost(node=node, reason="silent", mono_ns=self.now_ns))
        for spawn in self.all(c.Spawn):
            if spawn.node == node:
                self.kill(spawn.child)

    def write(self, step: int, *stages: str, reason: str = "", node: int = 0) -> None:
        """The writer of a node reports stages of the save of `step`."""
        writer = [item.child for item in self.all(c.Spawn) if item.role is Role.WRITER and item.node == node][-1]
        attempt = self.all(c.StartSave)[-1].attempt if self.all(c.StartSave) else ""
        for stage in stages:
            progress = wire.WriterProgress(
                step=step,
                stage=stage,
                directory=f"step-{step:08d}",
                size_bytes=1,
                seconds=0.1,
                reason=reason,
                message="",
                attempt=attempt,
            )
            self.say(writer, progress)

    # --- what followed --------------------------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        """Monotonic now."""
        return self.clock.monotonic_ns()

    def child_of(self, rank: int) -> int:
        """The child that was given `rank` last."""
        return [item.child for item in self.all(c.AssignRank) if item.rank == rank][-1]

    def all(self, kind: type[_Command]) -> list[_Command]:
        """Commands of a kind, in order."""
        return [item for item in self.commands if isinstance(item, kind)]

    def events(self, kind: type[_Event]) -> list[_Event]:
        """Events of a type, in order."""
        return [record.event for record in self.records if isinstance(record.event, kind)]

    def records_of(self, kind: type[Event]) -> list[Record]:
        """Records of an event type, in order."""
        return [record for record in self.records if isinstance(record.event, kind)]

    def forget(self) -> None:
        """Look only at what follows from now on (seats and children stay known)."""
        self.commands = [item for item in self.commands if isinstance(item, c.AssignRank | c.Spawn)]
        self.records = []

    def order(self, *kinds: type) -> list[str]:
        """Names of commands and events of these kinds, in the order they were issued."""
        found = [item.event if isinstance(item, c.Emit) else item for item in self.commands]
        return [type(item).__name__ for item in found if isinstance(item, kinds)]

    def _take(self, commands: list[c.Command]) -> None:
        self.commands.extend(commands)
        for command in commands:
            if isinstance(command, c.Emit):
                record = Record(
                    run="driven",
                    epoch=1,
                    generation=command.generation,
                    rank=command.rank,
                    seq=len(self.records) + 1,
                    time_ns=self.clock.wall_ns(),
                    event=command.event,
                )
                self.records.append(record)
                self.history.apply(record)
