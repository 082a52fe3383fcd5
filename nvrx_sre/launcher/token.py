"""The secret that the launchers of one run share: a file that only its owner can read.

The leader makes one in the run directory, which all nodes share, unless it is given another file. Never logged, never
sent: only macs made with it travel (`launcher.handshake`).
"""

from __future__ import annotations

import secrets
from pathlib import Path

from nvrx_sre.core.atomic import create_exclusively
from nvrx_sre.core.errors import StorageError, UserError

TOKEN_BYTES = 32
TOKEN_BYTES_MIN = 16
"""Fewest bytes of a token that a person made."""


def read_token(path: Path) -> bytes | None:
    """The token, None if there is no such file. Raises `UserError` for one that others can read, or that is short."""
    try:
        mode = path.stat().st_mode
        token = path.read_bytes().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"token file {path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    if mode & 0o077:
        raise UserError(f"token file {path} can be read by others: chmod 600 {path}")
    if len(token) < TOKEN_BYTES_MIN:
        raise UserError(f"token file {path} holds {len(token)} bytes: use {TOKEN_BYTES_MIN} or more")
    return token


def make_token(path: Path) -> bytes:
    """The token of `path`, made now if there is none. Raises `UserError`."""
    try:
        create_exclusively(path, secrets.token_hex(TOKEN_BYTES).encode() + b"\n")
    except StorageError as error:
        raise UserError(f"cannot make the token for the other nodes: {error}") from error
    token = read_token(path)
    assert token is not None, "it was there a moment ago"
    return token
