"""The writer as a launcher has it: a child process on a channel, with slots handed over by descriptor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.events import channel as wire

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90
"""A writer that says nothing for this long has hung."""

M = TypeVar("M", bound=wire.Message)


class WriterProcess:
    """A running writer of `run_dir`; end it with `leave` or `kill`."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self.channel, theirs = wire.create_pair()
        self.channel.socket.settimeout(LIMIT_S)
        command = [sys.executable, "-m", "nvrx_sre.checkpoint.writer", str(run_dir), "demo", *options]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, wire.CHANNEL_FD_VARIABLE: str(theirs.fileno())},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        self.hello = self.expect(wire.Hello)
        self.expect(wire.Parked)

    def expect(self, kind: type[M]) -> M:
        """The next message, which must be of `kind`."""
        received = self.channel.receive()
        assert received is not None, "the writer closed its channel"
        message, _ = received
        assert isinstance(message, kind), message
        return message

    def map(self, *slot_files: SlotFile) -> None:
        """Hand over the slots of ranks 0, 1, ..."""
        for rank, slots in enumerate(slot_files):
            message = wire.MapSlots(rank=rank, data_bytes=slots.data_bytes, blob_bytes=slots.blob_bytes)
            assert self.channel.send(message, (slots.fd,))

    def request(self, step: int, slots: list[int], *, generation: int = 1, keep: int = 2, epoch: int = 1) -> None:
        """Send `WriteSave` and return at once."""
        message = wire.WriteSave(
            step=step,
            epoch=epoch,
            generation=generation,
            world_size=len(slots),
            slots=slots,
            captured_ns=step,
            keep=keep,
        )
        assert self.channel.send(message)

    def save(self, step: int, slots: list[int], *, generation: int = 1, keep: int = 2) -> list[wire.WriterProgress]:
        """A save and all that the writer says about it."""
        self.request(step, slots, generation=generation, keep=keep)
        return self.answers()

    def answers(self) -> list[wire.WriterProgress]:
        """Progress up to `verified` or `failed`."""
        said = [self.expect(wire.WriterProgress)]
        while said[-1].stage not in ("verified", "failed"):
            said.append(self.expect(wire.WriterProgress))
        return said

    def leave(self) -> int:
        """End the writer in order; its exit code."""
        self.channel.send(wire.Leave())
        return self._ended()

    def kill(self) -> int:
        """SIGKILL."""
        self.process.kill()
        return self._ended()

    def _ended(self) -> int:
        self.process.communicate(timeout=LIMIT_S)
        self.channel.close()
        return self.process.returncode
