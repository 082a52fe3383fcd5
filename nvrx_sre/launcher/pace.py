"""When what one launcher has to say to another leaves: at once after a pause, bundled while there is more.

Model: every rank says the same things in a recovery, some milliseconds apart, and a packet costs both ends a turn of
their loop, whatever it holds. So the first one leaves at once, and what comes within `BUNDLE_S` after a packet leaves
together at its end. What is no news, a sign of life, waits for company, at most `LIVENESS_S`. So the packets of a
recovery grow with the nodes and hardly with the ranks (docs/guides/simulation.md).

Invariant: whatever was told of is due within `LIVENESS_S`. Pure: times are arguments, monotonic ns. The simulation
paces its links with this class.
"""

from __future__ import annotations

from nvrx_sre.core.clock import to_ns

BUNDLE_S = 0.005
"""Time between two packets: far below what a person notices in a recovery, far above a packet's cost."""
LIVENESS_S = 0.1
"""Longest wait of a sign of life: below the half of what lies between two of them."""


class Pace:
    """Of one direction of one connection."""

    def __init__(self) -> None:
        self.due_ns: int | None = None
        """When to send what there is, None if there is nothing."""
        self._next_ns = 0

    def at_once(self, now_ns: int) -> None:
        """There is something that must not wait."""
        self._put(now_ns)

    def news(self, now_ns: int) -> None:
        """There is something to say."""
        self._put(max(now_ns, self._next_ns))

    def sign_of_life(self, now_ns: int) -> None:
        """There is something that can wait for company."""
        self._put(max(now_ns + to_ns(LIVENESS_S), self._next_ns))

    def is_due(self, now_ns: int) -> bool:
        """Send it now."""
        return self.due_ns is not None and now_ns >= self.due_ns

    def sent(self, now_ns: int) -> None:
        """All there was has left."""
        self.due_ns = None
        self._next_ns = now_ns + to_ns(BUNDLE_S)

    def _put(self, due_ns: int) -> None:
        self.due_ns = due_ns if self.due_ns is None else min(self.due_ns, due_ns)
