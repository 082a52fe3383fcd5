"""`nvrx-sre events`: a record as a line for a person."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_sre.cli.events import line_of
from nvrx_sre.core.clock import NS_PER_S
from nvrx_sre.events.schema import Phase, PhaseEntered, Record

DAY_NS = 1_700_000_000 * NS_PER_S  # 2023-11-14 22:13:20 UTC


@pytest.mark.parametrize(("entered_ns", "shown"), [(DAY_NS - NS_PER_S // 4, "22:13:19.750Z"), (0, "-")])
def test_moments_are_times_of_the_day(entered_ns: int, shown: str, tmp_path: Path) -> None:
    """Nanoseconds since 1970 are for `--json`; 0 is never."""
    event = PhaseEntered(phase=Phase.LOAD, entered_ns=entered_ns)
    record = Record(run="demo", epoch=1, generation=2, rank=0, seq=3, time_ns=DAY_NS, event=event)
    line = line_of(record, tmp_path)
    assert line.startswith("2023-11-14 22:13:20.000Z  g2")
    assert line.endswith(f"phase=load entered={shown}"), line
