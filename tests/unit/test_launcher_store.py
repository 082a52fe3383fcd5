"""The c10d store of each generation: empty, on an address of its own, and made before it is needed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from nvrx_sre.launcher.store import StoreHost


@pytest.fixture
def host() -> Iterator[StoreHost]:
    """Nothing is served yet."""
    made = StoreHost()
    yield made
    made.close()


def client(port: int) -> TCPStore:
    """What a rank has of the store."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))


@pytest.mark.parametrize("is_ready", [True, False])
def test_each_generation_finds_an_empty_store(host: StoreHost, is_ready: bool) -> None:
    """Whether the next one was there in advance or not, it is another one, without the keys of the last."""
    first = host.open("127.0.0.1")
    if is_ready:
        host.make_ready()
        host.make_ready()
    client(first).set("key", "old")
    second = host.open("127.0.0.1")
    assert second != first
    assert not client(second).check(["key"])


def test_a_store_on_another_address_is_not_the_one_in_advance(host: StoreHost) -> None:
    """Ranks of several nodes need one that they reach."""
    host.open("127.0.0.2")
    host.make_ready()
    port = host.open("127.0.0.1")
    client(port).set("key", "value")
    assert client(port).get("key") == b"value"


def test_the_store_of_the_generation_before_ends_when_the_next_is_open(host: StoreHost) -> None:
    """Who comes too late finds nobody, rather than keys that nobody reads."""
    first = host.open("127.0.0.1")
    host.open("127.0.0.1")
    host.make_ready()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", first))
