"""Injection: each kind does what its name says. What kills or hangs a process runs in one of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvrx_sre.core.errors import InternalError
from nvrx_sre.events.schema import FaultClass
from nvrx_sre.faults import injection, storage
from nvrx_sre.faults.plan import DEVICE_KINDS, FaultKind, FaultSpec
from nvrx_sre.restart.torch_errors import describe

LIMIT_S = 60.0
"""Longest wait for anything here."""
AGAIN_MS = 1000
AGAIN_MAX = 60
"""How soon a signal is sent again that had no effect."""
SILENCE_S = 0.5
"""Fifty turns of a thread that turns: who says nothing for so long does not turn."""


@dataclass
class Actions:
    """Notes what a fault asked for."""

    run_dir: Path = Path("/nonexistent")
    rank: int = 0
    launcher_pid: int = 0
    asked: list[str] = field(default_factory=list)

    def poison_loss(self) -> None:
        self.asked.append("poison")

    def request_node_kill(self) -> None:
        self.asked.append("node_kill")
        raise InterruptedError  # stands for the launcher's SIGKILL


def fire(text: str, actions: Actions) -> None:
    """Fire the fault of `text`."""
    injection.fire(FaultSpec.parse(text), actions)


CHILD = """
import signal, sys, threading
from nvrx_sre.faults import injection
from nvrx_sre.faults.plan import FaultSpec
class Actions:
    rank, run_dir, launcher_pid = 0, None, 0
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell hands it down ignored
def turn():
    for _ in range(3 if go == "thread\\n" else 10**9):
        sys.stdout.write("turn\\n"); sys.stdout.flush()
        pause.wait(0.01)
    sys.stdout.write("turned\\n"); sys.stdout.flush()
pause = threading.Event()
print("ready", flush=True)
go = sys.stdin.readline()
threading.Thread(target=turn, daemon=True).start() if go != "\\n" else None
injection.fire(FaultSpec.parse(sys.argv[1]), Actions())
print("survived", flush=True)
"""


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(text: str, children: list[subprocess.Popen[str]], go: str = "") -> subprocess.Popen[str]:
    """A process that fires `text` at once; it has said that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    children.append(process)
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write(f"{go}\n")
    process.stdin.flush()
    return process


def test_every_kind_has_an_action() -> None:
    """No kind of the plan is without an injection."""
    assert set(injection._KINDS) | set(storage._KINDS) == set(FaultKind)
    assert not set(injection._KINDS) & set(storage._KINDS)


def test_exception_is_classified_as_one() -> None:
    """The injected exception has a type of its own and reads as the user's."""
    with pytest.raises(injection.InjectedError, match="exception@1:4") as raised:
        fire("exception@1:4", Actions())
    assert describe(raised.value).fault is FaultClass.EXCEPTION


def test_cuda_error_is_classified_as_one() -> None:
    """The stand-in of torch's device error is taken for one, and not for a peer's fault."""
    with pytest.raises(injection.AcceleratorError, match="CUDA error") as raised:
        fire("cuda_error@0:4", Actions())
    description = describe(raised.value)
    assert description.fault is FaultClass.CUDA_ERROR
    assert not description.communication


@pytest.mark.parametrize("kind", sorted(DEVICE_KINDS))
def test_a_fault_of_a_device_needs_one(kind: FaultKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a device says so, rather than go on as if it had been struck."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InternalError, match="in a process that has none"):
        fire(f"{kind}@0:4", Actions())


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["sigkill", "oom_kill"])
def test_kills_end_the_process_by_sigkill(kind: str, children: list[subprocess.Popen[str]]) -> None:
    """Nothing after the fault runs."""
    process = start(f"{kind}@0:1", children)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL
    assert "survived" not in output


@pytest.mark.processes
def test_sigstop_stops_and_goes_on_when_continued(children: list[subprocess.Popen[str]]) -> None:
    """The process is stopped, not dead; SIGCONT lets it go on behind the fault."""
    process = start("sigstop@0:1", children)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert "survived" in output


@pytest.mark.processes
def test_native_hang_lets_other_threads_turn(children: list[subprocess.Popen[str]]) -> None:
    """The interpreter lock is free during the call: heartbeats would go on."""
    process = start("hang_native@0:1", children, go="thread")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(4)]
    assert lines == ["turn\n"] * 3 + ["turned\n"]
    assert process.poll() is None


@pytest.mark.processes
def test_gil_hang_stops_all_threads(children: list[subprocess.Popen[str]]) -> None:
    """Nothing in the process turns any more, signals' Python handlers included; only SIGKILL ends it.

    A thread that turns for ever falls silent, at the latest when the main thread has come to the fault.
    """
    process = start("hang_gil@0:1", children, go="for ever")
    assert process.stdout is not None
    output = select.poll()
    output.register(process.stdout, select.POLLIN)
    while output.poll(SILENCE_S * 1000):
        assert set(os.read(process.stdout.fileno(), 65_536).split()) == {b"turn"}
    assert process.poll() is None
    process.kill()
    rest, _ = process.communicate(timeout=LIMIT_S)
    assert rest == ""
    assert process.returncode == -signal.SIGKILL


@pytest.mark.processes
def test_python_hang_is_interruptible(children: list[subprocess.Popen[str]]) -> None:
    """A signal's handler runs in the waiting main thread and can raise there.

    Sent again until it has, as a rank's monitor does: one that comes as the wait begins is not seen before its end.
    """
    process = start("hang@0:1", children, go="thread")
    assert process.stdout is not None
    while process.stdout.readline() != "turned\n":
        pass
    ended, pidfd = select.poll(), os.pidfd_open(process.pid)
    ended.register(pidfd, select.POLLIN)
    is_ended = any(process.send_signal(signal.SIGINT) or ended.poll(AGAIN_MS) for _ in range(AGAIN_MAX))
    os.close(pidfd)
    assert is_ended
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGINT


def test_sigterm_goes_to_the_launcher() -> None:
    """The launcher is told to end, this process goes on."""
    seen = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: seen.set())
    try:
        fire("sigterm@0:1", Actions(launcher_pid=os.getpid()))
        assert seen.wait(LIMIT_S)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nonfinite_asks_for_poison() -> None:
    """The loss is poisoned by whoever computes it."""
    actions = Actions()
    fire("nonfinite@0:4", actions)
    assert actions.asked == ["poison"]


def test_node_kill_asks_the_launcher_and_stays() -> None:
    """The fault does not return: the rank waits for its end."""
    actions = Actions()
    with pytest.raises(InterruptedError):
        fire("node_kill@0:4", actions)
    assert actions.asked == ["node_kill"]


def commit(run_dir: Path, step: int, generation: int, *, manifest: bool = True) -> Path:
    """A checkpoint directory with two shards of 1000 bytes."""
    directory = run_dir / "checkpoints" / f"step-{step:08d}-g{generation:05d}"
    directory.mkdir(parents=True)
    for rank in range(2):
        (directory / f"__{rank}_0.distcp").write_bytes(b"x" * 1000)
    if manifest:
        (directory / "manifest.json").write_text("{}", encoding="utf-8")
        verified = directory.parent / "verified.json"
        names = json.loads(verified.read_text()) if verified.exists() else {}
        verified.write_text(json.dumps({**names, directory.name: 1}), encoding="utf-8")
    return directory


def test_corrupt_checkpoint_truncates_the_newest_committed_shard(tmp_path: Path) -> None:
    """The rank's own shard of the newest commit loses its second half; nothing else is touched."""
    old, new = commit(tmp_path, 50, 1), commit(tmp_path, 100, 1)
    unfinished = commit(tmp_path, 150, 2, manifest=False)
    fire("corrupt_checkpoint@1:120", Actions(run_dir=tmp_path, rank=1))
    assert (new / "__1_0.distcp").stat().st_size == 500
    untouched = [new / "__0_0.distcp", old / "__1_0.distcp", unfinished / "__1_0.distcp"]
    assert [path.stat().st_size for path in untouched] == [1000, 1000, 1000]


def test_an_abandoned_commit_is_not_the_newest(tmp_path: Path) -> None:
    """A commit above a later generation's start belongs to a line that no restore uses."""
    kept, _ = commit(tmp_path, 50, 1), commit(tmp_path, 100, 1)
    (tmp_path / "fences.json").write_text(json.dumps([{"generation": 3, "step": 60}]), encoding="utf-8")
    assert injection.newest_checkpoint(tmp_path) == kept
    redone = commit(tmp_path, 70, 3)
    assert injection.newest_checkpoint(tmp_path) == redone


def test_corrupt_checkpoint_without_one_says_so(tmp_path: Path) -> None:
    """A plan that corrupts what does not exist yet is found out, not ignored."""
    with pytest.raises(InternalError, match="no committed checkpoint yet"):
        fire("corrupt_checkpoint@0:1", Actions(run_dir=tmp_path))
    commit(tmp_path, 50, 1)
    with pytest.raises(InternalError, match="no shard of rank 7"):
        fire("corrupt_checkpoint@7:60", Actions(run_dir=tmp_path, rank=7))


@dataclass
class TimedActions(Actions):
    """Knows how long a step takes."""

    usual_step_s: float = 0.5


@pytest.mark.parametrize(
    ("actions", "expected_s"), [(Actions(), 1.5 * injection.NOMINAL_STEP_S), (TimedActions(), 0.75)]
)
def test_slow_stretches_the_step(actions: Actions, expected_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is the factor beyond one, in usual steps where they are known."""
    waited: list[float] = []
    event = SimpleNamespace(wait=waited.append)
    monkeypatch.setattr(injection, "threading", SimpleNamespace(Event=lambda: event))
    fire("slow@0:4=2.5x", actions)
    assert waited == [pytest.approx(expected_s)]
