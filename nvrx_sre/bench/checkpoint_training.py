"""The training of the checkpoint benchmark: one rank, the same loop for every contestant.

    python -m nvrx_sre.bench.checkpoint_training --out DIR --contestant NAME ...     (started by a launcher)

Model: FSDP2 and AdamW on CPU, about 500 MB of state over the ranks (12 bytes a parameter). Our contestant runs under
our launcher and only calls `ctx.commit`; every other runs under torchrun, where the context does nothing, and saves
with a `Saver` of `checkpoint_peers`. Steps come in windows (`STEPS:DUE,...`, a save after each that is DUE); before
each window and after the last one stand steps that are neither committed nor saved: what a step costs alone.

Each rank appends JSON lines (`checkpoint_reading.Stamp`) with the host's monotonic clock; each is one write, so a
kill never tears one. Process safety: one process a rank. Must not: tell contestants apart inside a step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nvrx_sre.bench.checkpoint_peers import Saver, make_saver
from nvrx_sre.bench.checkpoint_reading import KILL_AFTER_S, Stamp
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.session import Context, resilient
from nvrx_sre.session.process import current

PAUSE_STEPS = 6
NUM_COPIES = 5
"""Copies that the memory bandwidth is the median of."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Committed steps `first..last`, a save after each of `due`."""

    first: int
    last: int
    due: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What this process is to do."""

    out: Path
    contestant: str
    dim: int
    layers: int
    batch: int
    windows: tuple[Window, ...]
    pause_s: float
    """Steps without commit before each window and after the last: for at least so long, and `PAUSE_STEPS`."""
    kill_step: int
    """The last rank kills itself shortly after the optimizer step that follows this step's save; 0 for never."""
    copies: bool
    """Also measure plain copies of a rank's state."""


class Block(nn.Module):
    """A pre-norm feed-forward block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, D]` -> `[B, D]`."""
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return cast(Tensor, x + self.down(hidden))


class Stamps:
    """Appends to this rank's file."""

    def __init__(self, path: Path) -> None:
        self.clock = SystemClock()
        self.was_killed = path.exists() and '"kind": "kill"' in path.read_text()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, kind: str, step: int, start_ns: int, **values: Any) -> None:
        """Record what began at `start_ns` and ends now."""
        stamp = Stamp(kind=kind, step=step, start_ns=start_ns, end_ns=self.clock.monotonic_ns(), **values)
        os.write(self._descriptor, json.dumps(vars(stamp)).encode() + b"\n")

    def now_ns(self) -> int:
        """Monotonic time."""
        return self.clock.monotonic_ns()


class Training:
    """Model, optimizer and saver of one generation."""

    def __init__(self, ctx: Context, order: Order, stamps: Stamps) -> None:
        self._ctx = ctx
        self._order = order
        self._stamps = stamps
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(order.dim) for _ in range(order.layers)))
        for block in self.model:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(self.model, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.saver: Saver = make_saver(order.contestant, order.out / "checkpoints", self.model, self.optimizer)
        ctx.track(model=self.model, optimizer=self.optimizer)

    def measure_copies(self) -> None:
        """Plain copies of as many bytes as this rank's state has, on all ranks at once."""
        locals_ = [_local(parameter) for parameter in self.model.parameters()]
        sources = [tensor.clone() for tensor in locals_ for _ in range(3)]
        targets = [tensor.clone() for tensor in sources]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in sources)
        for number in range(NUM_COPIES):
            dist.barrier()
            start_ns = self._stamps.now_ns()
            torch._foreach_copy_(targets, sources)
            self._stamps.add("copy", number, start_ns, num_bytes=num_bytes)

    def restore(self) -> None:
        """Restore with all ranks at once, and say how long it took."""
        dist.barrier()
        start_ns = self._stamps.now_ns()
        step = self._ctx.restore()
        process = current()
        self._stamps.add(
            "restored", step, start_ns, pid=os.getpid(), parts=process.restore_parts_s if process is not None else {}
        )

    def run(self) -> None:
        """All windows that are not behind us; a run that has ended already only restores."""
        if self._ctx.step == self._order.windows[-1].last:
            return
        for window in self._order.windows:
            if self._ctx.step >= window.last:
                continue
            if self._ctx.step < window.first:
                self._pause()
            while self._ctx.step < window.last:
                self._committed_step(window)
        self.saver.finish()
        self._pause()

    def _pause(self) -> None:
        until_ns = self._stamps.now_ns() + round(self._order.pause_s * 1e9)
        num_steps = 0
        while num_steps < PAUSE_STEPS or self._some_rank_waits(until_ns):
            num_steps += 1
            start_ns = self._stamps.now_ns()
            optimizer_ns = self._compute()
            self._ctx.tick()
            self._stamps.add("pause", self._ctx.step, start_ns, optimizer_ns=optimizer_ns)

    def _some_rank_waits(self, until_ns: int) -> bool:
        """The same answer on all ranks, so that all make as many steps."""
        waits = torch.tensor([int(self._stamps.now_ns() < until_ns)])
        dist.all_reduce(waits, op=dist.ReduceOp.MAX)
        return bool(waits.item())

    def _committed_step(self, window: Window) -> None:
        stamps, ctx = self._stamps, self._ctx
        step = ctx.step + 1
        is_due = step in window.due
        start_ns = stamps.now_ns()
        optimizer_ns = self._compute()
        self._kill_if_planned(step)
        boundary_start_ns = stamps.now_ns()
        if is_due:
            ctx.save()
        ctx.commit(tokens=self._order.batch)
        if is_due:
            self.saver.save(step)
        boundary_ns = stamps.now_ns() - boundary_start_ns
        stamps.add("step", step, start_ns, optimizer_ns=optimizer_ns, boundary_ns=boundary_ns, due=int(is_due))

    def _kill_if_planned(self, step: int) -> None:
        """By now every contestant has taken the state, or it would hold values of the next step."""
        ctx, stamps, kill_step = self._ctx, self._stamps, self._order.kill_step
        if kill_step and step == kill_step + 1 and ctx.rank == ctx.world_size - 1 and not stamps.was_killed:
            stamps.add("kill", step, stamps.now_ns())
            threading.Thread(target=_kill_soon, daemon=True).start()

    def _compute(self) -> int:
        """Forward, backward, optimizer; the time inside the optimizer's part, waits for staging included."""
        generator = torch.Generator().manual_seed(self._ctx.rank)
        x = torch.randn(self._order.batch, self._order.dim, generator=generator)
        loss = self.model(x).pow(2).mean()
        torch.autograd.backward(loss)
        start_ns = self._stamps.now_ns()
        self.saver.before_optimizer()
        self.optimizer.step()
        optimizer_ns = self._stamps.now_ns() - start_ns
        self.optimizer.zero_grad()
        return optimizer_ns


def _local(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _kill_soon() -> None:
    threading.Event().wait(KILL_AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)


@resilient
def train(ctx: Context, order: Order) -> None:
    """One generation."""
    torch.set_num_threads(1)
    ctx.init_process_group()
    stamps = Stamps(order.out / f"rank-{ctx.rank}.jsonl")
    training = Training(ctx, order, stamps)
    if order.copies and ctx.generation == 1:
        training.measure_copies()
    training.restore()
    training.run()


def parse(argv: Sequence[str]) -> Order:
    """Order from a command line; `argparse` ends the process if it cannot be read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contestant", required=True)
    for name in ("dim", "layers", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--kill-step", type=int, default=0)
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--window", action="append", default=[], help="STEPS:DUE,...")
    values = vars(parser.parse_args(argv))
    return Order(windows=tuple(_windows(values.pop("window"))), **values)


def _windows(texts: Sequence[str]) -> Iterator[Window]:
    last = 0
    for text in texts:
        steps, _, due = text.partition(":")
        yield Window(
            first=last + 1,
            last=last + int(steps),
            due=frozenset(last + int(number) for number in due.split(",") if due),
        )
        last += int(steps)


if __name__ == "__main__":
    train(parse(sys.argv[1:]))
