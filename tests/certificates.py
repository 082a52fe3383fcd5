"""A certificate for 127.0.0.1 that nobody trusts, made with openssl where a test needs one."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """PEM files of a self-signed certificate and its key."""

    certificate: Path
    key: Path

    def client_context(self) -> ssl.SSLContext:
        """A client that trusts this certificate alone."""
        return ssl.create_default_context(cafile=str(self.certificate))


def make_certificate(directory: Path) -> Certificate:
    """Write both files into `directory`."""
    made = Certificate(certificate=directory / "cert.pem", key=directory / "key.pem")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30"]
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-out", str(made.certificate), "-keyout", str(made.key)]
    subprocess.run(["openssl", "req", "-x509", *curve, *name, *files], check=True, capture_output=True)
    return made
