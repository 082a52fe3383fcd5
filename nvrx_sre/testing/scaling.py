"""What one recovery costs the control plane, against the number of ranks.

Model: a small job in a simulated world, one rank killed at a step; what is counted lies between the fault's detection
and the first step above H. Packets are those between the leader's launcher and the other hosts, inputs and records
those of the leader. The growth law is the slope of a line through the logarithms of the larger half: 1 is linear, 0
constant. Pure counting: no time is measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
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
_KILL_AT_STEP = 4


@dataclass(frozen=True, kw_only=True)
class RecoveryCost:
    """Counts of one recovery."""

    num_ranks: int
    num_hosts: int
    num_packets: int
    num_inputs: int
    num_records: int
    num_decisions: int


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One size: with `RANKS_A_HOST` ranks on a host, and packets with the same ranks on `FIXED_HOSTS` hosts."""

    cost: RecoveryCost
    num_packets_fixed_hosts: int


class _CountingWorld(World):
    """Notes what had been counted when the fault was detected and when progress was back."""

    def __init__(self, seed: int, config: WorldConfig, faults: Sequence[SimFault]) -> None:
        super().__init__(seed, config, faults)
        self.marks: list[tuple[int, int, int]] = []

    def append(self, record: Record) -> None:
        super().append(record)
        if isinstance(record.event, FaultDetected | ProgressResumed):
            self.marks.append((self.newest.links.num_packets, self.newest.num_inputs, len(self.records)))


def measure_recovery(num_ranks: int, num_hosts: int) -> RecoveryCost:
    """Kill the last rank of a job once; raises `InternalError` if anything about the run was wrong."""
    config = WorldConfig(
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        num_steps=_KILL_AT_STEP + 2,
        num_standbys=1 if num_hosts == 1 else 0,
        save_every=1000,
        drop_rate=0.0,
    )
    world = _CountingWorld(1, config, [SimFault(kind=SimKind.SIGKILL, rank=num_ranks - 1, step=_KILL_AT_STEP)])
    exit_code = world.run_job()
    problems = world.violations + judge(world)
    if exit_code or problems or len(world.marks) != 2:
        raise InternalError(f"the simulated job of {num_ranks} ranks ended with {exit_code}: {problems[:3]}")
    (packets, inputs, records), (packets_after, inputs_after, records_after) = world.marks
    return RecoveryCost(
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        num_packets=packets_after - packets,
        num_inputs=inputs_after - inputs,
        num_records=records_after - records,
        num_decisions=sum(isinstance(record.event, RestartDecided) for record in world.records),
    )


def measure_row(num_ranks: int) -> ScalingRow:
    """Both costs of a size."""
    cost = measure_recovery(num_ranks, max(1, num_ranks // RANKS_A_HOST))
    fixed = measure_recovery(num_ranks, min(FIXED_HOSTS, num_ranks))
    return ScalingRow(cost=cost, num_packets_fixed_hosts=fixed.num_packets)


def growth(points: Sequence[tuple[int, int]]) -> float:
    """Exponent of y = a * x^exponent through the larger half of (x, y); NaN with less than two points above zero."""
    logs = [(math.log(x), math.log(y)) for x, y in sorted(points) if x > 0 and y > 0]
    logs = logs[len(logs) // 2 :] if len(logs) > 3 else logs
    if len(logs) < 2:
        return math.nan
    return statistics.linear_regression(*zip(*logs, strict=True)).slope
