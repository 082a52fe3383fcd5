"""One redactor stands before journal, span and log: `core.masking`, here for records too.

What counts as a secret is said there. Immutable, hence thread-safe. Must not: fail on any text.
"""

from __future__ import annotations

import dataclasses
import typing

from nvrx_sre.core.masking import TextRedactor
from nvrx_sre.events.schema import EVENT_TYPES, Event, Record


class Redactor(TextRedactor):
    """Masks secrets in texts and in records."""

    def record(self, record: Record) -> Record:
        """`record` with the free texts of its event masked; the same object if there is nothing to mask."""
        event = record.event
        changed = {}
        for name in _TEXT_FIELDS.get(type(event), ()):
            value = getattr(event, name)
            masked = self.value(value)
            if masked != value:
                changed[name] = masked
        if not changed:
            return record
        return dataclasses.replace(record, event=dataclasses.replace(event, **changed))


def _text_fields(cls: type[Event]) -> tuple[str, ...]:
    """Fields that may hold free text: `str` itself (not an enum), and dicts."""
    hints = typing.get_type_hints(cls)
    return tuple(name for name, hint in hints.items() if hint is str or typing.get_origin(hint) is dict)


_TEXT_FIELDS: dict[type[Event], tuple[str, ...]] = {cls: _text_fields(cls) for cls in EVENT_TYPES.values()}


def blanked(record: Record) -> Record:
    """The record without any free text: what is kept when redaction itself fails. Closed sets and numbers stay."""
    texts = {
        item.name: "" for item in dataclasses.fields(record.event) if type(getattr(record.event, item.name)) is str
    }
    return dataclasses.replace(record, event=dataclasses.replace(record.event, **texts))
