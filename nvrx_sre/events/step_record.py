"""A rank's report of a step: the numbers that it stores, and the message that its launcher makes of them.

    generation, step           as in `messages.Step`
    mono_ns, begun_ns          when the step was over, and when the rank entered the step loop
    data_ns, save_ns,          since then, booked to these; what is booked nowhere was the steps' own
      evaluate_ns
    tokens                     since then, over all ranks
    slot, durable              as in `messages.Step`
    captured, skipped
    arrived_ns, gpu_ns
    loss                       `UNKNOWN_LOSS` where the user gave none

A rank stores what it has at hand, in whole nanoseconds, and its launcher does the rest: at a step boundary each line of
code is one that the rank's caches do not hold.

Pure. Must not: interpret what the numbers say.
"""

from __future__ import annotations

import math

from nvrx_sre.core.clock import NS_PER_S
from nvrx_sre.events.messages import NO_LOSS, Step
from nvrx_sre.events.step_ring import StepRecord

UNKNOWN_LOSS = math.inf
"""No step is committed with such a loss; unlike NaN it equals itself, and has the same hash everywhere."""


def to_message(record: StepRecord) -> Step:
    """The report as the launcher's machine takes it."""
    generation, step, mono_ns, begun_ns, data_ns, save_ns, evaluate_ns, tokens = record[:8]
    slot, durable, captured, skipped, arrived_ns, gpu_ns, loss = record[8:]
    has_loss = loss != UNKNOWN_LOSS
    message = object.__new__(Step)  # the frozen class itself sets field by field, at twice the cost
    message.__dict__.update(
        generation=generation,
        step=step,
        mono_ns=mono_ns,
        step_s=(mono_ns - begun_ns - data_ns - save_ns - evaluate_ns) / NS_PER_S,
        data_s=data_ns / NS_PER_S,
        checkpoint_block_s=save_ns / NS_PER_S,
        evaluate_s=evaluate_ns / NS_PER_S,
        tokens=tokens,
        loss=loss if has_loss else NO_LOSS,
        has_loss=has_loss,
        slot=slot,
        durable=durable != 0,
        captured=captured,
        skipped=skipped,
        arrived_ns=arrived_ns,
        gpu_ns=gpu_ns,
    )
    return message
