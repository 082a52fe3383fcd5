"""A rank with a family: rank 1 starts a shell that starts another process, the survivor looks what is left of them.

nvrx-sre launch ... family_script.py DIRECTORY
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nvrx_sre
from nvrx_sre.core import processes

STEPS = 12
FAMILY = "sleep 600 & echo $! > {path}.tmp; mv {path}.tmp {path}; wait"
"""A shell that waits for its child, whose pid it leaves in a file: a grandchild of the rank."""


@nvrx_sre.resilient
def train(ctx: nvrx_sre.Context, directory: Path) -> None:
    """A step is a sum over the ranks; the first generation's rank 1 has a family, which the next asks for."""
    import torch
    import torch.distributed as dist

    state = {"sum": 0.0}
    ctx.init_process_group()
    ctx.track(state=state)
    ctx.restore()
    family = directory / "family"
    if ctx.rank == 1 and ctx.generation == 1:
        start_family(directory, family)
    if ctx.rank == 0 and ctx.generation > 1:
        write_what_is_left(directory, family)
    while ctx.step < STEPS:
        total = torch.ones(1)
        dist.all_reduce(total)
        state["sum"] += float(total)
        ctx.commit(loss=state["sum"], tokens=1)
    ctx.finish(sum=state["sum"])


def start_family(directory: Path, family: Path) -> None:
    """Start shell and grandchild, and write down who they are: pid and start ticks of each."""
    grandchild = directory / "grandchild"
    shell = subprocess.Popen(["sh", "-c", FAMILY.format(path=grandchild)])
    while not grandchild.exists():
        try:
            shell.wait(timeout=0.01)
        except subprocess.TimeoutExpired:
            continue
    pids = [shell.pid, int(grandchild.read_text())]
    family.write_text("\n".join(f"{pid} {processes.start_ticks(pid)}" for pid in pids), encoding="ascii")


def write_what_is_left(directory: Path, family: Path) -> None:
    """How many of the family live now that the next generation has been formed."""
    members = [line.split() for line in family.read_text(encoding="ascii").splitlines()]
    alive = [pid for pid, ticks in members if processes.is_alive(int(pid), int(ticks))]
    (directory / "left").write_text(f"{len(alive)} of {len(members)}", encoding="ascii")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
