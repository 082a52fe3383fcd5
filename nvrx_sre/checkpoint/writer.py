"""The node's writer process; its arguments are RUN_DIR RUN [options].

A child of the launcher, outside every process group: it maps the ranks' slots by descriptors that come over
its channel, takes `WriteSave`, and answers with `WriterProgress`: written, committed, verified, or failed. A bounded
save (`checkpoint.pacing`) says now and then that it is being written, and loses its bound at `Hurry`. It deletes what
is surplus when it is told to (`Retain`). One save at a time; the launcher does not hand over a second. Dead ranks
change nothing: the slots are the launcher's. A full or failing disk ends that save and not the process.

It blocks in `channel.receive` and ends at `Leave`, at the end of the channel, or with its parent (SIGKILL).
SIGINT and SIGTERM are ignored: at a preemption the last save must still be written, and the launcher decides.
Must not: take part in training, write to stdout but for its log.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nvrx_sre.checkpoint import discover
from nvrx_sre.checkpoint.commit import SaveRefused, SaveRequest, failure_of, verify_committed
from nvrx_sre.checkpoint.parts import Share
from nvrx_sre.checkpoint.retention import Deleted, Retention
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.checkpoint.stages import unwatched
from nvrx_sre.core.clock import SystemClock, seconds, to_ns
from nvrx_sre.core.errors import StorageError, UserError
from nvrx_sre.core.output import print_masked, survive_a_full_disk
from nvrx_sre.core.processes import start_ticks
from nvrx_sre.events import messages as wire
from nvrx_sre.events.channel import Channel
from nvrx_sre.events.schema import SaveFailure
from nvrx_sre.events.settings import ChildSettings

if TYPE_CHECKING:
    from nvrx_sre.checkpoint.save import Saver

NICENESS = 5
"""Below training, which gets three times the share of a core that both want: a save has the whole interval between
saves, a step has not."""
TELL_EVERY_S = 10.0
"""A bounded save says so often that it goes on, or it would be taken for a hung one (`deadlines.save_s`)."""
MESSAGE_CHARACTERS_MAX = 500
RETENTION_WAIT_S = 2.0
"""Longest wait for a delete in hand when the writer is to leave; the next start of the run finishes it."""


@dataclass(frozen=True, kw_only=True)
class WriterConfig:
    """What the writer is started with."""

    run_dir: Path
    run: str
    bandwidth_bytes_s: float | None = None
    keeps_attempts: bool = False
    """What lies there uncommitted may be of a save that other nodes are writing: it is left alone."""


class Watcher(Protocol):
    """Follows each save through its stages: `faults.storage`, where a plan is in force."""

    def begin(self, step: int, passes: dict[str, int]) -> None:
        """A save of `step` begins."""

    def at(self, stage: str) -> None:
        """The save is at `stage`. May raise `OSError`."""


class Writer:
    """Answers the launcher's messages. Not thread-safe: one thread, one save at a time."""

    def __init__(self, config: WriterConfig, channel: Channel, watcher: Watcher | None = None) -> None:
        self._config = config
        self._channel = channel
        self._clock = SystemClock()
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._slot_files: dict[int, SlotFile] = {}
        self._watcher = watcher
        self._at_stage = unwatched if watcher is None else watcher.at
        self._heard: deque[tuple[wire.Message, list[int]] | None] = deque()
        """What came while a save was being written."""
        self._is_hurried = False
        self._writing: wire.WriteSave | None = None
        self._told_ns = 0
        self._saver: Saver | None = None
        self._retention = Retention(config.run_dir, config.run, self._deleted, log, self._at_stage)

    def serve(self) -> None:
        """Handle messages until `Leave` or the end of the channel; a delete in hand may finish, bounded."""
        while (received := self._next()) is not None:
            message, descriptors = received
            if isinstance(message, wire.Leave):
                break
            if isinstance(message, wire.MapSlots):
                self._map(message, descriptors)
            elif isinstance(message, wire.WriteSave):
                self.save(message)
            elif isinstance(message, wire.Retain):
                self._retention.request(message.keep, message.epoch)
            elif isinstance(message, wire.Hurry):
                self._is_hurried = True
            elif isinstance(message, wire.Doorbell):
                self._channel.take_over(descriptors)
        self._retention.wait_idle(RETENTION_WAIT_S)

    def _next(self) -> tuple[wire.Message, list[int]] | None:
        return self._heard.popleft() if self._heard else self._channel.receive()

    def _wait_for_pace(self, wait_s: float) -> bool:
        """A `pacing.Wait` that hears when the run ends, and says that a slow save is not a hung one."""
        until_ns = self._clock.monotonic_ns() + to_ns(wait_s)
        while not self._is_hurried and (left_s := seconds(until_ns - self._clock.monotonic_ns())) > 0:
            if self._poll.poll(min(left_s, TELL_EVERY_S) * 1000):
                received = self._channel.receive()
                self._heard.append(received)
                self._is_hurried = received is None or isinstance(received[0], wire.Hurry)
            self._tell_writing()
        return not self._is_hurried

    def _tell_writing(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if self._writing is not None and now_ns - self._told_ns >= to_ns(TELL_EVERY_S):
            self._told_ns = now_ns
            self._report(self._writing, "writing", "", 0, now_ns)

    def _map(self, message: wire.MapSlots, descriptors: list[int]) -> None:
        old = self._slot_files.pop(message.rank, None)
        if old is not None:
            old.close()
        try:
            fd = descriptors[0]
            self._slot_files[message.rank] = SlotFile.map(fd, message.data_bytes, message.blob_bytes)
        except (IndexError, UserError, StorageError) as error:
            log(f"slots of rank {message.rank} are not usable: {error}")

    def save(self, message: wire.WriteSave) -> None:
        """One save, from slots to the verified commit. Reports every stage; never raises for storage or data."""
        started_ns = self._told_ns = self._clock.monotonic_ns()
        self._writing = message
        if self._watcher is not None:
            self._watcher.begin(message.step, message.passes)
        for rank in [rank for rank in self._slot_files if rank >= message.world_size]:
            self._slot_files.pop(rank).close()  # of a larger world that is gone: memory that nothing else frees
        try:
            self._commit(message, started_ns)
        except SaveRefused as error:
            self._failed(message, error.reason, str(error), started_ns)
        except StorageError as error:
            self._failed(message, failure_of(error), str(error), started_ns)

    def _commit(self, message: wire.WriteSave, started_ns: int) -> None:
        """Commit and verify the save, or put in this writer's part of one."""
        from nvrx_sre.checkpoint.save import Source

        share = Share(
            part=message.part,
            num_parts=message.num_parts,
            first_rank=message.first_rank,
            attempt=message.attempt,
            deadline_s=message.deadline_s,
        )
        request = SaveRequest(
            run=self._config.run,
            step=message.step,
            epoch=message.epoch,
            generation=message.generation,
            captured_ns=message.captured_ns,
            world_size=message.world_size,
        )
        source = Source(slot_files=self._files_of(message), slots=message.slots, share=share)
        saved = self._saver_of_process().save(
            request, source, lambda size_bytes: self._report(message, "written", "", size_bytes, started_ns)
        )
        if saved.directory is None:
            return
        self._report(message, "committed", saved.directory.name, saved.size_bytes, started_ns)
        self._verify(message, saved.directory, saved.size_bytes)

    def _saver_of_process(self) -> Saver:
        from nvrx_sre.checkpoint.save import Saver
        from nvrx_sre.checkpoint.storage import WriteOptions

        if self._saver is None:
            options = WriteOptions(
                bandwidth_bytes_s=self._config.bandwidth_bytes_s, wait=self._wait_for_pace, at_stage=self._at_stage
            )
            self._saver = Saver(self._config.run_dir, options)
        return self._saver

    def _verify(self, message: wire.WriteSave, directory: Path, size_bytes: int) -> None:
        started_ns = self._clock.monotonic_ns()
        verify_committed(self._config.run_dir, directory, self._config.run, self._at_stage)
        discover.record_verified(self._config.run_dir, directory.name, self._clock.wall_ns())
        self._report(message, "verified", directory.name, size_bytes, started_ns)

    def _files_of(self, message: wire.WriteSave) -> list[SlotFile]:
        wanted = range(message.first_rank, message.first_rank + len(message.slots))
        missing = [rank for rank in wanted if rank not in self._slot_files]
        is_whole = message.num_parts > 1 or len(message.slots) == message.world_size
        if missing or not is_whole:
            raise SaveRefused(f"slots of ranks {missing} are not mapped", reason=SaveFailure.INTERRUPTED)
        return [self._slot_files[rank] for rank in wanted]

    def _deleted(self, deleted: Deleted) -> None:
        log(f"deleted {deleted.directory} in {deleted.seconds:.3f} s")
        self._channel.send(wire.Retired(step=deleted.step, directory=deleted.directory, seconds=deleted.seconds))

    def _report(self, message: wire.WriteSave, stage: str, directory: str, size_bytes: int, started_ns: int) -> None:
        self._channel.send(
            wire.WriterProgress(
                step=message.step,
                stage=stage,
                directory=directory,
                size_bytes=size_bytes,
                seconds=seconds(self._clock.monotonic_ns() - started_ns),
                reason="",
                message="",
                attempt=message.attempt,
            )
        )

    def _failed(self, message: wire.WriteSave, reason: SaveFailure, text: str, started_ns: int) -> None:
        log(f"save of step {message.step} failed ({reason}): {text}")
        self._channel.send(
            wire.WriterProgress(
                step=message.step,
                stage="failed",
                directory="",
                size_bytes=0,
                seconds=seconds(self._clock.monotonic_ns() - started_ns),
                reason=reason.value,
                message=text[:MESSAGE_CHARACTERS_MAX],
                attempt=message.attempt,
            )
        )


def log(text: str) -> None:
    """One line to stderr, which the launcher keeps in the run's logs."""
    print_masked(f"writer: {text}")


def parse_arguments(arguments: Sequence[str]) -> WriterConfig:
    """Configuration from the command line."""
    parser = argparse.ArgumentParser(prog="writer", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("run")
    parser.add_argument("--bandwidth-bytes-s", type=float, default=None, help="bound of the write rate")
    parser.add_argument("--keep-attempts", action="store_true", help="leave uncommitted saves alone")
    parsed = parser.parse_args(arguments)
    return WriterConfig(
        run_dir=parsed.run_dir,
        run=parsed.run,
        bandwidth_bytes_s=parsed.bandwidth_bytes_s,
        keeps_attempts=parsed.keep_attempts,
    )


def watcher_of(settings: ChildSettings, announce: Callable[[str, int, int], object]) -> Watcher | None:
    """Planned faults of storage, None without any.

    Loaded by name and only when a plan is in force, so that a run without one holds no code that can kill it.
    """
    if not settings.fault_specs:
        return None
    watcher: Watcher = importlib.import_module("nvrx_sre.faults.storage").StorageFaults(settings.fault_specs, announce)
    return watcher


def yield_to_training() -> None:
    """Lower this process's share of the cores, also where the scheduler groups processes by session."""
    os.nice(NICENESS)
    with suppress(OSError):  # kernels without automatic groups have no such file
        Path("/proc/self/autogroup").write_text(str(NICENESS), encoding="ascii")


def main(arguments: Sequence[str], settings: ChildSettings, channel: Channel) -> int:
    """Life of the process. Exit code 0 at `Leave` or the end of the channel."""
    config = parse_arguments(arguments)
    survive_a_full_disk()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    clock = SystemClock()
    channel.send(wire.Hello(pid=os.getpid(), start_ticks=start_ticks(os.getpid()), mono_ns=clock.monotonic_ns()))
    for name in () if config.keeps_attempts else discover.clear_interrupted(config.run_dir):
        log(f"removed {name}, which had not committed")
    import torch

    from nvrx_sre.checkpoint import save  # noqa: F401  # loaded now, so that the first save does not wait for it

    torch.set_num_threads(1)
    # Our own checksum covers every byte, at six times the speed.
    torch.serialization.set_crc32_options(False)
    watcher = watcher_of(
        settings,
        lambda spec, step, passes: channel.send(
            wire.Injected(generation=0, spec=spec, step=step, passes=passes, mono_ns=clock.monotonic_ns())
        ),
    )
    channel.send(wire.Parked(fit=True, note="", mono_ns=clock.monotonic_ns()))
    yield_to_training()
    Writer(config, channel, watcher).serve()
    return 0
