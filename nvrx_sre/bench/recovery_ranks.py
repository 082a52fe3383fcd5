"""What a recovery costs against the number of ranks: measured on this machine, and counted in simulation.

Measured is the overhead of an exception; the ranks share this machine's cores, and so do their recoveries.
Simulated is what the control plane has to do (`testing.scaling`): packets between the leader's launcher and the other
hosts and their bytes, facts that the leader takes in. The law is the exponent of growth; packets are to grow with the
hosts beside the leader's (8 ranks each) and not with the ranks. Blocking: minutes at 16,384 ranks.
"""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path

from nvrx_sre.bench.recovery_cases import BENCH, EXCEPTION, RANKS, BenchConfig
from nvrx_sre.bench.recovery_ours import calibrate, run_case
from nvrx_sre.bench.rows import Row, summarize, target
from nvrx_sre.testing import scaling

CALIBRATION_STEPS = 30
LINEAR = 1.1
"""Highest exponent that counts as linear."""
CONSTANT = 0.1


def measured_rows(contestant: str, scratch: Path, config: BenchConfig) -> list[Row]:
    """Overhead of an exception at each size, and its growth."""
    rows: list[Row] = []
    points: list[tuple[int, int]] = []
    for ranks in config.sizes:
        pace = calibrate(scratch / f"calibration-{ranks}", ranks, CALIBRATION_STEPS)
        measured = run_case(scratch / f"size-{ranks}", EXCEPTION, ranks, config.counts.at_size, pace)
        overheads_s = measured.overheads_s()
        points.append((ranks, round(statistics.median(overheads_s) * 1e6)))
        note = f"step {measured.step_s * 1000:.1f} ms, {ranks} ranks on {len(os.sched_getaffinity(0))} cores"
        rows.append(_row(contestant, RANKS, ranks, overheads_s, "s", note))
    law = scaling.growth(points)
    if math.isnan(law):  # one size, or an overhead below the noise of its own step
        return rows
    note = "of the overhead, larger half of the sizes"
    return [*rows, _row(contestant, f"{RANKS} growth", 0, [law], "exponent", note)]


def simulated_rows(contestant: str, max_ranks: int) -> list[Row]:
    """Packets and facts of one recovery at each size up to `max_ranks`, and how they grow."""
    sizes = [size for size in scaling.SIZES if size <= max_ranks]
    found = [scaling.measure_row(size) for size in sizes]
    rows: list[Row] = []
    for item in found:
        cost = item.cost
        note = f"{cost.num_hosts} hosts, {cost.num_bytes / 1000:.0f} kB; {cost.num_inputs} facts"
        note = f"{note}; {item.num_packets_fixed_hosts} packets with 4 hosts"
        rows.append(_row(contestant, f"{RANKS} simulated", cost.num_ranks, [cost.num_packets], "packets", note))
    laws = scaling.laws_of(found)
    by_hosts, of_bytes, by_ranks = laws.packets_by_hosts, laws.bytes_by_hosts, laws.packets_by_ranks_at_fixed_hosts
    is_met = max(by_hosts, of_bytes) <= LINEAR and by_ranks <= CONSTANT
    note = f"packets ~ hosts^{by_hosts:.2f}, bytes ~ hosts^{of_bytes:.2f}, packets with 4 hosts ~ ranks^{by_ranks:.2f}"
    verdict = target("linear in hosts, not in ranks", is_met)
    return [*rows, _row(contestant, f"{RANKS} simulated growth", 0, [by_hosts], "exponent", f"{note}; {verdict}")]


def _row(contestant: str, case: str, ranks: int, samples: list[float], unit: str, note: str) -> Row:
    return summarize(samples, bench=BENCH, contestant=contestant, case=case, ranks=ranks, unit=unit, note=note)
