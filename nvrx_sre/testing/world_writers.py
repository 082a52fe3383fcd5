"""Simulated writers: one on each host, each writes its host's share of a save; that of rank 0's host commits.

Model: as the real ones, they agree through the attempt's directory on the shared disk: who has written its share leaves
word there, whoever waits looks at it, and an end that anybody left there ends the attempt for all. One save at a time,
in stages, then retention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvrx_sre.checkpoint.slots import SlotHeader
from nvrx_sre.core.clock import to_ns
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import SaveFailure
from nvrx_sre.testing.world_disk import Attempt, Commit
from nvrx_sre.testing.world_plan import SimKind
from nvrx_sre.testing.world_ranks import SimChild

if TYPE_CHECKING:
    from collections.abc import Sequence

POLL_S = 0.05
"""Time between two looks at an attempt that waits for the other shares."""


class SimWriter(SimChild):
    """The durable writer of a host."""

    def write(self, message: wire.WriteSave) -> None:
        """Begin a save; contents are read while it runs, so the slots must be left alone."""
        mapped = list(self.launcher.slots)[message.first_rank :]  # a mapping outlives the launcher's dropping of slots
        taken = [mapped[rank].contents[slot] for rank, slot in enumerate(message.slots)]
        step = message.step
        if any(item is None and mapped[rank].filling[message.slots[rank]] == step for rank, item in enumerate(taken)):
            self.world.violation(f"step {step} was handed over while a rank still copied it")
        if any(item is None or (item.step, item.generation) != (step, message.generation) for item in taken):
            # Lost with its node, or overwritten before the launcher, which was behind, could hold it.
            self.world.reach("a writer found a slot that held another step")
            self.later(0.01, 0.1, lambda: self._fail(message, SaveFailure.INTERRUPTED))
            return

        def written() -> None:
            now = [mapped[rank].contents[slot] for rank, slot in enumerate(message.slots)]
            # Of an attempt that was given up nothing is committed: its slots were released with it.
            if now != taken and not self.world.disk.attempt(message.attempt).is_ended:
                self.world.violation(f"slots of the held save of step {step} were overwritten")
            self._written(message, taken)

        low_s, high_s = (0.05, 1.5)
        if self.world.fires(SimKind.SLOW_DISK, step):
            self.world.reach("a save was overdue")
            low_s = high_s = 2 * self.world.config.limits.deadlines.save_s
        self.later(low_s, high_s, written)

    def _written(self, message: wire.WriteSave, taken: Sequence[SlotHeader | None]) -> None:
        """This share is on the disk."""
        attempt = self.world.disk.attempt(message.attempt)
        if attempt.is_ended:
            self._fail(message, SaveFailure.INTERRUPTED)
            return
        attempt.parts.add(message.part)
        self._report(message, "written")
        if message.part == 0:
            self.later(0.01, 0.1, lambda: self._gather(message, taken, attempt, self.now_ns))

    def _gather(
        self, message: wire.WriteSave, taken: Sequence[SlotHeader | None], attempt: Attempt, since_ns: int
    ) -> None:
        """Commit when all shares are there; give up at the deadline, or when somebody else did."""
        if len(attempt.parts) == message.num_parts:
            self._commit(message, taken[0])
        elif attempt.is_ended or self.now_ns - since_ns > to_ns(message.deadline_s):
            attempt.is_ended = True
            self.world.reach("a save ended for want of another host's share")
            self._fail(message, SaveFailure.INTERRUPTED)
        else:
            self.later(POLL_S, POLL_S, lambda: self._gather(message, taken, attempt, since_ns))

    def _commit(self, message: wire.WriteSave, taken: SlotHeader | None) -> None:
        disk, world = self.world.disk, self.world
        step, generation = message.step, message.generation
        if world.fires(SimKind.STORAGE, step):
            self._fail(message, SaveFailure.STORAGE)
            return
        if disk.epoch > self.launcher.epoch or disk.is_abandoned(generation, step) or taken is None:
            world.reach("a writer refused to commit an abandoned line")
            self._fail(message, SaveFailure.ABANDONED_LINE)
            return
        if message.num_parts > 1:
            world.reach("the writers of several hosts committed a save")
        commit = Commit(step=step, generation=generation, epoch=self.launcher.epoch, content=taken)
        disk.commit(commit)
        self._report(message, "committed")
        self.later(0.02, 0.3, lambda: self._verify(message, commit))

    def _verify(self, message: wire.WriteSave, commit: Commit) -> None:
        commit.verified = True
        self._report(message, "verified")

    def retain(self) -> None:
        """Told to delete what is surplus: soon."""
        self.later(0.01, 0.2, self._retain)

    def _retain(self) -> None:
        disk = self.world.disk
        if disk.epoch > self.launcher.epoch:
            return
        for gone in disk.retain():
            self.world.reach("retention deleted a checkpoint")
            self.send(wire.Retired(step=gone.step, directory=gone.directory, seconds=0.01))

    def _fail(self, message: wire.WriteSave, reason: SaveFailure) -> None:
        """A save that one writer gives up is given up for all of them."""
        self.world.disk.attempt(message.attempt).is_ended = True
        self._report(message, "failed", reason)

    def _report(self, message: wire.WriteSave, stage: str, reason: str = "") -> None:
        self.send(
            wire.WriterProgress(
                step=message.step,
                stage=stage,
                directory=f"step-{message.step:08d}",
                size_bytes=1,
                seconds=0.1,
                reason=reason,
                message="",
                attempt=message.attempt,
            )
        )
