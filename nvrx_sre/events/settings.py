"""What a launcher tells a child once, in one environment variable: part of the contract, like the channel.

Pure: both sides bring their own mapping; nothing here reads the process's environment.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from nvrx_sre.core.errors import InternalError

SETTINGS_VARIABLE = "NVRX_SRE_SETTINGS"
STACKS_SIGNAL = 40
"""Makes a child write the stacks of all its threads for its launcher, also while native code holds the interpreter's
lock: SIGRTMIN + 6 on Linux."""
TRACE_MARK = "@trace "
"""Begins the one line of JSON among a child's stacks that is its flight recorder's."""
LAUNCHERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a preemption may send to every process of the job. The launcher decides; the fork server ignores them, and is
started with them blocked, so that none can strike before."""


@dataclass(frozen=True, kw_only=True)
class ChildSettings:
    """Constant for the life of a child; what changes with a generation comes over the channel."""

    run: str
    run_dir: str
    launcher_pid: int
    role: str
    attempt: int
    save_every: int
    waits_for_writer: bool
    interrupt_signal: int
    fault_specs: tuple[str, ...]
    group_timeout_s: float

    def to_environment(self) -> dict[str, str]:
        """Environment entries that carry these settings."""
        return {SETTINGS_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ChildSettings | None:
        """Settings in `environment`, None if no launcher put any there.

        Raises `InternalError` for settings of another version.
        """
        text = environment.get(SETTINGS_VARIABLE)
        if text is None:
            return None
        try:
            value = json.loads(text)
            value["fault_specs"] = tuple(value["fault_specs"])
            return cls(**value)
        except (ValueError, TypeError, KeyError) as error:
            raise InternalError(f"{SETTINGS_VARIABLE} cannot be read: {error}") from error
