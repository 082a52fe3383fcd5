"""The c10d store of each generation, hosted here so that no rank's death is special.

Every generation gets a server of its own on a socket that the launcher bound itself: on loopback, or on the address by
which other nodes reach it. The old one is dropped, and its keys with it. The next one is there before it is needed,
which saves 1.5 ms between the ranks' leaving and 'go'. Loads torch on first use, after the workers were started.
"""

from __future__ import annotations

import contextlib
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
    """Hosts one TCPStore at a time, and has another one ready."""

    def __init__(self) -> None:
        self._old: TCPStore | None = None
        self._store: TCPStore | None = None
        self._host = ""
        self._ready: TCPStore | None = None
        """An empty one on `_host`."""
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
        store = (self._ready if host == self._host else None) or _serve(host)
        if self._store is None:
            # Torch's 180,000 objects stay: looking through them would take the launcher's loop 50 ms now and then.
            gc.freeze()
        self._old, self._store, self._ready, self._host = self._store, store, None, host
        return int(store.port)

    def make_ready(self) -> None:
        """End the store of the generation before, and have the next one on the same address in advance.

        Blocks for 1.5 ms. One that cannot be made now is made when it is needed.
        """
        self._old = None
        with contextlib.suppress(OSError, RuntimeError):
            self._ready = self._ready or _serve(self._host)

    def close(self) -> None:
        """Stop serving."""
        self._old = self._store = self._ready = None


def _serve(host: str) -> TCPStore:
    """An empty store on a free port of `host`. Raises `OSError`."""
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
