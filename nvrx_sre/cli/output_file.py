"""Files that a command is told to write: what cannot work is said before the work, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from nvrx_sre.core.errors import UserError


def check_output_file(path: Path | None, *, made: Path | None = None, is_renamed: bool = False) -> None:
    """Raise `UserError` unless `path`, if it is given, can be written.

    A file that is there is written in place, as is a device, so it must be writable itself. One that is not there, and
    one whose writer makes another file and renames it (`is_renamed`), need a folder that takes a file. Below `made`, a
    directory that the command makes, any folder will be there.
    """
    if path is None:
        return
    where = path.absolute()
    root = None if made is None else made.absolute()
    try:
        if path.is_dir() or where == root:
            raise UserError(f"cannot write {path}: it is a folder; name a file")
        if root is None or not where.is_relative_to(root):
            _check_place(where, path, is_renamed)
    except OSError as error:  # a folder on the way to it that must not be looked into
        raise UserError(f"cannot write {path}: {error.strerror}; name another file") from error


def _check_place(where: Path, named: Path, is_renamed: bool) -> None:
    if where.exists() and not is_renamed:
        if not os.access(where, os.W_OK):
            raise UserError(f"cannot write {named}: it is not writable; name another file")
        return
    # A write follows a link whose file is not there yet, a rename replaces the link.
    folder = (where if is_renamed else Path(os.path.realpath(where))).parent
    if not folder.is_dir():
        raise UserError(f"cannot write {named}: there is no folder {folder}; make it, or name another file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {named}: {folder} is not writable; name another file")
