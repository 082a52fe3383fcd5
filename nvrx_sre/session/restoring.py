"""All ranks agree on one state and load it, or none does.

The launcher lists candidates, best first, the same steps for every rank. For each candidate every rank checks
its own part; the verdicts are reduced with MIN; what ranks hold copies of is compared; only a candidate that is good
everywhere is loaded. So no rank can end up on another step than its peers, and a rejected candidate is rejected by all.

The check of a slot fills parameters before it is known to be good (`checkpoint.restore`). A generation therefore never
begins at step 0 after one was rejected: the next candidate overwrites what was filled, or the generation ends. Its
successor builds its model anew, and is not offered the slot, which was emptied.

State that slots cannot hold (`checkpoint.supported`) goes another road, for the whole run alike: it is restored through
stand-ins, from durable checkpoints alone, and saved by the ranks themselves.

A shared file system may show a new checkpoint to one rank later than to another: what is not there yet is waited
for, with a bound. Collective; blocks for as long as the slowest check.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nvrx_sre.checkpoint import ring, supported
from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.replicas import differing
from nvrx_sre.checkpoint.restore import DurableCandidate, HotCandidate, Lap
from nvrx_sre.checkpoint.ring import Ring
from nvrx_sre.checkpoint.spare import Spare
from nvrx_sre.checkpoint.stand_ins import StandIns
from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import CheckpointCorrupt, NothingRestorable
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import RejectReason, RestoredFrom, Tier
from nvrx_sre.session import rank_saving
from nvrx_sre.session.laps import Laps
from nvrx_sre.session.process import RankProcess
from nvrx_sre.session.rank_saving import RankSaver
from nvrx_sre.session.saving import HotSaver

VISIBLE_WITHIN_S = 60.0
"""The longest that NFS by default answers from a directory's cached attributes (acdirmax in nfs(5)). Only a checkpoint
that the launcher has just seen whole is waited for."""
_LOOK_AGAIN_S = 0.25
_NOT_THERE = frozenset({RejectReason.NO_COMMIT_MARKER, RejectReason.MISSING_FILE})


class Candidate(Protocol):
    """A state that may be restored. `load` cannot fail for data reasons."""

    is_touched: bool
    """`check` has begun to write to the tracked objects: some candidate must be loaded, or they must be given up."""
    lap: Lap
    """Told of each part of `check` and `load` when it ends."""

    def check(self) -> None:
        """Raise `CheckpointCorrupt` if this rank's part is unusable."""

    def replicas(self) -> dict[str, str]:
        """Digests of what other ranks must hold as well, by name."""

    def load(self) -> None:
        """Copy the state into the tracked objects."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The state that all ranks now hold, and what saves from here on. From a hot slot: which, and who sealed it."""

    step: int
    source: RestoredFrom
    saver: HotSaver | RankSaver
    slot: int = -1
    slot_generation: int = 0


def restore(
    process: RankProcess,
    go: wire.Go,
    rank: int,
    device: torch.device,
    tracked: Mapping[str, Any],
    spare: Spare,
) -> Taken:
    """Load the state that all ranks agree on. Collective. Uses `spare` up.

    Raises `UserError` for state that cannot be saved, else as `Restorer.restore`.
    """
    if process.ring is None and device.type == "cuda":
        process.ring = Ring(device)
    # Slots end with the launcher: what they hold was captured from objects that were asked as training began.
    found = supported.check(tracked, is_recovery=any(entry["tier"] == Tier.HOT for entry in go.candidates))
    if not rank_saving.needed_by_any(found, device):
        restorer = Restorer(process, go, rank, device, spare)
        step, source = restorer.restore(tracked)
        spare.release()
        saver = HotSaver(process, Capturer(tracked, ring=process.ring), go.generation, step)
        slot, generation = restorer.held if restorer.held is not None else (-1, 0)
        return Taken(step=step, source=source, saver=saver, slot=slot, slot_generation=generation)
    if rank == 0:
        _tell_no_hot_tier(process, go, rank_saving.explain(found))
    stand_ins = StandIns(tracked)
    durable = replace(go, candidates=[entry for entry in go.candidates if entry["tier"] == Tier.DURABLE])
    step, source = Restorer(process, durable, rank, device, spare).restore(stand_ins.tracked)
    spare.release()
    if source is not RestoredFrom.FRESH:
        stand_ins.push()
    return Taken(step=step, source=source, saver=RankSaver(process, tracked, go, rank, step))


def fetch_ahead(process: RankProcess, go: wire.Go, device: torch.device) -> None:
    """On a device: begin to fetch the state that will be restored, beside the forming of the group. Does not block."""
    hot = next((entry for entry in go.candidates if entry["tier"] == Tier.HOT), None)
    if device.type == "cuda" and hot is not None and process.slots is not None:
        torch.cuda.set_device(device)
        process.ring = process.ring or Ring(device)
        ring.fetch_ahead(process.ring, process.slots, int(hot["slot"]))


def _tell_no_hot_tier(process: RankProcess, go: wire.Go, text: str) -> None:
    """Once a process to whoever reads its log, once a generation to the launcher."""
    if not process.knows_no_hot_tier:
        process.knows_no_hot_tier = True
        print(f"nvrx-sre: {text}", file=sys.stderr)
    process.control.send(
        wire.RankSave(
            generation=go.generation,
            step=0,
            stage="begun",
            directory="",
            size_bytes=0,
            seconds=0.0,
            reason="",
            message=text[:500],
            mono_ns=process.control.clock.monotonic_ns(),
        )
    )


class Restorer:
    """Walks down the candidates of one generation on one rank."""

    def __init__(
        self, process: RankProcess, go: wire.Go, rank: int, device: torch.device, spare: Spare | None = None
    ) -> None:
        self._spare = spare
        self._process = process
        self._go = go
        self._rank = rank
        self._device = device
        self._is_touched = False
        """Some rank's tracked objects hold what was not agreed on."""
        self._has_replicas = False
        self.held: tuple[int, int] | None = None
        """(slot, generation that sealed it) of the state that was loaded, None if no slot holds it."""
        self._lap = Laps(process.control.clock)

    def restore(self, tracked: Mapping[str, Any]) -> tuple[int, RestoredFrom]:
        """(step, source) of the state that all ranks now hold; (0, fresh) if there was none.

        Raises `NothingRestorable` if commits are on record and no candidate is good, `CheckpointCorrupt` on all ranks
        if there are none and the check of a rejected slot has written to the tracked objects.
        """
        self._process.restore_parts_s = self._lap.seconds
        for entry in self._go.candidates:
            candidate = self._candidate(entry, tracked)
            candidate.lap = self._lap
            problem = self._check(candidate)
            mine = candidate.replicas() if problem is None else {}
            if self._all_agree(entry, problem is None, candidate.is_touched, len(mine)):
                problem = self._compare(mine, entry)
                self._lap("agree")
                if problem is None:
                    candidate.load()
                    self.held = _slot_of(entry)
                    return int(entry["step"]), RestoredFrom(str(entry["tier"]))
            self._reject(entry, problem)
        if self._go.require_restore:
            raise NothingRestorable(
                f"commits of run {self._process.settings.run} are on record and none of them can be loaded; "
                f"see `nvrx-sre checkpoint list {self._process.settings.run_dir}`, or start again with --start-fresh"
            )
        if self._is_touched:
            raise CheckpointCorrupt(
                "no state in memory is good on all ranks and there is none on the disk: "
                "the run begins again at step 0, with a model that is built anew",
                reason=RejectReason.DIGEST.value,
            )
        return 0, RestoredFrom.FRESH

    def _candidate(self, entry: dict[str, Any], tracked: Mapping[str, Any]) -> Candidate:
        if entry["tier"] == Tier.HOT:
            slot, step, layout_hash = int(entry["slot"]), int(entry["step"]), str(entry["layout_hash"])
            hot = HotCandidate(self._process.slots, slot, step, layout_hash, tracked, self._spare)
            hot.ring = self._process.ring
            return hot
        directory = Path(self._process.settings.run_dir) / "checkpoints" / str(entry["directory"])
        run, world_size = self._process.settings.run, self._go.world_size
        return DurableCandidate(directory, run, self._rank, world_size, tracked, self._spare)

    def _check(self, candidate: Candidate) -> CheckpointCorrupt | None:
        """What is wrong with this rank's part, None if nothing is."""
        clock, never = self._process.control.clock, threading.Event()
        started_ns = clock.monotonic_ns()
        while True:
            try:
                candidate.check()
                return None
            except CheckpointCorrupt as error:
                waited_s = seconds(clock.monotonic_ns() - started_ns)
                if error.reason not in _NOT_THERE or waited_s >= VISIBLE_WITHIN_S:
                    return error
            # Another node's file system has no event to wait on.
            never.wait(_LOOK_AGAIN_S)

    def _all_agree(self, entry: dict[str, Any], good: bool, touched: bool, num_replicas: int) -> bool:
        """True if the candidate is the same one, and good, on every rank. Learns as well what ranks have to compare."""
        step, generation = int(entry["step"]), int(entry["generation"])
        mine = [step, -step, generation, -generation, int(good)]
        verdict = torch.tensor([*mine, int(not touched), -num_replicas], dtype=torch.int64, device=self._device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        *common, untouched, fewest = verdict.tolist()
        self._is_touched |= not untouched
        self._has_replicas = fewest < 0
        return bool(common == [*mine[:4], 1])

    def _compare(self, mine: dict[str, str], entry: dict[str, Any]) -> CheckpointCorrupt | None:
        """The same verdict on every rank: None unless copies of one tensor differ."""
        if not self._has_replicas:
            return None
        found: list[Any] = [None] * self._go.world_size
        dist.all_gather_object(found, mine)
        what = differing(found)
        message = f"{entry['tier']} state of step {entry['step']} is not usable: {what}"
        return CheckpointCorrupt(message, reason=RejectReason.DIGEST.value) if what else None

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


def _slot_of(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """(slot, generation that sealed it) of a candidate, None for a durable one."""
    return (int(entry["slot"]), int(entry["generation"])) if entry["tier"] == Tier.HOT else None
