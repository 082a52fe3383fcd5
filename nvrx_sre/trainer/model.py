"""The reference model: a small Llama-shaped language model over bytes, sharded with FSDP2.

Model: built on the meta device, `fully_shard` on every block and on the root, storage allocated but not
filled. `initialize` then fills it; a restore that overwrites everything makes that unnecessary, so the two
are apart. Each parameter is drawn in full from a generator keyed by (seed, name) and then cut to the local
shard: the same weights at any world size.

Invariants: no buffers (rotary tables are computed, not stored), so parameters and optimizer are the whole
state; on CPU with one thread the same inputs give the same bits.
Process safety: collective; every rank builds in the same order. Must not: read the environment, keep a model
alive in a module-level cache.
"""

from __future__ import annotations

import hashlib
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nvrx_sre.trainer.config import ModelShape

VOCABULARY = 256
_ROTARY_BASE = 10_000.0
_RESHARD_ABOVE_DIM = 512
"""Below this width a block's parameters stay gathered for its backward: latency, not memory, is what counts."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """`[B, S, D]` -> `[B, S, D]`."""
        batch, length, dim = x.shape
        heads = self.qkv(x).view(batch, length, 3 * self.num_heads, dim // self.num_heads).transpose(1, 2)
        query_key, value = heads.split((2 * self.num_heads, self.num_heads), dim=1)
        query, key = _rotate(query_key, *rotary).chunk(2, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, length, dim)))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.dim, 2 * shape.hidden_dim, bias=False)
        self.down = nn.Linear(shape.hidden_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, D]` -> `[B, S, D]`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return cast(Tensor, self.down(F.silu(gate) * up))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """`[B, S, D]` -> `[B, S, D]`."""
        x = x + self.attention(self.attention_norm(x), rotary)
        return cast(Tensor, x + self.feed_forward(self.feed_forward_norm(x)))


class ByteModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.num_heads
        self.embedding = nn.Embedding(VOCABULARY, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.head = nn.Linear(shape.dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[B, S] int64` -> logits `[B, S, 256]`."""
        x = self.embedding(tokens)
        rotary = _rotary_tables(tokens.shape[1], self.head_dim, x.device, x.dtype)
        for block in self.blocks:
            x = block(x, rotary)
        return cast(Tensor, self.head(self.norm(x)))


def build_model(shape: ModelShape, device: torch.device) -> ByteModel:
    """Sharded model on `device`, storage allocated and not initialised. Collective over the default group."""
    with torch.device("meta"):
        model = ByteModel(shape)
    reshard = shape.dim > _RESHARD_ABOVE_DIM
    bfloat = torch.bfloat16 if device.type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=bfloat, reduce_dtype=torch.float32 if bfloat else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # one for all: each block would make its own, 0.5 ms
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    model.to_empty(device=device)
    return model


def initialize(model: nn.Module, shape: ModelShape, seed: int) -> None:
    """Fill the parameters: norms with 1, the rest normal (0.02, residual outputs scaled by depth)."""
    residual_std = 0.02 / (2 * shape.num_layers) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = residual_std if name.endswith(("out.weight", "down.weight")) else 0.02
            full = torch.empty(parameter.shape).normal_(0.0, std, generator=_generator(seed, name))
            _copy_shard(parameter, full)


def build_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW over all parameters; the learning rate of each step is set by the loop."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters: a forward that no backward follows leaves them, and names then mean the whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model, all ranks together."""
    return sum(parameter.numel() for parameter in model.parameters())


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _generator(seed: int, name: str) -> torch.Generator:
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)


def _copy_shard(parameter: Tensor, full: Tensor) -> None:
    local = local_tensor(parameter)
    if isinstance(parameter, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        full = full[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
    local.copy_(full)


def _rotary_tables(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[S, head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, _ROTARY_BASE**-exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
