"""What saving costs the steps beside it: windows with saves between steps alone, each against its two neighbours.

    alone, first save, alone, nothing saved, alone, R1, alone, R2, alone, nothing saved, alone, R1, ...

Model. The machine and its neighbours change slowly, by more than what is to be measured, so one base for a whole run
says nothing: a window is compared with the steps right before and right after it. In a window saves are asked for each
`interval` steps until as many as planned have begun; it ends, `SETTLE_S` later, with the last write, so that the whole
cost of each save is in it. Windows with nothing saved are the control: as many steps, committed, whose efficiency must
be 1 within the noise. The first save of the run, for which slots are made and beside which the standby starts, stands
before all of them (`blocked` tells what it costs). Where saves are further apart than a window is long, the steps
between them count as steps alone.

    base        mean of the steps alone on either side, of both sides equally. Not their median: a window's wall time is
                a sum, and the sum of a skewed distribution is not its median times n
    efficiency  steps x base / wall
    freshness   age of the newest commit just before the next one, less the interval that was asked for, in write times

Pure, without torch. Must not: compare steps that were far apart in time.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nvrx_sre.bench.checkpoint_reading import Save, Span, Stamp, is_alone
from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import InternalError

KEEPS_FREED = ("env", "GLIBC_TUNABLES=glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736")
"""Command under which malloc keeps what is freed (mallopt(3)). Half the processor time of a step here was the kernel's,
for pages given back and fetched again, and in a virtual machine that time swings with its host."""
SETTLE_S = 2.0
"""After a save, until steps count as alone again (seconds): the writer reads and deletes what is surplus."""
WITH_VERIFY = 1.25
"""How much longer a write takes until it is verified: about, windows are planned with it."""
ALONE_MIN = 3
"""Fewest steps of a side; a window that has them on one side alone is compared with that."""
CONTROL = 0.0
"""Saturation of a window in which nothing is saved."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to run."""

    saturations: tuple[float, ...]
    num_rounds: int
    """Windows of each saturation."""
    saves_in_a_row: int
    """Saves of a window, where one follows the other."""
    write_s: float
    """A write as throttled, without the read that verifies it."""
    step_s: float


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Committed steps to run. `due`: numbers, from 1, of those whose state is saved."""

    num_steps: int
    due: tuple[int, ...] = ()
    saturation: float = CONTROL
    interval: int = 0


@dataclass(frozen=True, kw_only=True)
class Window:
    """A window that was run. Seconds, but for `freshness` (write times, one a commit)."""

    efficiency: float
    num_steps: int
    interval: int
    """Steps from save to save, 0 where nothing is saved."""
    base_s: float
    step_sd_s: float
    """Standard deviation of the steps alone."""
    write_s: float
    freshness: tuple[float, ...]
    num_commits: int
    num_possible: int


def plan_window(saturation: float, config: RunConfig) -> WindowPlan:
    """A window with a write that takes `saturation` times the compute between saves, `CONTROL` for none."""
    write_s, step_s, num_saves = config.write_s, config.step_s, config.saves_in_a_row
    write_steps = math.ceil(WITH_VERIFY * write_s / step_s)
    if saturation == CONTROL:
        return WindowPlan(num_steps=write_steps)
    interval = max(1, round(write_s / saturation / step_s))
    if interval > write_steps:  # each save stands alone
        return WindowPlan(num_steps=write_steps, due=(1,), saturation=saturation, interval=interval)
    # A save that is due while the writer is busy is made up for: the last one is asked for while that before it is
    # being written, and none after it.
    last_due = 1 + (num_saves - 1) * max(interval, write_steps // 2)
    return WindowPlan(
        num_steps=num_saves * write_steps,
        due=tuple(range(1, last_due + 1, interval)),
        saturation=saturation,
        interval=interval,
    )


def plan_run(config: RunConfig) -> list[WindowPlan]:
    """All windows of a run: the first save, which is not measured, then control and each saturation in turn."""
    kinds = [plan_window(each, config) for each in (CONTROL, *config.saturations)]
    first = WindowPlan(num_steps=kinds[0].num_steps, due=(1,))
    return [first, *(kind for _ in range(config.num_rounds) for kind in kinds)]


def read_windows(
    stamps: Sequence[Stamp], plans: Sequence[WindowPlan], saves: Sequence[Save], starting: Sequence[Span]
) -> list[Window]:
    """Figures of all windows but the first. `stamps`: of one rank, with a pause before each window and after the last.

    Raises `InternalError` if a window saved nothing that it should have, or too few steps beside it stood alone.
    """
    in_loop = (stamp for stamp in stamps if stamp.kind in ("pause", "step"))
    blocks = [list(block) for _, block in itertools.groupby(in_loop, key=lambda stamp: stamp.kind)]
    if len(blocks) != 2 * len(plans) + 1:
        raise InternalError(f"the benchmark's run has {len(blocks)} blocks of steps, not {2 * len(plans) + 1}")
    # What is saved at the end of a run was captured then, though it is the state of the last step.
    saves = [save for save in saves if save.started_ns < blocks[-1][-1].end_ns]
    settling = [(save.captured_ns, save.ended_ns + round(SETTLE_S * 1e9)) for save in saves]
    found = []
    for plan, before, window, after in zip(plans[1:], blocks[2:-1:2], blocks[3::2], blocks[4::2], strict=True):
        begin_ns = before[-1].end_ns
        last_ns = max((end_ns for start_ns, end_ns in settling if begin_ns <= start_ns < after[0].start_ns), default=0)
        steps = [*window, *(stamp for stamp in after if stamp.start_ns < last_ns)]
        sides = [[stamp for stamp in side if is_alone(stamp, [*settling, *starting])] for side in (before, after)]
        found.append(_read(steps, sides, plan, saves))
    return found


def _read(steps: Sequence[Stamp], sides: Sequence[Sequence[Stamp]], plan: WindowPlan, saves: Sequence[Save]) -> Window:
    sides = [side for side in sides if len(side) >= ALONE_MIN]
    if not sides:
        raise InternalError("too few steps stood alone beside a window: use longer pauses")
    begin_ns, end_ns = steps[0].start_ns, steps[-1].end_ns
    begun = [save for save in saves if begin_ns <= save.captured_ns <= end_ns]
    if plan.due and not begun:
        raise InternalError(f"no save was begun in the benchmark's window of interval {plan.interval}")
    durations_s = [[stamp.duration_s for stamp in side] for side in sides]
    base_s = statistics.mean(statistics.mean(side) for side in durations_s)
    wall_s = seconds(end_ns - begin_ns)
    between = max(0, plan.interval * len(begun) - len(steps))
    write_s = statistics.median(seconds(save.ended_ns - save.started_ns) for save in begun) if begun else 0.0
    commits = [save for save in begun if save.committed_ns]
    due_ns = [stamp.end_ns for stamp in steps if stamp.due]
    spacing_s = max(plan.interval * base_s, write_s)
    return Window(
        efficiency=(len(steps) + between) * base_s / (wall_s + between * base_s),
        num_steps=len(steps),
        interval=plan.interval,
        base_s=base_s,
        step_sd_s=statistics.mean(statistics.stdev(side) for side in durations_s),
        write_s=write_s,
        freshness=_freshness(begun, end_ns, plan.interval * base_s, write_s),
        num_commits=len(commits),
        num_possible=max(len(commits), num_possible(due_ns, spacing_s)),
    )


def _freshness(begun: Sequence[Save], end_ns: int, interval_s: float, write_s: float) -> tuple[float, ...]:
    """Of each commit. One that never came is told by the age at the end of the window."""
    if not begun:
        return ()
    commits = [save for save in begun if save.committed_ns] or [begun[0]]
    # The state before the first one of a window would have been captured an interval earlier.
    first = seconds((commits[0].committed_ns or end_ns) - commits[0].captured_ns)
    later = [
        seconds(save.committed_ns - before.captured_ns) - interval_s for before, save in itertools.pairwise(commits)
    ]
    return tuple(age_s / write_s for age_s in (first, *later))


def describe(windows: Sequence[Window]) -> str:
    """What the figures of these windows rest on."""
    values = [window.efficiency for window in windows]
    bases_ms = [window.base_s * 1000 for window in windows]
    steps = sorted({window.num_steps for window in windows})
    told = [
        f"{min(values):.3f} to {max(values):.3f} in {len(windows)} windows of {_range(steps)} steps",
        f"base {min(bases_ms):.0f} to {max(bases_ms):.0f} ms, deviation of a step alone "
        f"{statistics.median(window.step_sd_s for window in windows) * 1000:.0f} ms",
    ]
    interval = windows[0].interval
    if interval:
        write_s = statistics.median(window.write_s for window in windows)
        ratio = write_s / (interval * statistics.median(window.base_s for window in windows))
        told.append(f"a save each {interval}, write {write_s:.2f} s, write / compute {ratio:.2f}")
    return ", ".join(told)


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"


def num_possible(due_ns: Sequence[int], spacing_s: float) -> int:
    """Saves that could have been begun for these requests, if one takes `spacing_s` and the newest request waits."""
    count, free_ns = 0, 0
    taken_ns = -1
    for at_ns in due_ns:
        if at_ns <= taken_ns:
            continue
        # Requests while one is being written are made up for by one at its end.
        taken_ns = max(at_ns, free_ns)
        free_ns = taken_ns + round(spacing_s * 1e9)
        count += 1
    return count
