"""The context's phases: what runs outside of data, evaluation and saves is the first step until one is committed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import Phase
from nvrx_sre.session.context import Context
from nvrx_sre.session.times import StepTimes


class Control:
    """Stands for the rank's control; remembers the phases."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.step = self.progress = 0
        self.entered: list[Phase] = []
        self.channel = SimpleNamespace(report_step=lambda packet, is_urgent: None)

    def enter(self, phase: Phase, *, tell: bool = True) -> None:
        self.entered.append(phase)


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
        num_captured=0,
        num_skipped=0,
    )
    context._saver, context._times = saver, StepTimes(control.clock)
    return context


def test_the_first_step_keeps_its_deadline_after_its_data_came() -> None:
    """It compiles and allocates and may take longer than a step; fetching a batch does not make it an ordinary one."""
    control = Control()
    context = restored_context(control)
    with context.phase("data"):
        pass
    context.commit()
    with context.phase("data"):
        pass
    assert control.entered == [Phase.DATA, Phase.FIRST_STEP, Phase.STEP, Phase.DATA, Phase.STEP]
