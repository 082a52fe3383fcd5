"""When a child's deadline may pass next: a bound that costs nothing to keep, however many children there are.

Model: `due_ns` is never later than the first deadline of any child. Arming a child can only bring it forward; what was
disarmed or put off is found out at the next tick, when all children are looked at and the bound is set anew. So an
input costs the same with 2 and with 16,384 ranks. Pure.
"""

from __future__ import annotations


class Alarm:
    """Lower bound of the children's deadlines, monotonic ns; None if no child has one."""

    def __init__(self) -> None:
        self.due_ns: int | None = None

    def bring_forward(self, deadline_ns: int) -> None:
        """A child has this deadline from now on."""
        if self.due_ns is None or deadline_ns < self.due_ns:
            self.due_ns = deadline_ns
