"""Options of the form NAME=VALUE. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from nvrx_sre.core.errors import UserError


def pairs_of(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Names and values of a repeatable `option`. Raises `UserError` for a text without a name or a value."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise UserError(f"{option} {text!r} is not NAME=VALUE")
        found[name] = value
    return found
