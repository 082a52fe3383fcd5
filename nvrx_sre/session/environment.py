"""The environment of a rank's process: settings from the launcher, rank variables for user code."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping

from nvrx_sre.core.errors import InternalError
from nvrx_sre.events import messages as wire
from nvrx_sre.events.channel import CHANNEL_FD_VARIABLE, Channel
from nvrx_sre.events.settings import SETTINGS_VARIABLE, ChildSettings
from nvrx_sre.telemetry.context import TRACEPARENT_VARIABLE

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN_RENDEZVOUS = "env:// rendezvous"
"""In torch's message to a script that asks for the process group that torchrun prepares."""
PORT_TAKEN = "name: EADDRINUSE"
"""In torch's message to one that hosts a store where there is one (2.11 to 2.13); it also has the port."""
OWN_GROUP_HINT = (
    "the script forms its process group by itself: decorate its main function with "
    "@nvrx_sre.resilient, and call ctx.init_process_group() there"
)


def take_channel() -> Channel:
    """The fork server's end of its channel. Its descriptor is not inherited by anything that it executes."""
    descriptor = int(os.environ.pop(CHANNEL_FD_VARIABLE))
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))


def enter(environment: Mapping[str, str]) -> ChildSettings:
    """Take over what this process has beside its fork server's environment; the settings in it.

    Raises `InternalError` if there are none, or those of another version.
    """
    os.environ.update(environment)
    settings = ChildSettings.from_environment(environment)
    if settings is None:
        raise InternalError(f"{SETTINGS_VARIABLE} is not set")
    return settings


def own_device_index() -> int:
    """The device that a worker was started for; the first one in a standby, which has none yet."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def set_rank_variables(assign: wire.Assign, go: wire.Go, traceparent: str) -> None:
    """Give user code the variables it knows from torchrun, once the rank is known, and its generation's span.

    Ranks of several nodes meet over the interface that the launcher found; gloo reads it when it forms a group.
    """
    environment: MutableMapping[str, str] = os.environ
    environment["RANK"] = str(assign.rank)
    environment["LOCAL_RANK"] = str(assign.local_rank)
    environment["WORLD_SIZE"] = str(go.world_size)
    environment["LOCAL_WORLD_SIZE"] = str(assign.local_world_size)
    environment["GROUP_RANK"] = str(assign.node_rank)
    environment[TRACEPARENT_VARIABLE] = traceparent
    if go.interface:
        environment[INTERFACE_VARIABLE] = go.interface
        environment["MASTER_ADDR"], environment["MASTER_PORT"] = go.store_host, str(go.store_port)


def asks_for_torchruns_group(error: Exception, store_port: int | None = None) -> bool:
    """True if the script has called torch's `init_process_group` as under torchrun.

    No variable leads to a group on one node; over several nodes they lead to the launcher's store at `store_port`.
    """
    text = str(error)
    return TORCHRUN_RENDEZVOUS in text or (PORT_TAKEN in text and f"port: {store_port}," in text)


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
