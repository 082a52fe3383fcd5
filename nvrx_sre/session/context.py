"""The object that a training function gets: one per generation, per rank.

Model: a generation forms its group, registers state, restores, then commits steps. A commit is the step
boundary: the capture of the state begins there and the step is reported; the rank says separately when the
capture is sealed. All state of a generation hangs on its context and is dropped with it.

Thread safety: main thread only. Must not: block a step on telemetry; the report is a few stores to shared memory.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nvrx_sre.core.errors import UserError
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import Phase
from nvrx_sre.events.step_record import UNKNOWN_LOSS
from nvrx_sre.session.environment import OWN_GROUP_HINT, asks_for_torchruns_group
from nvrx_sre.session.process import RankProcess
from nvrx_sre.session.reports import StepReports
from nvrx_sre.telemetry import context as ambient

if TYPE_CHECKING:
    import torch

    from nvrx_sre.checkpoint.spare import Spare
    from nvrx_sre.restart.wrapper import Restarter
    from nvrx_sre.session.gpu_time import GpuTimer
    from nvrx_sre.session.injecting import Injector
    from nvrx_sre.session.rank_saving import RankSaver
    from nvrx_sre.session.saving import HotSaver
    from nvrx_sre.session.untracked import TrackingWatch

USER_PHASES = {"data": Phase.DATA, "evaluate": Phase.EVALUATE, "save": Phase.SAVE}


class NonFiniteLoss(Exception):
    """The loss of a step is infinite or not a number; the step is not committed."""


class Context:
    """One generation of a managed run, seen from one rank."""

    managed = True

    def __init__(
        self, process: RankProcess, assign: wire.Assign, go: wire.Go, restarter: Restarter, spare: Spare
    ) -> None:
        self._spare = spare
        self.rank = assign.rank
        self.local_rank = assign.local_rank
        self.world_size = go.world_size
        self.generation = go.generation
        self.attempt = process.settings.attempt
        self._process = process
        self._restarter = restarter
        self._control = process.control
        self._go = go
        self._tracked: dict[str, Any] = {}
        self._reports: StepReports | None = None
        self._gpu: GpuTimer | None = None
        """None on the CPU."""
        self._loop_phase = Phase.FIRST_STEP
        """What of the step loop runs outside of other phases: the first step has a deadline of its own."""
        self._saver: HotSaver | RankSaver | None = None
        self._watch: TrackingWatch | None = None
        self._results: dict[str, Any] = {}
        self._injector: Injector | None = None
        self._newest_candidate = max((int(item["step"]) for item in go.candidates), default=0)
        control = process.control
        ambient.follow_step(lambda: control.step)  # of this process; the generation is not to outlive itself by it
        if process.settings.fault_specs:
            from nvrx_sre.session.injecting import Injector

            self._injector = Injector(process, go, self.rank)

    @property
    def step(self) -> int:
        """Committed steps so far; the step being executed is `step + 1`."""
        return self._control.step

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        import torch

        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def poisoned(self) -> bool:
        """True if a planned fault wants the loss of this step to be not-a-number."""
        return self._injector is not None and self._injector.poisoned

    def init_process_group(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        """Form the generation's process group. Collective; blocks until all ranks are in.

        `backend`: nccl where there is CUDA, else gloo. `timeout_s`: the group's own timeout; recovery does not
        wait for it.
        """
        import torch
        import torch.distributed as dist

        self._inject("rendezvous")
        self._control.enter(Phase.RENDEZVOUS)
        if torch.cuda.is_available():
            torch.cuda.set_device(self.device)
        limit_s = self._process.settings.group_timeout_s if timeout_s is None else timeout_s
        with self._restarter.groups.sockets.window():
            store = dist.TCPStore(
                self._go.store_host,
                self._go.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=limit_s),
            )
            dist.init_process_group(
                backend or ("nccl" if torch.cuda.is_available() else "gloo"),
                store=dist.PrefixStore(f"generation-{self.generation}", store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=limit_s),
            )
        self._control.enter(Phase.REBUILD)
        self._inject("rebuild")

    def track(self, **objects: Any) -> None:
        """Register state under stable names, before `restore`.

        Anything with `state_dict` and `load_state_dict` (modules, optimizers, schedulers, loaders), or a dict of
        plain values that is updated in place, or a plain DataLoader over a map-style data set.
        """
        from nvrx_sre.checkpoint.tracked import is_restorable
        from nvrx_sre.session.loading import follow_loaders

        if self._saver is not None:
            raise UserError("ctx.track() was called after ctx.restore(): register all state first")
        control, me = self._control, weakref.ref(self)  # a script's loader may outlive the generation
        follow_loaders(objects, lambda: control.step, lambda: _let_change(me()), lambda: _take_batch(me()))
        for name, value in objects.items():
            if not is_restorable(value):
                raise UserError(
                    f"ctx.track({name}=...): {type(value).__name__} cannot be restored in place, use a dict"
                )
        self._tracked.update(objects)

    def restore(self) -> int:
        """Load the newest state that is good on all ranks; the step it belongs to, 0 if the run begins.

        Collective. Raises `NothingRestorable` if commits are on record and none can be loaded, `UserError` for tracked
        state that cannot be saved. From here on an optimizer over a tracked module that is not tracked itself raises
        `UserError` when it steps again after a commit.
        """
        from nvrx_sre.session.restoring import restore
        from nvrx_sre.session.untracked import TrackingWatch

        control = self._control
        control.enter(Phase.LOAD)
        self._inject("restore")
        started_ns = control.clock.monotonic_ns()
        taken = restore(self._process, self._go, self.rank, self.device, self._tracked, self._spare)
        self._saver = taken.saver
        is_first = taken.step == 0
        self._watch = TrackingWatch(self._tracked, lambda: control.step, is_first=is_first, tells=self.rank == 0)
        now_ns = control.clock.monotonic_ns()
        control.step = taken.step
        control.send(
            wire.Restored(
                generation=self.generation,
                step=taken.step,
                source=taken.source,
                seconds=(now_ns - started_ns) / 1e9,
                mono_ns=now_ns,
                slot=taken.slot,
                slot_generation=taken.slot_generation,
            )
        )
        control.enter(Phase.FIRST_STEP)
        assert control.channel.ring is not None  # it came before 'go'
        self._reports = StepReports(control.channel.ring, control.clock, self.generation, self._saver)
        if self.device.type == "cuda":
            from nvrx_sre.session.gpu_time import timer_for

            self._gpu = timer_for(self._tracked.values())
        return taken.step

    def commit(self, loss: float | torch.Tensor | None = None, tokens: int = 0) -> None:
        """The step is done on this rank: begin to capture the state if that is due, and report the step.

        `loss`: float or 0-dim tensor, `tokens`: trained by this step over all ranks. Raises `NonFiniteLoss`,
        and then the step is not committed. Blocks for the part of the state that is copied at once; parameters
        and optimizer state are copied while the next step computes, and the optimizer's step waits for that. Between
        this call and the optimizer's next step nothing else may change them. The report never blocks.
        """
        saver, reports = self._saver, self._reports
        if saver is None or reports is None:
            raise UserError("ctx.commit() was called before ctx.restore()")
        control = self._control
        step = control.step + 1
        self._inject("commit")
        value = UNKNOWN_LOSS
        if loss is not None:
            value = math.nan if self.poisoned else _number(loss)
            if not math.isfinite(value):
                raise NonFiniteLoss(f"loss of step {step} is {value}")
        if saver.is_durable_due(step):
            self._inject("save")
        now_ns = reports.now_ns  # first fetched and then called: see `reports`
        boundary_ns = now_ns()
        captured = saver.at_boundary(step)
        reports.save_ns += saver.take_waited_ns()
        reports.tokens += int(tokens)
        self._loop_phase = Phase.STEP
        entered_ns = control.enter(Phase.STEP, tell=False)
        control.step = step
        if self._gpu is not None:
            reports.gpu_ns = self._gpu.boundary()
        waits = captured.durable and self._process.settings.waits_for_writer
        until = control.wait_turn if waits else captured.save
        if reports.tell(step, boundary_ns, entered_ns, value, captured) or until is not None:
            control.channel.ring_bell()
        if self._injector is not None:
            self._injector.step_committed(reports.step_s())
        if until is not None:
            self._stand_still(step, reports, until)

    def _stand_still(self, step: int, reports: StepReports, until: Callable[[int], object]) -> None:
        """Stay at the boundary until the ranks have saved, or the writer takes the save (`--on-busy wait`).

        Booked as checkpoint time.
        """
        reports.enter(Phase.SAVE, self._control.enter(Phase.SAVE, tell=False))
        until(step)
        reports.enter(Phase.STEP, self._control.enter(Phase.STEP, tell=False))
        if self._gpu is not None:
            self._gpu.begin_step()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the time inside to `data`, `evaluate` or `save`, under that phase's deadline."""
        phase = USER_PHASES.get(name)
        if phase is None or self._reports is None:
            raise UserError(f"ctx.phase({name!r}): use one of {', '.join(USER_PHASES)}, after ctx.restore()")
        if phase is Phase.EVALUATE:
            self._let_change()
        self._reports.enter(phase, self._control.enter(phase, tell=False))
        self._inject(name)
        try:
            yield
        finally:
            self._reports.enter(Phase.STEP, self._control.enter(self._loop_phase, tell=False))
            if phase is Phase.DATA:
                self._take_batch()

    def mark(self, point: str) -> None:
        """A named point inside a step: evidence of progress, and where planned faults fire.

        `collective`, before the step's first collective, also tells which rank the others wait for.
        """
        self._begin_step()
        self._inject(point)
        now_ns = self._control.pass_point()
        reports = self._reports
        if point == "collective" and reports is not None and not reports.arrived_ns:
            reports.arrived_ns = now_ns
            if self._gpu is not None:
                self._gpu.mark()

    def tick(self) -> None:
        """Progress without a commit, such as a micro-batch: feeds the deadline."""
        self._begin_step()
        self._control.pass_point()

    def save(self) -> None:
        """The next commit is also saved durably."""
        if self._saver is None:
            raise UserError("ctx.save() was called before ctx.restore()")
        self._saver.request_durable()

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """Interrupts wait until the block is left; keep it short, the grace runs on."""
        return self._control.atomic()

    def keep(self, item: object) -> None:
        """`item` (a thread or child process) may outlive the generation."""
        self._restarter.leftovers.keep(item)

    def finish(self, **result: Any) -> None:
        """JSON scalars for the summary; rank 0's are shown."""
        self._results.update(result)

    @property
    def result(self) -> dict[str, Any]:
        """What `finish` was given."""
        return dict(self._results)

    def run(self, function: Callable[[Context], Any]) -> None:
        """Call the training function with this context; the runtime's entry, not for user code.

        A script that leaves with `sys.exit(0)` is through as well. Raises what the function raises, and `UserError`
        where it forms its process group by itself.
        """
        self._inject("init")
        try:
            function(self)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        except (ValueError, RuntimeError) as error:
            if asks_for_torchruns_group(error, self._go.store_port):
                raise UserError(OWN_GROUP_HINT).with_traceback(error.__traceback__) from None
            raise
        if self._watch is not None:
            self._watch.finish()
        if self._saver is not None:
            self._saver.finish(self._control.step)
        self._inject("exit")

    def discard(self) -> None:
        """The generation is over on this rank; the runtime's exit, not for user code. Blocks for a running copy."""
        if self._watch is not None:
            self._watch.close()
        if self._gpu is not None:
            self._gpu.close()
        if self._saver is not None:
            self._saver.close()
            self._spare.keep(self._tracked)
        if self._process.ring is not None:  # also what was fetched for a restore that never came
            self._process.ring.release()
        self._inject("teardown")

    def _let_change(self) -> None:
        """Scripts change weights by hand here: block until what the newest commit captures is copied."""
        if self._saver is not None and self._reports is not None:
            self._reports.save_ns += self._saver.take_waited_ns()  # of optimizers before
            self._saver.let_change()
            self._reports.waited(self._saver.take_waited_ns())

    def _begin_step(self) -> None:
        """The step after the newest commit has begun, as far as can be seen from here."""
        if self._saver is not None:
            self._saver.begin_step()

    def _take_batch(self) -> None:
        """The script has a batch: the step begins, if it has not."""
        self._begin_step()
        if self._gpu is not None:
            self._gpu.batch()

    def _inject(self, point: str) -> None:
        """Fire planned faults of the next step; before the restore, of the step after the newest candidate's."""
        if self._injector is not None:
            step = self._control.step if self._saver is not None else self._newest_candidate
            self._injector.at(step + 1, point)


def _number(loss: float | torch.Tensor) -> float:
    """Blocks for a tensor's value. Without its graph: torch warns of the conversion of one that has it."""
    detach = getattr(loss, "detach", None)
    return float(loss if detach is None else detach())


def _let_change(context: Context | None) -> None:
    if context is not None:
        context._let_change()


def _take_batch(context: Context | None) -> None:
    if context is not None:
        context._take_batch()
