"""A leader's links turned by a thread of their own, and what a follower's search needs, for tests of the two."""

from __future__ import annotations

import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvrx_sre.core.clock import SystemClock, to_ns
from nvrx_sre.core.limits import NodeLimits
from nvrx_sre.core.rng import seeded
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.handshake import Claims
from nvrx_sre.launcher.leader_link import LeaderLink, LinkConfig, listen
from nvrx_sre.launcher.leader_search import LeaderSearch, Where

TOKEN = b"a token that both sides know"
SETTINGS = {"--save-every": "50"}
LIMIT_S = 60
"""Longest wait for anything here."""


def link_config(*, port: int, lease_s: float = 10.0) -> LinkConfig:
    """A leader of three nodes in its epoch 4."""
    return LinkConfig(
        listener=listen("127.0.0.1", port),
        num_nodes=3,
        token=TOKEN,
        run="run",
        version="1",
        settings=SETTINGS,
        epoch=4,
        limits=NodeLimits(lease_s=lease_s),
    )


def port_of(config: LinkConfig) -> int:
    """Where the leader listens."""
    port: int = config.listener.getsockname()[1]
    return port


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@contextmanager
def silent_port() -> Iterator[int]:
    """A port on which nothing listens, and nobody else will: whoever connects is refused. A leader may listen there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


class LeaderLoop:
    """Turns a `LeaderLink`; its inputs arrive in `inputs`."""

    def __init__(self, *, lease_s: float = 10.0, port: int = 0) -> None:
        self.inputs: queue.Queue[c.Input] = queue.Queue()
        self._selector = selectors.DefaultSelector()
        config = link_config(port=port, lease_s=lease_s)
        self.link = LeaderLink(config, self._selector, SystemClock(), self.inputs.put)
        self.port = port_of(config)
        self._orders: queue.Queue[Callable[[], Any]] = queue.Queue()
        self._ours, self._theirs = socket.socketpair()
        self._selector.register(self._theirs, selectors.EVENT_READ, ("order", None))
        self._is_over = False
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    def order(self, action: Callable[[], Any]) -> None:
        """Have the loop's thread do something, and wait until it has."""
        done = threading.Event()
        self._orders.put(lambda: (action(), done.set()))
        self._ours.send(b"x")
        assert done.wait(LIMIT_S)

    def expect(self, kind: type[c.Input]) -> Any:
        """The next input, which must be of `kind`."""
        item = self.inputs.get(timeout=LIMIT_S)
        assert isinstance(item, kind), item
        return item

    def close(self, stop: c.Stop | None = None) -> None:
        """End the loop as a launcher's end does."""
        self._is_over = True
        self._ours.send(b"x")
        self._thread.join()
        self.link.close(stop)
        self._selector.close()
        self._ours.close()
        self._theirs.close()

    def _main(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(0.1):
                what, data = key.data
                if what == "link":
                    self.link.handle_ready(data)
                else:
                    self._theirs.recv(1)
                    self._orders.get_nowait()() if not self._orders.empty() else None
            self.link.drain()
            self.link.tend()
            self.link.flush()


class NoSignals:
    """A signal pipe on which nothing comes unless a test says so."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe2(os.O_NONBLOCK)

    def fileno(self) -> int:
        return self.read

    def received(self) -> list[int]:
        """Numbers written to it."""
        try:
            return list(os.read(self.read, 100))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Close both ends."""
        os.close(self.read)
        os.close(self.write)


def claims(**changes: Any) -> Claims:
    """A follower that fits."""
    wanted: dict[str, Any] = {"run": "run", "node_rank": 1, "node": "host1", "pid": 11, "start_ticks": 12}
    wanted |= {"version": "1", "mono_ns": SystemClock().monotonic_ns(), "settings": SETTINGS}
    return Claims(**(wanted | changes))


@contextmanager
def searching(
    directory: Path, host: str, port: int, token: bytes | None = TOKEN, on_said: Callable[[], None] = lambda: None
) -> Iterator[tuple[Any, list[str]]]:
    """(find(claims, limit_s), lines that a person would see); `on_said` is called at each."""
    path = directory / "token"
    if token is not None:
        path.write_bytes(token)
        path.chmod(0o600)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        on_said()

    clock, signals = SystemClock(), NoSignals()
    where = Where(host=host, port=port, token_file=path)
    search = LeaderSearch(where, clock, signals, seeded(1), say)  # type: ignore[arg-type]  # a pipe like it

    def find(wanted: Claims, limit_s: float = 0.0) -> Any:
        return search.find(lambda: wanted, clock.monotonic_ns() + to_ns(limit_s))

    find.signals = signals  # type: ignore[attr-defined]  # for the test that sends one
    try:
        yield find, said
    finally:
        signals.close()
