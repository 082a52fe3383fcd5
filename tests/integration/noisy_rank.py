"""A rank 0 that tells its launcher 10,000 things a second beside its training: -m tests.integration.noisy_rank MODULE.

The rank is read where the runtime does not watch: a script that asks for it cannot be a standby.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading

from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.events.messages import Alive
from nvrx_sre.session.process import current

MESSAGES_PER_S = 10_000
BURST_S = 0.002


def make_noise() -> None:
    """Until the process ends."""
    process = current()
    assert process is not None
    channel, clock, pause = process.control.channel, SystemClock(), threading.Event()
    begin_ns, num_sent = clock.monotonic_ns(), 0
    while not pause.wait(BURST_S):
        now_ns = clock.monotonic_ns()
        while num_sent < seconds(now_ns - begin_ns) * MESSAGES_PER_S:
            channel.send_nowait(Alive(generation=process.control.armed or 0, step=0, progress=0, mono_ns=now_ns))
            num_sent += 1


if __name__ == "__main__":
    if os.environb.get(b"RANK") == b"0":
        threading.Thread(target=make_noise, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
