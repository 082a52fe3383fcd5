"""Which TCP sockets belong to the process groups of a generation, and how to cut them.

Gloo's own abort does nothing: a blocked collective ends only at its timeout or when a socket of it ends. So every
descriptor that appears while a group is built is recorded by inode, and an interrupt ends exactly those. A socket of
the user's is never touched, since it did not appear inside a window. Lazy connections (TORCH_GLOO_LAZY_INIT=1) would
appear outside a window and are therefore refused by `session`.

Only the receiving side is shut down, and a duplicate keeps the connection itself until every rank has left (`release`).
Gloo notices the end of what it reads in its own thread and frees whoever waits. A *send* that finds its socket gone,
because it was shut down here or closed by a peer that is a moment ahead, frees nobody: gloo queues it behind the
error it has just told, and it waits for the group's timeout (docs/benchmarks/recovery.md).

Thread safety: `window` and `release` run in the main thread; `cut` may run at any time in another one, but for the time
of `release`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


def socket_descriptors() -> dict[int, int]:
    """Sockets of this process: inode -> descriptor."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found[int(target[8:-1])] = int(name)
    return found


class GroupSockets:
    """Sockets of the current generation's groups, and of the store client used to build them."""

    def __init__(self) -> None:
        self._recorded: set[int] = set()
        self._before: frozenset[int] | None = None
        self._held: dict[int, socket.socket] = {}
        """Inode -> duplicate of a socket that was cut."""

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """Record every socket that appears inside. Windows may nest; the outermost counts."""
        if self._before is not None:
            yield
            return
        self._before = frozenset(socket_descriptors())
        try:
            yield
        finally:
            self._recorded |= socket_descriptors().keys() - self._before
            self._before = None

    def cut(self) -> int:
        """End what arrives at all recorded sockets, and those of a window that is still open; how many are cut."""
        before = self._before
        for inode, descriptor in socket_descriptors().items():
            in_open_window = before is not None and inode not in before
            if inode not in self._held and (inode in self._recorded or in_open_window):
                duplicate = _end_receiving(descriptor)
                if duplicate is not None:
                    self._held[inode] = duplicate
        return len(self._held)

    def clear(self) -> None:
        """Forget the generation: its sockets are not cut any more. Peers do not notice yet."""
        self._recorded.clear()
        self._before = None

    def release(self) -> None:
        """Every rank has left the generation: close what was cut."""
        while self._held:
            self._held.popitem()[1].close()


def _end_receiving(descriptor: int) -> socket.socket | None:
    """A duplicate of the connection, which receives nothing more; None if it is none that could be cut."""
    try:
        duplicate = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM
    try:
        # Gloo's listener aborts the process when its accept fails: only connections are cut.
        if is_tcp and not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            duplicate.shutdown(socket.SHUT_RD)
            return duplicate
    except OSError:
        pass
    duplicate.close()
    return None
