"""What one recovery costs the control plane, against the number of ranks.

Model: a small job in a simulated world, one rank killed at a step, a warm standby on its host; what is counted lies
between the fault's detection and the first step above H. Packets and bytes are those between the leader's launcher and
the other hosts, both ways, inputs and records those of the leader. A seed decides by chance how long a recovery takes,
and whether a step is done again; so each size is the mean of several. The growth law is the slope of a line through the
logarithms of the larger half: 1 is linear, 0 constant. Pure counting: no time is measured.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nvrx_sre.core.errors import InternalError
from nvrx_sre.events.schema import FaultDetected, ProgressResumed, Record, RestartDecided
from nvrx_sre.testing.simulation import judge
from nvrx_sre.testing.world import World
from nvrx_sre.testing.world_plan import SimFault, SimKind, WorldConfig

RANKS_A_HOST = 8
"""As on the usual machine with eight devices."""
FIXED_HOSTS = 4
SIZES = tuple(2**power for power in range(1, 15))
"""Ranks of the table: 2 to 16,384."""
MANY_SEEDS = 8
"""Recoveries whose mean is a size's cost, up to `NUM_RANKS_OF_MANY` ranks, where they take no time; less of more, and
one from 4,096 on."""
NUM_RANKS_OF_MANY = 512
_KILL_AT_STEP = 4


@dataclass(frozen=True, kw_only=True)
class RecoveryCost:
    """Counts of one recovery, means of several rounded."""

    num_ranks: int
    num_hosts: int
    num_packets: int
    num_bytes: int
    num_inputs: int
    num_records: int
    num_decisions: int

    @property
    def num_other_hosts(self) -> int:
        """Hosts that packets go to: all but the leader's own."""
        return self.num_hosts - 1


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One size: with `RANKS_A_HOST` ranks on a host, and packets with the same ranks on `FIXED_HOSTS` hosts."""

    cost: RecoveryCost
    num_packets_fixed_hosts: int


class _CountingWorld(World):
    """Notes what had been counted when the fault was detected and when progress was back."""

    def __init__(self, seed: int, config: WorldConfig, faults: Sequence[SimFault]) -> None:
        super().__init__(seed, config, faults)
        self.marks: list[tuple[int, int, int, int]] = []

    def append(self, record: Record) -> None:
        super().append(record)
        if isinstance(record.event, FaultDetected | ProgressResumed):
            newest = self.newest
            newest.traffic.measures_bytes = isinstance(record.event, FaultDetected)
            counts = (newest.links.num_packets, newest.traffic.num_bytes, newest.num_inputs, len(self.records))
            self.marks.append(counts)


def measure_recovery(num_ranks: int, num_hosts: int) -> RecoveryCost:
    """Kill the last rank of a job once, in several worlds; raises `InternalError` if anything about a run was wrong."""
    num_seeds = max(1, MANY_SEEDS * NUM_RANKS_OF_MANY // max(num_ranks, NUM_RANKS_OF_MANY))
    found = []
    for seed in range(1, num_seeds + 1):
        with _nothing_collected():
            found.append(_recovery(seed, num_ranks, num_hosts))
    packets, num_bytes, inputs, records, decisions = (
        round(statistics.mean(counts)) for counts in zip(*found, strict=True)
    )
    return RecoveryCost(
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        num_packets=packets,
        num_bytes=num_bytes,
        num_inputs=inputs,
        num_records=records,
        num_decisions=decisions,
    )


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """A world lives until it is counted: to look for its garbage meanwhile was half of the time with 16,384 ranks.

    Costs memory, 0.9 GB with as many.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()


def _recovery(seed: int, num_ranks: int, num_hosts: int) -> tuple[int, int, int, int, int]:
    config = WorldConfig(
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        num_steps=_KILL_AT_STEP + 2,
        num_standbys=1,
        save_every=1000,
        drop_rate=0.0,
    )
    world = _CountingWorld(seed, config, [SimFault(kind=SimKind.SIGKILL, rank=num_ranks - 1, step=_KILL_AT_STEP)])
    exit_code = world.run_job()
    problems = world.violations + judge(world)
    if exit_code or problems or len(world.marks) != 2:
        raise InternalError(f"the simulated job of {num_ranks} ranks ended with {exit_code}: {problems[:3]}")
    packets, num_bytes, inputs, records = (after - before for before, after in zip(*world.marks, strict=True))
    return packets, num_bytes, inputs, records, sum(isinstance(item.event, RestartDecided) for item in world.records)


def measure_row(num_ranks: int) -> ScalingRow:
    """Both costs of a size."""
    cost = measure_recovery(num_ranks, max(1, num_ranks // RANKS_A_HOST))
    fixed = measure_recovery(num_ranks, min(FIXED_HOSTS, num_ranks))
    return ScalingRow(cost=cost, num_packets_fixed_hosts=fixed.num_packets)


@dataclass(frozen=True, kw_only=True)
class Laws:
    """Exponents of growth, NaN with too few sizes."""

    packets_by_hosts: float
    bytes_by_hosts: float
    packets_by_ranks_at_fixed_hosts: float
    inputs_by_ranks: float


def laws_of(rows: Sequence[ScalingRow]) -> Laws:
    """How the costs grow. Against the hosts beside the leader's: at two hosts one of them costs nothing."""
    costs = [row.cost for row in rows]
    return Laws(
        packets_by_hosts=growth([(cost.num_other_hosts, cost.num_packets) for cost in costs]),
        bytes_by_hosts=growth([(cost.num_other_hosts, cost.num_bytes) for cost in costs]),
        packets_by_ranks_at_fixed_hosts=growth([(row.cost.num_ranks, row.num_packets_fixed_hosts) for row in rows]),
        inputs_by_ranks=growth([(cost.num_ranks, cost.num_inputs) for cost in costs]),
    )


def growth(points: Sequence[tuple[int, int]]) -> float:
    """Exponent of y = a * x^exponent through the larger half of (x, y); NaN with less than two points above zero."""
    logs = [(math.log(x), math.log(y)) for x, y in sorted(points) if x > 0 and y > 0]
    logs = logs[len(logs) // 2 :] if len(logs) > 3 else logs
    if len(logs) < 2:
        return math.nan
    return statistics.linear_regression(*zip(*logs, strict=True)).slope
