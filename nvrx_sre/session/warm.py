"""Pay the first-time costs of FSDP2 before they are in anybody's way.

What is slow to import the fork server has; the first step of a sharded model costs 25 ms more, and a standby that has
done it is ready 2 ms after its assignment. The model is a toy on a one-rank group with a store of its own. Afterwards
the heap is frozen: a collection over 244,000 objects would cost 130 ms in a recovery. What depends on the run's own
model comes later (`session.rehearsal`).

Where there is CUDA all of this happens on a device, which costs a new process the most: context, libraries and kernels,
NCCL. A worker takes its own; a standby does not know which one it will need, takes the first, and has paid for most of
another's as well. What cannot be had there (its memory is full, say) is left to the rank.
"""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nvrx_sre.restart.abort import ProcessGroups

WIDTH = 8
TOKENS = 64
HEAP_BYTES = 24 << 20
"""Heap that the first step finds mapped: the activations of a small model. A page's first touch costs 2 us."""


def warm_up(groups: ProcessGroups, device_index: int) -> None:
    """Build and step a one-rank FSDP2 model, clear everything it made, freeze the heap."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", device_index % torch.cuda.device_count())
    try:
        _build_and_step(device)
    except RuntimeError as error:
        if device.type == "cpu":
            raise
        print(f"nvrx-sre: not warmed up on {device}: {str(error).splitlines()[0]}", file=sys.stderr)
    if device.type == "cuda":
        groups.abort()
    groups.clear()
    gc.collect()
    groups.let_go()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    _fetch_heap()
    gc.freeze()


def _build_and_step(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(torch.zeros(1, WIDTH, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if device.type == "cuda":
        dist.all_reduce(torch.ones(1, device=device))  # alone FSDP2 exchanges nothing, and NCCL is not loaded
        _run_common_kernels(device)


def _run_common_kernels(device: torch.device) -> None:
    """What most models are made of, forth and back: libraries and kernels are loaded at their first use."""
    x = torch.ones(2, TOKENS, 2, TOKENS, device=device, dtype=torch.bfloat16, requires_grad=True)
    heads = x.transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
    hidden = F.silu(F.rms_norm(mixed, mixed.shape[-1:])) @ torch.ones(2 * TOKENS, TOKENS, device=device, dtype=x.dtype)
    targets = torch.zeros(2 * TOKENS, dtype=torch.int64, device=device)
    torch.autograd.backward(F.cross_entropy(hidden.flatten(0, 1).float(), targets))
    torch.cuda.synchronize()


def _fetch_heap() -> None:
    """Map memory for the allocator to hand out: glibc keeps what is freed up to twice its largest mapping so far."""
    for _ in range(2):
        torch.ones(HEAP_BYTES, dtype=torch.uint8)
