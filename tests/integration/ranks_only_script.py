"""Four ranks around state that no slot can hold: FSDP1, FSDP2 with tensor parallelism on one dimension, subclasses.

Weights are drawn anew in every generation, so that only a restore can bring the old ones back. Each rank prints a
digest of every local bit behind each step.
"""

import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

import nvrx_sre

NUM_STEPS = 12
WIDTH = 6
NAMES = ("halves", "wrapped", "scaled")


class Marked(torch.Tensor):
    """A tensor of somebody's own type, over memory of its own."""


class Pair(torch.Tensor):
    """A wrapper around two tensors: the value is their sum."""

    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> "Pair":
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype, device=high.device)

    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        self.high, self.low = high, low

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> "Pair":
        return Pair(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, Pair(args[0].high, args[0].low))
        return func(*tree_map_only(Pair, lambda pair: pair.high + pair.low, args), **(kwargs or {}))


class Scaled(nn.Module):
    """Weights of both types, and a buffer that each rank has for itself."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).as_subclass(Marked))
        self.fixed = nn.Parameter(Pair(torch.randn(WIDTH), torch.randn(WIDTH)), requires_grad=False)
        self.register_buffer("seen", torch.full((2,), float(rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        result: torch.Tensor = (x @ self.weight).as_subclass(torch.Tensor) * (self.fixed + 0)
        return result


class Halves(nn.Module):
    """Two layers for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


def flat() -> nn.Module:
    """What FSDP1 wraps: shards are uneven, and some of the last are empty."""
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
    model.register_buffer("calls", torch.zeros(3))
    return model


def local_bits(tensor: torch.Tensor) -> bytes:
    """This rank's bits."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if isinstance(tensor, Pair):
        return local_bits(tensor.high) + local_bits(tensor.low)
    content: bytes = tensor.as_subclass(torch.Tensor).contiguous().numpy().tobytes()
    return content


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Every local bit of a model and its optimizer, the learning rate included.

    torch forgets the state of a parameter of which FSDP1 keeps nothing on this rank: there is nothing in it.
    """
    state = hashlib.sha256(repr([group["lr"] for group in optimizer.param_groups]).encode())
    for tensor in (*model.parameters(), *model.buffers()):
        state.update(local_bits(tensor))
        for key, value in sorted(optimizer.state.get(tensor, {}).items()) if tensor.numel() else ():
            state.update(key.encode() + local_bits(value))
    return state.hexdigest()[:12]


def random_stream() -> str:
    """Digest of the rank's random stream."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12]


def build(ctx: nvrx_sre.Context) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Weights that differ by generation."""
    torch.manual_seed(ctx.generation)
    mesh = init_device_mesh("cpu", (2, ctx.world_size // 2), mesh_dim_names=("data", "tensor"))
    halves = parallelize_module(Halves(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in (halves.up, halves.down):
        fully_shard(layer, mesh=mesh["data"])  # type: ignore[arg-type]  # a layer
    fully_shard(halves, mesh=mesh["data"])
    wrapped = FullyShardedDataParallel(flat(), use_orig_params=True, device_id=torch.device("cpu"))
    models = [halves, wrapped, Scaled(ctx.rank)]
    return models, optimizers_of(models)


def say(ctx: nvrx_sre.Context, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """One line to the rank's log."""
    found = [digest_of(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    print("bits", ctx.generation, ctx.step, *found, random_stream(), flush=True)


def optimizers_of(models: list[nn.Module]) -> list[torch.optim.Optimizer]:
    """One for each."""
    halves, wrapped, scaled = models
    return [
        torch.optim.AdamW(halves.parameters(), lr=0.01),
        torch.optim.AdamW(wrapped.parameters(), lr=0.02),
        torch.optim.SGD([scaled.weight], lr=0.01, momentum=0.9),  # type: ignore[list-item]  # a parameter
    ]


def tracked_of(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """What is tracked, by name."""
    tracked: dict[str, Any] = dict(zip(NAMES, models, strict=True))
    tracked |= {f"{name}_optimizer": item for name, item in zip(NAMES, optimizers, strict=True)}
    return tracked | {"schedule": torch.optim.lr_scheduler.StepLR(optimizers[1], 2, 0.5)}


@nvrx_sre.resilient
def train(ctx: nvrx_sre.Context) -> None:
    torch.set_num_threads(1)
    ctx.init_process_group()
    models, optimizers = build(ctx)
    tracked = tracked_of(models, optimizers)
    ctx.track(**tracked)
    ctx.restore()
    say(ctx, models, optimizers)
    while ctx.step < NUM_STEPS:
        x = torch.full((4, WIDTH), 0.1 * (ctx.step + 1))
        loss = torch.zeros(())
        for model in models:
            x = x + model(x)
            loss = loss + x.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tracked["schedule"].step()
        models[1].module.calls += 1
        torch.randn(1)
        ctx.commit(loss=loss.detach(), tokens=4)
        say(ctx, models, optimizers)


if __name__ == "__main__":
    train()
