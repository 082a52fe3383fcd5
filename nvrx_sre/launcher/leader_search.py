"""How a follower finds its leader: by name and port, again and again, saying why not whenever the reason changes.

Model: each try resolves the name anew, so that a leader that moved is found; all its addresses are tried. A leader that
is not there yet is not told apart from one that never will be: the search ends at a limit, with the last reason. What a
leader refuses for good ends it at once.

Blocks, bounded, and wakes when a signal arrives. Must not: decide what becomes of the run.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.core.backoff import Backoff
from nvrx_sre.core.clock import Clock, seconds, to_ns
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.rng import Generator
from nvrx_sre.core.signals import SignalPipe
from nvrx_sre.launcher import handshake
from nvrx_sre.launcher.handshake import Answer, Claims
from nvrx_sre.launcher.link import Link
from nvrx_sre.launcher.token import read_token

CONNECT_S = 3.0
"""Longest wait for one address."""
HANDSHAKE_S = 5.0
FIRST_WAIT_S = 0.1
MOST_WAIT_S = 5.0
"""Waits between tries double from the first to the most."""


class NotFound(Exception):
    """No leader within the limit; the text says where, how long, and why the last try failed."""


class Signalled(Exception):
    """A signal arrived during the search."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Failed(Exception):
    """One try failed; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The leader has taken this node."""

    link: Link
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the leader is looked for, and with which token."""

    host: str
    port: int
    token_file: Path

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class LeaderSearch:
    """Looks for one leader. `say` gets a line for a person whenever the reason changes."""

    def __init__(
        self, where: Where, clock: Clock, signals: SignalPipe, rng: Generator, say: Callable[[str], None]
    ) -> None:
        self._where = where
        self._clock = clock
        self._signals = signals
        self._rng = rng
        self._say = say

    def find(self, claims: Callable[[], Claims], until_ns: int) -> Found:
        """Try until the monotonic `until_ns`. Raises `NotFound`, `Signalled`, and `UserError` if it is refused."""
        started_ns = self._clock.monotonic_ns()
        backoff = Backoff(FIRST_WAIT_S, MOST_WAIT_S, self._rng)
        said, num_tries = "", 0
        while True:
            num_tries += 1
            try:
                return self._try(claims())
            except _Failed as error:
                reason = str(error)
            if reason != said:
                self._say(f"leader {self._where}: {reason}; trying again")
                said = reason
            now_ns = self._clock.monotonic_ns()
            if now_ns >= until_ns:
                took_s = seconds(now_ns - started_ns)
                raise NotFound(f"no leader at {self._where} within {took_s:.0f} s ({num_tries} tries): {reason}")
            self._wait(min(backoff.next_s(), seconds(until_ns - now_ns)))

    def _try(self, claims: Claims) -> Found:
        token = read_token(self._where.token_file)
        if token is None:
            raise _Failed(f"its token {self._where.token_file} is not there yet")
        reason = "no address"
        for address in self._addresses():
            try:
                link = self._connect(address)
            except OSError as error:
                reason = _reason(error, address)
                continue
            return self._shake(link, token, claims)
        raise _Failed(reason)

    def _addresses(self) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
        try:
            found = socket.getaddrinfo(self._where.host, self._where.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise _Failed(
                f"the name {self._where.host} is not known ({(error.strerror or str(error)).lower()})"
            ) from error
        return [(family, (str(address[0]), int(address[1]))) for family, _, _, _, address in found]

    def _connect(self, address: tuple[socket.AddressFamily, tuple[str, int]]) -> Link:
        family, where = address
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            try:
                sock.connect(where)
            except BlockingIOError:
                if not self._ready(sock, selectors.EVENT_WRITE, CONNECT_S):
                    raise TimeoutError(f"no answer within {CONNECT_S:g} s") from None
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code)) from None
        except BaseException:
            sock.close()
            raise
        return Link(sock)

    def _shake(self, link: Link, token: bytes, claims: Claims) -> Found:
        ours = handshake.new_nonce()
        try:
            theirs = handshake.read_challenge(self._next(link))
            link.send(handshake.claim(token, theirs, ours, claims))
            link.flush()
            answer = handshake.read_answer(token, theirs, ours, self._next(link))
        except handshake.HandshakeError as error:
            link.close()
            raise UserError(f"leader {self._where} cannot be joined: {error}") from error
        except BaseException:
            link.close()
            raise
        if answer.refused:
            link.close()
            if answer.is_final:
                raise UserError(f"leader {self._where} refuses this node: {answer.refused}")
            raise _Failed(f"refuses this node: {answer.refused}")
        link.seal(handshake.session_key(token, theirs, ours), is_leader=False)
        return Found(link=link, answer=answer)

    def _next(self, link: Link) -> bytes:
        """The next frame of the handshake."""
        until_ns = self._clock.monotonic_ns() + to_ns(HANDSHAKE_S)
        while True:
            payload, ended = link.receive_one()
            if payload is not None:
                return payload
            if ended:
                raise _Failed(f"{ended} before it had answered")
            left_s = seconds(until_ns - self._clock.monotonic_ns())
            if left_s <= 0 or not self._ready(link, selectors.EVENT_READ, left_s):
                raise _Failed(f"something listens there, and does not answer within {HANDSHAKE_S:g} s")

    def _wait(self, timeout_s: float) -> None:
        """Wait for a signal, bounded."""
        self._ready(None, selectors.EVENT_READ, timeout_s)

    def _ready(self, what: socket.socket | Link | None, event: int, timeout_s: float) -> bool:
        """True once `what` is ready, False past the time. Raises `Signalled`."""
        with closing(selectors.DefaultSelector()) as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            if what is not None:
                selector.register(what, event)
            ready = selector.select(timeout_s)
        received = self._signals.received()
        if received:
            raise Signalled(received[0])
        return bool(ready)


def _reason(error: OSError, address: tuple[socket.AddressFamily, tuple[str, int]]) -> str:
    host = address[1][0]
    if isinstance(error, ConnectionRefusedError):
        return f"refused: nothing listens at {host}"
    if isinstance(error, TimeoutError):
        return f"timed out: {host} does not answer"
    return f"{host} cannot be reached ({(error.strerror or str(error)).lower()})"
