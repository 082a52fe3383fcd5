"""The run directory: layout, identity, epochs, leftovers of a launcher that was killed.

Paths are those of docs/reference/contracts.md. Taking an epoch is an exclusive creation, so two launchers
can never hold the same one. On one host a live predecessor is refused; a dead one's children are ended by pid
*and* start time, so nothing else is ever hit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvrx_sre.checkpoint import discover
from nvrx_sre.core import processes
from nvrx_sre.core.atomic import create_exclusively, make_private_directory, write_json_atomically
from nvrx_sre.core.errors import RunDirectoryBusy, StorageError, Superseded, UserError
from nvrx_sre.core.identity import RUN_FILE
from nvrx_sre.events.schema import HaltReason

MAX_EPOCH_TRIES = 100


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One leadership of the run."""

    number: int
    node: str
    pid: int
    start_ticks: int


def config_digest(items: Mapping[str, str]) -> str:
    """Digest of what identifies a run's configuration."""
    return hashlib.sha256(json.dumps(dict(items), sort_keys=True).encode()).hexdigest()[:16]


def incident_name(number: int) -> str:
    """Name of the directory of what was kept of an incident."""
    return f"{number:05d}"


class RunDirectory:
    """Paths and identity of one run."""

    def __init__(self, path: Path, node_rank: int = 0) -> None:
        self.path = path
        self.journal = path / "journal"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.epochs = path / "epochs"
        self.incidents = path / "incidents"
        self.spans = path / "spans.jsonl"
        self.summary = path / "summary.json"
        self.halt = path / "halt.json"
        self._identity = path / RUN_FILE
        of_node = f"-{node_rank:05d}" if node_rank else ""
        self.metrics = path / f"metrics{of_node}.json"
        self.forkserver_log = self.logs / f"forkserver{of_node}.log"
        self._children = path / f"children{of_node}.json"

    def prepare(self, run: str, items: Mapping[str, str]) -> bool:
        """Create the directory, or check that it is this run's; True if the run existed before.

        Raises `UserError` if it cannot be written or belongs to another run or configuration.
        """
        try:
            make_private_directory(self.path)
            for part in (self.journal, self.checkpoints, self.logs, self.epochs):
                make_private_directory(part)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            raise UserError(
                f"run directory {self.path} cannot be used: {error.strerror}; choose another with --run-dir"
            ) from error
        identity = {"run": run, "config_digest": config_digest(items), "config": dict(items)}
        if not self._identity.exists():
            try:
                write_json_atomically(self._identity, identity)
            except StorageError as error:
                raise UserError(f"{error}; choose another run directory with --run-dir") from error
            return False
        self._check_identity(read_json(self._identity), identity)
        return True

    def _check_identity(self, found: Any, wanted: dict[str, Any]) -> None:
        if not isinstance(found, dict) or "config" not in found:
            raise UserError(f"{self._identity} is not a run's identity; choose another run directory with --run-dir")
        if found.get("run") != wanted["run"]:
            raise UserError(
                f"run directory {self.path} belongs to run {found.get('run')!r}, not {wanted['run']!r}; "
                "choose another with --run-dir"
            )
        was, now = found["config"], wanted["config"]
        if was and now and not set(was) & set(now):
            raise UserError(f"run directory {self.path} was made by {_made_by(was)}; choose another with --run-dir")
        changed = sorted(key for key in now if was.get(key) != now[key])
        if changed:
            detail = ", ".join(f"{key}: {was.get(key)} -> {now.get(key)}" for key in changed)
            raise UserError(
                f"run directory {self.path} holds a run of another configuration ({detail}); "
                "choose another with --run-dir"
            )

    def take_epoch(self) -> Epoch:
        """Take the next epoch.

        Raises `RunDirectoryBusy` if the newest epoch's launcher is alive on this host.
        """
        node, pid = socket.gethostname(), os.getpid()
        ticks, boot = processes.start_ticks(pid), processes.boot_id()
        content = {"node": node, "pid": pid, "start_ticks": ticks, "boot_id": boot}
        for _ in range(MAX_EPOCH_TRIES):
            newest = self.newest_epoch()
            self._refuse_live(newest)
            number = newest + 1
            if create_exclusively(self._epoch_path(number), (json.dumps(content) + "\n").encode()):
                return Epoch(number=number, node=node, pid=pid, start_ticks=ticks)
        raise Superseded(f"run directory {self.path}: other launchers keep taking the epoch")

    def newest_epoch(self) -> int:
        """Highest epoch ever taken, 0 if none."""
        return discover.highest_epoch(self.path)

    def has_epoch(self, number: int) -> bool:
        """The epoch was taken here, by whichever node."""
        return self._epoch_path(number).exists()

    def check_leads(self, epoch: int) -> None:
        """Raise `Superseded` if a higher epoch than `epoch` was taken."""
        newest = self.newest_epoch()
        if newest > epoch:
            raise Superseded(
                f"epoch {newest} has taken over run directory {self.path}: this launcher of epoch {epoch} ends"
            )

    def live_launcher(self) -> int | None:
        """Process of this host that holds the newest epoch and still runs, None if there is none."""
        return self._live_holder(self.newest_epoch())

    def newest_holder(self) -> dict[str, Any]:
        """What the newest epoch says of the launcher that took it (node, pid, ...); empty if there is none."""
        value = read_json(self._epoch_path(self.newest_epoch()))
        return value if isinstance(value, dict) else {}

    def request_halt(self, reason: str, by: HaltReason) -> None:
        """Ask the run's launcher to save, to stop, and to stay stopped. Raises `StorageError`."""
        write_json_atomically(self.halt, {"reason": reason, "by": by.value})

    def halt_request(self) -> tuple[str, HaltReason] | None:
        """Why a halt was asked for and by whom, None if it was not. A file that cannot be read asks for one as well."""
        if not self.halt.exists():
            return None
        value = read_json(self.halt)
        value = value if isinstance(value, dict) else {"reason": "unreadable halt request"}
        by = HaltReason.BRAKE if value.get("by") == HaltReason.BRAKE else HaltReason.OPERATOR
        return str(value.get("reason", "")), by

    def _epoch_path(self, number: int) -> Path:
        return self.epochs / f"{number:08d}.json"

    def _refuse_live(self, newest: int) -> None:
        pid = self._live_holder(newest)
        if pid is not None:
            raise RunDirectoryBusy(
                f"run directory {self.path} is in use by launcher process {pid} of this host; "
                "stop it first or choose another with --run-dir"
            )

    def _live_holder(self, epoch: int) -> int | None:
        holder = read_json(self._epoch_path(epoch))
        if not isinstance(holder, dict) or holder.get("boot_id") != processes.boot_id():
            return None
        pid = int(holder["pid"])
        return pid if processes.is_alive(pid, int(holder["start_ticks"])) else None

    def rank_log(self, rank: int) -> Path:
        """Where the output of `rank` goes now: a link to the log of the process that is this rank."""
        return self.logs / f"rank-{rank:05d}.log"

    def point_rank_log(self, rank: int, log: Path) -> None:
        """`rank` is now the process that writes `log`. Best effort: only people follow the link."""
        link = self.rank_log(rank)
        temporary = link.with_suffix(".new")
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(log.name)
            temporary.replace(link)

    def record_children(self, children: Mapping[int, int]) -> None:
        """Remember live children (pid -> start_ticks) for a successor. Not synced: it guards a live boot only."""
        value = {"boot_id": processes.boot_id(), "children": {str(pid): ticks for pid, ticks in children.items()}}
        write_json_atomically(self._children, value, durable=False)

    def end_leftovers(self) -> int:
        """Kill recorded children of a dead predecessor that still run; how many there were."""
        value = read_json(self._children)
        if not isinstance(value, dict) or value.get("boot_id") != processes.boot_id():
            return 0
        found = value.get("children", {}).items()
        return sum(processes.kill_session(int(pid), int(ticks)) for pid, ticks in found)


def _made_by(config: Mapping[str, str]) -> str:
    """The command whose runs have such a configuration."""
    return f"`nvrx-sre launch {config['script']}`" if "script" in config else "`nvrx-sre train`"


def read_json(path: Path) -> Any:
    """Content of a JSON file, None if it is missing or broken."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
