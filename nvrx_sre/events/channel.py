"""The channel between the launcher and a child: `messages` as packets over a socketpair, a rank's steps beside it.

One SOCK_SEQPACKET socketpair a child: one message is one packet, packets buffered by a sender survive its SIGKILL.

A rank's steps go beside the socket, through shared memory (`step_ring`), without a call into the kernel. A packet that
follows steps begins with their number, so that the launcher takes in both in the order in which they were told.

A launcher that takes in steps looks at its channels every so often and is not woken by them in between: to wake
it costs a busy sender more than all the rest of a report. What must not wait for that rings the `Doorbell`.

Thread and process safety: see `Channel`. Must not: block a training step (`send_nowait` drops and counts).
"""

from __future__ import annotations

import contextlib
import os
import socket

from nvrx_sre.events.messages import Alive, Message
from nvrx_sre.events.packets import MAX_PACKET_BYTES, decode, encode
from nvrx_sre.events.step_ring import MARK_BYTES, StepRing, unmark

SEND_BUFFER_BYTES = 1024 * 1024
"""Room that a child asks the kernel for: 2,700 short messages, 550 where `net.core.wmem_max` was never raised."""
CHANNEL_FD_VARIABLE = "NVRX_SRE_CHANNEL_FD"
"""Environment variable that hands a process that the launcher executes its end of the channel."""


class Channel:
    """One end of the socketpair. Not thread-safe for receiving; sends are single packets and may race."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.doorbell: int | None = None
        """Descriptor (eventfd) that is rung after each message that the other end should not be late for."""
        self.ring: StepRing | None = None
        """A rank's end: where its steps go. None before it is told, and for whoever is no rank."""
        self._num_unsent = 0

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def num_dropped(self) -> int:
        """Messages that found no room, and steps in whose place there is a later one."""
        return self._num_unsent + (0 if self.ring is None else self.ring.num_replaced)

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> bool:
        """Send and wait for room; False if the other end is gone."""
        is_sent = self._send(message, descriptors, 0)
        if is_sent:
            self.ring_bell()
        return is_sent

    def send_nowait(self, message: Message, descriptors: tuple[int, ...] = ()) -> bool:
        """Send without blocking; False (and counted in `num_dropped`) if there is no room or no peer."""
        is_sent = self._send(message, descriptors, socket.MSG_DONTWAIT)
        if is_sent and type(message) is not Alive:
            self.ring_bell()
        return is_sent

    def _send(self, message: Message, descriptors: tuple[int, ...], flags: int) -> bool:
        packet = encode(message) if self.ring is None else self.ring.mark(encode(message))
        try:
            if descriptors:
                socket.send_fds(self.socket, [packet], list(descriptors), flags)
            else:
                self.socket.send(packet, flags)
        except OSError:
            self._num_unsent += 1
            return False
        return True

    def ring_bell(self) -> None:
        """Have the other end look at once. A bell that cannot be rung only makes it late."""
        if self.doorbell is not None:
            with contextlib.suppress(OSError):
                os.eventfd_write(self.doorbell, 1)

    def receive(self) -> tuple[Message, list[int]] | None:
        """Next message with the descriptors beside it, from whoever reports no steps; None at end of stream.

        Blocks unless the socket is non-blocking (`BlockingIOError`: there is none). Raises `ValueError` for a packet
        that is no message.
        """
        try:
            packet, descriptors, _, _ = socket.recv_fds(self.socket, MAX_PACKET_BYTES, 4)
        except ConnectionError:
            return None
        if not packet:
            return None
        return decode(packet), descriptors

    def receive_plain(self) -> tuple[Message, int] | None:
        """`receive` for the launcher's end: the message, and how many steps its sender had told before.

        No child sends descriptors, and the kernel drops them. A child that died with something unread is told of once
        as an error, before what it had sent.
        """
        for _ in range(2):
            with contextlib.suppress(ConnectionError):
                packet, num_before = unmark(self.socket.recv(MARK_BYTES + MAX_PACKET_BYTES))
                return (decode(packet), num_before) if packet else None
        return None

    def take_over(self, descriptors: list[int]) -> None:
        """What came beside `Doorbell`: to be rung and written by this end from now on."""
        self.doorbell = descriptors[0]
        if len(descriptors) > 1:
            self.ring = StepRing.map(descriptors[1])

    def close(self) -> None:
        self.socket.close()


def create_pair() -> tuple[Channel, Channel]:
    """A connected pair: (launcher's end, child's end)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return Channel(ours), Channel(theirs)
