"""A rank that only reports steps: what a launcher has to take in, without a training behind it.

Started by the launcher as any worker (`-m nvrx_sre.bench.reporting_rank STEPS PER_SECOND FOLDER`); it speaks the rank
channel itself, so no torch is loaded. Steps are told as training tells them, without waiting for room; what found
none is counted in `FOLDER/<rank>`. Must not: run outside `bench telemetry`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from nvrx_sre.bench.step_reports import Reporter
from nvrx_sre.core.clock import seconds
from nvrx_sre.core.errors import InternalError, RestartAborted
from nvrx_sre.events.messages import Finished, Parked, Restored
from nvrx_sre.events.schema import Phase, RestoredFrom
from nvrx_sre.restart.control import RankControl
from nvrx_sre.session.process import current

BURST_S = 0.002
"""Steps that came due within this time are sent together: no timer is finer than that on a shared machine."""


def main(num_steps: int, steps_per_s: float, folder: Path) -> None:
    """Take a rank, report `num_steps` steps at `steps_per_s`, leave with the run."""
    control = taken_rank()
    try:
        rank, generation = enter_loop(control)
        _report_steps(control, generation, num_steps, steps_per_s)
        (folder / f"{rank}").write_text(str(control.channel.num_dropped))
        leave_loop(control, generation)
    except RestartAborted:
        return


def taken_rank() -> RankControl:
    """This process as a rank of the launcher that started it."""
    process = current()
    if process is None:
        raise InternalError("this module is started by `nvrx-sre bench telemetry`")
    control = process.control
    control.send(Parked(fit=True, note="", mono_ns=control.clock.monotonic_ns()))
    return control


def enter_loop(control: RankControl) -> tuple[int, int]:
    """The way of every rank into its step loop, with nothing to do on it: (rank, generation)."""
    assign, _ = control.wait_assigned()
    control.report_ready(assign.generation, fit=True, reason="")
    generation = control.wait_go(assign.generation).generation
    control.enter(Phase.RENDEZVOUS)
    control.enter(Phase.REBUILD)
    control.enter(Phase.LOAD)
    now_ns = control.clock.monotonic_ns()
    control.send(Restored(generation=generation, step=0, source=RestoredFrom.FRESH, seconds=0.0, mono_ns=now_ns))
    control.enter(Phase.FIRST_STEP)
    return assign.rank, generation


def leave_loop(control: RankControl, generation: int) -> None:
    """Say that the training is over, and wait until the run ends: raises `RestartAborted`."""
    now_ns = control.clock.monotonic_ns()
    control.send(Finished(generation=generation, step=control.step, result={}, mono_ns=now_ns))
    control.wait_interrupted(generation)


def _report_steps(control: RankControl, generation: int, num_steps: int, steps_per_s: float) -> None:
    clock, pause = control.clock, threading.Event()
    reporter = Reporter(control.channel, generation)
    started_ns = clock.monotonic_ns()
    step = 0
    while step < num_steps:
        pause.wait(BURST_S)
        due = min(num_steps, int(seconds(clock.monotonic_ns() - started_ns) * steps_per_s))
        while step < due:
            step += 1
            reporter.report(step)
    control.step = step


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
