"""State of folds as JSON and back: what a journal segment begins with, so that a long run is not read in whole.

Model: a fold derives from `Snapshotted` and names the attributes that are its state; `take` turns several folds
into one JSON-ready value, `put_back` fills fresh folds from it. Values may be JSON scalars, lists, tuples, sets,
deques, dicts, closed sets (enums), dataclasses that the fold names in `STORED`, and further folds. Each fold is
stored with the digest of its shape: a snapshot of another version of it does not fit, and the journal is read from
its beginning.

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
from typing import Any, ClassVar

from nvrx_sre.events import kinds
from nvrx_sre.events.schema import SCHEMA_VERSION

SNAPSHOT_VERSION = 3
"""To be raised when a stored attribute keeps its name and changes its meaning."""

_KEPT = "_stored"
"""Entry of a dataclass's `__dict__` that holds its stored form, no field of it."""

_CLASSES: dict[str, type] = {
    name: item for name, item in vars(kinds).items() if inspect.isclass(item) and issubclass(item, Enum)
}


class Snapshotted:
    """A fold whose state can be taken and put back. `STATE` names the attributes; all else is derived."""

    STATE: ClassVar[tuple[str, ...]] = ()
    STORED: ClassVar[tuple[type, ...]] = ()
    """Dataclasses and enums in the state, beside those of `events.kinds`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for item in cls.STORED:
            assert _CLASSES.setdefault(item.__name__, item) is item, f"two stored classes are {item.__name__}"

    def version(self) -> str:
        """What else the stored state depends on, such as a catalog."""
        return ""


def take(folds: Mapping[str, Snapshotted]) -> dict[str, Any]:
    """State of all folds, JSON-ready. Independent of them: what happens later does not show in it."""
    return {name: {"shape": shape(fold), "state": _state(fold)} for name, fold in folds.items()}


def keep_stored(value: Any) -> None:
    """`value`, a dataclass of a fold, never changes again: it is encoded now and not at each `take`.

    What a fold keeps of the past costs its owner nothing when a snapshot is taken.
    """
    value.__dict__[_KEPT] = ["kept", *_encode(value)[1:]]


def fits(folds: Mapping[str, Snapshotted], value: Mapping[str, Any]) -> bool:
    """`value` holds the state of all these folds, in their present shape."""
    stored_folds = {name: item.get("shape") for name, item in value.items() if isinstance(item, dict)}
    return all(stored_folds.get(name) == shape(fold) for name, fold in folds.items())


def put_back(folds: Mapping[str, Snapshotted], value: Mapping[str, Any]) -> None:
    """Fill fresh folds. Raises `ValueError` for a value that is no snapshot of these folds; they are spoilt then."""
    try:
        for name, fold in folds.items():
            _put_back(fold, value[name]["state"])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"not a snapshot of this version: {error!r}") from error


def shape(fold: Snapshotted) -> str:
    """Digest of what is stored for the fold: the names of its state and of what is in it."""
    described = [SCHEMA_VERSION, SNAPSHOT_VERSION, fold.version(), _names(fold)]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def _names(fold: Snapshotted) -> list[Any]:
    inner = [(name, getattr(fold, name)) for name in fold.STATE]
    classes = [(item.__name__, [field.name for field in _fields(item)]) for item in fold.STORED]
    return [classes, *((name, _names(item) if isinstance(item, Snapshotted) else "") for name, item in inner)]


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


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
    if isinstance(value, Enum) and type(value).__name__ in _CLASSES:
        return ["enum", type(value).__name__, value.value]
    if isinstance(value, Snapshotted):
        return _state(value)
    if dataclasses.is_dataclass(value) and type(value).__name__ in _CLASSES:
        kept = value.__dict__.get(_KEPT)
        if kept is not None:
            return kept
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
    if kind in ("data", "kept"):
        restored = _CLASSES[rest[0]](**{name: _decode(item) for name, item in rest[1].items()})
        if kind == "kept":
            restored.__dict__[_KEPT] = value
        return restored
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in rest[0]}
    items = [_decode(item) for item in rest[0]]
    if kind == "deque":
        return deque(items, rest[1])
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
