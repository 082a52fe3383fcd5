"""What a rank does for telemetry at a step boundary, and the work of the steps in between.

The report is that of `session.context`, without the checkpoint: the clock, the step's times, the packed step into the
ring. Work is hashing in the processor's own cache, so that nothing but the processor's speed decides how long it takes.
"""

from __future__ import annotations

import hashlib

from nvrx_sre.core.clock import SystemClock, to_ns
from nvrx_sre.events.channel import Channel
from nvrx_sre.events.messages import NO_LOSS, pack_step
from nvrx_sre.events.schema import Phase
from nvrx_sre.session.times import StepTimes
from nvrx_sre.telemetry import context

CHUNK = bytes(16 * 1024)
"""What is hashed at once: half of a core's data cache."""


class Reporter:
    """Reports steps of `generation` over a channel that has its ring."""

    def __init__(self, channel: Channel, generation: int = 1) -> None:
        self.channel = channel
        self._generation = generation
        self._times = StepTimes(SystemClock())
        self._tokens = 0

    def report(self, step: int) -> None:
        """Report a step, as `ctx.commit()` does."""
        self._times.switch(Phase.SAVE)
        spent = self._times.next_step(0)
        self._tokens += 1024
        packet = pack_step(
            self._generation,
            step,
            *spent,
            self._tokens,
            NO_LOSS,
            False,
            -1,
            False,
            0,
            0,
            0,
        )
        self.channel.report_step(packet, is_urgent=False)
        context.set_step(step)


def work(num_chunks: int) -> None:
    """Keep the processor busy."""
    digest = hashlib.sha256()
    for _ in range(num_chunks):
        digest.update(CHUNK)


def chunks_for(clock: SystemClock, wanted_s: float) -> int:
    """How much work takes `wanted_s` here."""
    num_chunks = 0
    until_ns = clock.monotonic_ns() + to_ns(10 * wanted_s)
    while clock.monotonic_ns() < until_ns:
        work(1)
        num_chunks += 1
    return max(1, num_chunks // 10)
