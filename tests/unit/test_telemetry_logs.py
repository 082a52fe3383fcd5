"""The structured log, the ambient context, and the readable line of each record."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest

from nvrx_sre.cli.narrate import narrate
from nvrx_sre.events.schema import LeaderLost, Record
from nvrx_sre.telemetry import context
from nvrx_sre.telemetry.logs import EventLog, configure, event_line, level_of
from nvrx_sre.telemetry.redact import Redactor
from tests.stories import STORIES, exception_story


@pytest.fixture(autouse=True)
def _clear_context() -> Iterator[None]:
    """The ambient values are the process's."""
    context.clear()
    yield
    context.clear()


def test_lines_are_json_with_the_ambient_values() -> None:
    """run, rank, generation, step and trace come from the context, a line's own fields win."""
    stream = io.StringIO()
    context.bind(run="demo", rank=3)
    traceparent = context.set_generation(2)
    context.follow_step(lambda: 41)
    configure(stream).info("hello", step=42)
    line = json.loads(stream.getvalue())
    assert {
        key: line[key] for key in ("run", "rank", "generation", "step", "trace_id", "span_id", "event", "level")
    } == {
        "run": "demo",
        "rank": 3,
        "generation": 2,
        "step": 42,
        "trace_id": context.run_trace_id("demo"),
        "span_id": context.generation_span_id("demo", 2),
        "event": "hello",
        "level": "info",
    }
    assert traceparent == f"00-{line['trace_id']}-{line['span_id']}-01"


def test_secrets_do_not_reach_the_log() -> None:
    """The redactor is the last processor before the renderer."""
    stream = io.StringIO()
    configure(stream, redactor=Redactor(["topsecret"])).warning(
        "got topsecret", password="x", nested={"a": "topsecret"}
    )
    assert "topsecret" not in stream.getvalue()
    assert '"password": "***"' in stream.getvalue()


def test_a_terminal_gets_a_pretty_line() -> None:
    """Not JSON where a person reads."""
    stream = io.StringIO()
    configure(stream, pretty=True).info("hello", step=1)
    assert "hello" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


@pytest.mark.parametrize("name", sorted(STORIES))
def test_every_record_can_be_logged(name: str) -> None:
    """One JSON line a record with its stamp, in the trace that is given."""
    stream = io.StringIO()
    log = EventLog(stream, Redactor())
    records = STORIES[name]().records
    for record in records:
        log.write(record, "c" * 32, "d" * 16)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == [type(record.event).__name__ for record in records]
    assert all(line["run"] == "demo" and line["trace_id"] and "generation" in line for line in lines)
    assert [line["level"] for line in lines] == [level_of(record) for record in records]


def test_a_recovery_reads_as_sentences() -> None:
    """Fault, decision, incident: one line each, with what a person asks first."""
    lines = [line for record in exception_story().records if (line := event_line(record))]
    text = "\n".join(lines)
    assert "fault: exception on rank 1 at step 11 in step (RuntimeError), detected after 0.100 s" in text
    assert "decision: restart at layer in_process: because" in text
    assert "incident 1 recovered: exception on rank 1 at step 11, layer in_process, 1 attempt, outage 2.200 s" in text
    assert "run ended at step 11 with exit 0: end" in text


def test_how_long_a_lost_launcher_was_silent_is_said() -> None:
    """To whoever reads the log or the events: whether the run was down for seconds or for a night."""
    lost = LeaderLost(lost_epoch=3, last_seen_ns=10**18)
    record = Record(run="r", epoch=4, generation=2, rank=None, seq=1, time_ns=10**18 + 42_500_000_000, event=lost)
    told = narrate(record)
    assert event_line(record) == "launcher of epoch 3 was lost; its last record is 42.5 s old"
    assert told is not None and told.text.endswith("its last record is 42.5 s old")
