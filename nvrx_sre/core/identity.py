"""Whether a path can be a run directory, and whose it is: the one line of `run.json` that every reader needs.

Process safety: the file is written once, atomically, by the run's first launcher. Must not: write it.
"""

from __future__ import annotations

import json
from pathlib import Path

from nvrx_sre.core.errors import UserError

RUN_FILE = "run.json"


def check_run_dir(path: Path) -> None:
    """Raise `UserError` where a command that reads a run is given no directory."""
    if path.is_file():
        raise UserError(f"{path} is a file, not a run directory")
    if not path.is_dir():
        raise UserError(f"{path} is not there: name the run directory (--run-dir of the run)")


def recorded_run(run_dir: Path) -> str | None:
    """Name of the run whose directory this is, None if it is none or cannot be read."""
    try:
        value = json.loads((run_dir / RUN_FILE).read_text())
    except (OSError, ValueError):
        return None
    name = value.get("run") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None
