"""Which run a directory belongs to: the one line of `run.json` that every reader needs.

Process safety: the file is written once, atomically, by the run's first launcher. Must not: write it.
"""

from __future__ import annotations

import json
from pathlib import Path

RUN_FILE = "run.json"


def recorded_run(run_dir: Path) -> str | None:
    """Name of the run whose directory this is, None if it is none or cannot be read."""
    try:
        value = json.loads((run_dir / RUN_FILE).read_text())
    except (OSError, ValueError):
        return None
    name = value.get("run") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None
