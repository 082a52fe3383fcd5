"""Child processes: forked as session leaders, watched by pidfd, ended as whole sessions.

Each child has one channel (SOCK_SEQPACKET), a ring for its steps if it may become a rank, one log file for both its
output streams (no pipe that a stalled launcher could fill), and, once the fork server (`launcher.forkserver`) has
started it, a pid and a pidfd. Before that it can be sent messages, which it finds when it starts, and be killed, which
it is when it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from nvrx_sre.core import processes
from nvrx_sre.core.atomic import PRIVATE_FILE_MODE
from nvrx_sre.events.channel import Channel, create_pair
from nvrx_sre.events.schema import Role
from nvrx_sre.events.settings import STACKS_SIGNAL
from nvrx_sre.events.step_ring import StepRing
from nvrx_sre.launcher.stacks import StackFile

TAIL_BYTES = 8192
LAST_LINE_CHARACTERS = 500
_FRAME = re.compile(r' +File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
"""A frame of a traceback, or the place of a syntax error."""
STACKS_WAIT_S = 0.1
"""Longest wait for the stacks of a hung process before it is killed (seconds)."""
STACKS_POLL_S = 0.005
_LIBC = ctypes.CDLL(None)


@dataclass(kw_only=True, eq=False)
class Child:
    """A child process, asked for or alive, and the launcher's ends of it."""

    number: int
    role: Role
    channel: Channel
    ring: StepRing | None
    log: Path
    pid: int = 0
    """0 until it was started."""
    start_ticks: int = 0
    pidfd: int = -1
    _is_doomed: bool = False
    """It was killed before it was started."""
    stacks: StackFile | None = None
    """Where it writes its stacks; not its own to close. None for a child that is never a rank."""
    _stacks_from_bytes: int | None = None
    """What was in it when stacks were requested, None when none are awaited."""

    def started(self, pid: int) -> None:
        """It is the process `pid`, a child of this one that nobody has reaped."""
        self.pid = pid
        self.start_ticks = processes.start_ticks(pid)
        self.pidfd = os.pidfd_open(pid)
        if self._is_doomed:
            self.kill()

    def kill(self) -> None:
        """SIGKILL the child's whole session, as soon as it is started; safe to repeat until it is reaped."""
        if not self.pid:
            self._is_doomed = True
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def request_stacks(self) -> None:
        """Have the stack of the child's main thread written to its stack file. Does not wait."""
        if self.stacks is None or not self.pid:
            return
        self.stacks.write("Asked for by the launcher:\n")
        self._stacks_from_bytes = self.stacks.num_bytes()
        # To its main thread: what is sent to the process the kernel may give to any. Nobody else has the number of a
        # child that was not reaped.
        if hasattr(_LIBC, "tgkill"):  # glibc 2.30
            _LIBC.tgkill(self.pid, self.pid, STACKS_SIGNAL)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, STACKS_SIGNAL)

    def await_stacks(self) -> None:
        """Wait until requested stacks are there, at most `STACKS_WAIT_S`. A stopped process is not waited for."""
        if self.stacks is None or self._stacks_from_bytes is None:
            return
        seen = self._stacks_from_bytes
        death = select.poll()
        death.register(self.pidfd, select.POLLIN)
        for _ in range(round(STACKS_WAIT_S / STACKS_POLL_S)):
            if processes.is_stopped(self.pid):
                self.stacks.write("The process is stopped: it cannot say where it stands.\n")
                break
            if death.poll(STACKS_POLL_S * 1000):
                break
            num_bytes = self.stacks.num_bytes()
            if num_bytes == seen > self._stacks_from_bytes:
                break
            seen = num_bytes
        self._stacks_from_bytes = None

    def reap(self) -> int:
        """Return code of the child (negative: signal), once it is dead.

        Ends what is left of its session and closes everything. The zombie holds the session's number until here, so
        that nothing else can be hit.
        """
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        self.kill()
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        os.close(self.pidfd)
        self.close()
        assert ended is not None, "without WNOHANG there is a result"
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def close(self) -> None:
        """Close channel and ring; a child that was never started has nothing else."""
        self.channel.close()
        if self.ring is not None:
            self.ring.close()

    def last_line(self) -> str:
        """Last non-empty line of the child's output; of a traceback at its end the error and its place."""
        return last_said(self.tail())[:LAST_LINE_CHARACTERS]

    def tail(self) -> str:
        """End of the child's output."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
        return ""


def last_said(text: str) -> str:
    """`ValueError: boom, train.py:7 main` if `text` ends with a traceback, else its last line that is not empty. Pure.

    Of an error's message of several lines the first counts, if the others are indented, as torch's are.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    indented = list(takewhile(lambda line: line[0].isspace(), reversed(lines)))
    if not lines or len(indented) == len(lines):
        return lines[-1].strip() if lines else ""
    end = len(lines) - 1 - len(indented)
    frames = takewhile(lambda line: line[0].isspace(), reversed(lines[:end]))
    place = next((found for line in frames if (found := _FRAME.fullmatch(line))), None)
    if place is None:
        return lines[-1].strip()
    function = place["function"]
    within = f" {function}" if function and function != "<module>" else ""
    return f"{lines[end]}, {os.path.basename(place['file'])}:{place['line']}{within}"


def prepare(number: int, role: Role, log: Path) -> tuple[Child, Channel, int]:
    """A child to be started: (its record, its end of the channel, descriptor of its log), the latter two to be closed.

    Raises `OSError` if there is no descriptor left, or no room for the log.
    """
    with contextlib.ExitStack() as made:
        ours, theirs = create_pair()
        made.callback(ours.close)
        made.callback(theirs.close)
        ring = None
        if role is not Role.WRITER:
            ring = StepRing.create()
            made.callback(ring.close)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE_MODE)
        made.pop_all()
    ours.socket.setblocking(False)
    return Child(number=number, role=role, channel=ours, ring=ring, log=log), theirs, output
