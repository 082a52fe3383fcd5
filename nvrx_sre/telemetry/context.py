"""What a rank's log lines are stamped with: run, generation, rank, step and trace; and which ids a run's spans have.

One ambient set of values a process (a rank is a process), readable from every thread. The step is read when a line
is written, so that no step costs anything here. Ids of spans are hashes of what a span stands for, so a rank knows
the span of its generation, which only the launcher writes, without asking for it. Standard library only. Thread
safety: single writes of single keys. Must not: cost a step anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, MutableMapping
from typing import Any

TRACEPARENT_VARIABLE = "TRACEPARENT"
"""Where OpenTelemetry's tools look for the span that theirs belong under (W3C trace context)."""

_ambient: dict[str, Any] = {}
_followed: dict[str, Callable[[], int]] = {}
"""Values that are asked for."""


def hash_id(num_digits: int, *parts: object) -> str:
    """Deterministic id of `num_digits` hex digits: 16 for a span, 32 for a trace."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:num_digits]


def run_trace_id(run: str) -> str:
    """Trace of the run: its generations and saves. Every incident has one of its own."""
    return hash_id(32, run, "run")


def generation_span_id(run: str, generation: int) -> str:
    """Span of one formation of the group, in the run's trace."""
    return hash_id(16, run, "generation", generation)


def traceparent(trace_id: str, span_id: str) -> str:
    """W3C form of a sampled span, for `TRACEPARENT` and HTTP headers."""
    return f"00-{trace_id}-{span_id}-01"


def bind(*, run: str, rank: int | None) -> None:
    """Name the process: `run`, and `rank` or None for a launcher."""
    _ambient["run"] = run
    _ambient["rank"] = rank


def set_generation(generation: int) -> str:
    """The generation that this process, named by `bind`, takes part in: lines belong to its span. Its `traceparent`."""
    run = _ambient["run"]
    trace_id, span_id = run_trace_id(run), generation_span_id(run, generation)
    _ambient.update(generation=generation, trace_id=trace_id, span_id=span_id)
    return traceparent(trace_id, span_id)


def follow_step(committed: Callable[[], int]) -> None:
    """From now on lines belong to the step that `committed` says: how many are committed. Called from any thread."""
    _followed["step"] = committed


def current() -> dict[str, Any]:
    """The ambient values that are set."""
    asked = {key: ask() for key, ask in _followed.items()}
    return {key: value for key, value in {**_ambient, **asked}.items() if value is not None}


def clear() -> None:
    """Forget everything (a new process, a test)."""
    _ambient.clear()
    _followed.clear()


def add_ambient(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """structlog processor: stamp the line with the ambient values that it does not set itself."""
    for key, value in current().items():
        event.setdefault(key, value)
    return event
