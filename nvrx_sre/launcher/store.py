"""The c10d store of each generation, hosted here so that no rank's death is special.

Every generation gets a server of its own on a socket that the launcher bound itself: on loopback, or on the address by
which other nodes reach it. The old one is dropped, and its keys with it. Loads torch on first use, after the workers
were started.
"""

from __future__ import annotations

import gc
import importlib
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STORE_TIMEOUT_S = 300


class StoreHost:
    """Hosts one TCPStore at a time."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._loading: threading.Thread | None = None

    def load(self) -> None:
        """Begin to load torch on a thread: a launcher that others hear beats of must not be silent for seconds."""
        self._loading = threading.Thread(target=importlib.import_module, args=("torch.distributed",), daemon=True)
        self._loading.start()

    def open(self, host: str) -> int:
        """Replace the store by an empty one on the address `host`; its port. Raises `OSError`."""
        if self._loading is not None:
            self._loading.join()
            self._loading = None
        from torch.distributed import TCPStore

        if self._store is None:
            # Torch's 180,000 objects stay: looking through them would take the launcher's loop 50 ms now and then.
            gc.freeze()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=1024)
        port: int = listener.getsockname()[1]
        self._store = TCPStore(
            host,
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
