"""From the stamps of ranks and the events of a run to the figures of the checkpoint benchmark. Pure, without torch.

Terms. A step *alone* is one of a pause: neither committed nor saved, while no save is being written and no process
is starting. The base is the median of those, per rank set; a rank set moves in step, so rank 0's stamps are used and
the slowest boundary of all ranks. Efficiency has a base of its own (`checkpoint_efficiency`).

    blocked     of a save: its boundary, plus what the next optimizer part takes above the median of steps alone
    inflation   of a save: what the steps until the next save (at most `FOLLOWING`) take above the base, less what
                is counted as blocked
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import InternalError
from nvrx_sre.events.schema import (
    Record,
    RestoredFrom,
    Role,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    SaveUnverified,
    SaveVerified,
    StandbyReady,
    WorkerStarted,
)

KILL_AFTER_S = 0.05
"""From the hand-over of a save, at the latest the next optimizer step, to the SIGKILL (seconds)."""
FOLLOWING = 4
"""Steps after a save that count as its inflation; the state of the benchmark is written in about as many."""
QUIET_S = 0.3
"""After the end of a write or of a start, before a step counts as alone (seconds)."""
ALONE_MIN = 3
LATER_NS = 1 << 62
"""End of what had not ended when the run did."""

OURS = "nvrx-sre"
NOTHING = "nothing saved"
SYNC = "dcp.save"
THREAD = "dcp.async_save thread"
THREAD_BEST = "dcp.async_save thread best"
PROCESS = "dcp.async_save process"
PROCESS_BEST = "dcp.async_save process best"
CONTESTANTS = (SYNC, THREAD, THREAD_BEST, PROCESS, PROCESS_BEST)
"""The others (`checkpoint_peers`)."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """One line of a rank's file. Times are monotonic; parts of a step in `*_ns`; `due` is 1 where a save was due."""

    kind: str
    step: int
    start_ns: int
    end_ns: int
    optimizer_ns: int = 0
    boundary_ns: int = 0
    due: int = 0
    num_bytes: int = 0
    pid: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part of what was restored."""

    @property
    def duration_s(self) -> float:
        """From start to end."""
        return seconds(self.end_ns - self.start_ns)


@dataclass(frozen=True, kw_only=True)
class Save:
    """A durable save of a run of ours, monotonic times; `committed_ns` 0 if it never was."""

    step: int
    captured_ns: int
    started_ns: int
    committed_ns: int = 0
    ended_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Base:
    """What a step costs alone."""

    step_s: float
    optimizer_s: float
    num_steps: int


_ENDS = (SaveVerified, SaveUnverified, SaveFailed)
Span = tuple[int, int]
"""(begin, end), monotonic ns."""


def read_stamps(out: Path, ranks: int) -> list[list[Stamp]]:
    """Stamps of each rank. Raises `InternalError` if one left none."""
    every = []
    for rank in range(ranks):
        path = out / f"rank-{rank}.jsonl"
        if not path.exists():
            raise InternalError(f"rank {rank} of the benchmark's run left no stamps")
        every.append([Stamp(**json.loads(line)) for line in path.read_text().splitlines()])
    return every


def saves_of(records: Sequence[Record], wall_minus_monotonic_ns: int) -> list[Save]:
    """Saves of a journal, oldest first, their times on the monotonic clock."""
    saves: list[Save] = []
    committed_ns = 0
    started: tuple[SaveStarted, int] | None = None
    for record in records:
        event, at_ns = record.event, record.time_ns - wall_minus_monotonic_ns
        if isinstance(event, SaveStarted):
            started, committed_ns = (event, at_ns), 0
        elif isinstance(event, SaveCommitted):
            committed_ns = at_ns
        elif isinstance(event, _ENDS) and started is not None and event.step == started[0].step:
            saves.append(
                Save(
                    step=event.step,
                    captured_ns=started[0].captured_ns - wall_minus_monotonic_ns,
                    started_ns=started[1],
                    committed_ns=committed_ns,
                    ended_ns=at_ns,
                )
            )
            started = None
    return saves


def starting_spans(records: Sequence[Record], wall_minus_monotonic_ns: int) -> list[Span]:
    """When a standby was starting; one that never got ready, to the end."""
    spans: list[Span] = []
    started: dict[int, int] = {}
    for record in records:
        event, at_ns = record.event, record.time_ns - wall_minus_monotonic_ns
        if isinstance(event, WorkerStarted) and event.role is Role.STANDBY:
            started[event.pid] = at_ns
        elif isinstance(event, StandbyReady):
            spans.append((started.pop(event.pid, 0), at_ns))
    return [*spans, *((at_ns, LATER_NS) for at_ns in started.values())]


def is_alone(stamp: Stamp, busy: Sequence[Span]) -> bool:
    """True if nothing of `busy` was at work beside it, or had been until just before."""
    quiet_ns = round(QUIET_S * 1e9)
    return not any(stamp.start_ns < end_ns + quiet_ns and stamp.end_ns > begin_ns for begin_ns, end_ns in busy)


def base_of(stamps: Iterable[Stamp], busy: Sequence[Span]) -> Base:
    """The base of a run. Raises `InternalError` if too few steps stood alone."""
    alone = [stamp for stamp in stamps if stamp.kind == "pause" and is_alone(stamp, busy)]
    # The first step of a run allocates optimizer state, the first of each pause follows a boundary.
    alone = alone[1:]
    if len(alone) < ALONE_MIN:
        raise InternalError(f"only {len(alone)} steps of the benchmark's run stood alone: use longer pauses")
    return Base(
        step_s=statistics.median(stamp.duration_s for stamp in alone),
        optimizer_s=statistics.median(seconds(stamp.optimizer_ns) for stamp in alone),
        num_steps=len(alone),
    )


def blocked_and_inflation(
    ranks: Sequence[Sequence[Stamp]], base: Base, before_step: int
) -> tuple[list[float], list[float]]:
    """(blocked, inflation) of each save before `before_step` that steps followed, in seconds, on the slowest rank."""
    steps = [{stamp.step: stamp for stamp in stamps if stamp.kind == "step"} for stamps in ranks]
    due = sorted(step for step, stamp in steps[0].items() if stamp.due and step < before_step)
    blocked, inflation = [], []
    for number, step in enumerate(due):
        end = due[number + 1] if number + 1 < len(due) else before_step
        following = [later for later in range(step + 1, min(end, step + FOLLOWING + 1)) if later in steps[0]]
        if not following:
            continue
        waits = [_wait_s(rank, step, base) for rank in steps if step in rank and following[0] in rank]
        total = sum(steps[0][later].duration_s - base.step_s for later in following)
        boundary_s = max(seconds(rank[step].boundary_ns) for rank in steps if step in rank)
        wait_s = max(waits, default=0.0)
        blocked.append(boundary_s + wait_s)
        inflation.append(total - wait_s)
    return blocked, inflation


def _wait_s(steps: dict[int, Stamp], step: int, base: Base) -> float:
    return max(0.0, seconds(steps[step + 1].optimizer_ns) - base.optimizer_s)


def restores(ranks: Sequence[Sequence[Stamp]], sources: Sequence[RestoredFrom]) -> dict[str, list[Stamp]]:
    """Each restore by kind: `warm` and `fresh` (hot tier), `durable`.

    `sources`: what each generation restored, in order. Fresh: of a process that had restored nothing before; the
    others are those of the slowest rank. Raises `InternalError` if stamps and generations do not match.
    """
    per_rank = [[stamp for stamp in stamps if stamp.kind == "restored"] for stamps in ranks]
    if any(len(stamps) != len(sources) for stamps in per_rank):
        raise InternalError("the benchmark's run has generations whose ranks did not all restore")
    found: dict[str, list[Stamp]] = {"warm": [], "fresh": [], "durable": []}
    seen: list[set[int]] = [set() for _ in ranks]
    for source, together in zip(sources, zip(*per_rank, strict=True), strict=True):
        fresh = [stamp for stamp, pids in zip(together, seen, strict=True) if stamp.pid not in pids]
        if source is RestoredFrom.DURABLE:
            found["durable"].append(_slowest(together))
        elif source is RestoredFrom.HOT:
            found["fresh" if fresh else "warm"].append(_slowest(fresh or together))
        for stamp, pids in zip(together, seen, strict=True):
            pids.add(stamp.pid)
    return found


def _slowest(stamps: Iterable[Stamp]) -> Stamp:
    return max(stamps, key=lambda stamp: stamp.duration_s)


def parts_note(stamps: Sequence[Stamp]) -> str:
    """Where the time of these restores went: the median of each part, and what no part accounts for."""
    names = list(dict.fromkeys(name for stamp in stamps for name in stamp.parts))
    medians_s = {name: statistics.median(stamp.parts.get(name, 0.0) for stamp in stamps) for name in names}
    medians_s["other"] = statistics.median(stamp.duration_s - sum(stamp.parts.values()) for stamp in stamps)
    return ", ".join(f"{name} {part_s * 1000:.1f}" for name, part_s in medians_s.items()) + " ms"


def copies(ranks: Sequence[Sequence[Stamp]]) -> tuple[list[float], int]:
    """(seconds of each plain copy on the slowest rank, bytes of a rank)."""
    per_rank = [[stamp for stamp in stamps if stamp.kind == "copy"] for stamps in ranks]
    slowest = [max(stamp.duration_s for stamp in together) for together in zip(*per_rank, strict=True)]
    return slowest, max(stamp.num_bytes for stamps in per_rank for stamp in stamps)
