"""Files that hold secrets, read so that nobody else could have read or written them.

Model: the opened file itself is checked, not its path: regular, owned by us (or root), no permission for group or
others, small. Links are followed, because a mounted secret is one. Read anew at each use, so that a rotation counts
at once; nothing is kept. Thread-safe.

Must not: put a secret into a message.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from nvrx_sre.core.errors import UserError

SECRET_BYTES_MAX = 4096


def read_secret_lines(path: Path) -> list[str]:
    """Lines of the file that are not empty, without surrounding space.

    Raises `UserError` if the file is missing, readable by others, somebody else's, too large or empty.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(f"secret file {path} cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"secret file {path} is not a regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise UserError(f"secret file {path} belongs to user {status.st_uid}: it must belong to the user who reads")
        if status.st_mode & 0o077:
            raise UserError(f"secret file {path} can be read by others: chmod 600 {path}")
        content = file.read(SECRET_BYTES_MAX + 1)
    if len(content) > SECRET_BYTES_MAX:
        raise UserError(f"secret file {path} is larger than {SECRET_BYTES_MAX} bytes")
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise UserError(f"secret file {path} is not UTF-8 text") from error
    found = [line for line in lines if line]
    if not found:
        raise UserError(f"secret file {path} is empty")
    return found


def is_one_of(given: str, secrets: Iterable[str]) -> bool:
    """Whether `given` is one of `secrets`; takes the same time whichever it is, and however much of it fits."""
    digest = hashlib.sha256(given.encode()).digest()
    matches = [hmac.compare_digest(digest, hashlib.sha256(secret.encode()).digest()) for secret in secrets]
    return any(matches)
