"""What a rank and its launcher hold: threads, descriptors, sockets, memory, counted from /proc.

A census appends one line of JSON a process to `FOLDER/rank-R.jsonl` and, on rank 0, to `FOLDER/launcher.jsonl`:
`{"threads", "fds", "sockets", "shared_bytes", "rss_bytes"}`. The launcher is the ancestor whose parent is the
benchmark.

Process safety: each process appends to files of its own. Must not: load torch.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from nvrx_sre.core.errors import InternalError

LAUNCHER = "launcher"
_STATUS = re.compile(r"^(VmRSS|RssShmem|Threads):\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Census:
    """Where to count."""

    folder: Path
    bench_pid: int

    def take(self, rank: int) -> None:
        """Append what this process holds, and on rank 0 what its launcher holds."""
        _append(self.folder / f"rank-{rank}.jsonl", holdings(os.getpid()))
        if rank == 0:
            _append(self.folder / f"{LAUNCHER}.jsonl", holdings(self._launcher_pid()))

    def _launcher_pid(self) -> int:
        for ancestor in psutil.Process().parents():
            if ancestor.ppid() == self.bench_pid:
                return int(ancestor.pid)
        raise InternalError(f"process {self.bench_pid} is no ancestor of this rank")


def holdings(pid: int) -> dict[str, int]:
    """What a process holds now, from /proc."""
    status = dict(_STATUS.findall(Path(f"/proc/{pid}/status").read_text()))
    targets = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            targets.append(os.readlink(entry))
        except FileNotFoundError:
            continue  # closed since the folder was read; that of the folder itself is one of them
    return {
        "threads": int(status["Threads"]),
        "fds": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "shared_bytes": int(status["RssShmem"]) * 1024,
        "rss_bytes": int(status["VmRSS"]) * 1024,
    }


def _append(path: Path, counted: dict[str, int]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(counted) + "\n")
