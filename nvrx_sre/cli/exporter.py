"""`nvrx-sre exporter`: metrics of all runs below a root, from their journals, on one endpoint.

For runs that end between two scrapes, pods that are gone, and hosts that Prometheus does not reach. The catalog is
that of the launchers, less what only a live launcher knows (nodes and ranks). Scrape either the launchers or the
exporter for a run, or tell them apart by job. Read-only: a run never notices.

Must not: import torch, change a run directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import click
from prometheus_client import CollectorRegistry

from nvrx_sre.cli.halt import existing_root
from nvrx_sre.core.clock import Clock, SystemClock, seconds
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.signals import SignalPipe
from nvrx_sre.telemetry.archive import KEEP_S, RunShelf
from nvrx_sre.telemetry.endpoint import MetricsServer

TURN_S = 1.0
"""Between two looks at the journals."""
UNHEALTHY_S = 30.0
"""`/healthz` answers 503 when the journals were not looked at for this long."""


class Exporter:
    """The shelf of runs and its endpoint. `turn` reads on; `say` hears once of each directory that cannot be shown.

    Raises `UserError` if the port cannot be bound.
    """

    def __init__(self, shelf: RunShelf, server_at: tuple[str, int | None], clock: Clock, say: Callable[[str], None]):
        self._shelf = shelf
        self._clock = clock
        self._say = say
        self._said: set[str] = set()
        self._turned_ns: int | None = None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(shelf)
        self.server = MetricsServer(registry, *server_at, self._is_healthy, lambda: self._turned_ns is not None)

    def turn(self) -> None:
        """Read what was appended to the journals. Blocks for the reading."""
        self._shelf.refresh()
        for path, why in self._shelf.unreadable.items():
            line = f"{path} is left out: {why}"
            if line not in self._said:
                self._said.add(line)
                self._say(line)
        self._turned_ns = self._clock.monotonic_ns()

    def _is_healthy(self) -> bool:
        turned_ns = self._turned_ns
        return turned_ns is not None and seconds(self._clock.monotonic_ns() - turned_ns) < UNHEALTHY_S


@click.command("exporter")
@click.argument("run_root", type=click.Path(path_type=Path), metavar="RUN_ROOT")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65_535), metavar="P", help="Port.  [default: a free one]")
@click.option("--keep-hours", type=click.FloatRange(min=0.0, min_open=True), default=KEEP_S / 3600, show_default=True,
              metavar="H", help="Show a run until its last record is this old.")  # fmt: skip
def command(run_root: Path, host: str, port: int | None, keep_hours: float) -> int:
    """Serve metrics of all runs below RUN_ROOT, from their journals.

    Runs until Ctrl-C or SIGTERM.
    """
    clock = SystemClock()
    shelf = RunShelf(existing_root(run_root), clock, keep_hours * 3600)
    exporter = Exporter(shelf, (host, port), clock, lambda line: click.echo(line, err=True))
    with contextlib.closing(exporter.server), contextlib.closing(SignalPipe()) as stopped:
        exporter.server.start()
        exporter.turn()
        click.echo(f"serving {exporter.server.url}")
        while not stopped.wait(TURN_S):
            exporter.turn()
    return ExitCode.FINISHED
