"""How two launchers find out that they belong together: who knows the token, and who has the same run.

    leader    -> {"protocol", "nonce"}                                    challenge
    follower  -> {"nonce", "claims": text, "mac"}                         claim
    leader    -> {"answer": text, "mac"}                                  answer

Each mac is an HMAC-SHA256 with the token over both nonces, the side and the text, so neither side learns the token, and
nothing said in one connection is worth anything in another. `claims` say who the follower is and what it would run; the
leader refuses what differs, by name. From token and nonces comes the key for all later frames.

Pure: bytes in, bytes out. Must not: do I/O, trust a text before its mac was checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

PROTOCOL = 1
NOT_GIVEN = "not given"
"""What a setting without a value is called."""
NONCE_BYTES = 32
_LABEL = b"nvrx-sre link 1 "


class HandshakeError(Exception):
    """The other side is not one of this run; the text says what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Who a follower is, and what it would run."""

    run: str
    node_rank: int
    node: str
    """Name of its host."""
    pid: int
    start_ticks: int
    version: str
    mono_ns: int
    """Its monotonic clock."""
    settings: dict[str, str] = field(default_factory=dict)
    """What must be the same on all nodes, by the name that a person knows it by."""
    gpu_uuids: list[str] = field(default_factory=list)
    """Its devices by local index, where they are known."""

    @property
    def identity(self) -> tuple[str, int, int]:
        """The very process."""
        return self.node, self.pid, self.start_ticks


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The leader's answer: `refused` is '' for a follower that it takes."""

    refused: str = ""
    is_final: bool = True
    """It makes no sense to ask again."""
    epoch: int = 0
    traceparent: str = ""
    """Span that the children's own belong under."""


T = TypeVar("T", Claims, Answer)


def new_nonce() -> bytes:
    """A number that nobody has seen."""
    return secrets.token_bytes(NONCE_BYTES)


def challenge(nonce: bytes) -> bytes:
    """The leader's first frame."""
    return json.dumps({"protocol": PROTOCOL, "nonce": nonce.hex()}).encode()


def read_challenge(payload: bytes) -> bytes:
    """The leader's nonce. Raises `HandshakeError` if nothing that speaks this protocol answers there."""
    value = _mapping(payload)
    if value.get("protocol") != PROTOCOL:
        raise HandshakeError(f"it speaks link protocol {value.get('protocol')}, this launcher {PROTOCOL}")
    return _nonce(value)


def claim(token: bytes, theirs: bytes, ours: bytes, claims: Claims) -> bytes:
    """The follower's frame."""
    text = _text(claims)
    return json.dumps({"nonce": ours.hex(), "claims": text, "mac": _mac(token, b"claim", theirs, ours, text)}).encode()


def read_claim(token: bytes, ours: bytes, payload: bytes) -> tuple[bytes, Claims]:
    """The follower's nonce and claims. Raises `HandshakeError`."""
    value = _mapping(payload)
    nonce = _nonce(value)
    return nonce, _checked(Claims, value, "claims", _mac(token, b"claim", ours, nonce, str(value.get("claims"))))


def answer(token: bytes, ours: bytes, theirs: bytes, what: Answer) -> bytes:
    """The leader's last frame of the handshake."""
    text = _text(what)
    return json.dumps({"answer": text, "mac": _mac(token, b"answer", ours, theirs, text)}).encode()


def read_answer(token: bytes, theirs: bytes, ours: bytes, payload: bytes) -> Answer:
    """The leader's answer. Raises `HandshakeError` if it does not know the token."""
    value = _mapping(payload)
    return _checked(Answer, value, "answer", _mac(token, b"answer", theirs, ours, str(value.get("answer"))))


def session_key(token: bytes, leaders: bytes, followers: bytes) -> bytes:
    """Key of all later frames of the connection."""
    return hmac.digest(token, _LABEL + b"key" + leaders + followers, hashlib.sha256)


def difference(ours: Mapping[str, str], theirs: Mapping[str, str], *, here: str, there: str) -> str:
    """What differs, in one line: `--save-every is 50 here and 20 there`; '' if nothing does.

    `here` and `there`: what to call the places of `ours` and `theirs`; they depend on who reads the line.
    """
    differing = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
    return ", ".join(
        f"{key} is {ours.get(key) or NOT_GIVEN} {here} and {theirs.get(key) or NOT_GIVEN} {there}" for key in differing
    )


def _mac(token: bytes, side: bytes, leaders: bytes, followers: bytes, text: str) -> str:
    return hmac.digest(token, _LABEL + side + leaders + followers + text.encode(), hashlib.sha256).hex()


def _text(value: Claims | Answer) -> str:
    return json.dumps(dataclasses.asdict(value), sort_keys=True)


def _checked(cls: type[T], value: Mapping[str, Any], key: str, mac: str) -> T:
    if not hmac.compare_digest(mac, str(value.get("mac"))):
        raise HandshakeError("its token is another one")
    try:
        return cls(**json.loads(str(value[key])))
    except (ValueError, TypeError) as error:
        raise HandshakeError(f"what it says of itself cannot be read: {error}") from error


def _mapping(payload: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(payload)
    except (ValueError, UnicodeDecodeError):
        value = None
    if not isinstance(value, dict):
        raise HandshakeError("it is no launcher of nvrx-sre")
    return value


def _nonce(value: Mapping[str, Any]) -> bytes:
    try:
        nonce = bytes.fromhex(str(value["nonce"]))
    except (KeyError, ValueError):
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise HandshakeError("it is no launcher of nvrx-sre")
    return nonce
