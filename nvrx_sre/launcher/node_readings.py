"""What a follower knows of the ranks on its node, for the metrics: when each was heard, how far it is, how late.

How late a rank comes is the leader's to say, which hears of all ranks; what its GPU takes, the intake's. Pure. Not
thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nvrx_sre.events import messages as wire
from nvrx_sre.telemetry.node_board import RankReading


@dataclass(kw_only=True)
class _Heard:
    at_ns: int
    step: int = 0


class NodeReadings:
    """Newest readings of the children of one node. Times are wall ns."""

    def __init__(self, rank_of: Callable[[int], int | None]) -> None:
        self._rank_of = rank_of
        self._heard: dict[int, _Heard] = {}
        self._late_s: dict[int, float] = {}

    def hear(self, child: int, message: wire.Message, now_ns: int) -> None:
        """A child has said something."""
        heard = self._heard.setdefault(child, _Heard(at_ns=now_ns))
        heard.at_ns = now_ns
        if isinstance(message, wire.Step | wire.Alive):
            heard.step = message.step

    def forget(self, child: int) -> None:
        """The child is dead."""
        self._heard.pop(child, None)

    def note_lateness(self, ranks: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        """How late the leader says that ranks come (seconds)."""
        self._late_s = dict(zip(ranks, seconds, strict=True))

    def of_ranks(
        self, pids: Mapping[int, int], gpu_s: Callable[[int], float | None] = lambda _: None
    ) -> dict[int, RankReading]:
        """Reading of each rank whose process lives; `pids` by child, `gpu_s` by rank."""
        readings = {}
        for child, heard in self._heard.items():
            rank = self._rank_of(child)
            if rank is not None and child in pids:
                readings[rank] = RankReading(
                    pid=pids[child],
                    heard_ns=heard.at_ns,
                    step=heard.step,
                    lateness_s=self._late_s.get(rank, 0.0),
                    gpu_s=gpu_s(rank),
                )
        return readings
