"""Commands to a child that has died since they were decided on: its node has forgotten it before anybody else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.events import messages as wire
from nvrx_sre.events.channel import create_pair
from nvrx_sre.events.schema import Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.config import RunConfig
from nvrx_sre.launcher.node import Node
from nvrx_sre.launcher.rundir import RunDirectory

DEAD, ALIVE = 1, 2


def go() -> wire.Go:
    """The word to form the second generation."""
    return wire.Go(
        generation=2,
        world_size=2,
        store_host="127.0.0.1",
        store_port=1,
        candidates=[],
        require_restore=False,
        passes={},
        hot_every=1,
    )


def test_go_for_a_rank_that_has_died_reaches_its_peer(tmp_path: Path) -> None:
    """It died after the last rank was ready, in the same look: its death is told right after."""
    (tmp_path / "logs").mkdir()
    config = RunConfig(run="r", run_dir=tmp_path, command=("x.py",), nproc=2, min_world_size=2)
    node = Node(config, RunDirectory(tmp_path), SystemClock(), lambda item: None, 1)
    pairs = {number: create_pair() for number in (DEAD, ALIVE)}
    for rank, (number, (ours, _)) in enumerate(pairs.items()):
        child: Any = SimpleNamespace(
            number=number, role=Role.WORKER, channel=ours, log=tmp_path / "x.log", pid=0, close=ours.close
        )
        node.children[number] = child
        node.apply(
            c.AssignRank(
                child=number, rank=rank, local_rank=rank, world_size=2, generation=2, node=0, local_world_size=2
            )
        )
    node.forget(DEAD)
    for number in (DEAD, ALIVE):
        node.apply(c.Tell(child=number, message=go()))
    theirs = pairs[ALIVE][1]
    heard = [theirs.receive() for _ in range(2)]
    assert [type(item[0]) for item in heard if item is not None] == [wire.Assign, wire.Go]
    node.close()
    for ends in pairs.values():
        for end in ends:
            end.close()
