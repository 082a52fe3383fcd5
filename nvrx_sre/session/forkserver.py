"""The node's fork server: `python -m nvrx_sre.session.forkserver LAUNCHER_PID [...]`. It has imported torch, and forks.

    Fork + (channel, log, stacks) -> fork: go-between -> fork: child   (session of its own, tells its pid, waits)
                                           ends at once                (now the launcher's child: it adopts orphans)
                                  <- Forked(pid)                       (goes on: log, environment, user's code)

Every worker, standby and writer of the node comes from here, so that none pays for the imports, and all share the pages
of what was imported. A child differs from a fresh interpreter in what the imports have fixed: the thread counts of
libraries and the seed of string hashes are those of the launcher's environment.

Invariants: one thread when it forks (OpenBLAS ends its threads around a fork by itself); CUDA is never touched;
nothing of the user's is imported, because what that does it does to each process; a child never returns into the
server's loop. It ends with the launcher, or when the channel does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from typing import NoReturn

from nvrx_sre.core import processes
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.output import print_error
from nvrx_sre.events import messages as wire
from nvrx_sre.events.channel import Channel
from nvrx_sre.events.schema import Role
from nvrx_sre.events.settings import LAUNCHERS_SIGNALS
from nvrx_sre.session.environment import enter, take_channel

PRELOADED = (
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "nvrx_sre.checkpoint.save",
    "nvrx_sre.checkpoint.writer",
    "nvrx_sre.restart.wrapper",
    "nvrx_sre.session.bootstrap",
    "nvrx_sre.session.injecting",
    "nvrx_sre.session.loading",
    "nvrx_sre.session.rehearsal",
    "nvrx_sre.session.restoring",
    "nvrx_sre.session.saving",
    "nvrx_sre.session.untracked",
    "nvrx_sre.session.warm",
)
"""What children need before they are ready, and what is slow to import or is first needed inside a recovery: `debug`
clears sharding caches, `loading` follows tracked loaders, an optimizer's first step imports Dynamo, and
`torch.use_deterministic_algorithms` inductor's configuration."""
PID_BYTES = 8


def preload() -> None:
    """Import what children need, and keep the collector from the pages that they share. Takes seconds."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # whoever needs it says so, in its own log
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve(channel: Channel) -> None:
    """Fork a child for each request, until the channel ends."""
    while (received := channel.receive()) is not None:
        message, descriptors = received
        if isinstance(message, wire.Fork):
            channel.send(_fork(message, descriptors, channel))


def _fork(message: wire.Fork, descriptors: list[int], channel: Channel) -> wire.Forked:
    """Start the child; what came of it. Waits for the go-between, which only forks."""
    ours, theirs = socket.socketpair()
    try:
        between = os.fork()
    except OSError as error:
        theirs.close()
        _close(descriptors)
        ours.close()
        return wire.Forked(child=message.child, pid=0, error=str(error))
    if not between:
        ours.close()
        channel.close()
        _go_between(message, descriptors, theirs)
    theirs.close()
    _close(descriptors)
    os.waitpid(between, 0)
    said = ours.recv(PID_BYTES)
    ours.close()
    if not said:
        return wire.Forked(child=message.child, pid=0, error="the fork server could not fork, its log says why")
    return wire.Forked(child=message.child, pid=int.from_bytes(said, "little"))


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _go_between(message: wire.Fork, descriptors: list[int], server: socket.socket) -> NoReturn:
    """Be the child's parent until it is there, or the child for all its life."""
    code = 1
    try:
        code = _child(message, descriptors, server) if not os.fork() else 0
    except BaseException as error:  # the boundary of a forked process: nothing may get back into the server's loop
        print_error(error)
    finally:
        _leave(code)


def _leave(code: int) -> NoReturn:
    """Not a normal exit: torch's teardown takes seconds and may block on a group that no longer exists."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _child(message: wire.Fork, descriptors: list[int], server: socket.socket) -> int:
    """The child's life; its exit code."""
    os.setsid()  # before the launcher knows the pid: it ends whole sessions
    try:
        server.send(os.getpid().to_bytes(PID_BYTES, "little"))
        server.recv(1)  # the end of the stream: the go-between is gone, and the launcher the parent
    except ConnectionError:
        return ExitCode.RETRYABLE  # the server has died: the launcher will never know of this child
    server.close()
    descriptor, log, *stacks = descriptors
    for standard in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(log, standard)
    os.close(log)
    for ours in (descriptor, *stacks):
        os.set_inheritable(ours, False)
    processes.set_name(message.name)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return _run(message, Channel(socket.socket(fileno=descriptor)), stacks)


def _run(message: wire.Fork, channel: Channel, stacks: list[int]) -> int:
    from nvrx_sre.checkpoint import writer
    from nvrx_sre.restart.stacks import OwnStacks
    from nvrx_sre.session import bootstrap

    settings = enter(message.environment)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # Python's own generator has a new seed since the fork; numpy's has not
    if not processes.die_with(settings.launcher_pid):
        return ExitCode.RETRYABLE
    if message.role == Role.WRITER:
        return writer.main(message.arguments, settings, channel)
    return bootstrap.main(message.arguments, settings, channel, OwnStacks(next(iter(stacks), None)))


def main(arguments: list[str]) -> int:
    """Exit code of the server."""
    processes.set_name("nvrx-forkserver")
    if not processes.die_with(int(arguments[0])):
        return ExitCode.RETRYABLE
    for number in LAUNCHERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHERS_SIGNALS)
    channel = take_channel()
    preload()
    serve(channel)
    return ExitCode.FINISHED


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
