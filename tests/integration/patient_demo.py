"""The demo with limits that a busy machine does not miss: python -m tests.integration.patient_demo ARGUMENTS."""

from __future__ import annotations

import functools
import sys

from nvrx_sre.cli import demo
from nvrx_sre.cli.main import main
from nvrx_sre.core.limits import Deadlines

STEP_DEADLINE_S = 10.0

if __name__ == "__main__":
    demo.STEP_DEADLINE_S = STEP_DEADLINE_S
    demo.Deadlines = functools.partial(  # type: ignore[misc, assignment]  # the same, with other defaults
        Deadlines, interrupt_grace_s=6.0, teardown_s=30.0, suspicion_s=2.0
    )
    sys.exit(main())
