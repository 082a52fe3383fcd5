"""What a run directory tells the brake: whether its run opted in, and since when an alert may count.

`brake.json` is written by each launcher's start and renewed by a resume, both through here. One small file, so that
the brake need not read a journal within its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.core.atomic import write_json_atomically
from nvrx_sre.launcher.rundir import RunDirectory, read_json


@dataclass(frozen=True, kw_only=True)
class BrakeConsent:
    """Content of brake.json."""

    is_allowed: bool
    since_ns: int
    """When the run last started or was resumed (Unix epoch)."""


def write_consent(directory: RunDirectory, consent: BrakeConsent) -> None:
    """Record the consent of this start. Raises `StorageError`."""
    write_json_atomically(_path(directory), {"allowed": consent.is_allowed, "since_ns": consent.since_ns})


def read_consent(directory: RunDirectory) -> BrakeConsent:
    """What the run's newest start said; a file that is missing or damaged allows nothing."""
    value = read_json(_path(directory))
    if not isinstance(value, dict) or type(value.get("since_ns")) is not int:
        return BrakeConsent(is_allowed=False, since_ns=0)
    return BrakeConsent(is_allowed=value.get("allowed") is True, since_ns=value["since_ns"])


def _path(directory: RunDirectory) -> Path:
    return directory.path / "brake.json"
