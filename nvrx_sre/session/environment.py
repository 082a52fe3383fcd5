"""The environment of a rank's process: settings from the launcher, rank variables for user code."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from nvrx_sre.events.settings import ChildSettings
from nvrx_sre.telemetry.context import TRACEPARENT_VARIABLE

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def read_settings() -> ChildSettings | None:
    """Settings of this process, or None if no launcher started it."""
    return ChildSettings.from_environment(os.environ)


def set_rank_variables(rank: int, local_rank: int, world_size: int, traceparent: str) -> None:
    """Give user code the variables it knows from torchrun, once the rank is known, and its generation's span."""
    environment: MutableMapping[str, str] = os.environ
    environment["RANK"] = str(rank)
    environment["LOCAL_RANK"] = str(local_rank)
    environment["WORLD_SIZE"] = str(world_size)
    environment["LOCAL_WORLD_SIZE"] = str(world_size)
    environment["GROUP_RANK"] = "0"
    environment[TRACEPARENT_VARIABLE] = traceparent


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
