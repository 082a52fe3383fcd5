"""A leader that will not run the job tells the other nodes so, rather than letting them look for it in vain.

Blocks, bounded by `nodes.grace_s`. Main thread only.
"""

from __future__ import annotations

import selectors
from contextlib import closing

from nvrx_sre.core.clock import Clock, seconds, to_ns
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.leader_link import LeaderLink, LinkConfig

TURN_S = 0.2


def turn_away(config: LinkConfig, clock: Clock, stop: c.Stop) -> int:
    """Tell every node that comes within the grace of `stop`; how many were told."""
    told: set[int] = set()

    def put(item: c.Input) -> None:
        if isinstance(item, c.NodeJoined):
            told.add(item.node)

    until_ns = clock.monotonic_ns() + to_ns(config.limits.grace_s)
    with closing(selectors.DefaultSelector()) as selector:
        link = LeaderLink(config, selector, clock, put)
        while len(told) < config.num_nodes - 1 and (left_s := seconds(until_ns - clock.monotonic_ns())) > 0:
            for key, _ in selector.select(min(TURN_S, left_s)):
                link.handle_ready(key.data[1])
            link.tend()
        link.close(stop)
    return len(told)
