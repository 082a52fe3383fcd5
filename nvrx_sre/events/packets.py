"""The wire form of messages: one message is one packet of `channel`, or of a link between launchers.

The frequent ones (`Sealed`, `Alive`, and `Step` between launchers) are fixed-size structs, all others are JSON. What a
rank tells of a step comes through its ring (`step_record`).

Pure. Must not: carry descriptors, which travel beside a message (SCM_RIGHTS), never as a number inside one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from collections.abc import Callable

from nvrx_sre.events.messages import Alive, Message, Sealed, Step

MAX_PACKET_BYTES = 64 * 1024
"""Largest packet; longer texts are cut by the sender. Well below the kernel's default socket buffer."""
MESSAGE_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in Message.__subclasses__()}

_FORMS: dict[type[Message], str] = {Step: "SIQQddddQd?b?QQQQ", Alive: "AIQQQQQI", Sealed: "LIQbQ"}
"""Frequent messages: the byte that a packet begins with, then the form of each field in its order."""
_FIELDS = {cls: tuple(item.name for item in dataclasses.fields(cls)) for cls in _FORMS}
_PACK: dict[type[Message], Callable[..., bytes]] = {
    cls: functools.partial(struct.Struct("=c" + form[1:]).pack, form[0].encode()) for cls, form in _FORMS.items()
}
_HOT = {ord(form[0]): (cls, _FIELDS[cls], struct.Struct("=x" + form[1:])) for cls, form in _FORMS.items()}
"""First byte of a packet -> the message that it holds, its fields, and how to read them."""
_new: Callable[[type[Message]], Message] = object.__new__


def encode(message: Message) -> bytes:
    """Wire form of a message. Raises `ValueError` if it does not fit a packet."""
    cls = type(message)
    pack = _PACK.get(cls)
    if pack is not None:
        return pack(*(getattr(message, name) for name in _FIELDS[cls]))
    packet = json.dumps({"type": cls.__name__, **dataclasses.asdict(message)}).encode()
    if len(packet) > MAX_PACKET_BYTES:
        raise ValueError(f"{cls.__name__} is {len(packet)} bytes, more than {MAX_PACKET_BYTES}")
    return packet


def decode(packet: bytes) -> Message:
    """Inverse of `encode`. Raises `ValueError` for anything that is not a message."""
    hot = _HOT.get(packet[0]) if packet else None
    try:
        if hot is not None:
            cls, names, form = hot
            message = _new(cls)  # the frozen class itself sets field by field, at twice the cost
            message.__dict__.update(zip(names, form.unpack(packet), strict=True))
            return message
        value = json.loads(packet)
        return MESSAGE_TYPES[value.pop("type")](**value)
    except (struct.error, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message of the channel: {error}") from error
