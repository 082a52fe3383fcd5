"""Leader and follower over a real connection: who is let in, what arrives, when the other side counts as lost."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import UserError
from nvrx_sre.events import messages as wire
from nvrx_sre.events import packets
from nvrx_sre.events.schema import Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher import link_codec
from nvrx_sre.launcher.leader_link import listen
from nvrx_sre.launcher.leader_search import NotFound, Signalled
from nvrx_sre.launcher.link import MAX_FRAME_BYTES, Link
from nvrx_sre.launcher.link_codec import Beat, Headers, Packet
from nvrx_sre.launcher.refusal import turn_away
from tests.integration.leader_loop import (
    LIMIT_S,
    TOKEN,
    LeaderLoop,
    claims,
    link_config,
    port_of,
    searching,
    silent_port,
)


@pytest.fixture
def leader() -> Iterator[LeaderLoop]:
    """A leader that listens for nodes 1 and 2."""
    loop = LeaderLoop()
    yield loop
    loop.close()


@pytest.fixture
def member(leader: LeaderLoop, tmp_path: Path) -> Iterator[Link]:
    """The link of node 1, which has joined."""
    with searching(tmp_path, "localhost", leader.port) as (find, _):
        found = find(claims())
    assert found.answer.epoch == 4
    assert leader.expect(c.NodeJoined) == c.NodeJoined(node=1, name="host1")
    yield found.link
    found.link.close()


def say(link: Link, *items: link_codec.Item) -> None:
    """Send from the follower's side."""
    for item in items:
        link.send(link_codec.encode(item))
    link.flush()


def hear(link: Link, kind: type[Any]) -> Any:
    """The next item of `kind` that the follower gets."""
    while True:
        assert select.select([link], [], [], LIMIT_S)[0], "nothing came"
        payloads, ended = link.receive()
        for payload in payloads:
            item = link_codec.decode(payload)
            if isinstance(item, kind):
                return item
        assert not ended, ended


def hear_one(link: Link) -> link_codec.Item:
    """The next item that is no beat."""
    while True:
        payload, ended = link.receive_one()
        if payload is not None:
            item = link_codec.decode(payload)
            if not isinstance(item, Beat):
                return item
        else:
            assert not ended, ended
            assert select.select([link], [], [], LIMIT_S)[0], "nothing came"


def spawn(leader: LeaderLoop, child: int) -> None:
    """The leader asks node 1 for a child."""
    command = c.Spawn(child=child, role=Role.WORKER, rank=2, attempt=0, node=1)
    leader.order(lambda: leader.link.apply(1, command))


def test_commands_and_facts_pass_in_order(leader: LeaderLoop, member: Link) -> None:
    """What the leader says arrives; what the node says of its children does, stamps on the leader's clock."""
    spawn(leader, 5)
    assert hear(member, c.Spawn).child == 5
    sealed = wire.Sealed(generation=1, step=2, slot=0, mono_ns=1)
    say(
        member,
        c.Spawned(child=5, pid=77, start_ticks=1),
        Packet(child=5, packet=packets.encode(sealed)),
        c.Exited(child=5, exit_code=3, signal=None, exited_ns=10**30 % 2**62, oom=False),
    )
    assert leader.expect(c.Spawned).pid == 77
    message = leader.expect(c.FromChild).message
    assert (message.step, message.slot) == (2, 0)
    assert leader.expect(c.Exited).exit_code == 3


def test_what_a_node_says_of_a_strangers_child_is_dropped(leader: LeaderLoop, member: Link) -> None:
    """A node speaks for its own children alone, and for each only until its end."""
    spawn(leader, 5)
    gone = c.Exited(child=5, exit_code=0, signal=None, exited_ns=1, oom=False)
    say(member, c.Spawned(child=6, pid=1, start_ticks=1), gone, gone, c.SignalReceived(signal=15, by_person=False))
    assert leader.expect(c.Exited).child == 5
    assert leader.expect(c.SignalReceived).signal == 15


def test_what_comes_right_behind_the_handshake_is_not_lost(leader: LeaderLoop, tmp_path: Path) -> None:
    """The leader's first commands may arrive in one piece with its answer: they carry tags, the answer has none."""
    put, commands = leader.inputs.put, [c.PublishSealed(step=step) for step in range(50)]

    def put_and_command(item: c.Input) -> None:
        put(item)
        for command in commands:
            leader.link.apply(1, command)
        leader.link.flush()

    leader.order(lambda: setattr(leader.link, "_put", put_and_command))
    with searching(tmp_path, "127.0.0.1", leader.port) as (find, _):
        link = find(claims()).link
    assert [hear_one(link) for _ in commands] == commands
    link.close()


def test_slots_of_a_rank_are_known_before_it_is_ready(leader: LeaderLoop, member: Link) -> None:
    """Headers come first on the same connection; they are void once the slots are dropped."""
    spawn(leader, 5)
    ready = wire.Ready(generation=2, fit=True, reason="", mono_ns=1)
    say(member, Headers(rank=2, headers=(None, None)), Packet(child=5, packet=packets.encode(ready)))
    leader.expect(c.FromChild)
    assert leader.link.headers() == {2: (None, None)}
    leader.order(lambda: leader.link.apply(1, c.DropSlots(num_ranks=1, node=1)))
    assert leader.link.headers() == {}


def test_the_end_of_the_connection_is_the_nodes_end(leader: LeaderLoop, member: Link) -> None:
    """Node first, then every child that it was asked for."""
    spawn(leader, 5)
    spawn(leader, 6)
    hear(member, c.Spawn)
    member.close()
    lost = leader.expect(c.NodeLost)
    assert (lost.node, lost.reason) == (1, "the connection was closed")
    assert [leader.expect(c.Exited).child for _ in range(2)] == [5, 6]


def test_a_node_that_is_not_there_starts_nothing(leader: LeaderLoop) -> None:
    """The child's end is told at once, so nobody waits for it."""
    spawn(leader, 5)
    assert leader.expect(c.Exited).last_line == "its node is lost"


def test_silence_beyond_the_lease_is_the_nodes_end(tmp_path: Path) -> None:
    """The connection is open and says nothing, beats unanswered: as lost as one that is closed."""
    leader = LeaderLoop(lease_s=2)
    try:
        with searching(tmp_path, "127.0.0.1", leader.port) as (find, _):
            link = find(claims()).link
        leader.expect(c.NodeJoined)
        assert leader.expect(c.NodeLost).reason == "silent for 2 s"
        link.close()
    finally:
        leader.close()


def test_beats_are_answered_and_keep_the_node(leader: LeaderLoop, member: Link) -> None:
    """The leader beats by itself; an echo tells it what time it is on the node."""
    beat = hear(member, Beat)
    say(member, Beat(sent_ns=beat.sent_ns, echo_ns=beat.sent_ns), c.SignalReceived(signal=2, by_person=True))
    assert leader.expect(c.SignalReceived).by_person


def test_the_end_reaches_every_node(tmp_path: Path) -> None:
    """Exit code and reason are the leader's; it is told before the connection is closed."""
    leader = LeaderLoop()
    with searching(tmp_path, "127.0.0.1", leader.port) as (find, _):
        link = find(claims()).link
    leader.expect(c.NodeJoined)
    stop = c.Stop(exit_code=93, reason="halted", result={})
    leader.close(stop)
    assert hear(link, c.Stop) == stop
    link.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "2"}, "version is 1 on the leader and 2 here"),
        ({"run": "other"}, "--name is run on the leader and other here"),
        ({"settings": {"--save-every": "20"}}, "--save-every is 50 on the leader and 20 here"),
        ({"settings": {}}, "--save-every is 50 on the leader and not given here"),
        ({"node_rank": 3}, "--node-rank is 3: use 1 to 2 beside the leader's 0"),
        ({"node_rank": 0}, "--node-rank is 0: use 1 to 2 beside the leader's 0"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_by_name(
    leader: LeaderLoop, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """One line on both sides that says what differs, each from where it is read; nothing is tried again."""
    with searching(tmp_path, "127.0.0.1", leader.port) as (find, said), pytest.raises(UserError) as refused:
        find(claims(**changes), LIMIT_S)
    assert str(refused.value) == f"leader 127.0.0.1:{leader.port} refuses this node: {message}"
    assert said == []
    seen_there = message.replace(" here", " there").replace(" on the leader", " here")
    assert leader.expect(c.NodeRefused) == c.NodeRefused(node=changes.get("node_rank", 1), reason=seen_there)


def test_a_wrong_token_is_refused(leader: LeaderLoop, tmp_path: Path) -> None:
    """And the leader lets in nobody for it."""
    wrong = searching(tmp_path, "127.0.0.1", leader.port, b"another token altogether")
    with wrong as (find, _), pytest.raises(UserError, match="cannot be joined: its token is another one"):
        find(claims(), LIMIT_S)
    assert leader.inputs.empty()


def test_a_second_launcher_of_one_node_rank_is_refused(leader: LeaderLoop, member: Link, tmp_path: Path) -> None:
    """The first one is there and stays; the message names it."""
    second = searching(tmp_path, "127.0.0.1", leader.port)
    with second as (find, _), pytest.raises(UserError, match="node rank 1 is taken by process 11 of host1"):
        find(claims(node="host2", pid=22), LIMIT_S)
    assert leader.expect(c.NodeRefused).node == 1
    say(member, c.SignalReceived(signal=15, by_person=False))
    leader.expect(c.SignalReceived)


def test_the_same_launcher_connects_anew(leader: LeaderLoop, member: Link, tmp_path: Path) -> None:
    """Its old connection is gone without the leader having noticed: lost, and back."""
    with searching(tmp_path, "127.0.0.1", leader.port) as (find, _):
        again = find(claims()).link
    assert leader.expect(c.NodeLost).reason == "its launcher connected anew"
    leader.expect(c.NodeJoined)
    again.close()


def test_reasons_are_told_apart_and_each_is_said_once(tmp_path: Path) -> None:
    """A name that is not known, a port where nothing listens, a host that does not answer."""
    with silent_port() as port, searching(tmp_path, "127.0.0.1", port) as (find, said):
        with pytest.raises(NotFound, match=r"no leader at 127\.0\.0\.1:\d+ within \d s \(\d+ tries\): refused"):
            find(claims(), 0.5)
        assert said == [f"leader 127.0.0.1:{port}: refused: nothing listens at 127.0.0.1; trying again"]
    unknown = searching(tmp_path, "no-such-host.invalid", port)
    with unknown as (find, said), pytest.raises(NotFound, match=r"the name no-such-host\.invalid is not known"):
        find(claims())


def test_something_else_that_listens_there_is_no_leader(tmp_path: Path) -> None:
    """It accepts and closes, as a proxy without a backend does: tried again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def hang_up() -> None:
            connection, _ = server.accept()
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        closed = r"(closed|reset by peer) before it had answered"
        with searching(tmp_path, "127.0.0.1", port) as (find, _), pytest.raises(NotFound, match=closed):
            find(claims())
        thread.join()


def test_a_leader_that_starts_late_is_found(tmp_path: Path) -> None:
    """And a token that is not there before the leader has made it."""
    started: list[LeaderLoop] = []

    def start() -> None:
        if started:
            return
        token = tmp_path / "token"
        token.write_bytes(TOKEN)
        token.chmod(0o600)
        started.append(LeaderLoop(port=port))

    with silent_port() as port, searching(tmp_path, "127.0.0.1", port, None, start) as (find, said):
        found = find(claims(), LIMIT_S)
    assert "is not there yet" in said[0]
    found.link.close()
    started[0].close()


def test_a_signal_ends_the_search(tmp_path: Path) -> None:
    """At once, whatever it waits for."""
    with searching(tmp_path, "no-such-host.invalid", 1) as (find, _):
        os.write(find.signals.write, bytes([15]))
        with pytest.raises(Signalled) as ended:
            find(claims(), LIMIT_S)
    assert ended.value.number == 15


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """Before anything is sent."""
    with searching(tmp_path, "127.0.0.1", 1) as (find, _):
        (tmp_path / "token").chmod(0o644)
        with pytest.raises(UserError, match="can be read by others: chmod 600"):
            find(claims())


def test_a_frame_from_a_stranger_ends_the_connection(leader: LeaderLoop, member: Link) -> None:
    """Bytes written into the connection without the key are not obeyed: the node is lost instead."""
    spawn(leader, 5)
    exited = link_codec.encode(c.Exited(child=5, exit_code=0, signal=None, exited_ns=1, oom=False))
    member.socket.setblocking(True)
    member.socket.sendall(len(exited).to_bytes(4, "little") + bytes(16) + exited)
    assert leader.expect(c.NodeLost).reason == "a frame that is not the peer's"
    assert leader.expect(c.Exited).exit_code is None


def test_a_frame_that_is_too_long_ends_the_connection(leader: LeaderLoop, member: Link) -> None:
    """Nobody makes the leader keep a gigabyte."""
    member.socket.setblocking(True)
    member.socket.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little") + bytes(16))
    assert leader.expect(c.NodeLost).reason == f"a frame of {MAX_FRAME_BYTES + 1} bytes"
    with pytest.raises(ValueError, match="longer than"):
        member.send(bytes(MAX_FRAME_BYTES + 1))


def test_many_connections_that_say_nothing_keep_nobody_out(leader: LeaderLoop, tmp_path: Path) -> None:
    """The oldest of them is closed for a new one."""
    idle = [socket.create_connection(("127.0.0.1", leader.port)) for _ in range(70)]
    with searching(tmp_path, "127.0.0.1", leader.port) as (find, _):
        find(claims(), LIMIT_S).link.close()
    leader.expect(c.NodeJoined)
    for sock in idle:
        sock.close()


def test_a_leader_that_will_not_run_tells_the_nodes_why(tmp_path: Path) -> None:
    """A halted run: its other nodes end with the leader's code, not after looking for it in vain."""
    stop = c.Stop(exit_code=93, reason="run r was stopped", result={})
    config = link_config(port=0)
    told, port = [], port_of(config)
    thread = threading.Thread(target=lambda: told.append(turn_away(config, SystemClock(), stop)))
    thread.start()
    links = []
    for node in (1, 2):
        with searching(tmp_path, "127.0.0.1", port) as (find, _):
            links.append(find(claims(node_rank=node, pid=node), LIMIT_S).link)
    thread.join()
    assert told == [2]
    for link in links:
        assert hear(link, c.Stop) == stop
        link.close()


def test_a_port_that_is_taken_is_told_at_once() -> None:
    """Which one, and why."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            UserError, match=f"cannot listen for other nodes on 127.0.0.1:{port}: address already in use"
        ):
            listen("127.0.0.1", port)
