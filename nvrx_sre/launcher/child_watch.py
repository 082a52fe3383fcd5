"""The children of this node as facts: started, what they say, dead.

Model: the fork server says who was started, channels what each child says (`launcher.intake`), a pidfd that it is dead.
Everything a child has sent is taken in before its death is told. Used by the leader's loop and by a follower's.

Main thread only. Must not: judge anything; block, but for the reaping of what is dead.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Any

from nvrx_sre.core.clock import Clock
from nvrx_sre.events import messages as wire
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher.intake import Intake
from nvrx_sre.launcher.node import Node
from nvrx_sre.launcher.oom import OomCounter
from nvrx_sre.launcher.process import Child

PutInput = Callable[[c.Input], None]


class ChildWatch:
    """Watches the children of `node`; `put` gets the facts in order. Registers with `selector`."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        node: Node,
        clock: Clock,
        put: PutInput,
        world_size: Callable[[], int] = lambda: 0,
    ) -> None:
        self.is_to_die = False
        """A planned fault ends this very process."""
        self._selector = selector
        self._node = node
        self._clock = clock
        self._put = put
        self.intake = Intake(selector, put, node.rank_of, world_size)
        self.intake.on_injected = self._note_injection
        self._registered: set[int] = set()
        self._oom = OomCounter()
        self._injected_oom: set[int] = set()
        selector.register(node.forks, selectors.EVENT_READ, ("forks", None))

    def is_watched(self, number: int) -> bool:
        """The child lives here, and was started."""
        return number in self._registered

    def select(self, timeout_s: float) -> list[Any]:
        """Wait, at most `timeout_s`, and take in what children said; data of whatever else is ready."""
        return self.intake.select(timeout_s)

    def handle_ready(self, what: str, child: Any) -> None:
        """Something of ours is ready: the fork server's answer, or a death."""
        if what == "forks":
            self.take_forks()
        elif child.number in self._registered:
            self.intake.drain(child)
            self._handle_death(child)

    def take_forks(self) -> None:
        """Watch the children that were started since the last call."""
        for child in self._node.take_forks():
            self.intake.add(child)
            self._selector.register(child.pidfd, selectors.EVENT_READ, ("death", child))
            self._registered.add(child.number)

    def drain_all(self) -> None:
        """Take in every packet that has arrived."""
        for number in list(self._registered):
            self.intake.drain(self._node.children[number])

    def tend(self) -> None:
        """What is to be looked at now and then. Call twice a second."""
        self._node.retry()
        self.take_forks()

    def close(self) -> None:
        """Stop listening."""
        self.intake.close()

    def _handle_death(self, child: Child) -> None:
        self._registered.discard(child.number)
        self.intake.remove(child)
        self._selector.unregister(child.pidfd)
        last_line = child.last_line()
        code = child.reap()
        self._node.forget(child.number)
        self._put(
            c.Exited(
                child=child.number,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                exited_ns=self._clock.monotonic_ns(),
                oom=self._oom.rose() or child.number in self._injected_oom,
                last_line=last_line,
            )
        )

    def _note_injection(self, number: int, message: wire.Injected) -> None:
        """A planned `oom_kill` cannot make the kernel strike: its announcement stands for the kernel's counter."""
        if message.spec.startswith("oom_kill@"):
            self._injected_oom.add(number)
        self.is_to_die |= message.spec.startswith("launcher_kill@")
