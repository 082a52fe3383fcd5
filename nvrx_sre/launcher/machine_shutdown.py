"""The end of a run: drain what is durable, let the children go, stop.

Model: an end is begun once, with an exit code and a bound. The writer may finish (and, where the run is stopped, save
the newest sealed step, for which ranks need not cooperate: the slots are the launcher's); everybody else is
told to leave and killed after a grace. When no child is left, or all bounds have passed, the run is finished.

A run whose training is done and whose last step could not be saved is not finished: what it trained since its newest
checkpoint ends with the launcher. It exits as one that is to be started again (docs/adr/0033).

Invariants: `RunFinished` and `Stop` are issued exactly once, in this order; every wait is bounded. Pure.
"""

from __future__ import annotations

from typing import Any

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.schema import Role, RunFinished
from nvrx_sre.launcher.commands import HurrySaves, Stop
from nvrx_sre.launcher.machine_commits import Commits
from nvrx_sre.launcher.machine_job import Job, Stage
from nvrx_sre.launcher.machine_roster import ChildState, Roster
from nvrx_sre.launcher.machine_saves import Saves


class Shutdown:
    """Brings the run to its end."""

    def __init__(self, job: Job, roster: Roster, commits: Commits, saves: Saves) -> None:
        self._job = job
        self._roster = roster
        self._commits = commits
        self._saves = saves
        self._exit_code = 0
        self._reason = ""
        self._result: dict[str, Any] = {}
        self._unsaved_exit_code: int = ExitCode.RETRYABLE
        """Of a run that is through and whose last step is not saved."""
        self._drain_until_ns = 0
        self._give_up_ns: int | None = None
        self._says_what_is_durable = False
        self._is_hurried = False
        """Somebody who kills waits for the end."""

    def finish(self, result: dict[str, Any], now_ns: int) -> None:
        """Training is done: the last step is saved if it is not yet, ranks stay until that is verified."""
        self._begin(ExitCode.FINISHED, "finished", self._job.config.limits.deadlines.final_drain_s, now_ns)
        self._result = result
        self._saves.flush(self._commits.sealed, now_ns)
        self.poll(now_ns)

    def stop(self, exit_code: int, reason: str, now_ns: int) -> None:
        """No restart: ranks go at once, a save in flight may finish."""
        self._begin(exit_code, reason, self._job.config.limits.deadlines.final_drain_s, now_ns)
        self._leave_all(now_ns)
        self.poll(now_ns)

    def give_up(self, exit_code: int, reason: str, now_ns: int) -> None:
        """Not to be started again as it is: ranks go at once, the newest sealed step is saved for whoever cures it."""
        self._begin(exit_code, reason, self._job.config.limits.deadlines.final_drain_s, now_ns)
        self._leave_all(now_ns)
        self._says_what_is_durable = self._commits.high_water > 0
        self._saves.flush(self._commits.sealed, now_ns)
        self.poll(now_ns)

    def drain(self, exit_code: int, reason: str, now_ns: int) -> None:
        """Preempted or halted: ranks go at once, the newest sealed step is saved."""
        self._begin(exit_code, reason, self._job.config.limits.deadlines.preemption_drain_s, now_ns)
        self._leave_all(now_ns)
        self._saves.flush(self._commits.sealed, now_ns)
        self._says_what_is_durable = self._is_hurried = True
        self.poll(now_ns)

    def hurry(self, exit_code: int, now_ns: int) -> None:
        """A termination signal while the end is under way: drain no longer than a preemption would.

        `exit_code`: of a run that the signal keeps from saving its last step.
        """
        drain_s = self._job.config.limits.deadlines.preemption_drain_s
        self._drain_until_ns = min(self._drain_until_ns, now_ns + to_ns(drain_s))
        self._is_hurried = True
        self._unsaved_exit_code = exit_code

    def kill_now(self, exit_code: int, reason: str, now_ns: int) -> None:
        """A person insists: kill everything, wait for nothing but the deaths."""
        if self._job.stage is not Stage.STOPPING:
            self._begin(exit_code, reason, 0.0, now_ns)
        self._exit_code, self._reason = exit_code, reason
        self._drain_until_ns = now_ns
        self._saves.close()
        for child in self._roster:
            self._roster.kill(child, reason, now_ns)
        self.poll(now_ns)

    def deadline_ns(self) -> int | None:
        """When the next bound passes."""
        if self._job.stage is not Stage.STOPPING:
            return None
        if self._give_up_ns is not None:
            return self._give_up_ns
        return self._drain_until_ns

    def poll(self, now_ns: int) -> None:
        """Go on as far as possible."""
        if self._job.stage is not Stage.STOPPING:
            return
        if not self._saves.is_idle and now_ns < self._drain_until_ns:
            return
        if self._give_up_ns is None:
            deadlines = self._job.config.limits.deadlines
            grace_s = deadlines.interrupt_grace_s if self._is_hurried else deadlines.teardown_s
            self._give_up_ns = now_ns + 2 * to_ns(grace_s)  # once to leave by itself, once to be dead after the kill
            self._saves.close()
            self._leave_all(now_ns)
            for child in self._roster.spares(Role.WRITER):
                self._roster.leave(child, grace_s, now_ns)
        if not len(self._roster) or now_ns >= self._give_up_ns:
            self._end()

    def _begin(self, exit_code: int, reason: str, drain_s: float, now_ns: int) -> None:
        self._commits.flush()
        self._job.stage = Stage.STOPPING
        self._job.command(HurrySaves())
        # Whoever cures the cause may want to go back behind it.
        self._saves.keeps_all = exit_code == ExitCode.DO_NOT_RESTART
        self._exit_code = exit_code
        self._reason = reason
        self._drain_until_ns = now_ns + to_ns(drain_s)

    def _leave_all(self, now_ns: int) -> None:
        """Workers and standbys: those that still train are not asked twice."""
        deadlines = self._job.config.limits.deadlines
        for child in self._roster:
            if child.role is Role.WRITER or child.state is ChildState.ENDING:
                continue
            is_waiting = child.state in (ChildState.FINISHED, ChildState.PARKED, ChildState.READY)
            self._roster.leave(child, deadlines.teardown_s if is_waiting else deadlines.interrupt_grace_s, now_ns)

    def _what_is_durable(self) -> str:
        """What the end of a run says about its saves: what really committed, not what was hoped for."""
        step = self._saves.committed_step
        known = f"durable up to step {step}" if step >= 0 else "nothing is durable"
        if self._says_what_is_durable:
            return f"; {known}"
        if not self._is_last_step_lost():
            return ""
        why = self._saves.last_failure
        if not why and (self._commits.sealed is None or self._commits.sealed.step < self._commits.step):
            why = "not captured on every rank: their logs say why"
        return f"; the last step is not saved{f' ({why})' if why else ''}, {known}"

    def _is_last_step_lost(self) -> bool:
        """Training is done, and its state is in no checkpoint: it goes with this launcher.

        It may be done below H, with fewer steps asked for than were executed before. Before the first step there is
        nothing to lose.
        """
        num_saved = max(0, self._saves.committed_step)
        return self._exit_code == ExitCode.FINISHED and num_saved < self._commits.step

    def _end(self) -> None:
        self._job.stage = Stage.STOPPED
        self._reason += self._what_is_durable()
        if self._is_last_step_lost():
            self._exit_code = self._unsaved_exit_code
        self._job.emit(
            RunFinished(
                exit_code=self._exit_code,
                reason=self._reason,
                step=self._commits.high_water,
                result=self._result,
            )
        )
        self._job.command(Stop(exit_code=self._exit_code, reason=self._reason, result=self._result))
