"""Stacks of ranks, from memory that a real process writes to the files of the incident: bounded, redacted, complete."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.events.channel import Channel, create_pair
from nvrx_sre.events.schema import Role
from nvrx_sre.events.settings import TRACE_MARK
from nvrx_sre.launcher import process, stacks
from nvrx_sre.launcher.process import Child
from nvrx_sre.launcher.stacks import MAX_BYTES, MAX_GENERATIONS, MAX_INCIDENTS, NOTHING, StackFile, StackKeeper
from nvrx_sre.restart import flight_recorder
from nvrx_sre.restart.stacks import OwnStacks, other_threads
from nvrx_sre.telemetry.boundary import Boundary
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.telemetry.redact import Redactor
from tests.patience import PATIENCE_S

SECRET = "s3cr3t-value"
NUM_REQUESTS = 2000
"""With faulthandler's all threads the process crashed after 150 to 550."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is asked, and the thread that writes, are waited for however busy the machine is."""
    monkeypatch.setattr(process, "STACKS_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(stacks, "CLOSE_S", PATIENCE_S)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[StackKeeper]:
    """A keeper of a launcher whose environment holds a secret."""
    keeper = StackKeeper(tmp_path / "incidents", Redactor([SECRET]), Boundary(SystemClock()))
    yield keeper
    keeper.close()


def files(keeper: StackKeeper, tmp_path: Path) -> dict[str, str]:
    """What lies in the run directory once everything is written: path below `incidents` -> content."""
    keeper.close()
    root = tmp_path / "incidents"
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


class Forked:
    """A real process that has called `body`, which says when it has got there, as a launcher sees it."""

    def __init__(self, file: StackFile, body: Callable[[Callable[[], object]], None], log: Path) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            OwnStacks(file.fd).listen()
            body(lambda: os.write(writer, b"1"))
            os._exit(0)
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        ours, theirs = create_pair()
        self.ends: tuple[Channel, Channel] = (ours, theirs)
        self.child = Child(number=1, role=Role.WORKER, channel=ours, ring=None, log=log, stacks=file)
        self.child.pid, self.child.pidfd = pid, os.pidfd_open(pid)

    def end(self) -> None:
        """SIGKILL, and reaped."""
        os.kill(self.child.pid, signal.SIGKILL)
        os.waitpid(self.child.pid, 0)
        os.close(self.child.pidfd)
        for end in self.ends:
            end.close()


def wait_in_native_code_with_the_lock(is_there: Callable[[], object]) -> None:
    """No other thread of the process turns meanwhile."""
    is_there()
    while True:
        ctypes.PyDLL(None).sleep(60)


def wait_beside_threads_that_come_and_go(is_there: Callable[[], object]) -> None:
    """The main thread waits, as in a collective, while threads start, call functions and end."""

    def nested(depth: int) -> None:
        if depth:
            nested(depth - 1)

    def churn() -> None:
        while True:
            thread = threading.Thread(target=nested, args=(20,))
            thread.start()
            thread.join()

    threading.Thread(target=churn, daemon=True).start()
    is_there()
    while True:
        ctypes.CDLL(None).sleep(60)


def die_of_a_bad_address(is_there: Callable[[], object]) -> None:
    """SIGSEGV in native code, as a broken extension does it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    is_there()
    ctypes.string_at(0)


def test_c30_a_process_that_holds_the_interpreters_lock_says_where(keeper: StackKeeper, tmp_path: Path) -> None:
    """Nothing in it can run but a signal's handler; the function that called the native code is named."""
    forked = Forked(keeper.open(1, 0), wait_in_native_code_with_the_lock, tmp_path / "log")
    forked.child.request_stacks()
    forked.child.await_stacks()
    forked.end()
    keeper.end(1)
    keeper.keep(1)
    [(name, text)] = files(keeper, tmp_path).items()
    assert name == "00001/g00000-rank-00000.stacks.txt"
    assert text.startswith("Asked for by the launcher:\n")
    assert "in wait_in_native_code_with_the_lock\n" in text


def test_asking_a_process_where_it_stands_never_harms_it(keeper: StackKeeper, tmp_path: Path) -> None:
    """Frames of threads that run meanwhile are not read: their owner would free them under the reader (SIGSEGV)."""
    file = keeper.open(1, 0)
    forked = Forked(file, wait_beside_threads_that_come_and_go, tmp_path / "log")
    ended = select.poll()
    ended.register(forked.child.pidfd, select.POLLIN)
    for _ in range(NUM_REQUESTS):
        forked.child.request_stacks()
        file.take()
    forked.child.request_stacks()
    forked.child.await_stacks()
    assert not ended.poll(0), "it lives"
    forked.end()
    keeper.end(1)
    keeper.keep(1)
    [text] = files(keeper, tmp_path).values()
    assert "in wait_beside_threads_that_come_and_go\n" in text
    assert "Thread 0x" not in text, "the main thread alone"


def test_a_fatal_signal_leaves_where_it_struck(keeper: StackKeeper, tmp_path: Path) -> None:
    """A rank that dies of SIGSEGV names the function that did it, in its incident."""
    forked = Forked(keeper.open(1, 0), die_of_a_bad_address, tmp_path / "log")
    _, status = os.waitpid(forked.child.pid, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    keeper.end(1)
    keeper.keep(1)
    [text] = files(keeper, tmp_path).values()
    assert text.startswith("Fatal Python error: Segmentation fault\n")
    assert "in die_of_a_bad_address\n" in text
    os.close(forked.child.pidfd)
    for end in forked.ends:
        end.close()


def test_other_threads_are_shown_by_one_that_holds_the_lock() -> None:
    """A loader's thread may be what the main thread waits for; the caller and the main thread are left out."""
    is_there, may_end = threading.Event(), threading.Event()

    def wait_in_a_loader() -> None:
        is_there.set()
        may_end.wait()

    thread = threading.Thread(target=wait_in_a_loader)
    thread.start()
    is_there.wait()
    text = other_threads()
    may_end.set()
    thread.join()
    assert "in wait_in_a_loader\n" in text
    assert "test_other_threads_are_shown" not in text


def test_a_stopped_process_is_not_waited_for_and_the_file_says_so(keeper: StackKeeper, tmp_path: Path) -> None:
    """SIGSTOP: the kernel runs no handler, so that there is no stack to have."""
    forked = Forked(keeper.open(1, 0), wait_in_native_code_with_the_lock, tmp_path / "log")
    os.kill(forked.child.pid, signal.SIGSTOP)
    os.waitpid(forked.child.pid, os.WUNTRACED)
    forked.child.request_stacks()
    forked.child.await_stacks()
    forked.end()
    keeper.end(1)
    keeper.keep(1)
    [text] = files(keeper, tmp_path).values()
    assert "The process is stopped: it cannot say where it stands.\n" in text


def test_memory_and_file_are_bounded(keeper: StackKeeper, tmp_path: Path) -> None:
    """A process that would write for ever is cut by the kernel; what it wrote first is kept, file after file."""
    file = keeper.open(1, 0)
    own = OwnStacks(file.fd)
    for attempt in range(2):
        keeper.enter(1, 0, 4)
        for _ in range(40):
            own.raised("x" * 10_000)
        assert file.num_bytes() == MAX_BYTES
        keeper.keep(1)
        assert file.num_bytes() == 0, f"there is room again after attempt {attempt}"
    [text] = files(keeper, tmp_path).values()
    assert len(text) == MAX_BYTES and text.startswith("Main thread, raised:\n")


def test_secrets_are_masked(keeper: StackKeeper, tmp_path: Path) -> None:
    """By form and by value, in stacks and in the trace."""
    own = OwnStacks(keeper.open(1, 0).fd)
    own.raised(f'  File "/{SECRET}/train.py", line 1\nValueError: postgres://me:hunter22@db/x --api-key abcdefgh\n')
    own.noted(json.dumps({"pg_config": {"0": {"desc": SECRET, "last_enqueued_collective": "1"}}}).encode(), "")
    keeper.keep(1)
    found = files(keeper, tmp_path)
    assert len(found) == 2
    everything = "".join(found.values())
    assert not [word for word in (SECRET, "hunter22", "abcdefgh") if word in everything], everything
    assert "ValueError" in everything


def test_the_interrupt_shows_the_frame_it_found_once(keeper: StackKeeper, tmp_path: Path) -> None:
    """What the launcher has asked for is not repeated, and neither is a second delivery."""
    file = keeper.open(1, 0)
    own = OwnStacks(file.fd)
    own.interrupted(sys._getframe())
    first = file.num_bytes()
    own.interrupted(sys._getframe())
    assert file.num_bytes() == first > 0
    keeper.keep(1)
    [text] = files(keeper, tmp_path).values()
    assert text.splitlines()[1].endswith("in test_the_interrupt_shows_the_frame_it_found_once"), text


def test_what_the_monitor_notes_does_not_stand_for_the_stack(keeper: StackKeeper, tmp_path: Path) -> None:
    """It writes the trace and the other threads first, and then interrupts the main thread."""
    own = OwnStacks(keeper.open(1, 0).fd)
    own.noted(b'{"entries": []}', "Thread 0x1 (most recent call first):\n")
    own.interrupted(sys._getframe())
    keeper.keep(1)
    found = files(keeper, tmp_path)
    assert "Thread 0x1" in found["00001/g00000-rank-00000.stacks.txt"]
    assert "interrupted" in found["00001/g00000-rank-00000.stacks.txt"]
    assert json.loads(found["00001/g00000-rank-00000.trace.json"]) == {"entries": []}


def test_stacks_carry_the_rank_and_generation_that_they_were_written_in(keeper: StackKeeper, tmp_path: Path) -> None:
    """Also if the process was given another rank since; a standby that was never a rank has none."""
    own = OwnStacks(keeper.open(1, 2).fd)
    OwnStacks(keeper.open(2, None).fd).raised("a standby's\n")
    keeper.enter(1, 2, 5)
    own.raised("as rank 2\n")
    keeper.assign(1, 0)
    keeper.keep(7)
    keeper.enter(1, 0, 6)
    own.raised("as rank 0\n")
    keeper.keep(7)
    found = files(keeper, tmp_path)
    assert [name for name, text in found.items() if "as rank" in text] == [
        "00007/g00005-rank-00002.stacks.txt",
        "00007/g00006-rank-00000.stacks.txt",
    ]
    assert not any("standby" in text for text in found.values())


def test_a_process_that_died_silently_is_said_to_have_none(keeper: StackKeeper, tmp_path: Path) -> None:
    """SIGKILL leaves nothing; who lives and wrote nothing is not mentioned."""
    for child in (1, 2):
        keeper.open(child, child - 1)
        keeper.enter(child, child - 1, 1)
    keeper.end(1)
    keeper.keep(1)
    assert files(keeper, tmp_path) == {"00001/g00001-rank-00000.stacks.txt": NOTHING}


def test_without_an_incident_nothing_is_kept(keeper: StackKeeper, tmp_path: Path) -> None:
    """The first generation opens; what was written before is gone by the next incident."""
    own = OwnStacks(keeper.open(1, 0).fd)
    own.raised("of no incident\n")
    keeper.keep(0)
    own.raised("of the first\n")
    keeper.keep(1)
    [text] = files(keeper, tmp_path).values()
    assert "of no incident" not in text


def test_the_newest_generations_of_an_incident_are_kept(keeper: StackKeeper, tmp_path: Path) -> None:
    """A run that fails for weeks does not fill its directory."""
    own = OwnStacks(keeper.open(1, 0).fd)
    for generation in range(1, MAX_GENERATIONS + 4):
        keeper.enter(1, 0, generation)
        own.raised("again\n")
        keeper.keep(1)
    assert [name[6:12] for name in files(keeper, tmp_path)] == [
        f"g{number:05d}" for number in range(4, MAX_GENERATIONS + 4)
    ]


def test_older_incidents_go_when_there_are_too_many(keeper: StackKeeper, tmp_path: Path) -> None:
    """The oldest first."""
    own = OwnStacks(keeper.open(1, 0).fd)
    for incident in range(1, MAX_INCIDENTS + 3):
        own.raised("another\n")
        keeper.keep(incident)
    names = [name[:5] for name in files(keeper, tmp_path)]
    assert names == [f"{number:05d}" for number in range(3, MAX_INCIDENTS + 3)]


def test_a_disk_that_refuses_costs_nothing_and_is_counted(tmp_path: Path) -> None:
    """The launcher's loop hears nothing of it."""
    (tmp_path / "incidents").write_text("a file where a directory should be")
    keeper = StackKeeper(tmp_path / "incidents", Redactor(), Boundary(SystemClock()))
    OwnStacks(keeper.open(1, 0).fd).raised("lost\n")
    keeper.keep(1)
    keeper.close()
    assert keeper.boundary.num_errors()[Component.OTHER] == 1


def test_a_trace_that_was_cut_is_left_out(keeper: StackKeeper, tmp_path: Path) -> None:
    """Half a line of JSON is none; the stacks beside it stay."""
    file = keeper.open(1, 0)
    file.write("a stack\n")
    file.write(f'{TRACE_MARK}{{"entries": [')
    keeper.keep(1)
    assert files(keeper, tmp_path) == {"00001/g00000-rank-00000.stacks.txt": "a stack\n"}


def test_a_trace_in_the_middle_of_a_line_of_the_stack_is_found(keeper: StackKeeper, tmp_path: Path) -> None:
    """faulthandler writes a stack word by word, in the main thread, while the monitor thread writes the trace."""
    file = keeper.open(1, 0)
    file.write('  File "train.py", line ')
    file.write(f'{TRACE_MARK}{{"entries": []}}\n')
    file.write("7 in step\n")
    file.write(f"ValueError: no trace: {TRACE_MARK}of it\n")
    keeper.keep(1)
    found = files(keeper, tmp_path)
    assert json.loads(found["00001/g00000-rank-00000.trace.json"]) == {"entries": []}
    assert found["00001/g00000-rank-00000.stacks.txt"] == (
        f'  File "train.py", line 7 in step\nValueError: no trace: {TRACE_MARK}of it\n'
    )


def entry(number: int, **more: object) -> dict[str, object]:
    """An entry of the recorder."""
    return {"record_id": number, "profiling_name": "nccl:all_reduce", "frames": ["not kept"], **more}


def test_the_newest_entries_of_a_trace_are_kept() -> None:
    """As many as are read, with their number; and the counters of the newest groups."""
    entries = [entry(number) for number in range(500)]
    groups = {str(number): {"last_enqueued_collective": "7"} for number in range(200)}
    trace = json.loads(flight_recorder.bounded({"pg_status": groups, "entries": entries}))
    assert [item["record_id"] for item in trace["entries"]] == list(range(500 - flight_recorder.MAX_ENTRIES, 500))
    assert trace["num_recorded"] == 500
    assert list(trace["pg_status"]) == [str(number) for number in range(200 - flight_recorder.MAX_GROUPS, 200)]
    assert "frames" not in trace["entries"][0]


def test_a_trace_of_long_entries_is_cut_to_its_room() -> None:
    """Shapes can be long; the newest entry is the last to go."""
    entries = [entry(number, input_sizes=[[1] * 500]) for number in range(64)]
    text = flight_recorder.bounded({"entries": entries})
    assert len(text) <= flight_recorder.MAX_BYTES
    assert json.loads(text)["entries"][-1]["record_id"] == 63


def test_who_is_asked_twice_is_waited_for_twice(keeper: StackKeeper, tmp_path: Path) -> None:
    """Softly at the deadline, and again before the kill: both are there."""
    forked = Forked(keeper.open(1, 0), wait_in_native_code_with_the_lock, tmp_path / "log")
    for _ in range(2):
        forked.child.request_stacks()
        forked.child.await_stacks()
    poller = select.poll()
    poller.register(forked.child.pidfd, select.POLLIN)
    assert not poller.poll(0), "it lives"
    forked.end()
    keeper.end(1)
    keeper.keep(1)
    [text] = files(keeper, tmp_path).values()
    assert text.count("Asked for by the launcher:\n") == text.count("in wait_in_native_code_with_the_lock\n") == 2
