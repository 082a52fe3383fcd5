"""When a node tells its standbys to rehearse: once each, as soon as its slots hold a state of the present world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.events.channel import Channel, create_pair
from nvrx_sre.events.schema import Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.config import RunConfig
from nvrx_sre.launcher.node import Node
from nvrx_sre.launcher.rundir import RunDirectory

STANDBY = 7


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[tuple[Node, Channel]]:
    """A node with one standby, and that standby's end of its channel."""
    config = RunConfig(run="r", run_dir=tmp_path, command=("x.py",), nproc=1, min_world_size=1)
    (tmp_path / "logs").mkdir()
    node = Node(config, RunDirectory(tmp_path), SystemClock(), lambda item: None, 1)
    ours, theirs = create_pair()
    child: Any = SimpleNamespace(
        number=STANDBY, role=Role.STANDBY, channel=ours, log=tmp_path / "x.log", pid=0, close=ours.close
    )
    node.children[STANDBY] = child
    yield node, theirs
    node.close()
    theirs.close()


def heard(channel: Channel) -> list[str]:
    """Names of the messages that have come, the descriptors beside them dropped."""
    channel.socket.setblocking(False)
    names: list[str] = []
    try:
        while (received := channel.receive()) is not None:
            names.append(type(received[0]).__name__)
    except BlockingIOError:
        return names
    return names


def grant(node: Node) -> None:
    """Slots for rank 0."""
    node.apply(c.GrantSlots(child=1, rank=0, data_bytes=4096, blob_bytes=4096))


def test_a_standby_rehearses_when_a_step_is_sealed(standby: tuple[Node, Channel]) -> None:
    """Not before, and not at every step."""
    node, channel = standby
    grant(node)
    node.apply(c.PublishSealed(step=-1))
    assert heard(channel) == ["MapSlots"]
    node.apply(c.PublishSealed(step=1))
    node.apply(c.PublishSealed(step=2))
    assert heard(channel) == ["Rehearse"]


def test_another_world_is_rehearsed_anew(standby: tuple[Node, Channel]) -> None:
    """Its shapes are others; a state that is on disk alone can be read by no standby."""
    node, channel = standby
    grant(node)
    node.apply(c.PublishSealed(step=1))
    node.apply(c.DropSlots(node=0, num_ranks=1))
    node.apply(c.PublishSealed(step=1))
    assert heard(channel) == ["MapSlots", "Rehearse", "SlotsDropped"]
    grant(node)
    node.apply(c.PublishSealed(step=2))
    assert heard(channel) == ["MapSlots", "Rehearse"]


def test_a_rank_rehearses_nothing(standby: tuple[Node, Channel]) -> None:
    """What was a standby has plans of its own."""
    node, channel = standby
    node.apply(
        c.AssignRank(child=STANDBY, rank=0, local_rank=0, world_size=1, generation=2, node=0, local_world_size=1)
    )
    grant(node)
    node.apply(c.PublishSealed(step=1))
    assert "Rehearse" not in heard(channel)
