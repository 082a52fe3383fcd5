"""One redactor stands before journal, span and log: secrets in environments, argv, URLs and stack text.

Two ways in which a secret is known: by its form (`PASSWORD=...`, `--token ...`, `Bearer ...`, user info in
a URL, well-known key prefixes, PEM blocks), and by its value (the values of environment variables whose
names say that they are secret). Immutable, hence thread-safe. Must not: fail on any text.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from nvrx_sre.events.schema import EVENT_TYPES, Event, Record

MASK = "***"
MIN_SECRET_CHARACTERS = 6
"""Shorter values of secret variables are left alone: masking 'on' or '1' everywhere would ruin every text."""

_SECRET_WORD = (
    r"(?:password|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?"
    r"|auth|authorization)"
)
SECRET_NAME = re.compile(rf"[\w.-]*{_SECRET_WORD}", re.IGNORECASE)
_BY_FORM: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), MASK),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {MASK}"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@:]*:[^\s/@]+@", re.IGNORECASE), rf"\1{MASK}@"),
    (re.compile(r"\b(?:AKIA[0-9A-Z]{16}|(?:ghp|gho|ghs)_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|sk-[\w-]{20,})"), MASK),
    (re.compile(rf"(?i)(--?[\w-]*{_SECRET_WORD})(\s+)(?!-)\S+"), rf"\1\2{MASK}"),
    (
        re.compile(
            rf"(?i)\b([\w.-]*{_SECRET_WORD})(['\"]?\s*[=:]\s*)(?!(?:bearer|basic)\b)(\"[^\"]*\"|'[^']*'|[^\s,;&'\"]+)"
        ),
        rf"\1\2{MASK}",
    ),
)


class Redactor:
    """Masks secrets. `values`: literal secrets to mask wherever they stand."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        literal = sorted({value for value in values if len(value) >= MIN_SECRET_CHARACTERS}, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, literal))) if literal else None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Redactor:
        """A redactor that knows the values of the environment's secret variables."""
        return cls(value for name, value in environment.items() if SECRET_NAME.fullmatch(name))

    def text(self, text: str) -> str:
        """`text` with every secret masked."""
        if self._values is not None:
            text = self._values.sub(MASK, text)
        for pattern, replacement in _BY_FORM:
            text = pattern.sub(replacement, text)
        return text

    def argv(self, argv: Iterable[str]) -> list[str]:
        """A command line with every secret masked, also where flag and value are two words."""
        result: list[str] = []
        for word in argv:
            hidden = result and result[-1].startswith("-") and SECRET_NAME.fullmatch(result[-1].lstrip("-"))
            result.append(MASK if hidden and not word.startswith("-") else self.text(word))
        return result

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """An environment with the values of secret variables masked."""
        return {name: MASK if SECRET_NAME.fullmatch(name) else self.text(value) for name, value in environment.items()}

    def value(self, value: Any) -> Any:
        """JSON-like `value` with every text in it masked."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                key: MASK if isinstance(item, str) and SECRET_NAME.fullmatch(str(key)) else self.value(item)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

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
