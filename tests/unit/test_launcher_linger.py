"""How long a launcher stays for its last scrapes: never beyond what a termination signal leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.limits import Limits, TelemetryLimits
from nvrx_sre.launcher.config import RunConfig
from nvrx_sre.launcher.main import SCRAPES_AFTER_END, longest_linger_s

NOW_NS = to_ns(1000.0)


def config(*, linger: bool = True) -> RunConfig:
    """A run that waits up to 65 s for its last scrapes, or not at all."""
    limits = Limits(telemetry=TelemetryLimits(metrics_linger_s=65.0))
    return RunConfig(
        run="r", run_dir=Path("r"), command=("x.py",), nproc=1, min_world_size=1, limits=limits, linger=linger
    )


@pytest.mark.parametrize(
    ("leave_in_s", "linger_s"),
    [(None, 65.0), (240.0, 65.0), (21.04, 21.0), (0.0, 0.0), (-3.0, 0.0)],
    ids=["nobody waits", "a long grace", "what is left", "at its end", "too late"],
)
def test_the_grace_of_a_signal_is_not_exceeded(leave_in_s: float | None, linger_s: float) -> None:
    """A drain that took all of it leaves nothing: the launcher must be gone before it is killed."""
    leave_by_ns = None if leave_in_s is None else NOW_NS + to_ns(leave_in_s)
    assert longest_linger_s(config(), leave_by_ns, NOW_NS) == linger_s
    assert longest_linger_s(config(linger=False), leave_by_ns, NOW_NS) == 0.0


def test_a_person_who_interrupts_waits_for_no_scrape() -> None:
    """Nor does who starts it again at once; a preemption costs one scrape, an end for good is seen twice."""
    waits = {code: SCRAPES_AFTER_END.get(code, 0) for code in ExitCode}
    assert (waits[ExitCode.INTERRUPTED], waits[ExitCode.RETRYABLE], waits[ExitCode.INTERNAL]) == (0, 0, 0)
    assert (waits[ExitCode.PREEMPTED], waits[ExitCode.FINISHED], waits[ExitCode.DO_NOT_RESTART]) == (1, 2, 2)
