"""Is there room for hot slots? Asked before memory is touched, because later the kernel answers by killing.

The limit of every cgroup above this process counts (v2 `memory.max`, v1 `memory.limit_in_bytes`), with what
it already uses less its reclaimable page cache; beside it the host's available memory. Reads /proc and /sys
at each call, holds no state. Must not: allocate what it asks about.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nvrx_sre.core.errors import UserError

USABLE_FRACTION = 0.8
"""Share of a cgroup's limit that slots, workers and writer may take together."""
_UNLIMITED_BYTES = 1 << 60
"""v1 writes 'no limit' as a number near 2**63; nothing real is above an exbibyte."""


def check_room(wanted_bytes: int, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
    """Raise `UserError` if `wanted_bytes` more would pass 80 % of a cgroup's limit or the host's free memory."""
    for directory, limit_bytes, used_bytes in _limits(proc, cgroups):
        usable_bytes = int(limit_bytes * USABLE_FRACTION)
        if used_bytes + wanted_bytes > usable_bytes:
            left_bytes = max(0, usable_bytes - used_bytes)
            raise UserError(
                f"hot checkpoint slots need {_mib(wanted_bytes)} but the memory limit {_mib(limit_bytes)} "
                f"of {directory} leaves {_mib(left_bytes)} (80 % of it, {_mib(used_bytes)} in use): "
                "raise the limit, use a smaller model, or switch the hot tier off with --hot-every 0"
            )
    available_bytes = _meminfo(proc, "MemAvailable")
    if available_bytes is not None and wanted_bytes > available_bytes:
        raise UserError(
            f"hot checkpoint slots need {_mib(wanted_bytes)} but the host has {_mib(available_bytes)} available: "
            "free memory, or switch the hot tier off with --hot-every 0"
        )


def memory_in_force(
    *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[int | None, int | None]:
    """(limit, used) in bytes of the cgroup around this process that has the least left, else of the host.

    Used is without reclaimable page cache. None where it cannot be read.
    """
    limited = [(limit_bytes, used_bytes) for _, limit_bytes, used_bytes in _limits(proc, cgroups)]
    if limited:
        return min(limited, key=lambda item: item[0] - item[1])
    total_bytes, available_bytes = _meminfo(proc, "MemTotal"), _meminfo(proc, "MemAvailable")
    if total_bytes is None or available_bytes is None:
        return None, None
    return total_bytes, total_bytes - available_bytes


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[Path, int, int]]:
    """(directory, limit, use) in bytes of each limited memory cgroup around this process."""
    for directory in _directories(proc, cgroups):
        limit_bytes = _number(directory / "memory.max")
        used_bytes = _number(directory / "memory.current")
        if limit_bytes is None:
            limit_bytes = _number(directory / "memory.limit_in_bytes")
            used_bytes = _number(directory / "memory.usage_in_bytes")
        if limit_bytes is not None and limit_bytes < _UNLIMITED_BYTES:
            yield directory, limit_bytes, max(0, (used_bytes or 0) - _reclaimable(directory))


def _directories(proc: Path, cgroups: Path) -> list[Path]:
    """The process's memory cgroups and all above them, v2 and v1, nearest first, each once."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        inner = root / path.lstrip("/")
        found += [inner, *(parent for parent in inner.parents if parent == root or root in parent.parents), root]
    return list(dict.fromkeys(found))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(directory: Path) -> int:
    """Page cache of files that the kernel would give back. Shared memory is on other lists and stays counted."""
    try:
        pairs = [line.split() for line in (directory / "memory.stat").read_text().splitlines()]
    except OSError:
        return 0
    values = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    return sum(values.get(f"total_{name}", values.get(name, 0)) for name in ("inactive_file", "active_file"))


def _meminfo(proc: Path, name: str) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
