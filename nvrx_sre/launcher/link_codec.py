"""What the launchers of a run say to each other, as bytes.

    b"B" | our time | their newest beat's time           a beat: alive, and what time it is there
    b"M" | child | packet                                a child's packet as it came, so that steps cost no decoding
    JSON {"type": name, fields}                          everything else: commands, inputs, slot headers

A closed set of dataclasses; fields are scalars, enums, tuples of numbers, and messages of the channel. Pure.
Must not: unpickle, accept a type or a field that is not in the set.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import typing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nvrx_sre.checkpoint.slots import SlotHeader
from nvrx_sre.events import messages as wire
from nvrx_sre.events import packets
from nvrx_sre.launcher import commands as c

_BEAT = struct.Struct("<cQQ")
_PACKET = struct.Struct("<cI")


@dataclass(frozen=True, kw_only=True)
class Beat:
    """`sent_ns`: the sender's monotonic clock. `echo_ns`: that of the beat it answers, 0 if it answers none."""

    sent_ns: int
    echo_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Packet:
    """A child has sent `packet`."""

    child: int
    packet: bytes


@dataclass(frozen=True, kw_only=True)
class Headers:
    """Slots of a rank as they are now: what it could restore from. Sent before each of the rank's `Ready`."""

    rank: int
    headers: tuple[SlotHeader | None, ...]


Item = c.Command | c.Input | Beat | Packet | Headers

_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        *(c.Spawn, c.AssignRank, c.Tell, c.TellWriter, c.RequestStacks, c.Kill, c.GrantSlots, c.DropSlots),
        *(c.PublishSealed, c.StrandSlots, c.HoldSlots, c.ReleaseSlots, c.SetHotInterval, c.ReleaseBoundary, c.Stop),
        *(c.NoteLateness, c.KeepStacks),
        *(c.Spawned, c.Exited, c.SignalReceived, c.DeviceUnfit, Headers),
    )
}
_HINTS = {name: typing.get_type_hints(cls) for name, cls in _TYPES.items()}


def encode(item: Item) -> bytes:
    """Payload of an item."""
    if isinstance(item, Packet):
        return _PACKET.pack(b"M", item.child) + item.packet
    if isinstance(item, Beat):
        return _BEAT.pack(b"B", item.sent_ns, item.echo_ns)
    name = type(item).__name__
    if name not in _TYPES:
        raise TypeError(f"{name} does not travel between launchers")
    fields = {field.name: _plain(getattr(item, field.name)) for field in dataclasses.fields(item)}
    return json.dumps({"type": name, **fields}).encode()


def decode(payload: bytes) -> Item:
    """Inverse of `encode`. Raises `ValueError` for anything else."""
    kind = payload[:1]
    try:
        if kind == b"M":
            return Packet(child=_PACKET.unpack_from(payload)[1], packet=payload[_PACKET.size :])
        if kind == b"B":
            _, sent_ns, echo_ns = _BEAT.unpack(payload)
            return Beat(sent_ns=sent_ns, echo_ns=echo_ns)
        value = json.loads(payload)
        name = value.pop("type")
        hints = _HINTS[name]
        item: Item = _TYPES[name](**{key: _restored(hints[key], field) for key, field in value.items()})
        return item
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an item of the link: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, wire.Message):
        return packets.encode(value).decode()
    if isinstance(value, SlotHeader):
        return dataclasses.asdict(value) | {"digest": value.digest.hex()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _restored(hint: Any, value: Any) -> Any:
    if hint is wire.Message:
        return packets.decode(value.encode())
    if typing.get_origin(hint) is tuple:
        return tuple(_header(item) if isinstance(item, dict) else item for item in value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    return value


def _header(value: dict[str, Any]) -> SlotHeader:
    return SlotHeader(**(value | {"digest": bytes.fromhex(value["digest"])}))
