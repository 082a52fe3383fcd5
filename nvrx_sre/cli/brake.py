"""`nvrx-sre brake`: the site's Alertmanager receiver that may halt runs which opted in.

Model: `DirectoryStore` is what the decisions of `monitoring.brake` see of the disk: run directories one level below
`--root`, and the brake's own stamp there. Control and metrics are separate listeners. Runs until SIGTERM or Ctrl-C.

Must not: import torch, or be needed by a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import click

from nvrx_sre.cli.halt import existing_root
from nvrx_sre.cli.pairs import pairs_of
from nvrx_sre.core.atomic import write_json_atomically
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import ExitCode, StorageError, UsageError
from nvrx_sre.core.identity import RUN_FILE, recorded_run
from nvrx_sre.core.signals import SignalPipe
from nvrx_sre.core.tls import server_context
from nvrx_sre.events.schema import HaltReason
from nvrx_sre.launcher.braking import read_consent
from nvrx_sre.launcher.rundir import RunDirectory, read_json
from nvrx_sre.monitoring.brake import Brake, BrakedRun, BrakePolicy
from nvrx_sre.monitoring.brake_metrics import BrakeMetrics
from nvrx_sre.monitoring.brake_server import BrakeConfig, BrakeServer
from nvrx_sre.telemetry.endpoint import EndpointSecurity, MetricsServer

DEFAULT_LISTEN = "127.0.0.1:9797"
STAMP_FILE = ".nvrx-sre-brake.json"


class DirectoryStore:
    """Run directories below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stamp = root / STAMP_FILE

    def find(self, run: str) -> Sequence[BrakedRun]:
        """Run directories whose identity names `run`."""
        found = []
        for identity in sorted(self._root.glob(f"*/{RUN_FILE}")):
            if recorded_run(identity.parent) == run:
                found.append(self._braked(run, identity.parent))
        return found

    def _braked(self, run: str, path: Path) -> BrakedRun:
        directory = RunDirectory(path)
        consent = read_consent(directory)
        return BrakedRun(
            run=run,
            directory=str(path),
            is_allowed=consent.is_allowed,
            since_ns=consent.since_ns,
            is_halt_requested=directory.halt.exists(),
        )

    def last_halt_ns(self) -> int | None:
        """The stamp; None before the first halt. Raises `StorageError` if there is one that cannot be read."""
        if not self._stamp.exists():
            return None
        value = read_json(self._stamp)
        if not isinstance(value, dict) or not isinstance(value.get("halted_ns"), int):
            raise StorageError(f"{self._stamp} cannot be read")
        return int(value["halted_ns"])

    def note_halt(self, now_ns: int) -> None:
        """Remember a halt, synced."""
        write_json_atomically(self._stamp, {"halted_ns": now_ns})

    def request_halt(self, run: BrakedRun, reason: str) -> None:
        """As `nvrx-sre halt` does."""
        RunDirectory(Path(run.directory)).request_halt(reason, HaltReason.BRAKE)


@click.command("brake")
@click.option("--root", type=click.Path(path_type=Path), required=True, metavar="DIR",
              help="Directory of the site's run directories.")  # fmt: skip
@click.option("--alert", "alerts", multiple=True, required=True, metavar="NAME",
              help="An alert that may halt a run; repeatable.")  # fmt: skip
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE",
              help="A label that alerts of this site carry, e.g. cluster=c1; repeatable.")  # fmt: skip
@click.option("--token-file", type=click.Path(path_type=Path), required=True, metavar="FILE",
              help="Private file (0600) of one token, or two during a rotation.")  # fmt: skip
@click.option("--listen", default=DEFAULT_LISTEN, show_default=True, metavar="HOST:PORT",
              help="Where Alertmanager posts; another host than loopback needs TLS.")  # fmt: skip
@click.option("--tls-cert", type=click.Path(path_type=Path), metavar="FILE", help="PEM certificate of the listener.")
@click.option("--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="Its key.")
@click.option("--metrics-host", default="127.0.0.1", show_default=True, metavar="HOST",
              help="Address of the brake's own /metrics.")  # fmt: skip
@click.option("--metrics-port", type=click.IntRange(1, 65_535), metavar="P",
              help="Port of the brake's own /metrics.  [default: a free one]")  # fmt: skip
def command(
    root: Path, alerts: tuple[str, ...], labels: tuple[str, ...], token_file: Path, listen: str, **options: object
) -> int:
    """Halt runs on alerts that say so, if they allow the brake.

    A run allows it with --allow-brake, an alert says so with action="halt". No shipped rule carries that label.
    """
    root = existing_root(root)
    policy = BrakePolicy(alerts=frozenset(alerts), labels=pairs_of("--label", labels))
    host, port = address(listen)
    config = BrakeConfig(
        host=host,
        port=port,
        token_file=token_file,
        tls=server_context(_path(options["tls_cert"]), _path(options["tls_key"])),
    )
    clock, metrics = SystemClock(), BrakeMetrics()
    metrics_port = options["metrics_port"]
    served = MetricsServer(
        metrics.registry,
        str(options["metrics_host"]),
        metrics_port if isinstance(metrics_port, int) else None,
        lambda: True,
        lambda: True,
        EndpointSecurity(),
    )
    with contextlib.closing(served):
        server = BrakeServer(config, Brake(policy, DirectoryStore(root), clock), metrics, clock, click.echo)
        with contextlib.closing(server), contextlib.closing(SignalPipe()) as stopped:
            served.start()
            server.start()
            click.echo(f"brake listens on {server.url}, metrics on {served.url}")
            stopped.wait()
    click.echo("brake stopped")
    return ExitCode.FINISHED


def address(text: str) -> tuple[str, int]:
    """`HOST:PORT` or `[HOST]:PORT`; port 0 is any free one. Raises `UsageError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise UsageError(f"--listen {text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _path(value: object) -> Path | None:
    return value if isinstance(value, Path) else None
