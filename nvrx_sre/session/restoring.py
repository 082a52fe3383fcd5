"""All ranks agree on one state and load it, or none does.

The launcher lists candidates, best first, the same steps for every rank. For each candidate every rank checks
its own part without touching the model; the verdicts are reduced with MIN; only a candidate that is good
everywhere is loaded. So no rank can end up on another step than its peers, and a rejected candidate is
rejected by all. Collective; blocks for as long as the slowest check.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nvrx_sre.checkpoint.restore import DurableCandidate, HotCandidate
from nvrx_sre.core.errors import CheckpointCorrupt, NothingRestorable
from nvrx_sre.events import channel as wire
from nvrx_sre.events.schema import RejectReason, RestoredFrom, Tier
from nvrx_sre.session.process import RankProcess


class Candidate(Protocol):
    """A state that may be restored. `check` does not touch the model, `load` cannot fail for data reasons."""

    def check(self) -> None:
        """Raise `CheckpointCorrupt` if this rank's part is unusable."""

    def load(self) -> None:
        """Copy the state into the tracked objects."""


class Restorer:
    """Walks down the candidates of one generation on one rank."""

    def __init__(self, process: RankProcess, go: wire.Go, rank: int, device: torch.device) -> None:
        self._process = process
        self._go = go
        self._rank = rank
        self._device = device

    def restore(self, tracked: Mapping[str, Any]) -> tuple[int, RestoredFrom]:
        """(step, source) of the state that all ranks now hold; (0, fresh) if there was none.

        Raises `NothingRestorable` if commits are on record and no candidate is good.
        """
        for entry in self._go.candidates:
            candidate = self._candidate(entry, tracked)
            problem = self._check(candidate)
            if self._all_agree(int(entry["step"]), problem is None):
                candidate.load()
                return int(entry["step"]), RestoredFrom(str(entry["tier"]))
            self._reject(entry, problem)
        if self._go.require_restore:
            raise NothingRestorable(
                f"commits of run {self._process.settings.run} are on record and none of them can be loaded; "
                f"see `nvrx-sre checkpoint list {self._process.settings.run_dir}`, or start again with --start-fresh"
            )
        return 0, RestoredFrom.FRESH

    def _candidate(self, entry: dict[str, Any], tracked: Mapping[str, Any]) -> Candidate:
        if entry["tier"] == Tier.HOT:
            return HotCandidate(
                self._process.slots, int(entry["slot"]), int(entry["step"]), str(entry["layout_hash"]), tracked
            )
        directory = Path(self._process.settings.run_dir) / "checkpoints" / str(entry["directory"])
        return DurableCandidate(directory, self._process.settings.run, self._rank, self._go.world_size, tracked)

    @staticmethod
    def _check(candidate: Candidate) -> CheckpointCorrupt | None:
        try:
            candidate.check()
        except CheckpointCorrupt as error:
            return error
        return None

    def _all_agree(self, step: int, good: bool) -> bool:
        verdict = torch.tensor([step, -step, int(good)], dtype=torch.int64, device=self._device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        low, high, ok = verdict.tolist()
        return bool(low == -high == step and ok == 1)

    def _reject(self, entry: dict[str, Any], problem: CheckpointCorrupt | None) -> None:
        if problem is None:
            return  # another rank found it; that rank tells the launcher
        self._process.control.send(
            wire.Rejected(
                generation=self._go.generation,
                step=int(entry["step"]),
                tier=str(entry["tier"]),
                directory=str(entry.get("directory", "")),
                reason=str(problem.reason or RejectReason.UNREADABLE),
                message=str(problem)[:500],
            )
        )
