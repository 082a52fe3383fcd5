"""State of folds as JSON and back: what a journal segment begins with, so that a long run is not read in whole.

Model: a fold derives from `Snapshotted` and names the attributes that are its state; `take` turns several folds
into one JSON-ready value, `put_back` fills fresh folds from it. Values may be JSON scalars, lists, tuples, sets,
deques, dicts, closed sets (enums), dataclasses marked `@stored`, and further folds. `shape` is a digest of what is
stored: a snapshot of another shape is not used, the journal is then read from its beginning.

Invariants: `put_back(take(x))` into a fresh fold gives the same fold; nothing is ever unpickled or evaluated.
Not thread-safe: the caller holds the lock that the folds change under.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, TypeVar

from nvrx_sre.events import kinds
from nvrx_sre.events.schema import SCHEMA_VERSION

SNAPSHOT_VERSION = 1
"""To be raised when a stored attribute keeps its name and changes its meaning."""

_Stored = TypeVar("_Stored", bound=type)
_CLASSES: dict[str, type] = {
    name: item for name, item in vars(kinds).items() if inspect.isclass(item) and issubclass(item, Enum)
}


def stored(cls: _Stored) -> _Stored:
    """Mark a dataclass or an enum as storable inside a fold's state. Names must be unique."""
    assert _CLASSES.setdefault(cls.__name__, cls) is cls, f"two stored classes are called {cls.__name__}"
    return cls


class Snapshotted:
    """A fold whose state can be taken and put back. `STATE` names the attributes; all else is derived."""

    STATE: ClassVar[tuple[str, ...]] = ()


def take(folds: Mapping[str, Snapshotted]) -> dict[str, Any]:
    """State of all folds, JSON-ready. Independent of them: what happens later does not show in it."""
    return {name: _state(fold) for name, fold in folds.items()}


def put_back(folds: Mapping[str, Snapshotted], value: Mapping[str, Any]) -> None:
    """Fill fresh folds. Raises `ValueError` for a value that is no snapshot of these folds; they are spoilt then."""
    try:
        for name, fold in folds.items():
            _put_back(fold, value[name])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"not a snapshot of this version: {error!r}") from error


def shape(folds: Mapping[str, Snapshotted]) -> str:
    """Digest of what `take` stores for these folds."""
    described = [SCHEMA_VERSION, SNAPSHOT_VERSION, [(name, _shape(fold)) for name, fold in sorted(folds.items())]]
    classes = [
        (name, [item.name for item in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else [])
        for name, cls in sorted(_CLASSES.items())
    ]
    return hashlib.sha256(repr((described, classes)).encode()).hexdigest()[:16]


def _shape(fold: Snapshotted) -> list[Any]:
    return [
        (name, _shape(value) if isinstance(value, Snapshotted) else "")
        for name, value in ((name, getattr(fold, name)) for name in fold.STATE)
    ]


def _state(fold: Snapshotted) -> dict[str, Any]:
    return {name: _encode(getattr(fold, name)) for name in fold.STATE}


def _put_back(fold: Snapshotted, state: Mapping[str, Any]) -> None:
    for name in fold.STATE:
        current = getattr(fold, name)
        if isinstance(current, Snapshotted):
            _put_back(current, state[name])
        else:
            setattr(fold, name, _decode(state[name]))


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | float) or type(value) in (int, str):
        return value
    if isinstance(value, Enum):
        return ["enum", type(value).__name__, value.value]
    if isinstance(value, Snapshotted):
        return _state(value)
    if dataclasses.is_dataclass(value) and type(value).__name__ in _CLASSES:
        fields = {item.name: _encode(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return ["data", type(value).__name__, fields]
    if isinstance(value, dict):
        return ["dict", [[_encode(key), _encode(item)] for key, item in value.items()]]
    if isinstance(value, deque):
        return ["deque", [_encode(item) for item in value], value.maxlen]
    for kind in (list, tuple, set, frozenset):
        if type(value) is kind:
            return [kind.__name__, [_encode(item) for item in value]]
    raise TypeError(f"a {type(value).__name__} cannot be stored")


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "enum":
        return _CLASSES[rest[0]](rest[1])
    if kind == "data":
        return _CLASSES[rest[0]](**{name: _decode(item) for name, item in rest[1].items()})
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in rest[0]}
    items = [_decode(item) for item in rest[0]]
    if kind == "deque":
        return deque(items, rest[1])
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
