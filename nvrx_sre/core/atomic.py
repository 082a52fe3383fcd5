"""Files that are either the old or the new content, and directories that are private.

Blocking: each function waits for the disk where it says `fsync`.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from nvrx_sre.core.errors import StorageError

PRIVATE_DIRECTORY_MODE = 0o700
PRIVATE_FILE_MODE = 0o600


def fsync_directory(path: Path) -> None:
    """Make renames and creations inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private_directory(path: Path) -> None:
    """Create `path` (and parents) with mode 0700; an existing directory is left as it is."""
    path.mkdir(mode=PRIVATE_DIRECTORY_MODE, parents=True, exist_ok=True)


def write_bytes_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace `path` with `content` by write, fsync and rename; mode 0600.

    Raises `StorageError` when the disk refuses. Without `durable` the content is atomic but may be lost
    in a power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE_MODE)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            fsync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def write_json_atomically(path: Path, value: Any, *, durable: bool = True) -> None:
    """`write_bytes_atomically` of `value` as indented JSON with sorted keys."""
    write_bytes_atomically(path, json_text(value).encode(), durable=durable)


def json_text(value: Any) -> str:
    """Indented JSON with sorted keys, for people as well."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def create_exclusively(path: Path, content: bytes) -> bool:
    """Create `path` with `content` unless it exists; True if this call created it. Durable.

    The content appears at once (link of a finished file), so a reader never sees a half-written winner.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_bytes_atomically(temporary, content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise StorageError(f"cannot create {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
    return True
