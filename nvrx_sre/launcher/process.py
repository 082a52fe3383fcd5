"""Child processes: started as session leaders, watched by pidfd, ended as whole sessions.

Each child has one channel (SOCK_SEQPACKET), one log file for both its output streams (no pipe that a stalled
launcher could fill), and a pidfd. Spawn from the main thread only: PR_SET_PDEATHSIG follows the thread that
spawned.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.core import processes
from nvrx_sre.core.atomic import PRIVATE_FILE_MODE
from nvrx_sre.events import channel as wire
from nvrx_sre.events.schema import Role
from nvrx_sre.events.settings import STACKS_SIGNAL

TAIL_BYTES = 8192
STACKS_WAIT_S = 0.1
"""Longest wait for the stacks of a hung process before it is killed (seconds)."""
STACKS_POLL_S = 0.01


@dataclass(kw_only=True, eq=False)
class Child:
    """A live child process and the launcher's ends of it."""

    number: int
    role: Role
    pid: int
    start_ticks: int
    pidfd: int
    channel: wire.Channel
    log: Path
    popen: subprocess.Popen[bytes]
    _stacks_from_bytes: int | None = None
    """Size of the log when stacks were requested, None when none are awaited."""

    def kill(self) -> None:
        """SIGKILL the child's whole session; safe to repeat."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def request_stacks(self) -> None:
        """Have the stacks of all the child's threads written to its log. Does not wait."""
        self._stacks_from_bytes = self._log_bytes()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, STACKS_SIGNAL)

    def await_stacks(self) -> None:
        """Wait until requested stacks stand in the log, at most `STACKS_WAIT_S`: a stopped process writes none."""
        if self._stacks_from_bytes is None:
            return
        death = select.poll()
        death.register(self.pidfd, select.POLLIN)
        seen = self._stacks_from_bytes
        for _ in range(round(STACKS_WAIT_S / STACKS_POLL_S)):
            if death.poll(STACKS_POLL_S * 1000):
                break
            size = self._log_bytes()
            if size == seen > self._stacks_from_bytes:
                break
            seen = size
        self._stacks_from_bytes = None

    def _log_bytes(self) -> int:
        with contextlib.suppress(OSError):
            return self.log.stat().st_size
        return 0

    def reap(self) -> int:
        """Return code of the dead child (negative: signal). Ends what is left of its session, closes everything."""
        code = self.popen.wait()
        self.kill()
        os.close(self.pidfd)
        self.channel.close()
        return code

    def last_line(self) -> str:
        """Last non-empty line of the child's output."""
        lines = [line for line in self.tail().splitlines() if line.strip()]
        return lines[-1].strip()[:500] if lines else ""

    def tail(self) -> str:
        """End of the child's output."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
        return ""


def spawn(number: int, role: Role, arguments: list[str], environment: Mapping[str, str], log: Path) -> Child:
    """Start `python *arguments` as a session leader with a channel.

    Raises `OSError` if the process cannot be started.
    """
    ours, theirs = wire.create_pair()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE_MODE)
    try:
        popen = subprocess.Popen(
            [sys.executable, *arguments],
            env={**environment, wire.CHANNEL_FD_VARIABLE: str(theirs.fileno()), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(output)
    ours.socket.setblocking(False)
    return Child(
        number=number,
        role=role,
        pid=popen.pid,
        start_ticks=processes.start_ticks(popen.pid),
        pidfd=os.pidfd_open(popen.pid),
        channel=ours,
        log=log,
        popen=popen,
    )
