"""Stages of a durable save by name, and who may watch them.

    plan -> write -> fsync -> manifest -> rename -> verify -> retention        (write and fsync once a file)

The writer names each stage as it enters it; planned faults of storage (`faults.storage`) strike there. Without a plan
nobody watches. A watcher may raise `OSError`, which then is the storage's.
"""

from __future__ import annotations

from collections.abc import Callable

AtStage = Callable[[str], None]
"""Called with the name of a stage, or with `file` before each file is closed."""


def unwatched(stage: str) -> None:
    """Nobody watches."""
