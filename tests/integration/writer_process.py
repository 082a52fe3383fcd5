"""The writer as a launcher has it: a child process on a channel, with slots handed over by descriptor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.events import messages as wire
from nvrx_sre.events.channel import CHANNEL_FD_VARIABLE, create_pair
from nvrx_sre.events.settings import ChildSettings

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 180
"""A writer that says nothing for this long has hung."""

M = TypeVar("M", bound=wire.Message)


class WriterProcess:
    """A running writer of `run_dir`; end it with `leave` or `kill`."""

    def __init__(self, run_dir: Path, *options: str, faults: Sequence[str] = (), prefix: Sequence[str] = ()) -> None:
        self.channel, theirs = create_pair()
        self.channel.socket.settimeout(LIMIT_S)
        command = [*prefix, sys.executable, "-m", "tests.integration.lone_writer", str(run_dir), "demo", *options]
        settings = ChildSettings(
            run="demo",
            run_dir=str(run_dir),
            launcher_pid=os.getpid(),
            role="writer",
            attempt=0,
            save_every=1,
            waits_for_writer=False,
            interrupt_signal=39,
            fault_specs=tuple(faults),
            group_timeout_s=60.0,
        )
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **settings.to_environment(), CHANNEL_FD_VARIABLE: str(theirs.fileno())},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        self.asides: list[wire.Message] = []
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

    def request(self, step: int, slots: list[int], **changes: Any) -> None:
        """Send `WriteSave` and return at once."""
        values = {"epoch": 1, "generation": 1, "world_size": len(slots), "captured_ns": step, **changes}
        assert self.channel.send(wire.WriteSave(step=step, slots=slots, **values))

    def save(self, step: int, slots: list[int], **changes: Any) -> list[wire.WriterProgress]:
        """A save and all that the writer says about it."""
        self.request(step, slots, **changes)
        return self.answers()

    def answers(self) -> list[wire.WriterProgress]:
        """Progress up to `verified` or `failed`; what retention and planned faults say meanwhile is in `asides`."""
        said: list[wire.WriterProgress] = []
        while not said or said[-1].stage not in ("verified", "failed"):
            received = self.channel.receive()
            assert received is not None, "the writer closed its channel"
            message, _ = received
            if isinstance(message, wire.WriterProgress):
                said.append(message)
            else:
                self.asides.append(message)
        if said[-1].stage == "verified":
            assert self.channel.send(wire.Retain(keep=2, epoch=1))  # as the launcher does
        return said

    def wait_for(self, kind: type[M]) -> M:
        """The next message of `kind`, an aside that has come before included; others are dropped."""
        while True:
            found = next((item for item in self.asides if isinstance(item, kind)), None)
            if found is not None:
                self.asides.remove(found)
                return found
            received = self.channel.receive()
            assert received is not None, "the writer closed its channel"
            self.asides.append(received[0])

    def leave(self) -> int:
        """End the writer in order; its exit code."""
        self.channel.send(wire.Leave())
        return self.ended()

    def kill(self) -> int:
        """SIGKILL."""
        self.process.kill()
        return self.ended()

    def ended(self) -> int:
        """Wait for the end of the process; its exit code."""
        self.process.communicate(timeout=LIMIT_S)
        self.channel.close()
        return self.process.returncode
