"""A rank under `torchrun --max-restarts` or NVRx's `ft_launcher`, as their documentation has it.

Model: each restart is a new process that forms its group, loads the newest save and goes on (`peer_training`). Under
ft_launcher (`--heartbeat`) it sends a heartbeat after each step.

The store gets a prefix of its own for each restart: with gloo, torch 2.13 otherwise meets the addresses of dead
peers. Process safety: one process a rank. Must not: use any of our recovery code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from nvrx_sre.bench.peer_training import PeerOptions, PeerRank, backend_of, own_device
from nvrx_sre.core import threads


def form_group(device: torch.device, group_timeout_s: float) -> tuple[int, int]:
    """Form the group of this restart; (rank, world size)."""
    store, rank, world_size = next(rendezvous("env://"))
    of_restart = PrefixStore(f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    timeout = timedelta(seconds=group_timeout_s)
    dist.init_process_group(backend_of(device), store=of_restart, rank=rank, world_size=world_size, timeout=timeout)
    return rank, world_size


def main(argv: Sequence[str]) -> None:
    """Train to the end, or to the next planned fault."""
    options, rest = PeerOptions.from_argv(argv)
    device = own_device(int(os.environ["LOCAL_RANK"]))
    place = form_group(device, options.group_timeout_s)
    trainee = PeerRank(options, device)
    if "--heartbeat" in rest:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        monitor = RankMonitorClient()
        monitor.init_workload_monitoring()
        trainee.train(*place, monitor.send_heartbeat)
        monitor.shutdown_workload_monitoring()
    else:
        trainee.train(*place, lambda: None)
    dist.destroy_process_group()
    threads.wait_until_asleep(threads.GLOO_WORKERS)


if __name__ == "__main__":
    main(sys.argv[1:])
