"""Simulated children: small state machines that follow the rank channel's protocol.

A worker computes, meets its peers in a collective at every step, begins a capture and reports; the copy runs beside
the next step and ends before that step changes the state. Time passes only through the world's queue; what is
scheduled for a process is void once it was interrupted or died (`token`), except the copy, which only death stops.
A stopped process does nothing and is not told of anything.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvrx_sre.checkpoint.slots import SlotHeader
from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.errors import NothingRestorable
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import Phase, RejectReason, RestoredFrom, Role, Tier
from nvrx_sre.testing.world_disk import Slots, content
from nvrx_sre.testing.world_faults import inject

if TYPE_CHECKING:
    from nvrx_sre.testing.world_launcher import SimLauncher

ALIVE_S = 1.0
ANSWER_S = 0.005
"""Longest time until a thread that is asked has its turn: Python's switch interval."""
FRESH = "fresh"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a generation may restore: entries as in `Go`, best first, each with what is found there."""

    candidates: list[tuple[dict[str, Any], SlotHeader]]
    requires_restore: bool
    """Commits were on record when the generation was opened."""


@functools.lru_cache(maxsize=4096)
def next_state(state: str, step: int) -> str:
    """The state after `step`: depends on the whole line of steps before it."""
    return hashlib.sha256(f"{state}/{step}".encode()).hexdigest()[:16]


def state_after(num_steps: int) -> str:
    """The state of an uninterrupted run."""
    state = FRESH
    for step in range(1, num_steps + 1):
        state = next_state(state, step)
    return state


def loss_of(state: str) -> float:
    """A loss that depends on the state alone, so that a replay must reproduce it."""
    return int(state, 16) / 2.0**64


class SimChild:
    """A process: lives, turns, sends in order, dies. Messages sent before death arrive before it is told."""

    def __init__(self, launcher: SimLauncher, number: int, role: Role, host: int) -> None:
        self.launcher = launcher
        self.world = launcher.world
        self.number = number
        self.role = role
        self.host = host
        self.pid = self.world.new_pid()
        self.is_alive = True
        self.is_stopped = False
        self.dies_from_ns = 0
        """Before this it is in the kernel, where SIGKILL does not reach it."""
        self.is_started = False
        """The fork server has made it a process."""
        self.is_doomed = False
        """It was killed, or told to leave, before it was started."""
        self.token = 0
        self._last_delivery_ns = 0

    def later(self, low_s: float, high_s: float, action: Callable[[], None]) -> None:
        """Do `action` after a random delay, unless the process was interrupted, stopped or died meanwhile."""
        token = self.token

        def run() -> None:
            if self.token == token:
                action()

        self.world.schedule(self.world.rng.uniform(low_s, high_s), lambda: self._run(run))

    def _run(self, action: Callable[[], None]) -> None:
        """Do `action` if the process can run; one whose host stands still goes on when that does."""
        if not self.is_alive or self.is_stopped:
            return
        awake_ns = self.launcher.awake_ns(self)
        if self.now_ns < awake_ns:
            self.world.schedule_at(awake_ns + to_ns(self.world.rng.uniform(0.0, 0.05)), lambda: self._run(action))
        else:
            action()

    def send(self, message: wire.Message) -> None:
        """Put a message on the channel: delivered in order after a short random delay."""
        self.launcher.deliver(self, message)

    @property
    def now_ns(self) -> int:
        """Monotonic now."""
        return self.world.now_ns

    def delivery_ns(self, delay_ns: int) -> int:
        """When the next packet of this child arrives: never before an earlier one."""
        self._last_delivery_ns = max(self._last_delivery_ns, self.now_ns + delay_ns)
        return self._last_delivery_ns

    def begin(self) -> None:
        """The process was started: import, say hello, park."""
        self.later(0.3, 1.5, self._hello)

    def _hello(self) -> None:
        self.send(wire.Hello(pid=self.pid, start_ticks=self.pid, mono_ns=self.now_ns))
        self.send(wire.Parked(fit=True, note="", mono_ns=self.now_ns))

    def on_leave(self) -> None:
        """Told to end in order."""
        self.later(0.001, 0.01, lambda: self.launcher.die(self, exit_code=0, signal=None))


class SimWorker(SimChild):
    """A worker or standby: parks, becomes a rank, runs generations."""

    def __init__(self, launcher: SimLauncher, number: int, role: Role, host: int) -> None:
        super().__init__(launcher, number, role, host)
        self.rank = -1
        self.generation = 0
        self.step = 0
        self.restored_step = 0
        self.captured_step = 0
        """Newest step that a slot holds or is taking."""
        self.state = FRESH
        self.progress = 0
        self.progressed_ns = 0
        """When it passed its newest point."""
        self.is_waiting = True
        """Outside the training function: it reads what the launcher says."""
        self.is_stuck = False
        """In a native call that never returns."""
        self.is_unfit = False
        self.ready_generation = 0
        """Newest generation that it said to be ready for."""
        self.has_finished = False
        self.hot_plan = (0, 0, 0)
        """(interval before, step from which the other holds, interval from there on)."""
        self.delay_s = 0.0
        """What the next step takes longer than usual."""
        self.slow_steps: dict[tuple[int, int], float] = {}
        """(generation, step) of which each half takes long, and how long (seconds)."""
        self._seconds = 0.0
        self._is_copying = False
        self._untold: tuple[SlotHeader, int] | None = None
        """The newest seal, if the socket had no room for it."""
        self._after_copy: Callable[[], None] | None = None

    def begin(self) -> None:
        """Start, and speak regularly from then on."""
        super().begin()
        self.world.schedule(ALIVE_S, lambda: self._run(self._alive))

    def assign(self, rank: int, generation: int) -> None:
        """Become a rank."""
        self.rank = rank
        self.role = Role.WORKER
        # One that is ready already only learns that it is another rank.
        self.later(0.001, 0.02, lambda: self._ready(generation) if self.ready_generation != generation else None)

    def go(self, generation: int, offer: Offer) -> None:
        """Run the training function in `generation`."""
        self.generation = generation
        self.step = 0
        self._untold = None
        self.is_waiting = self.has_finished = False
        self._seconds = 0.0
        self._enter(Phase.RENDEZVOUS)
        self._meet("rendezvous", lambda: self._rebuild(offer))

    def set_interval(self, every: int, from_step: int) -> None:
        """Capture at another interval from a step on."""
        self.hot_plan = (self.hot_plan[2], from_step, every)

    def interrupt(self, generation: int) -> None:
        """Leave `generation`, unless the process cannot."""
        if generation != self.generation or self.is_stuck:
            return
        self.token += 1
        self.launcher.leave_group(self)
        self.later(0.001, 0.03, lambda: self._acked(generation))

    def on_leave(self) -> None:
        """A process in the middle of training does not read this; the launcher kills it."""
        if self.is_waiting and not self.is_stuck:
            super().on_leave()

    def fail(self, *, communication: bool, kind: str, exception_type: str) -> None:
        """The training function raised: report, then wait for the interrupt."""
        self.token += 1
        self.is_waiting = True
        self.launcher.leave_group(self)
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
                mono_ns=self.now_ns,
            )
        )

    def answer(self, number: int) -> None:
        """Asked how far it is: its monitor thread says so, even if the main thread is in a native call."""
        self.world.schedule(self.world.rng.uniform(0.0, ANSWER_S), lambda: self._run(lambda: self._tell_alive(number)))

    def _tell_alive(self, probe: int = 0) -> None:
        self.send(
            wire.Alive(
                generation=self.generation,
                step=self.step,
                progress=self.progress,
                mono_ns=self.now_ns,
                age_ns=self.now_ns - self.progressed_ns,
                probe=probe,
            )
        )

    def _pass_point(self) -> None:
        self.progress += 1
        self.progressed_ns = self.now_ns

    def _alive(self) -> None:
        if not self.is_alive or self.is_stopped:
            return
        if self.generation:
            self._tell_alive()
        self.world.schedule(ALIVE_S, lambda: self._run(self._alive))

    def _acked(self, generation: int) -> None:
        self.is_waiting = True
        self.send(wire.Acked(generation=generation, mono_ns=self.now_ns))
        self._when_copied(lambda: self.later(0.005, 0.05, lambda: self._ready(generation + 1)))

    def _ready(self, generation: int) -> None:
        fit, self.is_unfit = not self.is_unfit, False
        self.progress = 0
        self.ready_generation = generation
        self.send(wire.Ready(generation=generation, fit=fit, reason="", mono_ns=self.now_ns))

    def _rebuild(self, offer: Offer) -> None:
        self._enter(Phase.REBUILD)
        if self._injected(Phase.REBUILD):
            return
        self.later(0.005, 0.05, lambda: self._load(offer))

    def _load(self, offer: Offer) -> None:
        self._enter(Phase.LOAD)
        self._meet("load", lambda: self._restore(offer))

    def _restore(self, offer: Offer) -> None:
        """Walk back together to the newest state that is good on all ranks."""
        for entry, found in offer.candidates:
            if self._is_damaged(entry):
                self._reject(entry)
                continue
            self._restored(entry["tier"], found.step, found.digest.decode())
            return
        if offer.requires_restore:
            self.world.violation("commits are on record and none can be restored")
            self.fail(communication=False, kind="checkpoint_corrupt", exception_type=NothingRestorable.__name__)
            return
        self._restored(RestoredFrom.FRESH, 0, FRESH)

    def _is_damaged(self, entry: dict[str, Any]) -> bool:
        if entry["tier"] == Tier.DURABLE:
            return not self.launcher.is_good(self.generation, entry["directory"])
        mine = self.launcher.slots[self.rank].contents[entry["slots"][self.rank]]
        if self.launcher.holds_its_slots(self.generation) and (mine is None or mine.step != entry["step"]):
            self.world.violation(f"rank {self.rank} does not hold the hot state of step {entry['step']} it was offered")
        return False

    def _reject(self, entry: dict[str, Any]) -> None:
        self.world.reach("a damaged checkpoint was walked past")
        self.send(
            wire.Rejected(
                generation=self.generation,
                step=entry["step"],
                tier=entry["tier"],
                directory=entry["directory"],
                reason=RejectReason.CHECKSUM,
                message="",
            )
        )

    def _restored(self, source: str, step: int, state: str) -> None:
        self.step = self.restored_step = self.captured_step = step
        self.state = state
        self.send(
            wire.Restored(generation=self.generation, step=step, source=source, seconds=0.01, mono_ns=self.now_ns)
        )
        self._enter(Phase.FIRST_STEP)
        if not self._injected(Phase.FIRST_STEP):
            self._compute()

    def _compute(self) -> None:
        if self.step >= self.world.config.num_steps:
            self._when_copied(self._capture_last)
            return
        self.later(0.0, 0.05, self._pass_middle)

    def _pass_middle(self) -> None:
        """The point of a step where planned faults strike: while the copy of the last one runs, or after it."""
        if self._injected(Phase.STEP):
            return
        half_s = self.slow_steps.get((self.generation, self.step + 1))
        if half_s is not None:
            self.world.reach("every rank was just in time")
            self.later(half_s, half_s, functools.partial(self._pass_half, half_s))
            return
        extra_s, self.delay_s = self.delay_s, 0.0
        self.later(0.01 + extra_s, 0.04 + extra_s, self._reduce)

    def _pass_half(self, half_s: float) -> None:
        self._pass_point()
        self.later(half_s, half_s, self._reduce)

    def _reduce(self) -> None:
        self._pass_point()
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
        self.progressed_ns = self.now_ns
        self.step += 1
        self.launcher.executed(self)
        self.state = next_state(self.state, self.step)
        world = self.world
        durable = self.step % world.config.save_every == 0
        before, from_step, after = self.hot_plan
        every = after if self.step >= from_step else before
        if not durable and (every == 0 or self.step % every):
            self._report(-1, durable)
            return
        if self._untold is not None:
            self._tell_sealed(*self._untold)
        mine = self.launcher.slots[self.rank]
        slot = mine.free_slot(self.step, self.generation, self.restored_step)
        if slot is None:
            world.reach("no slot was free")
            self._report(-1, durable)
            return
        self._begin_copy(mine, slot)
        if world.config.late_report_rate and world.rng.random() < world.config.late_report_rate:
            self._when_copied(lambda: self._report(slot, durable))
        else:
            self._report(slot, durable)

    def _capture_last(self) -> None:
        """Training is done: capture its state unless it is, once a slot is free."""
        if self.captured_step >= self.step:
            self._finish()
            return
        self._enter(Phase.SAVE)
        while self._untold is not None:  # this time it waits for room
            self._tell_sealed(*self._untold)
        self._take_slot()

    def _take_slot(self) -> None:
        mine = self.launcher.slots[self.rank]
        slot = mine.free_slot(self.step, self.generation, self.restored_step)
        if slot is None:
            if mine.held_slot >= 0:
                self._pass_point()  # no hang: the writer has a deadline of its own
            self.later(0.01, 0.05, self._take_slot)
            return
        self._begin_copy(mine, slot)
        self._when_copied(self._finish)

    def _begin_copy(self, mine: Slots, slot: int) -> None:
        """Copy beside the next step, in a thread that an interrupt does not stop; the slot is told sealed after it."""
        header = content(self.generation, self.step, self.state)
        mine.contents[slot], mine.filling[slot] = None, self.step
        self._is_copying, self.captured_step = True, self.step

        def copied() -> None:
            mine.contents[slot] = header
            self._tell_sealed(header, slot)
            self._is_copying = False
            then, self._after_copy = self._after_copy, None
            if then is not None:
                then()

        self.world.schedule(self.world.rng.uniform(0.001, 0.06), lambda: self._run(copied))

    def _tell_sealed(self, header: SlotHeader, slot: int) -> None:
        self._untold = (header, slot) if self._is_dropped(header.step) else None
        if self._untold is None:
            self.send(wire.Sealed(generation=header.generation, step=header.step, slot=slot, mono_ns=self.now_ns))

    def _is_dropped(self, step: int) -> bool:
        """A report of a step that finds the socket full is lost; the last one waits for room."""
        config = self.world.config
        return self.world.rng.random() < config.drop_rate and step < config.num_steps

    def _report(self, slot: int, durable: bool) -> None:
        self._pass_point()
        self._seconds += 0.05 + (self.world.config.capture_cost_s if self._is_copying else 0.0)
        if not self._is_dropped(self.step):
            self.send(
                wire.Step(
                    generation=self.generation,
                    step=self.step,
                    mono_ns=self.now_ns,
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
        self.is_waiting = self.has_finished = True
        self.world.check_final_state(self)
        self.send(
            wire.Finished(
                generation=self.generation,
                step=self.step,
                result={"state": self.state},
                mono_ns=self.now_ns,
            )
        )

    def _enter(self, phase: Phase) -> None:
        self._pass_point()
        self.send(
            wire.Entered(
                generation=self.generation,
                phase=phase.value,
                step=self.step,
                mono_ns=self.now_ns,
            )
        )

    def _meet(self, what: str, then: Callable[[], None]) -> None:
        """A collective: goes on when all ranks of the generation are in."""
        phase = {"rendezvous": Phase.RENDEZVOUS, "load": Phase.LOAD}.get(what)
        if phase is None or not self._injected(phase):
            self.launcher.meet(self, what, then)

    def _injected(self, phase: Phase) -> bool:
        """Fire what is planned here; True if this process does not go on."""
        # Before the step loop it counts how far the run has come, not this process.
        step = self.step if phase is Phase.STEP else self.launcher.machine.high_water
        kind = self.world.planned(self, step + 1, phase)
        return kind is not None and inject(self, kind)
