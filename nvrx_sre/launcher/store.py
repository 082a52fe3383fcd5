"""The c10d store of each generation, hosted here so that no rank's death is special.

Every generation gets a server of its own on a loopback socket that the launcher bound itself; the old one is
dropped, and its keys with it. Loads torch on first use, after the workers were started.
"""

from __future__ import annotations

import gc
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT_S = 300


class StoreHost:
    """Hosts one TCPStore at a time."""

    def __init__(self, host: str = LOOPBACK) -> None:
        self.host = host
        self._store: TCPStore | None = None

    def open(self) -> int:
        """Replace the store by an empty one; its port."""
        from torch.distributed import TCPStore

        if self._store is None:
            # Torch's 180,000 objects stay: looking through them would take the launcher's loop 50 ms now and then.
            gc.freeze()
        listener = socket.create_server((self.host, 0), backlog=1024)
        port: int = listener.getsockname()[1]
        self._store = TCPStore(
            self.host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )
        return port

    def close(self) -> None:
        """Stop serving."""
        self._store = None
