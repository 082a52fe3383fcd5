"""What a child process is told by its launcher, through its environment. The only reader of it on this side."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass

from nvrx_sre.core.errors import InternalError

SETTINGS_VARIABLE = "NVRX_SRE_SETTINGS"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class ChildSettings:
    """Constant for the life of a child; what changes with a generation comes over the channel."""

    run: str
    run_dir: str
    launcher_pid: int
    role: str
    attempt: int
    hot_every: int
    save_every: int
    interrupt_signal: int
    fault_specs: tuple[str, ...]
    group_timeout_s: float

    def to_environment(self) -> dict[str, str]:
        """Environment entries that carry these settings."""
        return {SETTINGS_VARIABLE: json.dumps(asdict(self))}


def read_settings(environment: Mapping[str, str] | None = None) -> ChildSettings | None:
    """Settings of this process, or None if no launcher started it."""
    text = (os.environ if environment is None else environment).get(SETTINGS_VARIABLE)
    if text is None:
        return None
    try:
        value = json.loads(text)
        value["fault_specs"] = tuple(value["fault_specs"])
        return ChildSettings(**value)
    except (ValueError, TypeError, KeyError) as error:
        raise InternalError(f"{SETTINGS_VARIABLE} cannot be read: {error}") from error


def set_rank_variables(rank: int, local_rank: int, world_size: int) -> None:
    """Give user code the variables it knows from torchrun, once the rank is known."""
    environment: MutableMapping[str, str] = os.environ
    environment["RANK"] = str(rank)
    environment["LOCAL_RANK"] = str(local_rank)
    environment["WORLD_SIZE"] = str(world_size)
    environment["LOCAL_WORLD_SIZE"] = str(world_size)
    environment["GROUP_RANK"] = "0"


class _WatchedEnviron(type(os.environ)):  # type: ignore[misc]  # os._Environ has no public name
    """`os.environ` that notes reads of rank variables before a rank is known."""

    touched: str = ""

    def __getitem__(self, key: str) -> str:
        if key in RANK_VARIABLES:
            _WatchedEnviron.touched = _WatchedEnviron.touched or key
        value: str = super().__getitem__(key)
        return value


def watch_rank_variables() -> None:
    """Start noting reads of rank variables by the user's script."""
    os.environ.__class__ = _WatchedEnviron


def rank_variable_read() -> str:
    """First rank variable that was read so far, '' if none."""
    return _WatchedEnviron.touched


def stop_watching_rank_variables() -> None:
    """From now on the rank is known; reads are the normal thing."""
    if isinstance(os.environ, _WatchedEnviron):
        os.environ.__class__ = _WatchedEnviron.__mro__[1]
