"""The node's writer process: `python -m nvrx_sre.checkpoint.writer RUN_DIR RUN [options]`.

A child of the launcher, outside every process group: it maps the ranks' slots by descriptors that come over
its channel, takes `WriteSave`, and answers with `WriterProgress`: written, committed, verified, or failed. One
save at a time; the launcher does not hand over a second. Dead ranks change nothing: the slots are the
launcher's. A full or failing disk ends that save and not the process.

It blocks in `channel.receive` and ends at `Leave`, at the end of the channel, or with its parent (SIGKILL).
SIGINT and SIGTERM are ignored: at a preemption the last save must still be written, and the launcher decides.
Must not: load torch before it said Hello, take part in training, write to stdout but for its log.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_sre.checkpoint import discover, retention
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.core.errors import CheckpointCorrupt, StorageError, UserError
from nvrx_sre.core.processes import start_ticks
from nvrx_sre.core.slow_storage import slow_storage_s
from nvrx_sre.events import channel as wire
from nvrx_sre.events.schema import SaveFailure

if TYPE_CHECKING:
    from nvrx_sre.checkpoint.storage import WriteOptions
    from nvrx_sre.checkpoint.write import PlanCache

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""
NICENESS = 5
"""Below training: a save has the whole interval between saves, a step has not."""
MESSAGE_CHARACTERS_MAX = 500


@dataclass(frozen=True, kw_only=True)
class WriterConfig:
    """What the writer is started with."""

    run_dir: Path
    run: str
    bandwidth_bytes_s: float | None = None
    delay_per_file_s: float = 0.0


class Writer:
    """Answers the launcher's messages. Not thread-safe: one thread, one save at a time."""

    def __init__(self, config: WriterConfig, channel: wire.Channel) -> None:
        self._config = config
        self._channel = channel
        self._clock = SystemClock()
        self._slot_files: dict[int, SlotFile] = {}
        self._plans: PlanCache | None = None

    def serve(self) -> None:
        """Handle messages until `Leave` or the end of the channel."""
        while (received := self._channel.receive()) is not None:
            message, descriptors = received
            if isinstance(message, wire.Leave):
                return
            if isinstance(message, wire.MapSlots):
                self._map(message, descriptors)
            elif isinstance(message, wire.WriteSave):
                self.save(message)

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
        """One save, from slots to retention. Reports every stage; never raises for storage or data."""
        from nvrx_sre.checkpoint.write import SaveRefused

        started_ns = self._clock.monotonic_ns()
        try:
            directory, size_bytes = self._commit(message, started_ns)
            self._verify(message, directory, size_bytes)
        except SaveRefused as error:
            self._failed(message, error.reason, str(error), started_ns)
        except StorageError as error:
            self._failed(message, SaveFailure.STORAGE, str(error), started_ns)
        else:
            self._retain(message.keep)

    def _commit(self, message: wire.WriteSave, started_ns: int) -> tuple[Path, int]:
        from nvrx_sre.checkpoint import write

        if self._plans is None:
            self._plans = write.PlanCache()
        request = write.SaveRequest(
            run=self._config.run,
            step=message.step,
            epoch=message.epoch,
            generation=message.generation,
            captured_ns=message.captured_ns,
        )
        ranks = write.read_slots(self._files_of(message), message.slots, request)
        write.check_finite(ranks)
        temporary = write.temporary_path(self._config.run_dir, request)
        try:
            plans = self._plans.plans_for(ranks)
            described = write.write_files(temporary, request, ranks, plans, self._options())
            self._report(message, "written", "", described.size_bytes, started_ns)
            directory = write.commit(self._config.run_dir, temporary, described, ranks)
        finally:
            # Gone after the rename; in every other case nothing of the attempt may stay.
            shutil.rmtree(temporary, ignore_errors=True)
        self._report(message, "committed", directory.name, described.size_bytes, started_ns)
        return directory, described.size_bytes

    def _verify(self, message: wire.WriteSave, directory: Path, size_bytes: int) -> None:
        from nvrx_sre.checkpoint.write import verify_committed

        started_ns = self._clock.monotonic_ns()
        verify_committed(self._config.run_dir, directory, self._config.run)
        verified = discover.read_verified(self._config.run_dir)
        discover.write_verified(self._config.run_dir, {**verified, directory.name: self._clock.wall_ns()})
        self._report(message, "verified", directory.name, size_bytes, started_ns)

    def _files_of(self, message: wire.WriteSave) -> list[SlotFile]:
        from nvrx_sre.checkpoint.write import SaveRefused

        missing = [rank for rank in range(message.world_size) if rank not in self._slot_files]
        if missing or len(message.slots) != message.world_size:
            raise SaveRefused(f"slots of ranks {missing} are not mapped", reason=SaveFailure.INTERRUPTED)
        return [self._slot_files[rank] for rank in range(message.world_size)]

    def _options(self) -> WriteOptions:
        from nvrx_sre.checkpoint.storage import WriteOptions

        return WriteOptions(bandwidth_bytes_s=self._config.bandwidth_bytes_s, delay_per_file_s=self._delay_per_file_s())

    def _delay_per_file_s(self) -> float:
        """Injected slowness: of the command line, or of a `slow_storage` fault since."""
        return max(self._config.delay_per_file_s, slow_storage_s(self._config.run_dir))

    def _retain(self, keep: int) -> None:
        """Old checkpoints go after the save is verified; a failure here costs disk space, not the save."""
        try:
            for name in retention.retain(self._config.run_dir, self._config.run, keep):
                log(f"deleted {name}")
        except (StorageError, CheckpointCorrupt) as error:
            log(f"kept all checkpoints: {error}")

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
            )
        )


def log(text: str) -> None:
    """One line to stderr, which the launcher keeps in the run's logs."""
    sys.stderr.write(f"writer: {text}\n")
    sys.stderr.flush()


def die_with_parent() -> bool:
    """Ask the kernel for SIGKILL when the parent dies; False if it is gone already."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def parse_arguments(arguments: Sequence[str]) -> WriterConfig:
    """Configuration from the command line."""
    parser = argparse.ArgumentParser(prog="python -m nvrx_sre.checkpoint.writer", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("run")
    parser.add_argument("--bandwidth-bytes-s", type=float, default=None, help="bound of the average write rate")
    parser.add_argument("--delay-per-file-s", type=float, default=0.0, help="injected slow storage, each file")
    parsed = parser.parse_args(arguments)
    return WriterConfig(
        run_dir=parsed.run_dir,
        run=parsed.run,
        bandwidth_bytes_s=parsed.bandwidth_bytes_s,
        delay_per_file_s=parsed.delay_per_file_s,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Process main. Exit code 0 at `Leave` or the end of the channel."""
    config = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not die_with_parent():
        return 0
    channel = wire.Channel(socket.socket(fileno=int(os.environ[wire.CHANNEL_FD_VARIABLE])))
    clock = SystemClock()
    channel.send(wire.Hello(pid=os.getpid(), start_ticks=start_ticks(os.getpid()), mono_ns=clock.monotonic_ns()))
    os.nice(NICENESS)
    for name in discover.clear_interrupted(config.run_dir):
        log(f"removed {name}, which had not committed")
    import torch

    from nvrx_sre.checkpoint import write  # noqa: F401  # loaded now, so that the first save does not wait for it

    torch.set_num_threads(1)
    channel.send(wire.Parked(fit=True, note="", mono_ns=clock.monotonic_ns()))
    Writer(config, channel).serve()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a normal exit: torch's teardown takes seconds and has nothing left to do.
    os._exit(code)
