"""Stacks of a node's ranks: taken from their processes before these are torn down, kept with the incident.

    StackFile (64 KiB of shared memory a process) -> StackKeeper.keep(incident) -> thread: redact, write
                                                     incidents/00003/g00002-rank-00001.stacks.txt, .trace.json

Model: `restart.stacks` says who writes into the memory. The descriptor's offset is shared with the process: it is how
much was written, and setting it back makes room for the next generation. What a dead process left is taken at its
death. All is handed to a thread once the teardown is over, when the next generation opens, and when the run ends: a
recovery pays for a copy.

Bounded: the memory's size is sealed; the newest `MAX_GENERATIONS` of an incident and the newest `MAX_INCIDENTS` of a
run are kept on disk. Redacted as logs are. Must not: wait for a disk, raise in the launcher's loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.core.atomic import PRIVATE_FILE_MODE, make_private_directory
from nvrx_sre.events.settings import TRACE_MARK
from nvrx_sre.launcher.rundir import incident_name
from nvrx_sre.telemetry.boundary import Boundary, SinkThread
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.telemetry.redact import Redactor

MAX_BYTES = 64 * 1024
"""What a process can say: 100 frames of 100 threads would be more, a rank's own are 2 to 8 KiB."""
MAX_INCIDENTS = 32
"""Incidents of a run whose stacks are kept."""
MAX_GENERATIONS = 8
"""Generations of an incident whose stacks are kept."""
MAX_ENDED = 256
"""Dead processes whose stacks wait to be kept."""
CLOSE_S = 2.0
"""Longest wait at the end for what was not written yet (seconds)."""
NOTHING = "No stack: the process had ended, or could not be asked any more.\n"


class StackFile:
    """The launcher's end of one process's memory."""

    def __init__(self) -> None:
        """Raises `OSError` if the kernel has no descriptor or no memory left."""
        self.fd = os.memfd_create("nvrx-stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, MAX_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(self.fd)
            raise

    def num_bytes(self) -> int:
        """How much was written since it was taken last."""
        return os.lseek(self.fd, 0, os.SEEK_CUR)

    def write(self, text: str) -> None:
        """A line of the launcher's own between what the process says."""
        with contextlib.suppress(OSError):  # full
            os.write(self.fd, text.encode())

    def take(self) -> str:
        """What was written; makes room."""
        content = os.pread(self.fd, self.num_bytes(), 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        return content.decode(errors="replace")

    def close(self) -> None:
        """Give the memory back."""
        os.close(self.fd)


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """What the process of a rank left of one generation."""

    rank: int
    generation: int
    text: str


@dataclass(kw_only=True)
class _Place:
    """Where a process writes, and whose stacks these are."""

    file: StackFile
    rank: int | None = None
    generation: int | None = None
    """None before it has entered one: then it is that of its launcher."""


class StackKeeper:
    """Keeps stacks below `directory`. The launcher's loop only; the writing has a thread of its own."""

    def __init__(self, directory: Path, redactor: Redactor, boundary: Boundary) -> None:
        self.boundary = boundary
        """Counts what could not be written; set before the first `keep`."""
        self._directory = directory
        self._redactor = redactor
        self._places: dict[int, _Place] = {}
        self._ended: deque[Stacks] = deque(maxlen=MAX_ENDED)
        self._generation = 0
        self._sink: SinkThread[tuple[int, Stacks]] | None = None

    def open(self, child: int, rank: int | None) -> StackFile:
        """Where a child that is about to be started writes. Raises `OSError` as `StackFile` does."""
        file = StackFile()
        self._places[child] = _Place(file=file, rank=rank)
        return file

    def assign(self, child: int, rank: int) -> None:
        """The child will be `rank`; what it was before names what it writes until then."""
        place = self._places.get(child)
        if place is not None and place.rank is None:
            place.rank = rank

    def enter(self, child: int, rank: int, generation: int) -> None:
        """The child is `rank` of `generation` from now on."""
        self._generation = generation
        place = self._places.get(child)
        if place is not None:
            place.rank, place.generation = rank, generation

    def end(self, child: int) -> None:
        """The child is dead: what it wrote is all there will be."""
        place = self._places.pop(child, None)
        if place is None:
            return
        stacks = self._taken(place)
        place.file.close()
        if stacks is not None:
            self._ended.append(stacks)

    def keep(self, incident: int) -> None:
        """Hand everything that was written to the thread, as `incident`'s; 0: there is none, it is dropped."""
        found = [stacks for place in self._places.values() if (stacks := self._taken(place)) is not None]
        found = [stacks for stacks in found if stacks.text] + list(self._ended)
        self._ended.clear()
        if not incident or not found:
            return
        if self._sink is None:
            self._sink = SinkThread(Component.OTHER, self._write, self.boundary)
        for stacks in found:
            self._sink.submit((incident, stacks))

    def close(self) -> None:
        """Finish writing, bounded, and give the memory back."""
        for place in self._places.values():
            place.file.close()
        self._places.clear()
        if self._sink is not None:
            self._sink.close(CLOSE_S)

    def _taken(self, place: _Place) -> Stacks | None:
        """None for a process that never was a rank."""
        text = place.file.take()
        if place.rank is None:
            return None
        generation = self._generation if place.generation is None else place.generation
        return Stacks(rank=place.rank, generation=generation, text=text)

    # --- the thread -----------------------------------------------------------------------------------------

    def _write(self, batch: Sequence[tuple[int, Stacks]]) -> None:
        for incident, stacks in batch:
            directory = self._directory / incident_name(incident)
            make_private_directory(directory)
            self._write_one(directory / f"g{stacks.generation:05d}-rank-{stacks.rank:05d}", stacks.text)
        for incident in {incident for incident, _ in batch}:
            _keep_newest_generations(self._directory / incident_name(incident))
        _keep_newest_incidents(self._directory)

    def _write_one(self, stem: Path, text: str) -> None:
        stack, trace = split(text)
        path = stem.with_suffix(".stacks.txt")
        redacted = self._redactor.text(stack or NOTHING).encode()
        # A rank may have had several processes in one attempt: each adds to the file, as long as there is room.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE_MODE), "ab") as file:
            file.write(redacted[: max(0, MAX_BYTES - file.tell())])
        if trace is not None:
            content = json.dumps(self._redactor.value(trace)) + "\n"
            with open(os.open(stem.with_suffix(".trace.json"), _REPLACE, PRIVATE_FILE_MODE), "w") as file_of_trace:
                file_of_trace.write(content)


_REPLACE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def split(text: str) -> tuple[str, object | None]:
    """(stacks, the flight recorder's trace or None): a trace that was cut is left out.

    The monitor thread may have written it into a line of the stack that the main thread was writing, word by word.
    """
    stack: list[str] = []
    trace = None
    for line in text.splitlines(keepends=True):
        before, mark, found = line.partition(TRACE_MARK)
        try:
            trace = json.loads(found) if mark else trace
        except ValueError:
            mark = "" if before else mark  # a line of the user's that holds the mark, or a trace that was cut
        stack.append(before if mark else line)
    return "".join(stack), trace


def _keep_newest_generations(directory: Path) -> None:
    names = sorted(path.name for path in directory.iterdir())
    newest = sorted({name.partition("-")[0] for name in names})[-MAX_GENERATIONS:]
    for name in names:
        if name.partition("-")[0] not in newest:
            (directory / name).unlink(missing_ok=True)


def _keep_newest_incidents(directory: Path) -> None:
    for path in sorted(directory.iterdir())[:-MAX_INCIDENTS]:
        shutil.rmtree(path, ignore_errors=True)
