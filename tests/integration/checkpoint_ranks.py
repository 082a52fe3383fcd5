"""Two or three real ranks around one FSDP2 model with awkward parts, driven over stdin and stdout.

    python -m tests.integration.checkpoint_ranks JSON      (one process a rank)

Modes: `train` (train, capture step 2 into the slot whose descriptor was passed, report, wait), `restore` (from the
slot and from the directory: report, train one more step, report), `load` (torch's own dcp.load and our restore into
any world size: report global values).
Awkward: an uneven shard, an empty shard, a frozen parameter, a 0-dim buffer that differs by rank, dropout.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.restore import DurableCandidate, HotCandidate
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.core import threads

WIDTH = 16


class Model(nn.Module):
    """Two linear layers and the awkward parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.gain = nn.Parameter(torch.ones(1))
        self.odd = nn.Parameter(torch.ones(3, 5))
        self.frozen = nn.Parameter(torch.full((7, 3), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1 + dist.get_rank()
        hidden = self.drop(torch.nn.functional.gelu(self.up(x)))
        return self.down(hidden) * self.gain + self.odd.sum() * 1e-3 + self.frozen.sum()


class Rank:
    """This rank's model, optimizer, scheduler and data position."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.position = {"sample": 0}
        torch.manual_seed(seed + dist.get_rank())

    @property
    def tracked(self) -> dict[str, Any]:
        """What is saved."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "position": self.position,
        }

    def step(self) -> None:
        """One optimizer step; draws from the rank's random stream."""
        self.model(torch.randn(4, WIDTH)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.position["sample"] += 4

    def digest(self) -> str:
        """Every local bit of state, the random stream and the learning rate included."""
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        state.update(json.dumps([self.position, self.scheduler.state_dict()], sort_keys=True).encode())
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            state.update(name.encode() + local_bytes(tensor))
            for key, value in sorted(self.optimizer.state.get(tensor, {}).items()):
                state.update(key.encode() + local_bytes(value))
        return state.hexdigest()


def local_bytes(tensor: torch.Tensor) -> bytes:
    """Bytes of this rank's part."""
    local = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return local.contiguous().numpy().tobytes()


def say(**values: Any) -> None:
    """One line to the test."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def open_slots(order: dict[str, Any]) -> SlotFile:
    """The slot file whose descriptor was inherited."""
    return SlotFile.map(order["fd"], order["data_bytes"], order["blob_bytes"])


def train(order: dict[str, Any]) -> None:
    """Two steps, a capture, then the step that a restored rank must repeat."""
    rank = Rank(seed=7)
    slots = open_slots(order)
    capturer = Capturer(rank.tracked)
    for _ in range(2):
        rank.step()
    capturer.capture(slots, 1, generation=1, step=2, durable=True, now_mono_ns=5)
    captured = rank.digest()
    rank.step()
    say(steps=[captured, rank.digest()], layout_hash=capturer.layout_hash)
    sys.stdin.read()


def restore(order: dict[str, Any]) -> None:
    """From the slot, then from the directory, each into a rank with other values; then one step."""
    said = {}
    for tier in ("hot", "durable"):
        rank = Rank(seed=99)
        candidate: HotCandidate | DurableCandidate = durable(order, rank)
        if tier == "hot":
            candidate = HotCandidate(open_slots(order), 1, 2, order["layout_hash"], rank.tracked)
        candidate.check()
        candidate.load()
        captured = rank.digest()
        rank.step()
        said[tier] = [captured, rank.digest()]
    say(**said)


def durable(order: dict[str, Any], rank: Rank) -> DurableCandidate:
    """The directory as a candidate of this rank."""
    return DurableCandidate(Path(order["directory"]), "demo", dist.get_rank(), dist.get_world_size(), rank.tracked)


def load(order: dict[str, Any]) -> None:
    """Into this world size by torch's own load, then by ours."""
    by_torch = Rank(seed=99)
    plain(order, by_torch)
    ours = Rank(seed=98)
    candidate = durable(order, ours)
    candidate.check()
    candidate.load()
    say(by_torch=global_values(by_torch), ours=global_values(ours), random=torch.rand(1).item())


def plain(order: dict[str, Any], rank: Rank) -> None:
    """torch's own load into `rank`, without any help of ours."""
    state: dict[str, Any] = {"model": rank.model.state_dict(), "optimizer": {"state": {}}}
    for name, parameter in rank.model.named_parameters():
        if parameter.requires_grad:
            state["optimizer"]["state"][name] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    dcp.load(state, checkpoint_id=order["directory"])
    for name, parameter in rank.model.named_parameters():
        if parameter.requires_grad:
            rank.optimizer.state[parameter] = state["optimizer"]["state"][name]


def global_values(rank: Rank) -> str:
    """Digest of the gathered parameters, moments and the common buffer; the same at every world size."""
    state = hashlib.sha256()
    for name, parameter in rank.model.named_parameters():
        for tensor in [parameter, *(value for _, value in sorted(rank.optimizer.state.get(parameter, {}).items()))]:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            state.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return state.hexdigest()


def main() -> None:
    """One rank."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    store = dist.FileStore(order["store"], order["world_size"])
    dist.init_process_group("gloo", store=store, rank=order["rank"], world_size=order["world_size"])
    {"train": train, "restore": restore, "load": load}[order["mode"]](order)
    dist.destroy_process_group()
    threads.wait_until_asleep(threads.GLOO_WORKERS)


if __name__ == "__main__":
    main()
