"""Addresses and interfaces of this host: which one the ranks of several nodes meet over. Blocks for a moment."""

from __future__ import annotations

import psutil

LOOPBACK = "127.0.0.1"
ANY_ADDRESS = "0.0.0.0"


def interface_of(address: str) -> str:
    """Name of the interface that has `address`, '' if none of this host has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address.partition("%")[0] == address for item in addresses):
            return name
    return ""
