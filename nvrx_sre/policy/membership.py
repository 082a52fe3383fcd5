"""Which devices take part in the next generation, and as which rank.

Model: devices stand in a fixed order (node by node, by local index). Excluded ones are left out; of the rest, whole
units of `multiple` take part, the first ones in order, ranked contiguously from 0. So a rank moves only down, and a
usable device that fills no unit stays idle until another exclusion needs it.

Pure.
"""

from __future__ import annotations

from collections.abc import Container, Iterable


def members(devices: Iterable[str], excluded: Container[str], multiple: int) -> tuple[str, ...]:
    """Devices of the next world in the order of their ranks; `multiple` >= 1 devices make a unit."""
    usable = [device for device in devices if device not in excluded]
    return tuple(usable[: len(usable) - len(usable) % multiple])
