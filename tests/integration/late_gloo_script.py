"""A resilient script in which gloo's threads get the processor only when nobody else wants it.

    python -m tests.integration.late_gloo_script NUM_PROCESSES

Says how each of its processes ended, as JSON. All run on one core, and keep the group, as a model does that is not
freed: without a wait at the end about four of five die of SIGABRT.
"""

from __future__ import annotations

import functools
import json
import os
import sys

import torch
import torch.distributed as dist

import nvrx_sre
from nvrx_sre.core import threads
from tests.patience import PATIENCE_S

NUM_COLLECTIVES = 20
kept: list[dist.ProcessGroup | None] = []


def starve_gloo() -> None:
    """Its threads run only when the main thread waits."""
    core = {min(os.sched_getaffinity(0))}
    for tid in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(tid), core)
        with open(f"/proc/self/task/{tid}/comm") as comm:
            if comm.read().strip() == threads.GLOO_WORKERS:
                os.sched_setscheduler(int(tid), os.SCHED_IDLE, os.sched_param(0))


@nvrx_sre.resilient
def train(ctx: nvrx_sre.Context) -> None:
    """Collectives of tensors that Python lets go of at once, the last of them right before the end."""
    ctx.init_process_group("gloo")
    kept.append(dist.group.WORLD)
    starve_gloo()
    for _ in range(NUM_COLLECTIVES):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 1
        del total


def main() -> None:
    """One process after the other, each with Python's own exit."""
    # What runs when nobody else wants the processor may take long to fall asleep on a busy machine.
    threads.wait_until_asleep = functools.partial(threads.wait_until_asleep, limit_s=PATIENCE_S)
    statuses = []
    for _ in range(int(sys.argv[1])):
        pid = os.fork()
        if not pid:
            train()
            sys.exit(0)
        statuses.append(os.waitpid(pid, 0)[1])
    sys.stdout.write(json.dumps(statuses) + "\n")


if __name__ == "__main__":
    main()
