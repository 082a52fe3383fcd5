"""What a rank's log lines are stamped with: run, generation, rank, step, and the incident's trace.

One ambient set of values a process (a rank is a process), readable from every thread. Setting the step is
one dictionary write, cheap enough for each step. Loads structlog only when a processor list is asked for
by the caller that has it; never torch. Thread safety: single writes of single keys.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

_ambient: dict[str, Any] = {}


def bind(*, run: str, rank: int | None) -> None:
    """Name the process: `run`, and `rank` or None for a launcher."""
    _ambient["run"] = run
    _ambient["rank"] = rank


def set_generation(generation: int) -> None:
    """The generation that this process takes part in."""
    _ambient["generation"] = generation


def set_step(step: int) -> None:
    """Committed steps so far."""
    _ambient["step"] = step


def set_trace(trace_id: str | None, span_id: str | None = None) -> None:
    """Trace that lines belong to (hex ids), or None for none."""
    _ambient["trace_id"] = trace_id
    _ambient["span_id"] = span_id


def current() -> dict[str, Any]:
    """The ambient values that are set."""
    return {key: value for key, value in _ambient.items() if value is not None}


def clear() -> None:
    """Forget everything (a new process, a test)."""
    _ambient.clear()


def add_ambient(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """structlog processor: stamp the line with the ambient values that it does not set itself."""
    for key, value in current().items():
        event.setdefault(key, value)
    return event
