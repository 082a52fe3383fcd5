"""The file of spans: each once, whole lines, in bounded space, whatever a replay gives again."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from nvrx_sre.telemetry.span_file import SpanFile
from nvrx_sre.telemetry.spans import FinishedSpan

ROOM = 600
"""Bytes of a file in these tests: three spans fit, the fourth makes it full."""


def span(number: int) -> FinishedSpan:
    """One of a row of spans that end one after the other."""
    return FinishedSpan(
        name="nvrx.save",
        trace_id="0" * 32,
        span_id=f"{number:016x}",
        parent_span_id=None,
        start_ns=number,
        end_ns=number + 1,
        attributes={},
    )


def small(directory: Path, max_files: int = 3) -> SpanFile:
    """A span file that is full soon."""
    return SpanFile(directory / "spans.jsonl", max_bytes=ROOM, max_files=max_files)


def held(directory: Path) -> list[int]:
    """Numbers of the spans in all files, oldest file first."""
    paths = [*sorted(directory.glob("spans-*.jsonl")), directory / "spans.jsonl"]
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    return [int(json.loads(line)["span_id"], 16) for line in lines]


def test_each_span_is_there_once_across_a_replay(tmp_path: Path) -> None:
    """A restarted launcher writes what is missing, after cutting a torn line."""
    path = tmp_path / "spans.jsonl"
    SpanFile(path).write([span(1), span(2)])
    path.write_bytes(path.read_bytes()[:-3])
    assert SpanFile(path).write([span(1), span(2), span(3)]) == [span(2), span(3)]
    assert held(tmp_path) == [1, 2, 3]
    assert json.loads(path.read_text().splitlines()[0])["status"] == "unset"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_long_run_keeps_its_newest_spans_in_bounded_space(tmp_path: Path) -> None:
    """The oldest files go; what is kept has no gap and no half line."""
    file = small(tmp_path)
    for number in range(1, 201):
        file.write([span(number)])
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert size <= 4 * (ROOM + 250), "three full files, each with the span that filled it, and the current one"
    kept = held(tmp_path)
    assert kept == list(range(kept[0], 201)) and len(kept) >= 9


@pytest.mark.parametrize("num_before", [3, 17, 100])
def test_a_replay_from_the_beginning_brings_nothing_back(tmp_path: Path, num_before: int) -> None:
    """Neither what full files hold nor what was in deleted ones is written again; new spans are."""
    before = small(tmp_path)
    for number in range(1, num_before + 1):
        before.write([span(number)])
    kept = held(tmp_path)
    replayed = [span(number) for number in range(1, num_before + 3)]
    assert small(tmp_path).write(replayed) == replayed[num_before:]
    assert held(tmp_path)[-2:] == [num_before + 1, num_before + 2]
    assert set(held(tmp_path)) <= {*kept, num_before + 1, num_before + 2}


def test_a_line_that_somebody_spoilt_does_not_stop_the_spans(tmp_path: Path) -> None:
    """It is no span; the others are known all the same."""
    path = tmp_path / "spans.jsonl"
    SpanFile(path).write([span(1)])
    path.write_bytes(b"what?\n[]\n" + path.read_bytes())
    assert SpanFile(path).write([span(1), span(2)]) == [span(2)]
