"""Which TCP sockets belong to the process groups of a generation, and how to cut them.

Gloo's own abort does nothing: a blocked collective ends only at its timeout or when a socket of it is shut
down. So every descriptor that appears while a group is built is recorded by inode, and an interrupt shuts
exactly those down. `shutdown`, never `close`: gloo keeps the descriptor. A socket of the user's is never
touched, since it did not appear inside a window. Lazy connections (TORCH_GLOO_LAZY_INIT=1) would appear
outside a window and are therefore refused by `session`.

Thread safety: `window` runs in the main thread; `cut` may run at any time in another one.
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
        """Shut down all recorded sockets, and those of a window that is still open; how many were cut."""
        before = self._before
        num_cut = 0
        for inode, descriptor in socket_descriptors().items():
            in_open_window = before is not None and inode not in before
            if (inode in self._recorded or in_open_window) and _shut_down(descriptor):
                num_cut += 1
        return num_cut

    def clear(self) -> None:
        """Forget everything: the generation is over."""
        self._recorded.clear()
        self._before = None


def _shut_down(descriptor: int) -> bool:
    try:
        duplicate = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False
    with duplicate:
        is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM
        try:
            # Gloo's listener aborts the process when its accept fails: only connections are cut.
            if not is_tcp or duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        return True
