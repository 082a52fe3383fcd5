"""What a person sees: lines, progress, the reporter's promise never to hold up the launcher, final tables."""

from __future__ import annotations

import dataclasses
import errno
import io
import threading
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from rich.console import Console

from nvrx_sre.cli import final_tables, narrate, report
from nvrx_sre.cli.running import StopCause, run_and_report
from nvrx_sre.core.clock import NS_PER_S
from nvrx_sre.core.errors import StorageError
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record, StepKind, StepsCommitted
from nvrx_sre.launcher import main as launcher
from nvrx_sre.launcher.config import RunConfig
from nvrx_sre.launcher.rundir import RunDirectory

START_NS = 1_700_000_000 * NS_PER_S


def _record(event: schema.Event, *, at_s: float = 0.0, rank: int | None = None, seq: int = 1) -> Record:
    return Record(
        run="demo", epoch=1, generation=1, rank=rank, seq=seq, time_ns=START_NS + round(at_s * NS_PER_S), event=event
    )


def _sample(cls: type[schema.Event]) -> schema.Event:
    """An event with a value of the right kind in every field."""
    values: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            values[name] = next(iter(kind))
        elif name.endswith("_ns"):
            values[name] = START_NS
        else:
            known = {int: 3, float: 0.25, str: "text", bool: True, list[int]: [0, 1]}
            values[name] = known.get(kind, {} if "dict" in str(kind) else None)
    return cls(**values)


def _steps(last_step: int, *, at_s: float, kind: StepKind = StepKind.NEW) -> Record:
    event = dataclasses.replace(
        _sample(StepsCommitted),
        kind=kind,
        first_step=last_step,
        last_step=last_step,
        started_ns=START_NS + round((at_s - 0.5) * NS_PER_S),
        committed_ns=START_NS + round(at_s * NS_PER_S),
        tokens=500,
        loss=2.125,
    )
    return _record(event, at_s=at_s, seq=last_step)


def _console() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, width=200, highlight=False, markup=False), output


@pytest.mark.parametrize("name", sorted(schema.EVENT_TYPES))
def test_every_event_has_a_line_or_none(name: str) -> None:
    """A line is one line without raw field names, for any event of the closed set."""
    line = narrate.narrate(_record(_sample(schema.EVENT_TYPES[name]), at_s=1.0, rank=1))
    assert line is None or ("\n" not in line.text and line.text and "None" not in line.text)


@pytest.mark.parametrize(
    "event",
    [
        schema.FaultDetected,
        schema.FaultInjected,
        schema.IncidentClosed,
        schema.CheckpointRejected,
        schema.StateRestored,
    ],
)
def test_faults_and_recoveries_are_always_told(event: type[schema.Event]) -> None:
    """These are what a person watches for."""
    assert narrate.narrate(_record(_sample(event), rank=1)) is not None


def test_a_telemetry_failure_is_told_with_its_cause() -> None:
    """The cause where there is one; a full queue has none."""
    events = [
        schema.TelemetryDegraded(component="otlp", dropped=3, errors=1, error=error) for error in ("", "HTTP 404")
    ]
    lines = [narrate.narrate(_record(event)) for event in events]
    assert [line.text for line in lines if line is not None] == [
        "telemetry: otlp dropped 3, errors 1",
        "telemetry: otlp dropped 3, errors 1; the newest: HTTP 404",
    ]


def test_an_unknown_culprit_is_said() -> None:
    """A hang in a collective has no known root: the line does not invent one."""
    line = narrate.narrate(_record(_sample(schema.FaultDetected), rank=None))
    assert line is not None and "unknown rank" in line.text


@pytest.mark.parametrize(
    ("value_s", "wanted"), [(None, "-"), (0.0031, "3.1 ms"), (0.2144, "0.214 s"), (12.34, "12.3 s")]
)
def test_durations_for_people(value_s: float | None, wanted: str) -> None:
    """Three digits are enough, and a missing one is a dash."""
    assert narrate.duration_text(value_s) == wanted


def test_sizes_for_people() -> None:
    """Decimal units."""
    assert [narrate.bytes_text(value) for value in (17, 25_300, 8_123_456)] == ["17 B", "25.3 kB", "8.1 MB"]


def test_progress_says_step_loss_rate_and_goodput() -> None:
    """The four numbers of the bar."""
    tally = report.ProgressTally()
    tally.add(_record(_sample(schema.RunStarted), at_s=0.0, seq=0))
    tally.add(_steps(12, at_s=1.0))
    assert tally.text(300).startswith("step 12/300  loss 2.125  1,000 tokens/s  goodput ")


def _diverged(step: int, generation: int) -> Record:
    event = schema.ReplayDiverged(step=step, expected="a", actual="b")
    return dataclasses.replace(_record(event, at_s=step, seq=step), generation=generation)


def test_steps_that_differ_when_redone_are_two_lines_a_restart() -> None:
    """A script without a seed has one in every step: the first is told at once, the others with their number."""
    console, output = _console()
    with report.TerminalReporter(None, console) as reporter:
        for record in (
            *(_diverged(step, 2) for step in range(13, 53)),
            dataclasses.replace(_steps(52, at_s=60.0, kind=StepKind.REDONE), generation=2),
            dataclasses.replace(_steps(53, at_s=61.0), generation=2),
            dataclasses.replace(_steps(54, at_s=62.0), generation=2),
            *(_diverged(step, 3) for step in (53, 54)),
            _diverged(53, 4),
            *(_diverged(step, 5) for step in range(60, 70)),
        ):
            reporter(record)
    told = [line for line in output.getvalue().splitlines() if "a different loss" in line]
    assert told == [
        "step 13 gave a different loss when it was redone",
        "39 more steps up to step 52 gave a different loss when they were redone",
        "step 53 gave a different loss when it was redone",
        "1 more step up to step 54 gave a different loss when it was redone",
        "step 53 gave a different loss when it was redone",
        "step 60 gave a different loss when it was redone",
        "9 more steps up to step 69 gave a different loss when they were redone",
    ]
    lines = output.getvalue().splitlines()
    assert lines.index(told[1]) < lines.index(told[2])


def test_lines_elsewhere_than_a_terminal_are_few() -> None:
    """A hundred aggregates in ten seconds give three progress lines: first, one later, last."""
    console, output = _console()
    with report.TerminalReporter(200, console) as reporter:
        for step in range(1, 101):
            reporter(_steps(step, at_s=step / 10))
    lines = output.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/200", "51/200", "100/200"]


def test_a_fault_is_shown_between_progress() -> None:
    """Its line comes in order and whole."""
    console, output = _console()
    with report.TerminalReporter(None, console) as reporter:
        reporter(_steps(1, at_s=0.1))
        reporter(_record(_sample(schema.FaultDetected), at_s=0.2, rank=1, seq=2))
    shown = output.getvalue()
    assert shown.index("step 1") < shown.index("fault: exception")


def test_a_terminal_gets_a_bar() -> None:
    """On a terminal the bar is drawn and gone at the end."""
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True, highlight=False, markup=False)
    with report.TerminalReporter(10, console) as reporter:
        reporter(_steps(5, at_s=1.0))
    assert "step 5/10" in output.getvalue() and "━" in output.getvalue()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued is shown before the end, however busy the machine is."""
    monkeypatch.setattr(report, "CLOSE_TIMEOUT_S", 60.0)


def test_a_line_of_what_is_no_record_is_shown_in_its_place() -> None:
    """It passes through the same queue, so it can hold up nobody either."""
    console, output = _console()
    with report.TerminalReporter(None, console) as reporter:
        reporter(_record(_sample(schema.JournalRepaired)))
        reporter.say("node 1 was refused: --keep is 3 here and 5 there")
    assert output.getvalue().splitlines()[1:] == ["node 1 was refused: --keep is 3 here and 5 there"]


def test_what_rank_0_has_said_is_not_said_again() -> None:
    """A terminal shows its output as well; `events` tells of it, as of any other interval."""
    record = _record(schema.HotIntervalChosen(every_steps=0, cost_s=0.0, step_s=0.0, reason="not captured in memory"))
    console, output = _console()
    with report.TerminalReporter(None, console) as reporter:
        reporter(record)
        reporter(_record(_sample(schema.HotIntervalChosen)))
    assert "not captured" not in output.getvalue()
    assert len(output.getvalue().splitlines()) == 1
    assert narrate.narrate(record) is not None


@pytest.mark.parametrize(("number", "cure"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_a_full_disk_comes_with_its_cure(
    number: int, cure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space, or another directory; a broken disk needs another cure, which we do not know."""

    def fail(*_: object) -> object:
        error = StorageError("cannot write brake.json")
        raise error from OSError(number, "refused")

    monkeypatch.setattr(launcher, "run", fail)
    config = RunConfig(run="r", run_dir=tmp_path / "r", command=("x.py",), nproc=1, min_world_size=1)
    with pytest.raises(StorageError) as raised:
        run_and_report(config, num_steps=None)
    said = "cannot write brake.json: free some space, or choose another directory with --run-dir"
    assert str(raised.value) == (said if cure else "cannot write brake.json")


class _StuckFile(io.StringIO):
    """A terminal that does not read until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.reached = threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        self.released.wait()
        return super().write(text)


def test_a_terminal_that_does_not_read_never_holds_up_the_run() -> None:
    """Records beyond the queue are dropped and counted; the call returns at once."""
    file = _StuckFile()
    reporter = report.TerminalReporter(10, Console(file=file, width=100))
    reporter(_steps(1, at_s=0.0))
    assert file.reached.wait(30)
    for step in range(report.QUEUE_RECORDS + 10):
        reporter(_steps(step, at_s=1.0))
    assert reporter.num_dropped == 10
    file.released.set()
    reporter.close()


class _GoneFile(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_terminal_that_is_gone_is_no_error() -> None:
    """The run goes on in silence."""
    reporter = report.TerminalReporter(10, report.QuietConsole(file=_GoneFile(), width=100))
    for step in range(50):
        reporter(_steps(step, at_s=float(step)))
    reporter.close()
    assert not reporter._thread.is_alive()


SUMMARY: dict[str, Any] = {
    "run": "demo",
    "exit_code": 0,
    "steps": 300,
    "high_water": 300,
    "redone_steps": 91,
    "final_loss": 2.5,
    "goodput": {"training": 0.71, "durable": None},
    "ledger": {"new": 20.0, "redo": 4.0, "halted": 0.0},
    "wall_s": 24.0,
    "incidents": [
        {
            "fault": "hang",
            "rank": None,
            "step": 140,
            "layer": "in_process",
            "attempts": 1,
            "detection_s": 4.0,
            "outage_s": 4.2,
            "resume_s": 4.1,
            "rollback_steps": 0,
            "verdict": "recovered",
        },
    ],
    "saves": {
        "hot": {"committed": 391, "failed": 0, "skipped": 2, "rejected": 0},
        "durable": {"committed": 6, "failed": 0, "skipped": 0, "rejected": 1},
        "blocking_s": 0.2,
    },
}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (
            {"exception_type": "NameError", "message": "no 'x'", "frame": "a.py:5 train"},
            "(NameError: no 'x', a.py:5 train)",
        ),
        ({"exception_type": "ValueError", "message": "y" * 500}, "(ValueError: " + "y" * 157 + "...)"),
        ({"signal": 9, "message": "step 20"}, "(signal 9)"),
        ({"exit_code": 1, "message": "SyntaxError: expected ':'"}, "(exit code 1: SyntaxError: expected ':')"),
        ({"exit_code": 0, "fault": schema.FaultClass.USER_ERROR}, "@nvrx_sre.resilient"),
        ({}, "fault: exception on rank 1"),
    ],
    ids=["exception", "long", "signal", "exit", "undecorated", "nothing"],
)
def test_a_fault_says_what_happened(changes: dict[str, Any], wanted: str) -> None:
    """Error, message and place are on the terminal: nobody has to look for a log first."""
    empty = {"fault": schema.FaultClass.EXCEPTION, "exception_type": "", "message": "", "frame": ""}
    unknown = {"signal": None, "exit_code": None}
    event = dataclasses.replace(_sample(schema.FaultDetected), **{**empty, **unknown, **changes})
    line = narrate.narrate(_record(event, rank=1))
    assert line is not None and wanted in line.text


def test_final_tables_show_the_summary(tmp_path: Path) -> None:
    """Incidents, ledger, saves and places; a state that never was is left out."""
    (tmp_path / "journal").mkdir()
    console, output = _console()
    final_tables.print_summary(
        SUMMARY, tmp_path, metrics_url="http://127.0.0.1:1/metrics", num_steps=9000, console=console
    )
    shown = output.getvalue()
    assert f"{SUMMARY['high_water']} of 9000 steps" in shown
    for wanted in ("hang", "in_process", "4.000 s", "recovered", "83.3%", "391", "exit 0", "journal", "/metrics"):
        assert wanted in shown
    assert "halted" not in shown and "spans" not in shown


def test_final_tables_name_faults_that_never_struck(tmp_path: Path) -> None:
    """With what each would have needed; a run whose faults all struck says nothing of it."""
    why = {
        "exception@0:900": "the run came to step 50",
        "exception@0:3/backward": "rank 0 passed no such point in step 3 under this launcher",
        "hang@1:9": "rank 1 passed no such point in step 9 under this launcher",
        "sigkill@2:9/restore": "rank 2 had no restore from step 9 on under this launcher",
        "no_space@0:40/rename": "no save from step 40 on came to its stage under this launcher",
        "sigkill@0:60/save": "the run came to step 50",
    }
    summary = {"run": "x", "high_water": 50, "faults_never_struck": list(why)}
    console, output = _console()
    final_tables.print_summary(summary, tmp_path, console=console)
    lines = [line for line in output.getvalue().splitlines() if "never struck" in line]
    assert lines == [f"planned, never struck: {spec} ({reason})" for spec, reason in why.items()]

    console, output = _console()
    final_tables.print_summary(summary | {"faults_never_struck": []}, tmp_path, console=console)
    assert "never struck" not in output.getvalue()


@pytest.mark.parametrize(
    ("hot", "durable", "has_writer"),
    [
        ({"committed": 0}, {"committed": 2}, False),
        ({"committed": 0}, {"failed": 1}, False),
        ({"committed": 5}, {"committed": 2}, True),
        ({"committed": 0}, {"committed": 0}, True),
    ],
)
def test_faults_of_storage_need_a_writer(
    hot: dict[str, int], durable: dict[str, int], has_writer: bool, tmp_path: Path
) -> None:
    """Where the ranks wrote the saves there was none: it is not the stage that was missing."""
    summary = {"run": "x", "high_water": 50, "saves": {"hot": hot, "durable": durable}}
    console, output = _console()
    planned = {"faults_never_struck": ["no_space@0:40/rename"]}
    final_tables.print_summary(summary | planned, tmp_path, console=console)
    stage = "no save from step 40 on came to its stage under this launcher"
    writer = "it strikes the writer of the hot tier: without one the ranks write the saves themselves"
    assert f"never struck: no_space@0:40/rename ({stage if has_writer else writer})" in output.getvalue()
    assert (stage in output.getvalue()) == has_writer


@pytest.mark.parametrize(("exit_code", "what"), [(0, "never struck"), (93, "never struck"), (143, "not struck yet")])
def test_final_tables_of_a_run_that_goes_on_say_not_yet(exit_code: int, what: str, tmp_path: Path) -> None:
    """A preempted run is started again, with the same plan."""
    summary = {"run": "x", "exit_code": exit_code, "high_water": 5, "faults_never_struck": ["hang@0:9"]}
    console, output = _console()
    final_tables.print_summary(summary, tmp_path, console=console)
    assert f"planned, {what}: hang@0:9 (the run came to step 5)" in output.getvalue().splitlines()


def test_final_tables_tell_a_degraded_recovery(tmp_path: Path) -> None:
    """As the line of the incident did, and what it means; an incident that ended the run is not called so."""
    console, output = _console()
    rows = [
        {"fault": fault, "verdict": verdict, "degraded": True}
        for fault, verdict in (("node_lost", "recovered"), ("hang", "exhausted"))
    ]
    final_tables.print_summary({"run": "x", "incidents": rows}, tmp_path, console=console)
    shown = output.getvalue()
    assert [line.split()[-1] for line in shown.splitlines() if "node_lost" in line or "hang" in line] == [
        "degraded",
        "exhausted",
    ]
    assert final_tables.DEGRADED in shown


def test_final_tables_of_a_failed_start_are_its_incidents(tmp_path: Path) -> None:
    """Nothing was trained or saved: what went wrong is not to be searched for among empty tables."""
    console, output = _console()
    summary = SUMMARY | {"high_water": 0, "exit_code": 78}
    final_tables.print_summary(summary, tmp_path, console=console)
    shown = output.getvalue()
    assert "Incidents" in shown and "exit 78" in shown
    assert not [word for word in ("Where the time went", "Saves", "Goodput") if word in shown]


def _stop(action: schema.Action) -> schema.RestartDecided:
    return dataclasses.replace(_sample(schema.RestartDecided), action=action)


def test_the_exit_line_names_the_fault_that_stopped_the_run(tmp_path: Path) -> None:
    """With the error, its place and the log of the rank; a fault that was recovered is none of it."""
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    log = directory.logs / "rank-00001-epoch-0001-attempt-0000-2.log"
    log.touch()
    directory.point_rank_log(1, log)
    fault = dataclasses.replace(
        _sample(schema.FaultDetected), exception_type="", signal=None, exit_code=2, message="SyntaxError: x, a.py:3"
    )
    cause = StopCause()
    cause(_record(fault, rank=0))
    cause(_record(_stop(schema.Action.RESTART)))
    assert cause.text(tmp_path) == ""
    cause(_record(fault, rank=1))
    cause(_record(_stop(schema.Action.STOP)))
    assert cause.text(tmp_path) == f"; rank 1: exit code 2: SyntaxError: x, a.py:3; see {directory.rank_log(1)}"


def test_small_hot_slots_have_a_size() -> None:
    """A model of some kilobytes does not take 0 MiB."""
    event = dataclasses.replace(_sample(schema.HotSlotsAllocated), slot_bytes=52_300, total_bytes=325_000)
    line = narrate.narrate(_record(event))
    assert line is not None and "52.3 kB each, 325.0 kB on this node" in line.text


def test_final_tables_of_a_run_that_was_refused(tmp_path: Path) -> None:
    """An empty summary still says where the run directory is."""
    console, output = _console()
    final_tables.print_summary({}, tmp_path, console=console)
    assert str(tmp_path) in output.getvalue()


def test_final_tables_bear_missing_keys(tmp_path: Path) -> None:
    """A run that ended early has dashes, not an error."""
    console, output = _console()
    final_tables.print_summary({"run": "x", "incidents": [{}]}, tmp_path, console=console)
    assert "Run x: exit -, - steps" in output.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_final_tables_never_break_a_word(width: int, tmp_path: Path) -> None:
    """A row is one line at any width; at 80 columns it fits, with the longest names there are."""
    output = io.StringIO()
    console = Console(file=output, width=width, soft_wrap=True)
    incident = {"fault": "exception", "layer": "in_process", "verdict": "recovered", "rank": 1, "step": 9999}
    times = {"attempts": 3, "detection_s": 4.001, "outage_s": 4.593, "rollback_steps": 89}
    final_tables.print_summary({"run": "x", "incidents": [incident | times]}, tmp_path, console=console)
    row = next(line for line in output.getvalue().splitlines() if "exception" in line)
    assert row.split() == ["exception", "in_process", "1", "9999", "3", "4.001", "s", "4.593", "s", "89", "recovered"]
    assert len(row) <= 80
