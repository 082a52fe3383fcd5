"""The redactor: masks secrets in environments, argv, URLs and the text of stacks. For everything that is written.

Two ways in which a secret is known: by its form (`PASSWORD=...`, `--token ...`, `Bearer ...`, user info in
a URL, well-known key prefixes, PEM blocks), and by its value (the values of environment variables whose
names say that they are secret). `telemetry.redact` has the same for records. Immutable, hence thread-safe.
Must not: fail on any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Self

MASK = "***"
MIN_SECRET_CHARACTERS = 6
"""Shorter values of secret variables are left alone: masking 'on' or '1' everywhere would ruin every text."""

_SECRET_WORD = (
    r"(?:password|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?"
    r"|auth|authorization)"
)
SECRET_NAME = re.compile(rf"[\w.-]*{_SECRET_WORD}", re.IGNORECASE)
# What stands before a secret is bounded or left out: otherwise a long word costs the square of its length.
_BY_FORM: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), MASK),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {MASK}"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]{0,30}://)[^\s/@:]*:[^\s/@]+@", re.IGNORECASE), rf"\1{MASK}@"),
    (re.compile(r"\b(?:AKIA[0-9A-Z]{16}|(?:ghp|gho|ghs)_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|sk-[\w-]{20,})"), MASK),
    (re.compile(rf"(?i)(-[\w-]{{0,80}}{_SECRET_WORD})(\s+)(?!-)\S+"), rf"\1\2{MASK}"),
    (
        re.compile(rf"(?i)({_SECRET_WORD})(['\"]?\s*[=:]\s*)(?!(?:bearer|basic)\b)(\"[^\"]*\"|'[^']*'|[^\s,;&'\"]+)"),
        rf"\1\2{MASK}",
    ),
)


class TextRedactor:
    """Masks secrets. `values`: literal secrets to mask wherever they stand."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        literal = sorted({value for value in values if len(value) >= MIN_SECRET_CHARACTERS}, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, literal))) if literal else None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """A redactor that knows the values of the environment's secret variables. Reads no other value."""
        return cls(environment[name] for name in environment if SECRET_NAME.fullmatch(name))

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
