"""Whether a listener needs TLS, its context, and that of a client. Reads PEM files; keeps nothing. Thread-safe."""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path

from nvrx_sre.core.errors import UserError


def is_loopback(host: str) -> bool:
    """True if `host` can only be reached from this machine. Other names than `localhost` are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def server_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """TLS 1.2 or newer from PEM files; None if neither is given.

    Raises `UserError` if only one is given or they cannot be used together.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UserError("a TLS certificate and its key are given together: give both files, or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"TLS certificate {certificate} and key {key} cannot be used: {error}") from error
    return context


def client_context(ca: Path) -> ssl.SSLContext:
    """A client that trusts the PEM certificates of `ca` alone. Raises `UserError` if the file has none."""
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"CA file {ca} cannot be used: {error}") from error
