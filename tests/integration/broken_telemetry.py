"""The command line with a telemetry of which every part raises: python -m tests.integration.broken_telemetry ARGUMENTS.

Journal, span exporter, metrics and log handler fail at every record; folds and endpoint stay as they are.
"""

from __future__ import annotations

import sys

from nvrx_sre.cli.main import main
from nvrx_sre.core.clock import Clock
from nvrx_sre.launcher import main as launcher
from nvrx_sre.telemetry.hub import Telemetry, TelemetryConfig


def fail(*_: object) -> bool:
    """Stands for every part."""
    raise RuntimeError("telemetry is broken")


class BrokenTelemetry(Telemetry):
    """Telemetry that fails wherever it can."""

    def __init__(self, config: TelemetryConfig, clock: Clock | None = None) -> None:
        super().__init__(config, clock)
        self.journal.append = fail  # type: ignore[method-assign]
        self.metrics.apply = fail  # type: ignore[method-assign]
        self._log_sink._handle = fail
        self._span_sink._handle = fail


if __name__ == "__main__":
    launcher.Telemetry = BrokenTelemetry  # type: ignore[misc]
    sys.exit(main())
