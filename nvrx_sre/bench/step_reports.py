"""What a rank does for telemetry at a step boundary, and the training of the steps in between.

The report is that of `session.context`, with a loss, and nothing captured; the rest of the boundary, which is there
without reports as well, is `pass_boundary`. The training is that of a small model: its forward and backward pass and
AdamW, in the thread of the rank and no other. That is what surrounds a report, and it decides what a report costs: it
leaves nothing of the report's code and data in the processor's caches. Work that fits into a core's own caches leaves
some of it there, so that a report costs half as much after it (docs/benchmarks).

Must not: load torch before it trains, since the process that takes reports in has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nvrx_sre.core.clock import SystemClock, to_ns
from nvrx_sre.events.channel import Channel
from nvrx_sre.session.reports import StepReports

LOSS = 2.5
"""Of each reported step."""
NUM_LAYERS, WIDTH, BATCH = 4, 96, 32
"""The model that is trained: a step of it takes well below a millisecond, so that any length can be made of some."""
_NUM_WARM_UP_STEPS = 50


@dataclass(frozen=True)
class _Captured:
    """What became of a step at its boundary: nothing was due."""

    slot: int = -1
    durable: bool = False


class _Saver:
    """In the place of what captures steps."""

    def __init__(self) -> None:
        self.num_captured = self.num_skipped = 0
        self._plan = (0, 0, 0)
        self._nothing = _Captured()

    def at_boundary(self, step: int) -> _Captured:
        """Nothing is due."""
        before, from_step, after = self._plan
        every = after if step >= from_step else before
        return self._nothing if every == 0 or step % every else _Captured(slot=0)


class Reporter:
    """Reports steps of `generation` over a channel that has its ring."""

    def __init__(self, channel: Channel, generation: int = 1) -> None:
        assert channel.ring is not None
        self.channel = channel
        self._saver = _Saver()
        self._captured = _Captured()
        self._reports = StepReports(channel.ring, SystemClock(), generation, self._saver)

    def pass_boundary(self, step: int) -> None:
        """What a boundary is without a report: find out that nothing is to be captured."""
        self._captured = self._saver.at_boundary(step)

    def report(self, step: int) -> None:
        """Report a step, as `ctx.commit()` does."""
        reports = self._reports
        now_ns = reports.now_ns
        boundary_ns = now_ns()
        reports.tokens += 1024
        if reports.tell(step, boundary_ns, boundary_ns, LOSS, self._captured):
            self.channel.ring_bell()

    def report_nothing(self, step: int) -> None:
        """In the place of `report`: what of its time is the call and the clock that times it."""


def training(clock: SystemClock, wanted_s: float) -> Callable[[], None]:
    """Trains for about `wanted_s` at each call. Blocks for a second to find out how many steps that is."""
    step = _training_step()
    for _ in range(_NUM_WARM_UP_STEPS):
        step()
    num_steps, started_ns = 0, clock.monotonic_ns()
    until_ns = started_ns + to_ns(max(1.0, 10 * wanted_s))
    while clock.monotonic_ns() < until_ns:
        step()
        num_steps += 1
    num_wanted = max(1, round(num_steps * to_ns(wanted_s) / (clock.monotonic_ns() - started_ns)))

    def train() -> None:
        for _ in range(num_wanted):
            step()

    return train


def _training_step() -> Callable[[], None]:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, wanted = torch.randn(2, BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        torch.autograd.backward(loss)
        optimizer.step()

    return step
