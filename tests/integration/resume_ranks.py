"""One rank of two around `Restorer`, in a gloo group of its own; each case is told by name what this rank sees.

    python -m tests.integration.resume_ranks JSON      (one process a rank)

Every rank has its own copy of the run directory, so that one can be shown what the other is not. Says one line a
case: the step and tier it restored, what the tracked state then is, and what it told the launcher.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.manifest import rank_file_name
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.core import threads
from nvrx_sre.core.clock import NS_PER_S
from nvrx_sre.session import restoring

NEW, OLD = "step-00000020-g00001", "step-00000010-g00001"


def build() -> dict[str, Any]:
    """What a script tracks; `position` says which step the rest belongs to."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "position": {"step": 0}}


def train(state: dict[str, Any], num_steps: int) -> list[str]:
    """Losses of some steps, in hex. Draws its data and its dropout from the rank's own stream."""
    losses = []
    for _ in range(num_steps):
        loss = state["model"](torch.randn(3, 4)).pow(2).mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        state["position"]["step"] += 1
        losses.append(loss.item().hex())
    return losses


class Clock:
    """Time that passes only when it is asked for; `on_look` is called then."""

    def __init__(self, step_s: float, on_look: Any = None) -> None:
        self._now_ns = 0
        self._step_ns = int(step_s * NS_PER_S)
        self._on_look = on_look

    def monotonic_ns(self) -> int:
        """The time now."""
        self._now_ns += self._step_ns
        if self._on_look is not None:
            self._on_look(self._now_ns)
        return self._now_ns


class Rank:
    """This rank and its view of the run directory."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.rank = int(order["rank"])
        self.run_dir = Path(order["run_dirs"][self.rank])
        self.checkpoints = self.run_dir / "checkpoints"

    def restore(self, tracked: dict[str, Any], clock: Clock, *hot: dict[str, Any], slots: Any = None) -> dict[str, Any]:
        """Walk down the candidates with the other rank, train three steps, and tell."""
        told: list[Any] = []
        process = SimpleNamespace(
            slots=slots,
            ring=None,
            settings=SimpleNamespace(run="demo", run_dir=str(self.run_dir)),
            control=SimpleNamespace(clock=clock, send=told.append),
        )
        durable = [
            {"tier": "durable", "step": step, "generation": 1, "directory": name}
            for step, name in ((20, NEW), (10, OLD))
        ]
        go = SimpleNamespace(candidates=[*hot, *durable], require_restore=True, world_size=2, generation=2)
        restorer = restoring.Restorer(process, go, self.rank, torch.device("cpu"))  # type: ignore[arg-type]
        step, source = restorer.restore(tracked)
        return {
            "step": step,
            "source": str(source),
            "position": tracked["position"]["step"],
            "last_epoch": tracked["scheduler"].last_epoch,
            "rejected": [[message.step, message.tier, message.reason, message.message] for message in told],
        }

    def visible(self) -> dict[str, Any]:
        """Both see everything."""
        tracked = build()
        result = self.restore(tracked, Clock(0.001))
        return result | {"losses": train(tracked, 3)}

    def late(self) -> dict[str, Any]:
        """Rank 1 sees the newest directory only on its fourth look at the time."""
        hidden = self.checkpoints / ".hidden"
        looks = []

        def on_look(now_ns: int) -> None:
            looks.append(now_ns)
            if len(looks) == 4:
                hidden.rename(self.checkpoints / NEW)

        if self.rank == 1:
            (self.checkpoints / NEW).rename(hidden)
        return self.restore(build(), Clock(1.0, on_look if self.rank == 1 else None))

    def never(self) -> dict[str, Any]:
        """Rank 1 never sees it, and time passes."""
        if self.rank == 1:
            (self.checkpoints / NEW).rename(self.checkpoints / ".hidden")
        try:
            return self.restore(build(), Clock(restoring.VISIBLE_WITHIN_S))
        finally:
            if self.rank == 1:
                (self.checkpoints / ".hidden").rename(self.checkpoints / NEW)

    def damaged(self) -> dict[str, Any]:
        """Rank 1 reads another byte in its own random state than was written."""
        path = self.checkpoints / NEW / rank_file_name(1)
        content = path.read_bytes()
        if self.rank == 1:
            path.write_bytes(content.replace(b'"rng"', b'"RNG"'))
        try:
            tracked = build()
            result = self.restore(tracked, Clock(0.001))
            return result | {"losses": train(tracked, 3)}
        finally:
            path.write_bytes(content)

    def replicas(self) -> dict[str, Any]:
        """Two hot states of averaged models: in the newer one rank 1's copy has drifted."""
        slots, hashes = [], []
        for step, drift in ((40, 1.0), (30, 0.0)):
            torch.manual_seed(step)
            tracked = build()
            tracked["model"] = DistributedDataParallel(tracked["model"])
            with torch.no_grad():
                tracked["model"].module[0].bias[2] += drift * self.rank
            capturer = Capturer(tracked)
            capturer.refresh()
            if not slots:
                slots.append(SlotFile.create(*capturer.required_bytes(), name="nvrx-test"))
            capturer.capture(slots[0], len(hashes), generation=1, step=step, durable=False, now_mono_ns=1)
            hashes.append(capturer.layout_hash)
        fresh = build()
        fresh["model"] = DistributedDataParallel(fresh["model"])
        hot = [
            {"tier": "hot", "step": step, "generation": 1, "slot": slot, "layout_hash": hashes[slot]}
            for slot, step in enumerate((40, 30))
        ]
        return self.restore(fresh, Clock(0.001), *hot, slots=slots[0])


def main() -> None:
    """All cases one after the other: a process start costs more than they do."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    store = dist.FileStore(order["store"], 2)
    dist.init_process_group("gloo", store=store, rank=order["rank"], world_size=2)
    rank = Rank(order)
    results = {}
    for case in order["cases"]:
        results[case] = getattr(rank, case)()
        dist.barrier()
    sys.stdout.write(json.dumps(results) + "\n")
    dist.destroy_process_group()
    threads.wait_until_asleep(threads.GLOO_WORKERS)


if __name__ == "__main__":
    main()
