"""The context: what runs outside of data, evaluation and saves is the first step until one is committed; reports."""

from __future__ import annotations

import dataclasses
import math
import re
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from nvrx_sre.core.clock import Clock, SystemClock
from nvrx_sre.core.errors import UserError
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import FaultClass, Phase
from nvrx_sre.events.step_record import to_message
from nvrx_sre.events.step_ring import StepRing
from nvrx_sre.restart import torch_errors
from nvrx_sre.session.context import Context, NonFiniteLoss
from nvrx_sre.session.reports import StepReports
from nvrx_sre.testing.clock import ManualClock


class Control:
    """Stands for the rank's control; remembers the phases."""

    def __init__(self) -> None:
        self.clock: Clock = SystemClock()
        self.step = self.progress = 0
        self.entered: list[Phase | None] = []
        """Phases, and None where weights were allowed to change."""
        self.begun: list[int] = []
        """How many of those there were each time something of the next step had begun."""
        self.ring = StepRing.create()
        self.num_bells = 0
        self.channel = SimpleNamespace(ring=self.ring, ring_bell=self.ring_bell)

    def enter(self, phase: Phase, *, tell: bool = True) -> int:
        self.entered.append(phase)
        return self.clock.monotonic_ns()

    def pass_point(self) -> int:
        self.progress += 1
        return self.clock.monotonic_ns()

    def ring_bell(self) -> None:
        self.num_bells += 1

    def told(self) -> list[wire.Step]:
        """Reports that the launcher would take in now."""
        return [to_message(record) for record in self.ring.take(2**62)]


def restored_context(control: Control) -> Context:
    """A context as `restore` leaves it."""
    settings = SimpleNamespace(attempt=0, fault_specs=(), waits_for_writer=False)
    process: Any = SimpleNamespace(settings=settings, control=control)
    assign: Any = SimpleNamespace(rank=0, local_rank=0)
    go = wire.Go(
        generation=1,
        world_size=1,
        store_host="",
        store_port=0,
        candidates=[],
        require_restore=False,
        passes={},
        hot_every=1,
    )
    nothing: Any = None
    context = Context(process, assign, go, nothing, nothing)
    captured = SimpleNamespace(slot=-1, durable=False, save=None)
    saver: Any = SimpleNamespace(
        is_durable_due=lambda step: False,
        at_boundary=lambda step: captured,
        take_waited_ns=lambda: 0,
        let_change=lambda: control.entered.append(None),
        begin_step=lambda: control.begun.append(len(control.entered)),
        num_captured=0,
        num_skipped=0,
    )
    context._saver, context._reports = saver, StepReports(control.ring, control.clock, 1, saver)
    return context


@pytest.fixture
def control() -> Iterator[Control]:
    """A control whose ring is closed afterwards."""
    made = Control()
    yield made
    made.ring.close()


def test_the_first_step_keeps_its_deadline_after_its_data_came(control: Control) -> None:
    """It compiles and allocates and may take longer than a step; fetching a batch does not make it an ordinary one."""
    context = restored_context(control)
    with context.phase("data"):
        pass
    context.commit()
    with context.phase("data"):
        pass
    assert control.entered == [Phase.DATA, Phase.FIRST_STEP, Phase.STEP, Phase.DATA, Phase.STEP]


def test_a_commit_is_told_without_a_call(control: Control) -> None:
    """With what the user said of it; a loss and tokens may be tensors, and are numbers in the report."""
    context = restored_context(control)
    context.commit(loss=torch.tensor(0.25), tokens=torch.tensor(100))  # type: ignore[arg-type]  # users do
    context.mark("collective")
    context.commit()
    first, second = control.told()
    assert (first.generation, first.step, first.tokens, first.loss, first.has_loss) == (1, 1, 100, 0.25, True)
    assert (second.step, second.tokens, second.has_loss, first.arrived_ns) == (2, 100, False, 0)
    assert math.isnan(second.loss) and first.mono_ns < second.arrived_ns < second.mono_ns
    assert control.num_bells == 0


@pytest.mark.parametrize(
    "loss",
    [0.25, np.array(0.25), np.float32(0.25), torch.tensor(0.25), torch.tensor(0.25, requires_grad=True)],
    ids=["float", "array", "scalar", "tensor", "graph"],
)
def test_a_loss_is_given_as_it_comes(control: Control, loss: Any) -> None:
    """Also with its graph: torch's warning of that would be the last line of the log, and the cause of what ends it."""
    torch.set_warn_always(True)
    try:
        restored_context(control).commit(loss=loss)
    finally:
        torch.set_warn_always(False)
    assert [report.loss for report in control.told()] == [0.25]


def test_gpu_time_comes_with_the_next_report(control: Control) -> None:
    """The timer hears of batches, the first mark and commits; with the generation it is closed."""
    context = restored_context(control)
    heard: list[str] = []

    def boundary() -> int:
        heard.append("boundary")
        return 70 + len(heard)

    gpu: Any = SimpleNamespace(
        boundary=boundary,
        batch=lambda: heard.append("batch"),
        mark=lambda: heard.append("mark"),
        begin_step=lambda: heard.append("begin_step"),
        close=lambda: heard.append("close"),
    )
    context._gpu = gpu
    loader = DataLoader(TensorDataset(torch.arange(1)))
    saver, context._saver = context._saver, None
    context.track(loader=loader)
    context._saver = saver
    with context.phase("data"):
        pass
    next(iter(loader))
    for point in ("forward", "collective", "collective"):
        context.mark(point)
    context.commit()
    context.commit()
    assert heard == ["batch", "batch", "mark", "boundary", "boundary"]
    assert [report.gpu_ns for report in control.told()] == [74, 75]
    standing: Any = saver
    standing.at_boundary = lambda step: SimpleNamespace(slot=-1, durable=True, save=lambda step: heard.append("save"))
    context.commit()
    assert heard[-3:] == ["boundary", "save", "begin_step"], "the stretch begins after the wait"
    process: Any = context._process
    process.ring, context._saver = None, None
    context.discard()
    assert heard[-1] == "close"


def test_a_step_that_is_not_finite_is_not_told(control: Control) -> None:
    """It is not committed either."""
    context = restored_context(control)
    with pytest.raises(NonFiniteLoss, match="loss of step 1 is inf"):
        context.commit(loss=math.inf)
    assert control.told() == [] and context.step == 0


def test_a_rank_that_waits_for_the_answer_calls_the_launcher(control: Control) -> None:
    """And the wait is the checkpoint's time, not the next step's."""
    context = restored_context(control)
    saver: Any = context._saver
    steps = []

    def save(step: int) -> None:
        assert control.num_bells == 1 and [report.step for report in control.told()] == [1]
        steps.append(step)

    saver.at_boundary = lambda step: SimpleNamespace(slot=-1, durable=True, save=save if step == 1 else None)
    context.commit()
    context.commit()
    (second,) = control.told()
    assert steps == [1] and control.num_bells == 1
    assert second.durable and second.checkpoint_block_s > 0
    assert control.entered == [Phase.STEP, Phase.SAVE, Phase.STEP, Phase.STEP]


def test_a_wait_at_the_end_of_a_pass_is_no_time_of_data(control: Control) -> None:
    """It is the checkpoint's alone; what an optimizer waited for before the phase is not taken from the phase."""
    context, clock = restored_context(control), ManualClock()
    saver: Any = context._saver
    control.clock = clock
    context._reports = reports = StepReports(control.ring, clock, 1, saver)
    saver.let_change = lambda: clock.advance(3.0)
    saver.take_waited_ns = iter([2_000_000_000, 3_000_000_000, 0]).__next__
    clock.advance(4.0)
    with context.phase("data"):
        context._let_change()
        clock.advance(1.0)
    context.commit()
    (report,) = control.told()
    assert (report.step_s, report.data_s, report.checkpoint_block_s) == (2.0, 1.0, 5.0)
    assert reports.step_s() == 2.0


@pytest.mark.parametrize("value", [np.zeros(2), bytearray(2), {1}, 3])
def test_what_cannot_be_restored_in_place_is_refused_at_once(control: Control, value: object) -> None:
    """It would be saved, and never given back."""
    context = restored_context(control)
    context._saver = None
    with pytest.raises(UserError, match=r"track\(odd=...\): \w+ cannot be restored in place, use a dict"):
        context.track(odd=value)


def test_weights_may_be_changed_by_hand_in_an_evaluation_and_after_a_loader(control: Control) -> None:
    """Averaged weights are swapped in there: what the newest commit captures is copied before the script goes on."""
    context = restored_context(control)
    with context.phase("data"):
        pass
    with context.phase("evaluate"):
        pass
    assert control.entered == [Phase.DATA, Phase.FIRST_STEP, None, Phase.EVALUATE, Phase.FIRST_STEP]
    saver, context._saver = context._saver, None
    loader = DataLoader(TensorDataset(torch.arange(2)))
    context.track(loader=loader)
    context._saver = saver
    control.entered.clear()
    batches = iter(loader)
    assert len([next(batches), next(batches)]) == 2
    assert control.entered == []
    assert next(batches, None) is None
    assert control.entered == [None]


@pytest.mark.parametrize(("code", "is_through"), [(0, True), (None, True), (1, False)])
def test_a_script_that_leaves_is_through_if_it_says_so(control: Control, code: int | None, is_through: bool) -> None:
    """`sys.exit()` in the training function: the last step is captured as after a return."""
    context = restored_context(control)
    finished: list[int] = []
    saver: Any = SimpleNamespace(finish=finished.append)
    context._saver = saver

    def train(_: Context) -> None:
        raise SystemExit(code)

    if is_through:
        context.run(train)
    else:
        with pytest.raises(SystemExit):
            context.run(train)
    assert finished == [0] * is_through


@pytest.mark.parametrize("arguments", [{}, {"init_method": "env://"}])
def test_a_script_that_forms_its_group_in_the_function_is_told_what_to_call(
    control: Control, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that does so outside: an error of the user's, at its line, which no further attempt cures."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    def train(_: Context) -> None:
        dist.init_process_group("gloo", **arguments)

    with pytest.raises(UserError, match=r"by itself: .* call ctx\.init_process_group\(\) there$") as caught:
        restored_context(control).run(train)
    fault = torch_errors.describe(caught.value)
    assert fault.fault is FaultClass.USER_ERROR
    assert re.fullmatch(r"test_session_context\.py:\d+ train", fault.frame)


def test_a_group_at_the_launchers_store_is_the_scripts_own_as_well(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several nodes the variables lead there: rank 0 would host a store where the launcher's is, each time."""
    context = restored_context(control)
    with socket.create_server(("", 0)) as store:
        context._go = dataclasses.replace(context._go, store_port=store.getsockname()[1])
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(context._go.store_port)}
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", **variables}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=r"call ctx\.init_process_group\(\) there$"):
            context.run(lambda _: dist.init_process_group("gloo"))
        context._go = dataclasses.replace(context._go, store_port=1)
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
            context.run(lambda _: dist.init_process_group("gloo"))


def test_another_error_of_the_function_stays_what_it_is(control: Control) -> None:
    """Whatever its type."""

    def train(_: Context) -> None:
        raise ValueError("no such column")

    with pytest.raises(ValueError, match=r"^no such column$"):
        restored_context(control).run(train)


def test_the_end_of_the_function_is_told_to_the_watch(control: Control) -> None:
    """Which says whether something was trained and never committed."""
    context = restored_context(control)
    ends: list[str] = []
    saver: Any = SimpleNamespace(finish=lambda step: ends.append("saver"))
    watch: Any = SimpleNamespace(finish=lambda: ends.append("watch"))
    context._saver, context._watch = saver, watch
    context.run(lambda _: None)
    assert ends == ["watch", "saver"]


def test_what_begins_a_step_is_told_to_the_saver(control: Control) -> None:
    """A batch, data, a mark, a micro-batch; not an evaluation.

    A pass may end inside the data phase: that comes first.
    """
    context = restored_context(control)
    saver, context._saver = context._saver, None
    loader = DataLoader(TensorDataset(torch.arange(1)))
    context.track(loader=loader)
    context._saver = saver
    batches = iter(loader)
    with context.phase("evaluate"):
        pass
    assert control.begun == []
    next(batches)
    context.mark("forward")
    context.tick()
    assert len(control.begun) == 3
    control.begun.clear()
    control.entered.clear()
    with context.phase("data"):
        assert next(batches, None) is None
    assert control.entered == [Phase.DATA, None, Phase.FIRST_STEP] and control.begun == [3]
