"""The same context for a script that runs without a launcher: plain `python` or torchrun.

Nothing is captured and nothing recovered; the script does what it would do without nvrx-sre. It says so once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nvrx_sre.core import threads
from nvrx_sre.core.errors import UserError

if TYPE_CHECKING:
    import torch

DEFAULT_GROUP_TIMEOUT_S = 600.0


class UnmanagedContext:
    """`Context` without a launcher behind it."""

    managed = False
    generation = 1
    attempt = 1
    poisoned = False

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.step = 0
        self._results: dict[str, Any] = {}
        self._formed_group = False
        if self.rank == 0:
            print("nvrx-sre: no launcher, so nothing is saved or recovered (use `nvrx-sre launch`)", file=sys.stderr)

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        import torch

        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def init_process_group(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        """Form the default group from torchrun's variables, or a group of one. Collective; blocks."""
        import torch
        import torch.distributed as dist

        if torch.cuda.is_available():
            torch.cuda.set_device(self.device)
        name = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        timeout = timedelta(seconds=timeout_s or DEFAULT_GROUP_TIMEOUT_S)
        if self.world_size == 1 and "MASTER_ADDR" not in os.environ:
            dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(name, timeout=timeout)
        self._formed_group = True

    def track(self, **objects: Any) -> None:
        """Nothing is saved without a launcher; a loader gives what it gives under one."""
        from nvrx_sre.session.loading import follow_loaders

        follow_loaders(objects)

    def restore(self) -> int:
        """Always a fresh start."""
        return self.step

    def commit(self, loss: float | torch.Tensor | None = None, tokens: int = 0) -> None:
        """Count the step."""
        self.step += 1

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """No ledger without a launcher."""
        if name not in ("data", "evaluate", "save"):
            raise UserError(f"ctx.phase({name!r}): use one of data, evaluate, save")
        yield

    def mark(self, point: str) -> None:
        """No deadline without a launcher."""

    def tick(self) -> None:
        """No deadline without a launcher."""

    def save(self) -> None:
        """Nothing is saved without a launcher."""

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """No interrupt without a launcher."""
        return contextlib.nullcontext()

    def keep(self, item: object) -> None:
        """No generation ends without a launcher."""

    def finish(self, **result: Any) -> None:
        """Remember the results."""
        self._results.update(result)

    def close(self) -> None:
        """The function has returned: end the group, and wait for its threads, which may else abort the process's exit.

        They live as long as a model holds the group. Not after an error: a peer that is gone would be waited for.
        """
        if not self._formed_group:
            return
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
            threads.wait_until_asleep(threads.GLOO_WORKERS)

    @property
    def result(self) -> dict[str, Any]:
        """What `finish` was given."""
        return dict(self._results)
