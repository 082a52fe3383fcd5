"""Only sockets of a group are cut: those that appeared inside a window, and no listener; and nobody's send fails."""

from __future__ import annotations

import socket

import pytest

from nvrx_sre.restart.sockets import GroupSockets


def connected() -> tuple[socket.socket, socket.socket, socket.socket]:
    """(listener, client, server side) over loopback."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return listener, client, server


def test_only_connections_of_the_window_are_cut() -> None:
    """A connection made before the window lives on, one made inside ends, its listener does not."""
    own = connected()
    groups = GroupSockets()
    with groups.window():
        inside = connected()
    later = connected()
    try:
        assert groups.cut() == 2
        assert inside[2].recv(1) == b""
        own[1].sendall(b"x")
        later[1].sendall(b"y")
        assert (own[2].recv(1), later[2].recv(1)) == (b"x", b"y")
        socket.create_connection(inside[0].getsockname()).close()
    finally:
        groups.release()
        for triple in (own, inside, later):
            for item in triple:
                item.close()


def test_an_open_window_is_cut_too() -> None:
    """A rank blocked while its group is being formed is freed as well; after `clear` nothing is cut."""
    groups = GroupSockets()
    with groups.window():
        inside = connected()
        assert groups.cut() == 2
    groups.clear()
    groups.release()
    assert groups.cut() == 0
    for item in inside:
        item.close()


def test_a_cut_fails_no_send_before_every_rank_has_left() -> None:
    """Gloo leaves a send that fails waiting for ever: not this rank's, nor that of a peer after this one closed."""
    groups = GroupSockets()
    listener = socket.create_server(("127.0.0.1", 0))
    with groups.window():
        own = socket.create_connection(listener.getsockname())
    peer, _ = listener.accept()
    assert groups.cut() == 1
    assert own.recv(1) == b""
    own.sendall(b"x")
    own.close()
    groups.clear()
    for _ in range(3):
        peer.sendall(b"y")
    assert peer.recv(1) == b"x"
    peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        peer.recv(1)
    groups.release()
    peer.setblocking(True)
    with pytest.raises(ConnectionResetError):
        peer.recv(1)
    for item in (listener, peer):
        item.close()
