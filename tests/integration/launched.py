"""Run the real command line in a process of its own and read back what it left: summary, journal, exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nvrx_sre.core import processes
from nvrx_sre.events import journal
from nvrx_sre.events.schema import Event, Record, Role, WorkerStarted

RUN_LIMIT_S = 300
"""A run that takes longer has hung; its journal is printed."""
PATIENT = ("--config", str(Path(__file__).with_name("patient.toml")))
"""Graces and bounds that hold on a busy machine too."""
FINDS_HANGS = ("--step-deadline", "5")
"""For runs whose ranks hang; those of others have no deadline that a busy machine could miss."""

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that has ended."""

    exit_code: int
    output: str
    run_dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        """Content of summary.json."""
        value: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return value

    @property
    def records(self) -> list[Record]:
        """The journal."""
        return read(self.run_dir)

    @property
    def spans(self) -> list[dict[str, Any]]:
        """Finished spans."""
        return [json.loads(line) for line in (self.run_dir / "spans.jsonl").read_text().splitlines()]

    def events(self, kind: type[E]) -> list[tuple[Record, E]]:
        """Records of one kind with their events."""
        return [(record, record.event) for record in self.records if isinstance(record.event, kind)]

    def pids(self) -> set[int]:
        """Every child that the run ever started."""
        return {event.pid for _, event in self.events(WorkerStarted)}

    def rank_pids(self) -> set[int]:
        """Workers and standbys that the run ever started."""
        return {event.pid for _, event in self.events(WorkerStarted) if event.role is not Role.WRITER}

    def explain(self) -> str:
        """What a failing assertion should show."""
        lines = [f"{r.generation} {r.rank} {type(r.event).__name__} {r.event}"[:300] for r in self.records]
        return "\n".join([self.output[-4000:], *lines[-120:], *logs(self.run_dir)])


def read(run_dir: Path) -> list[Record]:
    """The journal of a run so far, [] before it exists."""
    directory = run_dir / "journal"
    return list(journal.read_journal(directory)) if directory.is_dir() else []


def logs(run_dir: Path) -> Iterator[str]:
    """Ends of all children's logs."""
    for path in sorted((run_dir / "logs").glob("*.log")):
        yield f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"


def start(
    arguments: list[str], module: str = "nvrx_sre", *, prefix: Sequence[str] = (), **environment: str
) -> subprocess.Popen[str]:
    """Start `nvrx-sre ARGUMENTS` as the leader of its own process group, by the command `prefix` if there is one."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", module, *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(popen: subprocess.Popen[str], run_dir: Path, limit_s: float = RUN_LIMIT_S) -> Ended:
    """Wait for a started command."""
    try:
        output, _ = popen.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        popen.kill()
        output, _ = popen.communicate()
        ended = Ended(exit_code=-9, output=output, run_dir=run_dir)
        raise AssertionError(f"the run hung\n{ended.explain()}") from None
    return Ended(exit_code=popen.returncode, output=output, run_dir=run_dir)


def train_arguments(run_dir: Path, *more: str) -> list[str]:
    """A small, quick training run: 24 steps, a save each 8."""
    common = ["--run-dir", str(run_dir), "--steps", "24", "--save-every", "8", "--seq-len", "32", "--batch-size", "4"]
    return ["train", *common, *PATIENT, "--metrics-linger", "0", *more]


def train(run_dir: Path, *more: str) -> Ended:
    """Run a training run to its end."""
    return finish(start(train_arguments(run_dir, *more)), run_dir)


def wait_for(run_dir: Path, popen: subprocess.Popen[str], wanted: Callable[[Record], bool]) -> Record:
    """Follow the journal until a record fits; fails when the process ends before."""
    seen = 0
    while True:
        alive = popen.poll() is None
        records = read(run_dir)
        for record in records[seen:]:
            if wanted(record):
                return record
        seen = len(records)
        if not alive:
            raise AssertionError(f"the run ended before the record came:\n{popen.communicate()[0][-4000:]}")
        try:
            popen.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue


def live(pids: set[int]) -> set[int]:
    """Those of `pids` that still run."""
    return {pid for pid in pids if processes.is_alive(pid, processes.start_ticks(pid))}
