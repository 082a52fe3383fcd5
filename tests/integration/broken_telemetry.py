"""The command line with a telemetry that fails wherever it can: python -m tests.integration.broken_telemetry ARGUMENTS.

Spans' file, metrics and log handler raise at every record; ranks run `tests.integration.noisy_rank`. Folds, journal and
endpoint stay as they are: their disks, collectors and scrapers are the test's.
"""

from __future__ import annotations

import sys

from nvrx_sre.cli.main import main
from nvrx_sre.core.clock import Clock
from nvrx_sre.events.schema import Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher import main as launcher
from nvrx_sre.launcher.node import Node
from nvrx_sre.telemetry.hub import Telemetry, TelemetryConfig


def fail(*_: object) -> bool:
    """Stands for every part."""
    raise RuntimeError("telemetry is broken")


class BrokenTelemetry(Telemetry):
    """Telemetry that fails wherever it can."""

    def __init__(self, config: TelemetryConfig, clock: Clock | None = None) -> None:
        super().__init__(config, clock)
        self.metrics.apply = fail  # type: ignore[method-assign]
        self._log_sink._handle = fail
        self._span_file.write = fail  # type: ignore[assignment, method-assign]


_arguments = Node._arguments


def noisy(self: Node, command: c.Spawn) -> list[str]:
    """What a child runs, with a noise before it if it is a rank."""
    arguments = _arguments(self, command)
    if command.role is Role.WRITER:
        return arguments
    return ["-m", "tests.integration.noisy_rank", *arguments[1:]]


if __name__ == "__main__":
    launcher.Telemetry = BrokenTelemetry  # type: ignore[misc]
    Node._arguments = noisy  # type: ignore[method-assign]
    sys.exit(main())
