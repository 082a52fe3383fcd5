"""How long each part of a piece of work took. Seconds, by the name of the part; a name may come again."""

from __future__ import annotations

from nvrx_sre.core.clock import NS_PER_S, Clock


class Laps:
    """Called with a part's name when it ends. Not thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_ns = clock.monotonic_ns()
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str) -> None:
        now_ns = self._clock.monotonic_ns()
        self.seconds[name] = self.seconds.get(name, 0.0) + (now_ns - self._since_ns) / NS_PER_S
        self._since_ns = now_ns
