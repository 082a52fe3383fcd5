"""What the peers of the recovery benchmark train: the reference trainer's model, saved and loaded by torch itself.

Model: a plain training loop that saves with `torch.distributed.checkpoint` every few steps and starts from the newest
save. Planned faults hit rank 0 and the last rank in turn; a fault is spent once its line is in that rank's
stamp file, so it fires once. Each rank appends JSON lines to `OUT/rank-R.jsonl` with the host's monotonic clock:
`{"kind": "restored" | "step" | "fault", "step": s, "ns": t}`; a line survives the rank's SIGKILL.

Process safety: one process a rank. Must not: use any of our recovery code.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nvrx_sre.bench.recovery_cases import COLLECTIVE, EXCEPTION, HANG, SIGKILL, WAIT_S
from nvrx_sre.core.atomic import write_json_atomically
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.trainer.config import TrainerConfig
from nvrx_sre.trainer.corpus import Corpus, load_corpus
from nvrx_sre.trainer.data import DataOrder
from nvrx_sre.trainer.model import build_model, build_optimizer, initialize

SPARED_S = 120.0
"""Longest wait of a survivor (seconds)."""
SLICE_S = 0.005


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """What a peer's rank is told."""

    out: Path
    case: str
    steps: int
    save_every: int
    fault_steps: tuple[int, ...]
    group_timeout_s: float

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> tuple[PeerOptions, list[str]]:
        """Options, and what is left for the peer's own script. Exits with 2 as any argparse program."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--case", choices=(EXCEPTION, SIGKILL, HANG, COLLECTIVE), required=True)
        parser.add_argument("--steps", type=int, required=True)
        parser.add_argument("--save-every", type=int, required=True)
        parser.add_argument("--fault-steps", type=int, nargs="*", default=[])
        parser.add_argument("--group-timeout", type=float, required=True)
        found, rest = parser.parse_known_args(argv)
        options = cls(
            out=found.out,
            case=found.case,
            steps=found.steps,
            save_every=found.save_every,
            fault_steps=tuple(found.fault_steps),
            group_timeout_s=found.group_timeout,
        )
        return options, rest

    def faults_of(self, rank: int, world_size: int) -> list[int]:
        """Steps at which a rank is the fault: rank 0 and the last rank take turns."""
        turns = {0: self.fault_steps[0::2], world_size - 1: self.fault_steps[1::2]}
        return list(self.fault_steps if world_size == 1 else turns.get(rank, ()))


class Stamps:
    """Appends to this rank's stamp file; each line is one write, so a kill never tears one."""

    def __init__(self, path: Path) -> None:
        self._clock = SystemClock()
        self.num_faults = sum('"fault"' in line for line in path.read_text().splitlines()) if path.exists() else 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, kind: str, step: int) -> None:
        """Record that `kind` happened at `step`, now."""
        self.num_faults += kind == "fault"
        line = json.dumps({"kind": kind, "step": step, "ns": self._clock.monotonic_ns()})
        os.write(self._descriptor, line.encode() + b"\n")


def own_device(local_rank: int) -> torch.device:
    """The device of a rank, which it uses from now on: a GPU where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def backend_of(device: torch.device) -> str:
    """What ranks on such devices meet over."""
    return "nccl" if device.type == "cuda" else "gloo"


class PeerTraining:
    """Model, optimizer and data of one rank, and its periodic save. Needs a process group."""

    def __init__(
        self, config: TrainerConfig, corpus: Corpus, out: Path, place: tuple[int, int], device: torch.device
    ) -> None:
        """`place`: rank and world size."""
        self._out = out
        self._device = device
        self._rank, world_size = place
        self._order = DataOrder(config, corpus, rank=self._rank, world_size=world_size)
        self.model = build_model(config.shape, device)
        initialize(self.model, config.shape, config.seed)
        self.optimizer = build_optimizer(self.model, config.peak_learning_rate)

    def run_step(self, step: int) -> None:
        """One optimizer step."""
        tokens = torch.from_numpy(self._order.batch(step, 0).tokens).to(self._device)
        logits: Tensor = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
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


class PeerRank:
    """One rank of a peer: everything that outlives a restart inside a process."""

    def __init__(self, options: PeerOptions, device: torch.device, *, spares_survivors: bool = False) -> None:
        """`spares_survivors`: ranks that are not the fault wait for it in Python rather than in a collective."""
        torch.set_num_threads(1)
        self._options = options
        self._device = device
        self._spares_survivors = spares_survivors and options.case != COLLECTIVE
        self._num_calls = 0
        self._config = TrainerConfig()
        self._corpus = load_corpus(self._config.data)
        self._stamps: Stamps | None = None

    def train(self, rank: int, world_size: int, beat: Callable[[], None]) -> None:
        """Restore and train to the end, or to the next planned fault; `beat` is called after each step.

        Needs a process group of `world_size`.
        """
        options = self._options
        if self._stamps is None:
            self._stamps = Stamps(options.out / f"rank-{rank}.jsonl")
        stamps = self._stamps
        training = PeerTraining(self._config, self._corpus, options.out, (rank, world_size), self._device)
        done = training.restore()
        stamps.add("restored", done)
        pending = options.faults_of(rank, world_size)[stamps.num_faults :]
        spared = options.fault_steps[self._num_calls :] if self._spares_survivors else ()
        self._num_calls += 1
        for step in range(done + 1, options.steps + 1):
            if pending and step == pending[0]:
                self._fail(stamps, step)
            if spared and step == spared[0]:
                _await_interrupt()
            training.run_step(step)
            stamps.add("step", step)
            beat()
            if step % options.save_every == 0:
                training.save(step)

    def _fail(self, stamps: Stamps, step: int) -> None:
        """Be the fault. Raises `RuntimeError`, dies, or never returns."""
        if self._options.case == COLLECTIVE:
            threading.Event().wait(WAIT_S)  # until the others wait in their collective
        stamps.add("fault", step)
        if self._options.case == SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._options.case == HANG:
            threading.Event().wait()
        raise RuntimeError("planned fault of the benchmark")


def _await_interrupt() -> None:
    """Wait, in slices short enough for an exception that is raised from another thread."""
    for _ in range(round(SPARED_S / SLICE_S)):
        threading.Event().wait(SLICE_S)
    raise TimeoutError(f"no interrupt within {SPARED_S:g} s of another rank's fault")
