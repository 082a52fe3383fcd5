"""The peer of the recovery benchmark: the same model under `torchrun --max-restarts`, as its documentation has it.

Model: a plain training script. It saves with `torch.distributed.checkpoint` every few steps, and after a restart
loads the newest save. The planned faults hit the last rank; a fault is spent once its line is in that rank's
stamp file, so it fires once. Each rank appends JSON lines to `OUT/rank-R.jsonl` with the host's monotonic clock:
`{"kind": "restored" | "step" | "fault", "step": s, "ns": t}`; a line survives the rank's SIGKILL.

The store gets a prefix of its own for each restart: with gloo, torch 2.13 otherwise meets the addresses of dead
peers. Process safety: one process a rank. Must not: use any of our recovery code.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.rendezvous import rendezvous

from nvrx_sre.core.atomic import write_json_atomically
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.trainer.config import TrainerConfig
from nvrx_sre.trainer.corpus import load_corpus
from nvrx_sre.trainer.data import DataOrder
from nvrx_sre.trainer.model import build_model, build_optimizer, initialize

EXCEPTION = "exception"
SIGKILL = "sigkill"


class Stamps:
    """Appends to this rank's stamp file; each line is one write, so a kill never tears one."""

    def __init__(self, path: Path) -> None:
        self._clock = SystemClock()
        self.num_faults = sum('"fault"' in line for line in path.read_text().splitlines()) if path.exists() else 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, kind: str, step: int) -> None:
        """Record that `kind` happened at `step`, now."""
        line = json.dumps({"kind": kind, "step": step, "ns": self._clock.monotonic_ns()})
        os.write(self._descriptor, line.encode() + b"\n")


class PeerTraining:
    """Model, optimizer and data of one rank, and its periodic save."""

    def __init__(self, config: TrainerConfig, out: Path, rank: int, world_size: int) -> None:
        self._out = out
        self._rank = rank
        self._order = DataOrder(config, load_corpus(config.data), rank=rank, world_size=world_size)
        self.model = build_model(config.shape, torch.device("cpu"))
        initialize(self.model, config.shape, config.seed)
        self.optimizer = build_optimizer(self.model, config.peak_learning_rate)

    def run_step(self, step: int) -> None:
        """One optimizer step."""
        tokens = torch.from_numpy(self._order.batch(step, 0).tokens)
        logits: Tensor = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int) -> None:
        """Collective: save `step` and then point to it."""
        save(self._state(), checkpoint_id=self._directory(step))
        if self._rank == 0:
            write_json_atomically(self._pointer, {"step": step})

    def restore(self) -> int:
        """Collective: load the newest save; its step, 0 if there is none."""
        if not self._pointer.exists():
            return 0
        step = int(json.loads(self._pointer.read_text())["step"])
        state = self._state()
        load(state, checkpoint_id=self._directory(step))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return step

    @property
    def _pointer(self) -> Path:
        return self._out / "newest.json"

    def _directory(self, step: int) -> Path:
        return self._out / f"step-{step:08d}"

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def form_group() -> tuple[int, int]:
    """Form the gloo group of this restart; (rank, world size)."""
    store, rank, world_size = next(rendezvous("env://"))
    prefix = f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    dist.init_process_group("gloo", store=PrefixStore(prefix, store), rank=rank, world_size=world_size)
    return rank, world_size


def fail(case: str) -> None:
    """Be the fault."""
    if case == SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("planned fault of the benchmark")


def main(argv: Sequence[str]) -> None:
    """Train to the end, through as many restarts as there are planned faults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", choices=(EXCEPTION, SIGKILL), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--fault-steps", type=int, nargs="*", default=[])
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rank, world_size = form_group()
    stamps = Stamps(options.out / f"rank-{rank}.jsonl")
    training = PeerTraining(TrainerConfig(), options.out, rank, world_size)
    done = training.restore()
    stamps.add("restored", done)
    pending = options.fault_steps[stamps.num_faults :] if rank == world_size - 1 else []
    for step in range(done + 1, options.steps + 1):
        if pending and step == pending[0]:
            stamps.add("fault", step)
            fail(options.case)
        training.run_step(step)
        stamps.add("step", step)
        if step % options.save_every == 0:
            training.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
