"""Four real ranks and every way to wrap a model: capture, train on, restore into a new one, train on again.

    python -m tests.integration.capture_ranks STORE RANK WORLD_SIZE      (one process a rank)

Says one JSON line: case -> "same", or what differs; for kinds that no slot can hold, their names or the refusal.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.restore import HotCandidate
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.checkpoint.supported import check
from nvrx_sre.core import threads
from nvrx_sre.core.errors import UserError

WIDTH = 24


class Model(nn.Module):
    """Uneven and (with more ranks than rows) empty shards, a frozen part, tied weights, buffers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mid = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
        self.down = nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight
        self.odd = nn.Parameter(torch.ones(3, 5))
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((7, 3), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1 + dist.get_rank()
        hidden: torch.Tensor = self.down(self.mid(self.up(x)))
        return hidden * self.gain + self.odd.sum() * 1e-3 + self.frozen.sum()


Wrap = Callable[[nn.Module], nn.Module]


def sharded(mesh: DeviceMesh | None = None) -> Wrap:
    """FSDP2; over a 2-D mesh that is HSDP."""

    def wrap(model: nn.Module) -> nn.Module:
        fully_shard(model.mid, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return wrap


def from_meta(model: nn.Module) -> nn.Module:
    """Built without memory, sharded, then given memory and values."""
    with torch.device("meta"):
        empty = Model()
    wrapped = sharded()(empty)
    wrapped.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in [*wrapped.parameters(), *wrapped.buffers()]:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.copy_(torch.rand(local.shape, generator=generator).to(local.dtype))
    return wrapped


class Trainee:
    """A wrapped model with two optimizers, and its own random stream."""

    def __init__(self, wrap: Wrap, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = wrap(Model())
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizers = [torch.optim.AdamW(trained[:2], lr=0.01), torch.optim.SGD(trained[2:], lr=0.01, momentum=0.9)]
        torch.manual_seed(seed + dist.get_rank())

    @property
    def tracked(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "adam": self.optimizers[0], "sgd": self.optimizers[1]}

    def step(self) -> None:
        """Two micro-batches, then both optimizers."""
        for _ in range(2):
            self.model(torch.randn(2, WIDTH)).pow(2).mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(self) -> None:
        """Forward alone: FSDP2 leaves the root's parameters gathered behind it."""
        with torch.no_grad():
            self.model(torch.randn(2, WIDTH))

    def digest(self) -> str:
        """Every local bit, the random stream included."""
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            state.update(name.encode() + local_bytes(tensor))
            for optimizer in self.optimizers:
                for key, value in sorted(optimizer.state.get(tensor, {}).items()):
                    state.update(key.encode() + local_bytes(value))
        return state.hexdigest()


def local_bytes(tensor: Any) -> bytes:
    """Bytes of this rank's part."""
    local = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
    content: bytes = local.contiguous().numpy().tobytes()
    return content


def verdict(wrap: Wrap) -> str:
    """Captured after an evaluation, copied while nothing steps, sealed behind a step; restored into other values.

    Then a capture during which somebody changes a parameter.
    """
    rank = Trainee(wrap, seed=7)
    rank.step()
    rank.step()
    rank.evaluate()
    capturer = Capturer(rank.tracked)
    capturer.refresh()
    slots = SlotFile.create(*capturer.required_bytes(), name="nvrx-test")
    filling = capturer.begin(slots, 0, generation=1, step=2, durable=False, now_mono_ns=1)
    captured = rank.digest()
    rank.model(torch.randn(2, WIDTH)).sum().backward()  # the next step's forward and backward, under the copy
    filling.copy()
    for optimizer in rank.optimizers:
        optimizer.zero_grad()
    torch.manual_seed(11 + dist.get_rank())
    rank.step()
    filling.seal()
    other = Trainee(wrap, seed=99)
    other.step()
    candidate = HotCandidate(slots, 0, 2, capturer.layout_hash, other.tracked)
    candidate.check()
    candidate.load()
    if other.digest() != captured:
        return "the restored state is another one"
    with torch.no_grad():  # buffers moved with the forward pass under the copy
        other.model(torch.randn(2, WIDTH))
    torch.manual_seed(11 + dist.get_rank())
    other.step()
    is_same = other.digest() == rank.digest()
    filling = capturer.begin(slots, 1, generation=1, step=3, durable=False, now_mono_ns=1)
    with torch.no_grad():  # by hand, through whatever the script has in its hands
        next(parameter for parameter in rank.model.parameters() if parameter.requires_grad).zero_()
    filling.copy()
    slots.close()
    if filling.is_whole:
        return "a change by hand under the copy was not seen"
    return "same" if is_same else "the step behind the restore is another one"


def names(model: nn.Module) -> str:
    """What of it only the ranks can save, or the message that it cannot be saved."""
    try:
        return ", ".join(check({"model": model}))
    except UserError as error:
        return str(error)


def strided(mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over a dimension that is sharded by tensor parallelism already."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tensor"], [Shard(0)]))
    return fully_shard(model, mesh=mesh["data"])


def with_gaps(mesh: DeviceMesh) -> nn.Module:
    """Every second pair of rows: no contiguous block of the whole."""
    model = nn.Linear(4, 2 * mesh.size(0), bias=False)
    gaps = [_StridedShard(0, split_factor=2), Replicate()]
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, gaps, run_check=False))
    return model


def main() -> None:
    """One rank."""
    store, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    half = (world_size // 2, 2)
    said = {
        "fsdp2": verdict(sharded(init_device_mesh("cpu", (world_size,)))),
        "hsdp": verdict(sharded(init_device_mesh("cpu", half, mesh_dim_names=("replicate", "shard")))),
        "ddp": verdict(lambda model: DistributedDataParallel(model, find_unused_parameters=True)),
        "meta": verdict(from_meta),
        "strided": names(strided(init_device_mesh("cpu", half, mesh_dim_names=("data", "tensor")))),
        "gaps": names(with_gaps(init_device_mesh("cpu", half, mesh_dim_names=("data", "tensor")))),
        "fsdp1": names(FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), device_id=torch.device("cpu"))),
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()
    threads.wait_until_asleep(threads.GLOO_WORKERS)


if __name__ == "__main__":
    main()
