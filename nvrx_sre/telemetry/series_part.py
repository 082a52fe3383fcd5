"""What the parts of the series fold share: a table of handlers, one part a theme.

A part handles the events it names and writes its own series into the shared values. Invariants: the same records
give the same values; a series belongs to one part. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record
from nvrx_sre.events.snapshot import Snapshotted
from nvrx_sre.telemetry.metric import Metric
from nvrx_sre.telemetry.values import Values

Handler = Callable[[Record, Any], None]


class SeriesPart(Snapshotted):
    """One theme of the series. Subclasses fill `handlers`."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.handlers: dict[type[schema.Event], Handler] = {}

    def apply(self, record: Record) -> None:
        """Fold one record."""
        handler = self.handlers.get(type(record.event))
        if handler is not None:
            handler(record, record.event)

    def counting(self, metric: Metric, *labels: str) -> Handler:
        """A handler that counts the event in one series."""
        return lambda _, __: self.values.add(metric, 1, *labels)
