"""Files that a command is told to write: what cannot work is said before the work, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from nvrx_sre.core.errors import UserError


def check_output_file(path: Path | None, *, made: Path | None = None) -> None:
    """Raise `UserError` unless `path`, if it is given, can become a file: its folder is there and takes one.

    Below `made`, a directory that the command makes, any folder will be there.
    """
    if path is None or (made is not None and path.absolute().is_relative_to(made.absolute())):
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder; name a file")
    if not folder.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {folder}; make it, or name another file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {path}: {folder} is not writable; name another file")
