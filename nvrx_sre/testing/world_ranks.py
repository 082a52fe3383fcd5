"""Simulated children: small state machines that follow the rank channel's protocol.

A worker computes, meets its peers in a collective at every step, begins a capture and reports; the copy runs beside
the next step and ends before that step changes the state. Time passes only through the world's queue; what is
scheduled for a process is void once it was interrupted or died (`token`), except the copy, which only death stops.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from nvrx_sre.events import channel as wire
from nvrx_sre.events.schema import Phase, Role
from nvrx_sre.testing.world_plan import SimKind
from nvrx_sre.testing.world_storage import Commit, Content

if TYPE_CHECKING:
    from nvrx_sre.testing.world import World

ALIVE_S = 1.0
FRESH = "fresh"


def next_state(state: str, step: int) -> str:
    """The state after `step`: depends on the whole line of steps before it."""
    return hashlib.sha256(f"{state}/{step}".encode()).hexdigest()[:16]


def loss_of(state: str) -> float:
    """A loss that depends on the state alone, so that a replay must reproduce it."""
    return int(state, 16) / 2.0**64


class SimChild:
    """A process: lives, turns, sends in order, dies. Messages sent before death arrive before it is told."""

    def __init__(self, world: World, number: int, role: Role, pid: int) -> None:
        self.world = world
        self.number = number
        self.role = role
        self.pid = pid
        self.is_alive = True
        self.is_stopped = False
        self.token = 0
        self._last_delivery_ns = 0

    def later(self, low_s: float, high_s: float, action: Callable[[], None]) -> None:
        """Do `action` after a random delay, unless the process was interrupted, stopped or died meanwhile."""
        token = self.token

        def run() -> None:
            if self.is_alive and not self.is_stopped and self.token == token:
                action()

        self.world.schedule(self.world.rng.uniform(low_s, high_s), run)

    def send(self, message: wire.Message) -> None:
        """Put a message on the channel: delivered in order after a short random delay."""
        self.world.deliver(self, message)

    def delivery_ns(self, delay_ns: int) -> int:
        """When the next packet of this child arrives: never before an earlier one."""
        self._last_delivery_ns = max(self._last_delivery_ns, self.world.clock.monotonic_ns() + delay_ns)
        return self._last_delivery_ns

    def begin(self) -> None:
        """The process was started: import, say hello, park."""
        self.later(0.3, 1.5, self._hello)

    def _hello(self) -> None:
        self.send(wire.Hello(pid=self.pid, start_ticks=self.pid, mono_ns=self.world.clock.monotonic_ns()))
        self.send(wire.Parked(fit=True, note="", mono_ns=self.world.clock.monotonic_ns()))

    def on_leave(self) -> None:
        """Told to end in order."""
        self.later(0.001, 0.01, lambda: self.world.die(self, exit_code=0, signal=None))


class SimWriter(SimChild):
    """The durable writer: one save at a time, in stages."""

    def write(self, step: int, generation: int, slots: tuple[int, ...]) -> None:
        """Begin a save; contents are read while it runs, so the slots must be left alone."""
        mapped = list(self.world.storage.slots)  # a mapping outlives the launcher's dropping of the slots
        taken = [mapped[rank].contents[slot] for rank, slot in enumerate(slots)]

        def written() -> None:
            now = [mapped[rank].contents[slot] for rank, slot in enumerate(slots)]
            if now != taken or any(item is None or item.step != step for item in taken):
                self.world.violation(f"slots of the held save of step {step} were overwritten")
            self._report(step, "written")
            self.later(0.01, 0.1, lambda: self._commit(step, generation, taken))

        self.later(0.05, 1.5, written)

    def _commit(self, step: int, generation: int, contents: list[Content | None]) -> None:
        world = self.world
        if world.fires(SimKind.STORAGE, 0, step, Phase.STEP):
            self._report(step, "failed", "storage")
            return
        if world.storage.is_abandoned(generation, step):
            self._report(step, "failed", "abandoned_line")
            return
        kept = [item for item in contents if item is not None]
        world.storage.commits.append(Commit(step=step, generation=generation, contents=kept))
        self._report(step, "committed")
        self.later(0.02, 0.3, lambda: self._report(step, "verified"))

    def _report(self, step: int, stage: str, reason: str = "") -> None:
        self.send(
            wire.WriterProgress(
                step=step,
                stage=stage,
                directory=f"step-{step:08d}",
                size_bytes=1,
                seconds=0.1,
                reason=reason,
                message="",
            )
        )


class SimWorker(SimChild):
    """A worker or standby: parks, becomes a rank, runs generations."""

    def __init__(self, world: World, number: int, role: Role, pid: int) -> None:
        super().__init__(world, number, role, pid)
        self.rank = -1
        self.generation = 0
        self.step = 0
        self.restored_step = 0
        self.state = FRESH
        self.progress = 0
        self.is_waiting = True
        """Outside the training function: it reads what the launcher says."""
        self.is_stuck = False
        """In a native call that never returns."""
        self.is_unfit = False
        self.hot_plan = (0, 0, 0)
        """(interval before, step from which the other holds, interval from there on)."""
        self._seconds = 0.0
        self._is_copying = False
        self._after_copy: Callable[[], None] | None = None

    def begin(self) -> None:
        """Start, and speak regularly from then on."""
        super().begin()
        self.world.schedule(ALIVE_S, self._alive)

    def assign(self, rank: int, generation: int) -> None:
        """Become a rank."""
        self.rank = rank
        self.role = Role.WORKER
        self.later(0.001, 0.02, lambda: self._ready(generation))

    def go(self, generation: int, candidates: list[tuple[str, Content]]) -> None:
        """Run the training function in `generation`."""
        self.generation = generation
        self.step = 0
        self.is_waiting = False
        self._seconds = 0.0
        self._enter(Phase.RENDEZVOUS)
        self._meet("rendezvous", lambda: self._rebuild(candidates))

    def set_interval(self, every: int, from_step: int) -> None:
        """Capture at another interval from a step on."""
        self.hot_plan = (self.hot_plan[2], from_step, every)

    def interrupt(self, generation: int) -> None:
        """Leave `generation`, unless the process cannot."""
        if generation != self.generation or self.is_stuck:
            return
        self.token += 1
        self.world.leave_group(self)
        self.later(0.001, 0.03, lambda: self._acked(generation))

    def on_leave(self) -> None:
        """A process in the middle of training does not read this; the launcher kills it."""
        if self.is_waiting and not self.is_stuck:
            super().on_leave()

    def fail(self, *, communication: bool, kind: str, exception_type: str) -> None:
        """The training function raised: report, then wait for the interrupt."""
        self.token += 1
        self.is_waiting = True
        self.world.leave_group(self)
        self.send(
            wire.Fault(
                generation=self.generation,
                fault=kind,
                communication=communication,
                exception_type=exception_type,
                frame="train.py:10 train",
                message="",
                stack="",
                step=self.step + 1,
                phase="step",
                mono_ns=self.world.clock.monotonic_ns(),
            )
        )

    def _alive(self) -> None:
        if not self.is_alive:
            return
        if not self.is_stopped and self.generation:
            self.send(
                wire.Alive(
                    generation=self.generation,
                    step=self.step,
                    progress=self.progress,
                    mono_ns=self.world.clock.monotonic_ns(),
                )
            )
        self.world.schedule(ALIVE_S, self._alive)

    def _acked(self, generation: int) -> None:
        self.is_waiting = True
        self.send(wire.Acked(generation=generation, mono_ns=self.world.clock.monotonic_ns()))
        self._when_copied(lambda: self.later(0.005, 0.05, lambda: self._ready(generation + 1)))

    def _ready(self, generation: int) -> None:
        fit, self.is_unfit = not self.is_unfit, False
        self.progress = 0
        self.send(wire.Ready(generation=generation, fit=fit, reason="", mono_ns=self.world.clock.monotonic_ns()))

    def _rebuild(self, candidates: list[tuple[str, Content]]) -> None:
        self._enter(Phase.REBUILD)
        self.later(0.005, 0.05, lambda: self._load(candidates))

    def _load(self, candidates: list[tuple[str, Content]]) -> None:
        self._enter(Phase.LOAD)
        self._meet("load", lambda: self._restore(candidates))

    def _restore(self, candidates: list[tuple[str, Content]]) -> None:
        source, content = candidates[0] if candidates else (FRESH, None)
        self.step = self.restored_step = 0 if content is None else content.step
        self.state = FRESH if content is None else content.state
        self.send(
            wire.Restored(
                generation=self.generation,
                step=self.step,
                source=source,
                seconds=0.01,
                mono_ns=self.world.clock.monotonic_ns(),
            )
        )
        self._enter(Phase.FIRST_STEP)
        self._compute()

    def _compute(self) -> None:
        if self.step >= self.world.num_steps:
            self._when_copied(self._finish)
            return
        self.later(0.0, 0.05, self._pass_middle)

    def _pass_middle(self) -> None:
        """The point of a step where planned faults strike: while the copy of the last one runs, or after it."""
        if not self._injected(Phase.STEP):
            self.later(0.01, 0.04, self._reduce)

    def _reduce(self) -> None:
        self.progress += 1
        self._meet(f"step {self.step + 1}", lambda: self._when_copied(self._update))

    def _when_copied(self, then: Callable[[], None]) -> None:
        """Go on at once, or when the running copy is done, unless interrupted meanwhile."""
        if not self._is_copying:
            then()
            return
        token = self.token
        self._after_copy = lambda: then() if self.token == token else None

    def _update(self) -> None:
        """The optimizer's step."""
        self.later(0.002, 0.01, self._capture)

    def _capture(self) -> None:
        self.step += 1
        self.state = next_state(self.state, self.step)
        world = self.world
        durable = self.step % world.save_every == 0
        before, from_step, after = self.hot_plan
        every = after if self.step >= from_step else before
        if not durable and (every == 0 or self.step % every):
            self._report(-1, durable)
            return
        slot = world.storage.slots[self.rank].free_slot(self.generation, self.restored_step)
        if slot is None:
            self._report(-1, durable)
            return
        contents = world.storage.slots[self.rank].contents
        contents[slot] = None
        content = Content(generation=self.generation, step=self.step, state=self.state)
        self._is_copying = True
        if world.config.is_seal_told_early:
            self._tell_sealed(content, slot)

        def copied() -> None:
            contents[slot] = content
            if not world.config.is_seal_told_early:
                self._tell_sealed(content, slot)
            self._is_copying = False
            then, self._after_copy = self._after_copy, None
            if then is not None:
                then()

        self._in_thread(0.001, 0.06, copied)
        if world.config.late_report_rate and world.rng.random() < world.config.late_report_rate:
            self._when_copied(lambda: self._report(slot, durable))
        else:
            self._report(slot, durable)

    def _in_thread(self, low_s: float, high_s: float, action: Callable[[], None]) -> None:
        """Like `later`, but an interrupt does not stop it."""

        def run() -> None:
            if self.is_alive and not self.is_stopped:
                action()

        self.world.schedule(self.world.rng.uniform(low_s, high_s), run)

    def _tell_sealed(self, content: Content, slot: int) -> None:
        if self.world.rng.random() >= self.world.drop_rate or content.step == self.world.num_steps:
            self.send(
                wire.Sealed(
                    generation=content.generation,
                    step=content.step,
                    slot=slot,
                    mono_ns=self.world.clock.monotonic_ns(),
                )
            )

    def _report(self, slot: int, durable: bool) -> None:
        self.progress += 1
        self._seconds += 0.05 + (self.world.config.capture_cost_s if self._is_copying else 0.0)
        if self.world.rng.random() >= self.world.drop_rate or self.step == self.world.num_steps:
            self.send(
                wire.Step(
                    generation=self.generation,
                    step=self.step,
                    mono_ns=self.world.clock.monotonic_ns(),
                    step_s=self._seconds,
                    data_s=0.0,
                    checkpoint_block_s=0.0,
                    evaluate_s=0.0,
                    tokens=self.step * 100,
                    loss=loss_of(self.state),
                    has_loss=True,
                    slot=slot,
                    durable=durable,
                    captured=0,
                    skipped=0,
                )
            )
        self._compute()

    def _finish(self) -> None:
        self._enter(Phase.FINALIZE)
        self.is_waiting = True
        self.world.check_final_state(self)
        self.send(
            wire.Finished(
                generation=self.generation,
                step=self.step,
                result={"state": self.state},
                mono_ns=self.world.clock.monotonic_ns(),
            )
        )

    def _enter(self, phase: Phase) -> None:
        self.progress += 1
        self.send(
            wire.Entered(
                generation=self.generation,
                phase=phase.value,
                step=self.step,
                mono_ns=self.world.clock.monotonic_ns(),
            )
        )

    def _meet(self, what: str, then: Callable[[], None]) -> None:
        """A collective: goes on when all ranks of the generation are in."""
        phase = {"rendezvous": Phase.RENDEZVOUS, "load": Phase.LOAD}.get(what)
        if phase is None or not self._injected(phase):
            self.world.meet(self, what, then)

    def _injected(self, phase: Phase) -> bool:
        """Fire what is planned here; True if this process does not go on."""
        kind = self.world.planned(self.rank, self.step + 1, phase)
        if kind is None:
            return False
        return self.world.inject(self, kind)
