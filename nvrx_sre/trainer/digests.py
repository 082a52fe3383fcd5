"""Three digests that prove a recovery: of the losses, of the samples seen, of the final state.

Model: `Progress` is tracked state, so it rolls back with model and optimizer and ends up describing the last
execution of each step and nothing else. The loss digest is a chain over (step, bits of the loss). The sample
digest is a sum over (position, sample) on each rank: the sum over all ranks does not depend on how the samples
were dealt out, and a lost, repeated or exchanged sample changes it. The state digest covers every local tensor of
every rank, in rank order, and so belongs to one world size.

Process safety: `combined_samples_digest` and `state_digest` are collective over the default group. Digests are
against mistakes, not against tampering.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from nvrx_sre.trainer.data import Indices, mix64
from nvrx_sre.trainer.model import local_tensor

_DIGEST_BYTES = 16
_MASK64 = (1 << 64) - 1


class Progress:
    """What a rank has trained so far; tracked, so that it is captured and rolled back with the model."""

    def __init__(self) -> None:
        self.loss_digest = "0" * 2 * _DIGEST_BYTES
        self.samples_sum = 0
        self.last_loss: float | None = None
        self.evaluation_loss: float | None = None

    def add_samples(self, positions: Indices, samples: Indices) -> None:
        """Take in one batch of this rank: positions `[b] int64` in the run's order and the samples there."""
        with np.errstate(over="ignore"):
            keys = mix64(positions.astype(np.uint64)) + samples.astype(np.uint64)
            total = int(mix64(keys).sum(dtype=np.uint64))
        self.samples_sum = (self.samples_sum + total) & _MASK64

    def add_loss(self, step: int, loss: float) -> None:
        """Take in the loss of `step`, the mean over all ranks."""
        packed = bytes.fromhex(self.loss_digest) + struct.pack("<Qd", step, loss)
        self.loss_digest = xxhash.xxh3_128_hexdigest(packed)
        self.last_loss = loss

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the sum as hex, since not every reader of JSON keeps 64 bits."""
        return {
            "loss_digest": self.loss_digest,
            "samples_sum": f"{self.samples_sum:016x}",
            "last_loss": self.last_loss,
            "evaluation_loss": self.evaluation_loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.loss_digest = str(state["loss_digest"])
        self.samples_sum = int(state["samples_sum"], 16)
        self.last_loss = state["last_loss"]
        self.evaluation_loss = state["evaluation_loss"]

    def load_resharded(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> None:
        """Take over from the ranks of another world: losses are common to all, sample sums go to rank 0."""
        self.load_state_dict(states[0])
        total = sum(int(state["samples_sum"], 16) for state in states) & _MASK64
        self.samples_sum = total if rank == 0 else 0


def combined_samples_digest(progress: Progress, device: torch.device) -> str:
    """Samples digest over all ranks, 16 hex digits. Collective."""
    parts = _gather(progress.samples_sum.to_bytes(8, "little"), device)
    return f"{sum(int.from_bytes(part, 'little') for part in parts) & _MASK64:016x}"


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """xxh3_128 over the local parameters and optimizer state of every rank, 32 hex digits. Collective."""
    own = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        _update(own, name, parameter)
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            _update(own, f"{name}/{key}", value if isinstance(value, Tensor) else torch.tensor(value))
    return xxhash.xxh3_128_hexdigest(b"".join(_gather(own.digest(), device)))


def _update(digest: xxhash.xxh3_128, name: str, tensor: Tensor) -> None:
    local = local_tensor(tensor).cpu().contiguous()
    digest.update(f"{name} {local.dtype} {tuple(local.shape)}\n".encode())
    digest.update(local.reshape(-1).view(torch.uint8).numpy().data)


def _gather(own: bytes, device: torch.device) -> list[bytes]:
    """The same number of bytes from each rank, in rank order."""
    sent = torch.tensor(list(own), dtype=torch.uint8, device=device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    return [bytes(part.tolist()) for part in received]
