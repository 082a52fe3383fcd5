"""Waits of tests: for the thing itself, as long as it takes on a busy machine, and never for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nvrx_sre.core.clock import SystemClock, to_ns

PATIENCE_S = 60.0
"""Longest wait for what takes milliseconds on an idle machine. Nothing that a test asserts hangs on its length."""
LOOK_S = 0.002
"""Between two looks at what has no event to wait for."""


def wait_until(condition: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    """Block until `condition` holds; fails with `what` if it never does."""
    clock, pause = SystemClock(), threading.Event()
    until_ns = clock.monotonic_ns() + to_ns(limit_s)
    while not condition():
        assert clock.monotonic_ns() < until_ns, f"{what}: not within {limit_s:g} s"
        pause.wait(LOOK_S)
