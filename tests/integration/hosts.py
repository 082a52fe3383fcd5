"""Hosts on one machine: network namespaces on one bridge, each with a name, an address, and /etc/hosts of its own.

    h = Hosts("a", "b")     a 10.77.0.1, b 10.77.0.2       all over one switch that a test can cut or slow down

Needs root and `ip`. A test that cannot make them fails.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

INTERFACE = "veth0"
UNANSWERED = "10.77.0.99"
"""An address to which packets go and from which none come."""
_NETWORK = "10.77.0"
_START = 'hostname "$0" && exec "$@"'
"""In a UTS namespace of its own, so that the host has a name of its own as well."""


def _run(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(arguments)}: {done.stderr.strip()} (namespaces need root)")


class Hosts:
    """The named hosts, which can reach each other."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._prefix = f"nvrx{os.getpid()}"
        self._switch = f"{self._prefix}sw"
        self._made: list[str] = []
        self._files: list[Path] = []
        for number, name in enumerate(names, 1):
            if number == 1:
                self._make_switch()
            self._make(name, number)

    def address(self, name: str) -> str:
        """Address of a host."""
        return f"{_NETWORK}.{self.names.index(name) + 1}"

    def prefix(self, name: str) -> Sequence[str]:
        """What to put before a command that runs on the host."""
        return ("ip", "netns", "exec", self._space(name), "unshare", "--uts", "sh", "-c", _START, name)

    def resolve(self, name: str, table: dict[str, str]) -> None:
        """On the host, what names mean from now on, also to processes that run there already."""
        text = "".join(f"{address} {known}\n" for known, address in {"localhost": "127.0.0.1", **table}.items())
        path = Path("/etc/netns") / self._space(name) / "hosts"
        with path.open("r+") as file:  # the same file: it is mounted over /etc/hosts
            file.truncate()
            file.write(text)

    def cut(self, name: str) -> None:
        """Nothing reaches the host, and nothing leaves it; nobody is told."""
        _run("ip", "-n", self._switch, "link", "set", f"p-{name}", "nomaster")

    def heal(self, name: str) -> None:
        """The host is reached again."""
        _run("ip", "-n", self._switch, "link", "set", f"p-{name}", "master", "br0")

    def slow_down(self, name: str, rate: str) -> None:
        """What leaves the host queues behind a link of `rate`, e.g. 2mbit."""
        shape = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "5s")
        _run("ip", "netns", "exec", self._space(name), "tc", "qdisc", "add", "dev", INTERFACE, *shape)

    def close(self) -> None:
        """Take everything apart."""
        for space in self._made:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=30, check=False)
        for path in self._files:
            path.unlink(missing_ok=True)
            path.parent.rmdir()

    def _space(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _make_switch(self) -> None:
        _run("ip", "netns", "add", self._switch)
        self._made.append(self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")

    def _make(self, name: str, number: int) -> None:
        space, port = self._space(name), f"p-{name}"
        table = Path("/etc/netns") / space / "hosts"
        table.parent.mkdir(parents=True)
        table.touch()
        self._files.append(table)
        _run("ip", "netns", "add", space)
        self._made.append(space)
        ends = ("type", "veth", "peer", "name", port, "netns", self._switch)
        _run("ip", "link", "add", INTERFACE, "netns", space, *ends)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", space, "addr", "add", f"{_NETWORK}.{number}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _run("ip", "-n", space, "link", "set", interface, "up")
        _run("ip", "-n", space, "neigh", "add", UNANSWERED, "lladdr", "02:00:00:00:00:99", "dev", INTERFACE)
        self.resolve(name, {known: f"{_NETWORK}.{place}" for place, known in enumerate(self.names, 1)})


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """The hosts, for as long as the block runs."""
    made = Hosts(*names)
    try:
        yield made
    finally:
        made.close()
