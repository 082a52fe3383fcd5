"""The launcher's side of the node's fork server: one process that has imported torch, from which children are forked.

    put(request) -> queue -> Fork + (channel, log, stacks) -> `session.forkserver` -> Forked(pid) -> take()

A fork takes about 10 ms where a fresh interpreter needs seconds for its imports. The server is started with the first
request. If it dies, the child that it was about to start has failed, which the launcher's policy judges; one that had
started a child before is replaced at once, any other with the next request. One request at a time is on its way, the
rest waits here: nothing that the server does, or does not do, blocks the launcher's loop.

`fileno()` is ready when `take` has something to do, and stays the same when the server is replaced. Main thread only:
the kernel ends the server, and every child, with the thread that they are the children of.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.core import processes
from nvrx_sre.core.atomic import PRIVATE_FILE_MODE
from nvrx_sre.core.clock import Clock, to_ns
from nvrx_sre.events import messages as wire
from nvrx_sre.events.channel import CHANNEL_FD_VARIABLE, Channel, create_pair
from nvrx_sre.events.settings import LAUNCHERS_SIGNALS

MODULE = "nvrx_sre.session.forkserver"


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A child to be started, with the descriptors that go to it: its end of its channel, and its log.

    `stacks`: where a rank puts its stacks, which stays the launcher's; () for a child that is none.
    """

    message: wire.Fork
    channel: Channel
    output: int
    stacks: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the launcher's copies of the descriptors."""
        self.channel.close()
        os.close(self.output)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to start a server."""

    environment: Mapping[str, str]
    """The server's, and so that of every child."""
    command: Sequence[str]
    """The user's, for whoever looks for it in a list of processes; the server does not run it."""
    log: Path
    answer_s: float
    """Longest time for an answer, the server's own start included (seconds)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Server:
    popen: subprocess.Popen[bytes]
    channel: Channel
    pidfd: int
    start_ticks: int

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)


class ForkServer:
    """Has children of this process started, one after another."""

    def __init__(self, config: ServerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._server: _Server | None = None
        self._waiting: deque[Request] = deque()
        self._on_way: int | None = None
        """The child that the server was asked for last, None once it has answered."""
        self._sent_ns = 0
        self._is_proven = False
        """The server has started a child."""
        self._epoll = select.epoll()

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def is_starting(self) -> bool:
        """A child may be there whose pid is not known yet."""
        return self._on_way is not None

    def processes(self) -> dict[int, int]:
        """pid -> start ticks of the server, empty if there is none."""
        return {} if self._server is None else {self._server.popen.pid: self._server.start_ticks}

    def put(self, request: Request) -> None:
        """Ask for a child; `take` begins, and says in time what came of it."""
        self._waiting.append(request)

    def take(self) -> list[wire.Forked]:
        """What came of requests since the last call; begins the next. Never blocks. Call now and then also unasked."""
        answers = self._read()
        server = self._server
        if server is not None and server.popen.poll() is not None:
            answers += self._read()  # what it said between the last look and its death
            answers += self._bury(server)
            if self._is_proven:
                self._is_proven = False
                with contextlib.suppress(OSError):  # the next request tries again, and says so if it cannot
                    self._running()
        elif server is not None and self._on_way is not None and self._is_overdue():
            server.kill()
        return answers + self._send()

    def close(self) -> list[wire.Forked]:
        """End the server and drop what waits; children that it has started and nobody has taken."""
        while self._waiting:
            self._waiting.popleft().close()
        answers: list[wire.Forked] = []
        if self._server is not None:
            self._server.kill()
            self._server.popen.wait()
            answers = self._read()
            self._bury(self._server)
        self._epoll.close()
        return answers

    def _is_overdue(self) -> bool:
        return self._clock.monotonic_ns() - self._sent_ns > to_ns(self._config.answer_s)

    def _read(self) -> list[wire.Forked]:
        answers: list[wire.Forked] = []
        if self._server is None:
            return answers
        with contextlib.suppress(BlockingIOError):
            while (received := self._server.channel.receive_plain()) is not None:
                message, _ = received
                if isinstance(message, wire.Forked):
                    self._on_way = None
                    self._is_proven |= message.pid > 0
                    answers.append(message)
        return answers

    def _bury(self, server: _Server) -> list[wire.Forked]:
        """The server is dead: the child that it was about to start will not come."""
        self._epoll.unregister(server.channel)
        self._epoll.unregister(server.pidfd)
        server.channel.close()
        os.close(server.pidfd)
        self._server = None
        lost, self._on_way = self._on_way, None
        why = f"the fork server died ({server.popen.returncode}), its log is {self._config.log}"
        return [] if lost is None else [wire.Forked(child=lost, pid=0, error=why)]

    def _send(self) -> list[wire.Forked]:
        """Send the next request if none is on its way; those that cannot be sent are answered at once."""
        failed: list[wire.Forked] = []
        while self._waiting and self._on_way is None:
            request = self._waiting[0]
            try:
                server = self._running()
                descriptors = (request.channel.fileno(), request.output, *request.stacks)
                packet_fits = server.channel.send_nowait(request.message, descriptors)
            except (OSError, ValueError) as error:
                text = error.strerror if isinstance(error, OSError) else str(error)
                failed.append(wire.Forked(child=request.message.child, pid=0, error=text or str(error)))
            else:
                if not packet_fits:
                    break  # it has just died: the request is for the next one
                self._on_way, self._sent_ns = request.message.child, self._clock.monotonic_ns()
            self._waiting.popleft().close()
        return failed

    def _running(self) -> _Server:
        """The server, started if need be. Raises `OSError` if it cannot be."""
        if self._server is None:
            self._server = self._start()
            self._epoll.register(self._server.channel, select.EPOLLIN)
            self._epoll.register(self._server.pidfd, select.EPOLLIN)
        return self._server

    def _start(self) -> _Server:
        ours, theirs = create_pair()
        output = None
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHERS_SIGNALS)
        try:
            output = os.open(self._config.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE_MODE)
            popen = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(os.getpid()), *self._config.command],
                env={
                    **self._config.environment,
                    CHANNEL_FD_VARIABLE: str(theirs.fileno()),
                    "PYTHONUNBUFFERED": "1",
                },
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
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
            if output is not None:
                os.close(output)
        ours.socket.setblocking(False)
        return _Server(
            popen=popen,
            channel=ours,
            pidfd=os.pidfd_open(popen.pid),
            start_ticks=processes.start_ticks(popen.pid),
        )
