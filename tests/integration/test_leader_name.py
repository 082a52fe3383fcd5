"""The leader's name: not known at first, known before anything listens there, and at last the leader's."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from nvrx_sre.launcher import leader_search
from tests.integration.leader_loop import LIMIT_S, LeaderLoop, claims, searching, silent_port

NAME = "run-0.workers.test"
UNKNOWN_TRIES, REFUSED_TRIES = 3, 2


class LateName:
    """Stands for a cluster's name service: no record at first, then an address, at which a leader is started last."""

    def __init__(self, port: int) -> None:
        self.num_asked = 0
        self.leader: LeaderLoop | None = None
        self._port = port

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        """As `socket.getaddrinfo`."""
        assert (host, port) == (NAME, self._port)
        self.num_asked += 1
        if self.num_asked <= UNKNOWN_TRIES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if self.num_asked > UNKNOWN_TRIES + REFUSED_TRIES:
            self.leader = LeaderLoop(port=self._port)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", self._port))]


def test_c77_a_name_that_comes_late_costs_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launcher looks on, asking for the name anew each time; why it waits is said once for each reason."""
    with silent_port() as port, searching(tmp_path, NAME, port) as (find, said):
        names = LateName(port)
        monkeypatch.setattr(leader_search.socket, "getaddrinfo", names.getaddrinfo)
        found = find(claims(), LIMIT_S)
    assert names.leader is not None and names.num_asked == UNKNOWN_TRIES + REFUSED_TRIES + 1
    assert said == [
        f"leader {NAME}:{port}: the name {NAME} is not known (name or service not known); trying again",
        f"leader {NAME}:{port}: refused: nothing listens at 127.0.0.1; trying again",
    ]
    found.link.close()
    names.leader.close()
