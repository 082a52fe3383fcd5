"""Names and identifiers: run names, devices, random ids. Pure but for `random_hex`."""

from __future__ import annotations

import re
import secrets

from nvrx_sre.core.errors import UserError

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def check_run_name(name: str) -> str:
    """Return `name` if it is a valid run name, else raise `UserError` that says what is allowed."""
    if RUN_NAME.fullmatch(name):
        return name
    raise UserError(
        f"run name {name!r} is not valid: use 1 to 63 of a-z, 0-9, '.', '_', '-', starting with a letter or digit"
    )


def run_name_from(text: str) -> str:
    """Nearest valid run name to free text such as a directory's name."""
    cleaned = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).lstrip("._-")[:63]
    return cleaned or "run"


def device_id(node: str, local_rank: int, gpu_uuid: str | None = None) -> str:
    """Identity that faults are counted against: node and GPU UUID, else node and local rank."""
    return f"{node}/{gpu_uuid}" if gpu_uuid else f"{node}/{local_rank}"


def node_of(device: str) -> str:
    """Node of a device's identity."""
    return device.rpartition("/")[0]


def random_hex(num_bytes: int) -> str:
    """Random id in hex, `2 * num_bytes` characters (trace ids: 16 bytes, span ids: 8)."""
    return secrets.token_hex(num_bytes)
