"""OTLP export: a real receiver gets every span; a dead or silent one costs nothing."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from nvrx_sre.core.limits import Limits, TelemetryLimits
from nvrx_sre.events.schema import Record
from nvrx_sre.goodput.incidents import incident_trace_id
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.telemetry.context import generation_span_id, run_trace_id
from nvrx_sre.telemetry.hub import Telemetry, TelemetryConfig
from nvrx_sre.telemetry.otlp import OtlpSink
from tests.integration.launched import PATIENT, finish, start
from tests.integration.otlp_receiver import Receiver, attributes
from tests.patience import PATIENCE_S
from tests.stories import RUN, exception_story, fallback_story, ns


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A live collector."""
    started = Receiver()
    yield started
    started.close()


def export(run_dir: Path, endpoint: str, timeout_s: float, records: Sequence[Record] = ()) -> Telemetry:
    """Record a whole run with an exporter at `endpoint`, closed."""
    limits = Limits(telemetry=TelemetryLimits(exporter_timeout_s=timeout_s))
    config = TelemetryConfig(run=RUN, run_dir=run_dir, epoch=1, otlp_endpoint=endpoint, limits=limits)
    telemetry = Telemetry(config)
    telemetry.replay()
    for record in records or exception_story().records:
        telemetry.record(record)
    # What is left for the end, and its bound, is the collector.
    assert telemetry.sync(PATIENCE_S) and telemetry._span_sink.flush(PATIENCE_S)
    telemetry.close()
    return telemetry


def test_a_collector_gets_every_span_with_our_times_and_ids(tmp_path: Path, receiver: Receiver) -> None:
    """Ids, parents, explicit times, status and attributes arrive as they stand in spans.jsonl."""
    telemetry = export(tmp_path, receiver.url, PATIENCE_S)
    assert len(receiver.spans) == telemetry.spans.num_finished
    incident = next(span for span in receiver.spans if span.name == "nvrx.incident")
    assert incident.trace_id.hex() == incident_trace_id(RUN, 1)
    assert (incident.start_time_unix_nano, incident.end_time_unix_nano) == (ns(12.9), ns(14.6))
    assert incident.status.code == Status.StatusCode.STATUS_CODE_UNSET
    assert len(incident.links) == 1
    failed = next(span for span in receiver.spans if span.name == "nvrx.generation")
    assert failed.status.code == Status.StatusCode.STATUS_CODE_ERROR
    stages = [span for span in receiver.spans if span.parent_span_id == incident.span_id]
    assert len(stages) == 5
    assert telemetry.num_errors()[Component.OTLP] == 0


PARENTS = {
    "nvrx.run": None,
    "nvrx.generation": "nvrx.run",
    "nvrx.save": "nvrx.run",
    "nvrx.seal": "nvrx.save",
    "nvrx.write": "nvrx.save",
    "nvrx.commit": "nvrx.save",
    "nvrx.verify": "nvrx.save",
    "nvrx.incident": None,
    "nvrx.detect": "nvrx.incident",
    "nvrx.teardown": "nvrx.incident",
    "nvrx.rendezvous": "nvrx.incident",
    "nvrx.restore": "nvrx.incident",
    "nvrx.first_step": "nvrx.incident",
    "nvrx.reject": "nvrx.incident",
}


def test_the_collector_sees_the_hierarchy_in_two_traces(tmp_path: Path, receiver: Receiver) -> None:
    """Every span stands under the one that its name says: the run's trace, and one for the incident."""
    export(tmp_path, receiver.url, PATIENCE_S, fallback_story().records)
    by_id = {span.span_id: span for span in receiver.spans}
    assert len(by_id) == len(receiver.spans)
    assert {span.name for span in receiver.spans} == set(PARENTS)
    for span in receiver.spans:
        parent = by_id[span.parent_span_id].name if span.parent_span_id else None
        assert parent == PARENTS[span.name], span.name
        is_of_incident = "nvrx.incident" in (span.name, parent)
        assert span.trace_id.hex() == (incident_trace_id(RUN, 1) if is_of_incident else run_trace_id(RUN)), span.name
    for incident, _ in receiver.named("nvrx.incident"):
        assert [by_id[link.span_id].name for link in incident.links] == ["nvrx.generation"]


def test_names_are_those_of_the_conventions(tmp_path: Path, receiver: Receiver) -> None:
    """Service, host and process on the resource; `error.type` and the process that failed on the spans."""
    export(tmp_path, receiver.url, PATIENCE_S)
    (resource,) = {tuple(sorted(item.items())) for item in receiver.resources}
    expected = {"service.name": "nvrx-sre", "service.instance.id": f"{RUN}/1", "process.pid": os.getpid()}
    assert expected.items() <= dict(resource).items()
    assert {"service.version", "host.name", "process.executable.path", "process.runtime.version"} <= dict(
        resource
    ).keys()
    ((incident, _),) = receiver.named("nvrx.incident")
    assert "error.type" not in attributes(incident.attributes)
    failed = [span for span, _ in receiver.named("nvrx.generation") if "error.type" in attributes(span.attributes)]
    assert [attributes(span.attributes)["error.type"] for span in failed] == ["exception"]
    ((detect, _),) = receiver.named("nvrx.detect")
    assert {"process.pid", "host.name", "exception.type"} <= attributes(detect.attributes).keys()


def test_a_replay_sends_nothing_twice(tmp_path: Path, receiver: Receiver) -> None:
    """What the next launcher finds in spans.jsonl was sent before."""
    export(tmp_path, receiver.url, PATIENCE_S)
    sent = len(receiver.spans)
    again = Telemetry(TelemetryConfig(run=RUN, run_dir=tmp_path, epoch=2, otlp_endpoint=receiver.url))
    again.replay()
    again.close()
    assert again.spans.num_finished == sent == len(receiver.spans)


TRACED_SCRIPT = """
import os
import torch
import nvrx_sre
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

def tracer():
    provider = TracerProvider(resource=Resource.create({"process.pid": os.getpid()}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=os.environ["USER_OTLP"])))
    return provider, provider.get_tracer("user")

def loader(name):
    parent = TraceContextTextMapPropagator().extract({"traceparent": os.environ["TRACEPARENT"]})
    provider, user = tracer()
    with user.start_as_current_span(name, context=parent):
        pass
    provider.shutdown()

@nvrx_sre.resilient
def train(ctx):
    ctx.init_process_group()
    model = torch.nn.Linear(2, 2)
    ctx.track(model=model)
    ctx.restore()
    loader("user.work")
    child = os.fork()
    if child == 0:
        loader("user.loader")
        os._exit(0)
    os.waitpid(child, 0)
    while ctx.step < 4:
        ctx.mark("forward")
        ctx.commit(loss=1.0)

train()
"""


def test_c59_spans_of_ranks_and_of_their_children_belong_to_their_generation(
    tmp_path: Path, receiver: Receiver
) -> None:
    """A rank that traces, forks a child that traces, and is called again: each span once, from the process that it
    names, under the generation's span that the launcher sends; all in the run's trace. The launcher was told the
    collector's address alone.
    """
    script = tmp_path / "script.py"
    script.write_text(TRACED_SCRIPT)
    run_dir = tmp_path / "run"
    options = ["--run-dir", str(run_dir), "--name", RUN, "--nproc-per-node", "1", "--standbys", "0", *PATIENT]
    fault = ["--fault", "exception@0:3", "--otlp-endpoint", receiver.base_url, "--metrics-linger", "0"]
    foreign = f"00-{'a' * 32}-{'b' * 16}-01"
    popen = start(["launch", *options, *fault, str(script)], USER_OTLP=receiver.url, TRACEPARENT=foreign)
    ended = finish(popen, run_dir)
    assert ended.exit_code == 0, ended.explain()
    generations = {span.span_id.hex() for span, _ in receiver.named("nvrx.generation")}
    assert generations == {generation_span_id(RUN, number) for number in (1, 2)}
    for name in ("user.work", "user.loader"):
        found = receiver.named(name)
        assert {span.parent_span_id.hex() for span, _ in found} == generations and len(found) == 2, ended.explain()
        assert {span.trace_id.hex() for span, _ in found} == {run_trace_id(RUN)}
    work, loaders = ([item["process.pid"] for _, item in receiver.named(name)] for name in ("user.work", "user.loader"))
    assert len(set(work)) == 1, "the rank's process was kept"
    assert len({*work, *loaders}) == 3, "and each child is one of its own"


def test_a_collector_that_refuses_is_quoted(tmp_path: Path, receiver: Receiver) -> None:
    """The line of the log names what it answered: a wrong path is nothing that a person would guess."""
    telemetry = export(tmp_path, f"{receiver.base_url}/elsewhere", PATIENCE_S)
    assert not receiver.spans
    assert telemetry.num_dropped()[Component.OTLP] == telemetry.spans.num_finished
    log = (tmp_path / "logs" / "launcher.log").read_text()
    assert f"collector at {receiver.base_url}/elsewhere did not take" in log
    assert "spans: HTTP 404 Not Found (" in log


def test_c61_a_dead_collector_is_counted_and_the_file_is_whole(tmp_path: Path) -> None:
    """Connection refused: spans.jsonl has everything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    telemetry = export(tmp_path, f"http://127.0.0.1:{port}/v1/traces", 0.3)
    assert len((tmp_path / "spans.jsonl").read_text().splitlines()) == telemetry.spans.num_finished
    counts = telemetry.num_errors()[Component.OTLP], telemetry.num_dropped()[Component.OTLP]
    assert sum(counts) >= 1


def test_c61_a_silent_collector_is_counted_and_the_file_is_whole(tmp_path: Path) -> None:
    """It accepts and never answers: the exporter gives up by itself, and what it could not send is counted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        telemetry = export(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}/v1/traces", 0.3)
    assert len((tmp_path / "spans.jsonl").read_text().splitlines()) == telemetry.spans.num_finished
    counts = telemetry.num_errors()[Component.OTLP], telemetry.num_dropped()[Component.OTLP]
    assert sum(counts) >= 1


def test_c61_an_exporter_that_never_comes_back_does_not_hold_the_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its own patience: closing leaves it where it is, after the flush's bound, and counts what it holds."""
    answered = threading.Event()
    monkeypatch.setattr(OtlpSink, "write", lambda *_: answered.wait())
    telemetry = export(tmp_path, "http://127.0.0.1:9/v1/traces", 0.3)
    assert not answered.is_set()
    assert telemetry.num_dropped()[Component.OTLP] == telemetry.spans.num_finished > 0
    answered.set()
