"""What the recovery benchmark asks: its cases, how often, and what was promised. Pure.

    exception    one rank raises; rank 0 and the last rank in turn, as in every case
    sigkill      one rank is killed
    hang         one rank waits in Python for ever; a step may take `STEP_DEADLINE_S`
    collective   one rank raises when the others wait in a collective, with a short and a long timeout of the group
    leak         one run with many restarts in process: what is counted must not grow
    ranks        exceptions against the number of ranks, measured and simulated

Must not: load torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_sre.core.errors import UserError

BENCH = "recovery"
EXCEPTION, SIGKILL, HANG, COLLECTIVE, LEAK, RANKS = "exception", "sigkill", "hang", "collective", "leak", "ranks"
CASES = (EXCEPTION, SIGKILL, HANG, COLLECTIVE, LEAK, RANKS)
AT_EVERY_SIZE = (EXCEPTION, SIGKILL)
"""Cases that are asked with every number of ranks; the others with the first."""

WAIT_S = 0.5
"""How long the failing rank of `collective` lets the others wait (seconds)."""
STEP_DEADLINE_S = 1.0
"""Ours, in the case `hang`: a step is 0.05 s here (seconds)."""
HEARTBEAT_S = 3.0
"""ft_launcher's, in the case `hang`: the limit of the figures we compare with (seconds)."""
GROUP_TIMEOUT_S = 600.0
"""Of the process group where the case does not say (seconds)."""
COLLECTIVE_TIMEOUTS_S = (5.0, 60.0)

OVERHEAD_MAX_S = {(EXCEPTION, 2): 0.08, (EXCEPTION, 4): 0.20, (SIGKILL, 2): 0.12, (SIGKILL, 4): 0.30}
"""(case, ranks) -> highest median overhead (seconds), on two cores."""
DETECTED_MAX_S = 0.2
"""A hang is detected at most this long after its deadline (seconds)."""
TIMEOUTS_MAX_RATIO = 1.2
"""Medians at two timeouts of the group differ by no more than this factor."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many faults of each kind."""

    exceptions: int = 100
    kills: int = 30
    hangs: int = 10
    collective: int = 10
    """At each timeout of the group."""
    leak: int = 200
    at_size: int = 5
    """At each number of ranks of the case `ranks`."""
    peers: int = 5
    """Of each case under each peer; 0 leaves them out."""
    peers_long_wait: int = 1
    """Under a peer that may wait for the longest timeout of the group each time."""

    def of(self, case: str) -> int:
        """Faults of a case under our launcher."""
        return {EXCEPTION: self.exceptions, SIGKILL: self.kills, HANG: self.hangs, COLLECTIVE: self.collective}[case]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure."""

    counts: Counts = Counts()
    ranks: tuple[int, ...] = (2, 4)
    cases: tuple[str, ...] = CASES
    collective_timeouts_s: tuple[float, ...] = COLLECTIVE_TIMEOUTS_S
    sizes: tuple[int, ...] = (2, 4, 8, 16)
    """Ranks of the case `ranks`."""
    max_simulated: int = 16_384

    def __post_init__(self) -> None:
        counts = self.counts
        ours = (counts.exceptions, counts.kills, counts.hangs, counts.collective, counts.leak, counts.at_size)
        if min(ours) < 1 or counts.peers < 0 or not self.ranks or min(self.ranks) < 1:
            raise UserError("bench recovery needs at least 1 fault, 0 or more faults of the peers and 1 rank")


def same_count(num_faults: int, num_peer_faults: int) -> Counts:
    """As many faults in every case."""
    return Counts(
        exceptions=num_faults,
        kills=num_faults,
        hangs=num_faults,
        collective=num_faults,
        leak=num_faults,
        at_size=num_faults,
        peers=num_peer_faults,
        peers_long_wait=min(1, num_peer_faults),
    )


def quick() -> BenchConfig:
    """Few faults and small worlds: shows that it works, not what it costs."""
    return BenchConfig(
        counts=same_count(4, 2),
        ranks=(2,),
        collective_timeouts_s=(2.0, 30.0),
        sizes=(2, 3),
        max_simulated=64,
    )
