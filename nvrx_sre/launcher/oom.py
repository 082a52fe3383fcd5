"""OOM kills counted by the kernel for our cgroup, so that they are told from other SIGKILLs (cgroup v1 and v2)."""

from __future__ import annotations

from pathlib import Path


def _candidates() -> list[Path]:
    paths = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            paths.append(Path(f"/sys/fs/cgroup{group}/memory.events"))
        elif "memory" in controllers.split(","):
            paths.append(Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control"))
    return paths


class OomCounter:
    """Tells whether the kernel killed something of this cgroup since the last look."""

    def __init__(self) -> None:
        self._path = next((path for path in _candidates() if path.exists()), None)
        self._seen = self._read()

    def rose(self) -> bool:
        """True if the counter rose since the last call; False where there is no counter."""
        count = self._read()
        rose, self._seen = count > self._seen, count
        return rose

    def _read(self) -> int:
        if self._path is None:
            return 0
        try:
            pairs = [line.split() for line in self._path.read_text().splitlines()]
        except OSError:
            return 0
        return next((int(pair[1]) for pair in pairs if pair[0] == "oom_kill"), 0)
