"""Rows of benchmarks: figures and shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.bench.rows import MACHINE, machine_row, percentile, summarize, table, write_json

KEYS = ["bench", "contestant", "case", "ranks", "n", "median", "p95", "max", "unit", "note"]


def test_a_row_summarizes_its_samples() -> None:
    """Median, nearest-rank p95 and maximum."""
    samples = [float(value) for value in range(1, 101)]
    row = summarize(samples, bench="b", contestant="c", case="x", ranks=2, unit="s", note="")
    assert (row.n, row.median, row.p95, row.max) == (100, 50.5, 95.0, 100.0)


def test_no_samples_is_an_error() -> None:
    """A benchmark that measured nothing must say so."""
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 0.5)


@given(st.lists(st.floats(allow_nan=False), min_size=1), st.floats(0.0, 1.0))
def test_a_percentile_is_a_sample_that_enough_do_not_exceed(samples: list[float], share: float) -> None:
    """Nearest rank."""
    value = percentile(samples, share)
    assert value in samples
    assert sum(item <= value for item in samples) >= share * len(samples) - 1e-9


def test_the_file_has_the_promised_keys_and_one_machine_row(tmp_path: Path) -> None:
    """The machine is named once, whether the caller did it or not."""
    row = summarize([1.0], bench="b", contestant="c", case="x", ranks=2, unit="s", note="n")
    for rows in ([row], [row, machine_row()]):
        write_json(tmp_path / "rows.json", rows)
        content = json.loads((tmp_path / "rows.json").read_text())
        assert [list(item) for item in content] == [KEYS, KEYS]
        assert [item["bench"] for item in content] == ["b", MACHINE]


def test_the_table_has_a_header_and_short_numbers() -> None:
    """Four significant digits are enough for a person."""
    row = summarize([1.23456], bench="b", contestant="c", case="x", ranks=2, unit="s", note="n")
    assert table([row]) == [tuple(KEYS), ("b", "c", "x", "2", "1", "1.235", "1.235", "1.235", "s", "n")]
