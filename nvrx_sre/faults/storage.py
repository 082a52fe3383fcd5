"""Makes planned faults of storage happen, in the writer, at the stage where the plan says so.

Model: the writer names each stage as it enters it (`at`); a fault fires at its stage of the first save at or after
its step, as often as its passes allow. `slow_storage` without a stage lengthens every file of every save from its
step on, and is announced once. A fault that strikes is announced before it does, so that the launcher counts it.

- `writer_kill` ends this process by SIGKILL, with whatever is half written.
- `launcher_kill` stands still: the launcher ends itself when it has put the announcement on record.
- `no_space`, `io_error` raise what the kernel raises (ENOSPC, EIO): the way to a disk that fails on demand.
- `slow_storage` waits.

Loaded by the writer only when the plan holds such a fault. Thread safety: stages may be named by any thread of the
writer; each is decided under a lock. Must not: load torch.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping

from nvrx_sre.faults.plan import STORAGE_KINDS, FaultKind, FaultSpec

ANY_FILE = "file"
"""Stage that each file of a save passes just before it is closed; where a lasting `slow_storage` waits."""
DEFAULT_STAGE = "write"
"""Where a fault of storage without a stage strikes."""

Announce = Callable[[str, int, int], object]
"""(text of the fault, step, passes)"""


class StorageFaults:
    """The faults of storage of one writer process."""

    def __init__(self, specs: Iterable[str], announce: Announce) -> None:
        self._specs = [spec for spec in map(FaultSpec.parse, specs) if spec.kind in STORAGE_KINDS]
        self._announce = announce
        self._passes: dict[FaultSpec, int] = {}
        self._struck: set[FaultSpec] = set()
        self._step = 0
        self._lock = threading.Lock()

    def begin(self, step: int, passes: Mapping[str, int]) -> None:
        """A save of `step` begins; `passes`: how often each fault has fired in the run, by its text."""
        with self._lock:
            self._step = step
            self._struck.clear()
            for spec in self._specs:
                self._passes[spec] = max(self._passes.get(spec, 0), passes.get(str(spec), 0))

    def at(self, stage: str) -> None:
        """The save is at `stage`. Returns, raises `OSError`, waits, or never comes back."""
        for spec in self._due(stage):
            _KINDS[spec.kind](spec)

    def _due(self, stage: str) -> list[FaultSpec]:
        with self._lock:
            found = [spec for spec in self._specs if self._is_due(spec, stage)]
            for spec in found:
                if _is_lasting(spec) and self._passes[spec]:
                    continue
                self._struck.add(spec)
                self._passes[spec] += 1
                self._announce(str(spec), self._step, self._passes[spec])
            return found

    def _is_due(self, spec: FaultSpec, stage: str) -> bool:
        if self._step < spec.step:
            return False
        if _is_lasting(spec):
            return stage == ANY_FILE
        is_here = stage == (spec.phase or DEFAULT_STAGE) and spec not in self._struck
        return is_here and not spec.is_spent({str(spec): self._passes[spec]})


def _is_lasting(spec: FaultSpec) -> bool:
    return spec.kind is FaultKind.SLOW_STORAGE and spec.phase is None


def _kill(spec: FaultSpec) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stand_still(spec: FaultSpec) -> None:
    threading.Event().wait()  # this process dies with the launcher


def _refuse(number: int) -> Callable[[FaultSpec], None]:
    def refuse(spec: FaultSpec) -> None:
        raise OSError(number, f"{os.strerror(number)} (planned fault {spec})")

    return refuse


def _wait(spec: FaultSpec) -> None:
    threading.Event().wait(spec.value)


_KINDS: dict[FaultKind, Callable[[FaultSpec], None]] = {
    FaultKind.WRITER_KILL: _kill,
    FaultKind.LAUNCHER_KILL: _stand_still,
    FaultKind.NO_SPACE: _refuse(errno.ENOSPC),
    FaultKind.IO_ERROR: _refuse(errno.EIO),
    FaultKind.SLOW_STORAGE: _wait,
}
