"""One TCP connection between two launchers: frames in order, none from a stranger.

    u32 length | tag, 16 bytes | payload           little-endian; without a tag until both sides have proved themselves

Model: `send` queues and writes what the socket takes, `receive` gives the whole frames that have arrived. After the
handshake (`launcher.handshake`) every frame carries a keyed tag over its place in the stream, so that nobody who can
reach the port, or write into the connection, is obeyed. Nothing is encrypted: what travels is no secret.

Invariants: frames arrive in order, whole, once, or the link is lost; what is queued and what a frame may hold is
bounded. Non-blocking, single-threaded. Must not: unpickle, judge silence (its owner does).
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct

MAX_FRAME_BYTES = 1024 * 1024
"""Longest payload: sixteen times the longest message of a child."""
MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""What may wait for a peer that does not read; beyond it the link counts as lost."""
TAG_BYTES = 16
OVERHEAD_BYTES = 4 + TAG_BYTES
"""What a frame adds to its payload."""
RECEIVE_BYTES = 256 * 1024

_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<Q")


class LinkLost(Exception):
    """The connection is of no use any more; the text says why."""


class _Seal:
    """Tags of one direction: a keyed digest over the number of the frame and its payload."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key = hmac.digest(key, direction, hashlib.sha256)
        self._num_frames = 0

    def next_tag(self, payload: bytes) -> bytes:
        place = _PLACE.pack(self._num_frames)
        self._num_frames += 1
        return hmac.digest(self._key, place + payload, hashlib.sha256)[:TAG_BYTES]


class Link:
    """One end of a connection. Owns its socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._seal_out: _Seal | None = None
        self._seal_in: _Seal | None = None

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def local_address(self) -> str:
        """Address of this host by which the peer is reached; raises `LinkLost` on a connection that is gone."""
        return _host_of(self.socket, "getsockname")

    @property
    def peer_address(self) -> str:
        """Address of the peer; raises `LinkLost` on a connection that is gone."""
        return _host_of(self.socket, "getpeername")

    @property
    def wants_write(self) -> bool:
        """Something waits until the socket takes more."""
        return bool(self._outgoing)

    def seal(self, key: bytes, *, is_leader: bool) -> None:
        """From the next frame on every frame carries a tag made with `key`."""
        ours, theirs = (b"leader", b"follower") if is_leader else (b"follower", b"leader")
        self._seal_out, self._seal_in = _Seal(key, ours), _Seal(key, theirs)

    def bound_silence(self, limit_s: float) -> None:
        """Have the kernel give up data that is not acknowledged within `limit_s`."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(limit_s * 1000))

    def send(self, payload: bytes) -> None:
        """Queue one frame; `flush` writes it. Raises `LinkLost` if too much waits already."""
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(payload)} bytes is longer than {MAX_FRAME_BYTES}")
        if len(self._outgoing) > MAX_QUEUED_BYTES:
            raise LinkLost(f"more than {MAX_QUEUED_BYTES} bytes wait for it")
        tag = b"" if self._seal_out is None else self._seal_out.next_tag(payload)
        self._outgoing += _LENGTH.pack(len(payload)) + tag + payload

    def flush(self) -> None:
        """Write what the socket takes now. Raises `LinkLost`."""
        while self._outgoing:
            try:
                num_sent = self.socket.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError as error:
                raise LinkLost(_reason(error)) from error
            del self._outgoing[:num_sent]

    def receive(self) -> tuple[list[bytes], str]:
        """Payloads that have arrived, and why nothing more will come ('' while the connection lives).

        A frame that is too long, or not from the peer, ends the connection as well; what came before it counts.
        """
        payloads: list[bytes] = []
        while True:
            payload, ended = self.receive_one()
            if payload is None:
                return payloads, ended
            payloads.append(payload)

    def receive_one(self) -> tuple[bytes | None, str]:
        """The next payload alone, None if there is none; and then why nothing more will come.

        During the handshake: what arrived behind it is read once the link is sealed.
        """
        payload, wrong = self._next_frame()
        if payload is not None or wrong:
            return payload, wrong
        ended = self._read()
        payload, wrong = self._next_frame()
        return payload, "" if payload is not None else wrong or ended

    def close(self) -> None:
        """Close the socket; what is still queued is dropped."""
        self.socket.close()

    def _read(self) -> str:
        """Take in what the socket holds; why nothing more will come, '' if more may."""
        while True:
            try:
                chunk = self.socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return ""
            except OSError as error:
                return _reason(error)
            if not chunk:
                return "the connection was closed"
            self._incoming += chunk
            if len(self._incoming) > MAX_QUEUED_BYTES:
                return ""  # taken up again at the next turn

    def _next_frame(self) -> tuple[bytes | None, str]:
        """The next whole payload, None if there is none yet; and what is wrong with it."""
        head = _LENGTH.size + (0 if self._seal_in is None else TAG_BYTES)
        if len(self._incoming) < head:
            return None, ""
        (length,) = _LENGTH.unpack_from(self._incoming)
        if length > MAX_FRAME_BYTES:
            return None, f"a frame of {length} bytes"
        if len(self._incoming) < head + length:
            return None, ""
        tag, payload = bytes(self._incoming[_LENGTH.size : head]), bytes(self._incoming[head : head + length])
        if self._seal_in is not None and not hmac.compare_digest(tag, self._seal_in.next_tag(payload)):
            return None, "a frame that is not the peer's"
        del self._incoming[: head + length]
        return payload, ""


def _host_of(sock: socket.socket, which: str) -> str:
    try:
        host: str = getattr(sock, which)()[0]
    except OSError as error:
        raise LinkLost(_reason(error)) from error
    return host.removeprefix("::ffff:")  # an IPv4 peer of a socket that takes both


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
