"""Several writers, one checkpoint: what they tell each other through the attempt's directory.

    every writer    plan-0000K.json   layouts of its ranks, and a form (dtype, shape, digest) of each plain tensor
                    ... until all plans are there: from the same plans every writer makes the same global plan ...
                    its ranks' files, synced
                    part-0000K.json   those files with size and checksum, and where each piece of a tensor lies
    the leader      ... until all parts are in, or a deadline ...   manifest, rename

A record is written atomically, guards itself with a checksum, and names the attempt it belongs to. A leader that must
give up removes the attempt's directory, any other writer leaves `end-0000K.json` in it: whoever waits notices either.
The records are gone before the manifest is written: they are no part of the checkpoint.

With one writer nothing of this touches the disk. Blocking: `gather` waits for the slowest writer. Must not: import
torch, use a process group.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from nvrx_sre.checkpoint.commit import SaveRefused
from nvrx_sre.checkpoint.layout import canonical_json
from nvrx_sre.core.atomic import PRIVATE_DIRECTORY_MODE, write_bytes_atomically
from nvrx_sre.core.clock import SystemClock, to_ns
from nvrx_sre.events.schema import SaveFailure

PLAN = "plan"
PART = "part"
END = "end"
POLL_S = 0.05
"""Pause between two looks: a shared filesystem tells nobody of a file that another node made."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of the save this writer writes."""

    part: int = 0
    """0 is the leader's, which commits."""
    num_parts: int = 1
    first_rank: int = 0
    attempt: str = ""
    """Name on which all writers of the save agreed; '' where there is only one."""
    deadline_s: float = 600.0
    """Longest wait for the other parts."""

    @property
    def is_leader(self) -> bool:
        """This writer commits."""
        return self.part == 0


class Exchange:
    """The records of one attempt, seen from one writer. `check` is called while waiting and may raise."""

    def __init__(self, directory: Path, share: Share, check: Callable[[], None]) -> None:
        self._directory = directory
        self._share = share
        self._check = check
        self._clock = SystemClock()
        self._deadline_ns = self._clock.monotonic_ns() + to_ns(share.deadline_s)
        self._never = threading.Event()
        self._has_joined = False

    def give_up(self) -> None:
        """Tell the others that this writer will not put in its part, unless the attempt is gone already.

        Raises `OSError` or `StorageError` if they cannot be told; they then wait until their deadline.
        """
        if not self._has_joined:
            self._directory.mkdir(mode=PRIVATE_DIRECTORY_MODE, exist_ok=True)
        if self._directory.exists():
            self.put(END, {})

    def put(self, kind: str, body: dict[str, Any]) -> None:
        """Show this writer's record to the others. Raises `StorageError`."""
        text = canonical_json({"attempt": self._share.attempt, **body})
        record = {"checksum": xxhash.xxh3_128_hexdigest(text.encode()), "body": text}
        write_bytes_atomically(self._path(kind, self._share.part), json.dumps(record).encode())
        self._has_joined = True

    def gather(self, kind: str) -> list[dict[str, Any]]:
        """Records of all writers, in the order of their parts. Blocks until the last is there.

        Raises `SaveRefused` (interrupted) past the deadline, or when the attempt is gone.
        """
        return [self._wait(kind, part) for part in range(self._share.num_parts)]

    def clear(self) -> None:
        """Remove every record. Raises `OSError`."""
        for kind in (PLAN, PART, END):
            for part in range(self._share.num_parts):
                self._path(kind, part).unlink(missing_ok=True)

    def _wait(self, kind: str, part: int) -> dict[str, Any]:
        while (body := self._read(kind, part)) is None:
            self._check()
            if not self._directory.exists() or any(self._directory.glob(f"{END}-*.json")):
                raise _given_up(f"another writer gave attempt {self._share.attempt} up")
            if self._clock.monotonic_ns() >= self._deadline_ns:
                raise _given_up(f"{kind} {part} did not come within {self._share.deadline_s:g} s")
            self._never.wait(POLL_S)
        return body

    def _read(self, kind: str, part: int) -> dict[str, Any] | None:
        """The record, None while it is not there or not readable as a whole."""
        try:
            record = json.loads(self._path(kind, part).read_bytes())
            text = record["body"]
            if xxhash.xxh3_128_hexdigest(text.encode()) != record["checksum"]:
                return None
            body: dict[str, Any] = json.loads(text)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return body if body.get("attempt") == self._share.attempt else None

    def _path(self, kind: str, part: int) -> Path:
        return self._directory / f"{kind}-{part:05d}.json"


def _given_up(message: str) -> SaveRefused:
    return SaveRefused(message, reason=SaveFailure.INTERRUPTED)
