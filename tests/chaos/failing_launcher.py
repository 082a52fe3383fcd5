"""The command line with a launcher that raises when a file asks for it: python -m tests.chaos.failing_launcher ...

It raises where it looks, twice a second, whether it still leads: in the middle of its loop, with children running.
"""

from __future__ import annotations

import sys

from nvrx_sre.cli.main import main
from nvrx_sre.launcher.rundir import RunDirectory

REQUEST = "raise-now"
"""File in the run directory that asks for the error."""
_check_leads = RunDirectory.check_leads


def check_or_fail(self: RunDirectory, epoch: int) -> None:
    """Raise if asked to, once."""
    request = self.path / REQUEST
    if request.exists():
        request.unlink()
        raise RuntimeError("the launcher is asked to fail")
    _check_leads(self, epoch)


if __name__ == "__main__":
    RunDirectory.check_leads = check_or_fail  # type: ignore[method-assign]
    sys.exit(main())
