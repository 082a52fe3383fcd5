"""The mark that makes storage slow: a file in the run directory that the durable writer honours.

A rank that injects `slow_storage` writes it; who writes checkpoints reads it before each file and waits that long.
Standard library only.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from nvrx_sre.core.atomic import write_json_atomically

SLOW_STORAGE_FILE = "slow_storage.json"


def slow_down_storage(run_dir: Path, seconds_per_file: float) -> None:
    """From now on each file of a durable save takes `seconds_per_file` longer; 0 ends it."""
    write_json_atomically(run_dir / SLOW_STORAGE_FILE, {"seconds_per_file": seconds_per_file}, durable=False)


def slow_storage_s(run_dir: Path) -> float:
    """Extra seconds that each file of a durable save is to take; 0 without the mark or with a broken one."""
    try:
        value = json.loads((run_dir / SLOW_STORAGE_FILE).read_bytes())["seconds_per_file"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
    usable = isinstance(value, int | float) and math.isfinite(value) and value > 0
    return float(value) if usable else 0.0
