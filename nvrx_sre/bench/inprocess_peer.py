"""A rank under NVRx's in-process `Wrapper`: the same process is called again after a fault.

Model: what a process needs once (imports, corpus, the store of torchrun's agent) is made before the wrapped function; a
call forms its group under a prefix of its own, loads the newest save and goes on (`peer_training`). `--interval S` sets
every polling interval and no wait for further ranks; without it the wrapper's defaults hold. `--store-port` is that of
the wrapper's own store.

Survivors of an exception are spared the collective (but in the case `collective`): on CPU the model keeps the failed
rank's group, and so its connections, alive, and who is inside one waits for the timeout of the process group.

The ranks are started by torchrun without restarts, and LOCAL_RANK is removed: later versions otherwise ask NVML for a
device of that number and end every rank of a CPU run. Process safety: one process a rank. Must not: use any of
our recovery code; copy any of the peer's; postpone annotations (the wrapper passes its call by the parameter's type).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Optional

import torch.distributed as dist
from nvidia_resiliency_ext.inprocess import CallWrapper, Wrapper
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from nvrx_sre.bench.peer_training import PeerOptions, PeerRank, backend_of, own_device
from nvrx_sre.core import threads


def intervals(interval_s: float | None) -> dict[str, timedelta]:
    """Arguments of the wrapper: none for its defaults."""
    if interval_s is None:
        return {}
    polled = ("monitor_thread", "monitor_process", "heartbeat", "progress_watchdog")
    return {f"{name}_interval": timedelta(seconds=interval_s) for name in polled} | {"last_call_wait": timedelta(0)}


def main(argv: Sequence[str]) -> None:
    """Train to the end, through every planned fault."""
    options, rest = PeerOptions.from_argv(argv)
    parser = argparse.ArgumentParser()
    parser.add_argument("--store-port", type=int, required=True)
    parser.add_argument("--interval", type=float)
    own = parser.parse_args(rest)
    device = own_device(int(os.environ.pop("LOCAL_RANK")))
    agent_store, _, _ = next(rendezvous("env://"))
    trainee = PeerRank(options, device, spares_survivors=True)
    timeout = timedelta(seconds=options.group_timeout_s)

    def train(call: Optional[CallWrapper] = None) -> None:  # noqa: UP045  # the spelling that the wrapper looks for
        assert call is not None
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = PrefixStore(f"call-{call.iteration}", agent_store)
        dist.init_process_group(backend_of(device), store=store, rank=rank, world_size=world_size, timeout=timeout)
        trainee.train(rank, world_size, lambda: None)
        dist.destroy_process_group()

    wrapped: Any = Wrapper(store_kwargs={"port": own.store_port}, **intervals(own.interval))(train)
    wrapped()
    threads.wait_until_asleep(threads.GLOO_WORKERS)


if __name__ == "__main__":
    main(sys.argv[1:])
