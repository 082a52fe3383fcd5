"""Records as JSON-ready dicts and back: the journal's line form. Pure; unknown types and fields are errors."""

from __future__ import annotations

import dataclasses
import typing
from enum import StrEnum
from typing import Any

from nvrx_sre.events.schema import EVENT_TYPES, Event, Record

_STAMP = ("run", "epoch", "generation", "rank", "seq", "time_ns")


def to_dict(record: Record) -> dict[str, Any]:
    """Record as a flat JSON-ready dict: `type`, the stamp, then `data` with the event's fields."""
    head: dict[str, Any] = {"type": type(record.event).__name__}
    head.update({name: getattr(record, name) for name in _STAMP})
    head["data"] = {item.name: getattr(record.event, item.name) for item in dataclasses.fields(record.event)}
    return head


def from_dict(value: dict[str, Any]) -> Record:
    """Inverse of `to_dict`. Raises `ValueError` for an unknown type or wrong fields."""
    cls = EVENT_TYPES.get(value.get("type", ""))
    if cls is None:
        raise ValueError(f"unknown event type {value.get('type')!r}")
    try:
        event = cls(**{key: _restore(cls, key, item) for key, item in value["data"].items()})
        return Record(event=event, **{name: value[name] for name in _STAMP})
    except (KeyError, TypeError) as error:
        raise ValueError(f"event {cls.__name__} does not fit the schema: {error}") from error


_ENUM_FIELDS: dict[tuple[type[Event], str], type[StrEnum]] = {}
for _cls in EVENT_TYPES.values():
    for _name, _type in typing.get_type_hints(_cls).items():
        if isinstance(_type, type) and issubclass(_type, StrEnum):
            _ENUM_FIELDS[_cls, _name] = _type


def _restore(cls: type[Event], key: str, item: Any) -> Any:
    enum = _ENUM_FIELDS.get((cls, key))
    return item if enum is None else enum(item)
