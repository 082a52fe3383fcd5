"""The fork server as the launcher has it: whose its children are, what they have and have not, and its death."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_sre.core import processes
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import Role
from nvrx_sre.events.settings import ChildSettings
from nvrx_sre.launcher import process
from nvrx_sre.launcher.forkserver import ForkServer, Request, ServerConfig
from nvrx_sre.launcher.orphans import Orphans

LIMIT_S = 180
"""A server that does not answer for this long has hung."""


class Launcher:
    """As much of a launcher as a fork server needs."""

    def __init__(self, place: Path, **environment: str) -> None:
        self.place = place
        self.log = place / "forkserver.log"
        config = ServerConfig(
            environment={**os.environ, **environment}, command=("train.py",), log=self.log, answer_s=LIMIT_S
        )
        self.forks = ForkServer(config, SystemClock())
        self._num_children = 0

    def ask(self, code: str, *arguments: str) -> process.Child:
        """A child that is to run a script."""
        self._num_children += 1
        number = self._num_children
        script = self.place / f"script-{number}.py"
        script.write_text(code)
        child, theirs, output = process.prepare(number, Role.WORKER, self.place / f"{number}.log")
        settings = ChildSettings(
            run="demo",
            run_dir=str(self.place),
            launcher_pid=os.getpid(),
            role=Role.WORKER,
            attempt=0,
            save_every=1,
            waits_for_writer=False,
            interrupt_signal=39,
            fault_specs=(),
            group_timeout_s=60.0,
        )
        fork = wire.Fork(
            child=number,
            role=Role.WORKER,
            name="nvrx-rank-00003",
            arguments=[str(script), *arguments],
            environment={**settings.to_environment(), "RANK": "3"},
        )
        self.forks.put(Request(message=fork, channel=theirs, output=output))
        return child

    def answer(self) -> wire.Forked:
        """What comes of the next request."""
        poller = select.poll()
        poller.register(self.forks, select.POLLIN)
        while not (answers := self.forks.take()):
            assert poller.poll(LIMIT_S * 1000), self.log.read_text()
        [answer] = answers
        return answer

    def start(self, code: str, *arguments: str) -> process.Child:
        """A child that runs a script."""
        child = self.ask(code, *arguments)
        answer = self.answer()
        assert (answer.child, answer.error) == (child.number, "")
        child.started(answer.pid)
        return child

    def run(self, code: str, *arguments: str) -> tuple[int, list[str]]:
        """Exit code and lines of a child that ends by itself."""
        child = self.start(code, *arguments)
        return child.reap(), child.log.read_text().splitlines()

    def server_pid(self) -> int:
        """The server that runs now."""
        [pid] = self.forks.processes()
        return pid

    def close(self) -> None:
        """End the server."""
        self.forks.close()


@pytest.fixture(scope="module", autouse=True)
def orphans() -> Iterator[Orphans]:
    """This process adopts, as a launcher does."""
    orphans = Orphans()
    yield orphans
    orphans.close()


@pytest.fixture(scope="module")
def launcher(orphans: Orphans, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """One server for all tests that leave it alive."""
    launcher = Launcher(tmp_path_factory.mktemp("forks"))
    assert launcher.run("") == (0, [])  # it starts with the first request
    yield launcher
    launcher.close()


def wait_dead(pid: int) -> None:
    """Until a process has ended, which is a zombie then."""
    pidfd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(LIMIT_S * 1000)
    os.close(pidfd)


def test_a_child_is_the_launchers_own(launcher: Launcher) -> None:
    """Parent, session, name, arguments, environment, output, exit code: all as of a process that it had executed."""
    code = (
        "import os, sys\n"
        "print(os.getpid(), os.getppid(), os.getsid(0), os.getpgid(0))\n"
        "print(open('/proc/self/comm').read().strip(), *sys.argv[1:], os.environ['RANK'], __name__)\n"
        "print(os.read(0, 1), file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    child = launcher.start(code, "--lr", "1")
    assert child.start_ticks == processes.start_ticks(child.pid) > 0
    assert child.reap() == 7
    pid = str(child.pid)
    assert child.log.read_text().splitlines() == [
        f"{pid} {os.getpid()} {pid} {pid}",
        "nvrx-rank-00003 --lr 1 3 __main__",
        "b''",
    ]


def test_a_child_has_torch_and_nothing_of_the_launchers(launcher: Launcher) -> None:
    """Imports are there; of descriptors there are the three standard ones, its channel and what it opened itself."""
    code = (
        "import os, sys, threading\n"
        "print('torch.distributed.fsdp' in sys.modules, [t.name for t in threading.enumerate()])\n"
        "names = {}\n"
        "for fd in range(3, 256):\n"
        "    try:\n        names[fd] = os.readlink(f'/proc/self/fd/{fd}')\n    except OSError:\n        pass\n"
        "print([(name.split(':')[0], os.get_inheritable(fd)) for fd, name in names.items()])\n"
    )
    secret = os.open(launcher.place, os.O_RDONLY)
    os.set_inheritable(secret, True)
    exit_code, lines = launcher.run(code)
    os.close(secret)
    assert (exit_code, lines) == (0, ["True ['MainThread', 'nvrx-slots_0', 'nvrx-monitor']", "[('socket', False)]"])


def test_children_draw_different_numbers(launcher: Launcher) -> None:
    """What was imported once is not the seed of all."""
    code = "import random, numpy\nprint(random.random(), numpy.random.rand())\n"
    drawn = [launcher.run(code)[1][0].split() for _ in range(2)]
    assert not set(drawn[0]) & set(drawn[1])


def test_a_child_killed_before_it_was_started_ends_when_it_is(launcher: Launcher) -> None:
    """The launcher may change its mind before it knows the pid; what it sent meanwhile is not lost either."""
    doomed = launcher.ask("import signal\nsignal.pause()\n")
    doomed.kill()
    answer = launcher.answer()
    doomed.started(answer.pid)
    assert doomed.reap() == -signal.SIGKILL
    told = launcher.ask(
        "from nvrx_sre.core.errors import RestartAborted\nfrom nvrx_sre.session.process import current\n"
        "try:\n    current().control.wait_assigned()\nexcept RestartAborted:\n    print('told to leave')\n"
    )
    assert told.channel.send(wire.Leave())
    told.started(launcher.answer().pid)
    assert (told.reap(), told.log.read_text()) == (0, "told to leave\n")


def test_a_signal_to_all_processes_of_the_job_ends_children_and_not_the_server(launcher: Launcher) -> None:
    """SIGTERM and SIGINT do to a child what they do to any process; the server waits for the launcher's decision."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(launcher.server_pid(), number)
    child = launcher.start("import signal\nsignal.pause()\n")
    child.channel.socket.settimeout(LIMIT_S)
    received = child.channel.receive_plain()
    assert received is not None and isinstance(received[0], wire.Hello)
    os.kill(child.pid, signal.SIGTERM)
    assert child.reap() == -signal.SIGTERM
    code, lines = launcher.run("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()\n")
    assert (code, lines[-1]) == (1, "KeyboardInterrupt")


def test_what_a_dead_child_leaves_is_ended_and_reaped(launcher: Launcher, orphans: Orphans) -> None:
    """Its session goes with it, in whatever process group; a daemon of its own session and our own children stay."""
    code = (
        "import subprocess, sys\n"
        "sleeper = [sys.executable, '-c', 'import signal; signal.pause()']\n"
        "print(subprocess.Popen(sleeper, process_group=0).pid)\n"
        "print(subprocess.Popen(sleeper, start_new_session=True).pid)\n"
    )
    own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    wait_dead(own.pid)
    child = launcher.start(code)
    assert child.reap() == 0
    left, daemon = map(int, child.log.read_text().split())
    orphans.left_by(child.pid)
    orphans.tend(launcher.forks.processes())
    wait_dead(left)
    assert processes.is_alive(daemon, processes.start_ticks(daemon))
    assert own.wait() == 3, "whoever started it waits for it"
    orphans.tend(launcher.forks.processes())
    os.kill(daemon, signal.SIGKILL)
    wait_dead(daemon)
    orphans.tend(launcher.forks.processes())
    assert not {left, daemon} & set(processes.children()), "no zombie is left"


def test_a_dead_server_costs_the_child_on_its_way_and_is_replaced(tmp_path: Path) -> None:
    """Whoever waits behind that child gets its process from the next server."""
    launcher = Launcher(tmp_path)
    lost, next_one = launcher.ask(""), launcher.ask("print('next')\n")
    assert launcher.forks.take() == []
    first = launcher.server_pid()
    os.kill(first, signal.SIGKILL)
    answer = launcher.answer()
    assert (answer.child, answer.pid) == (lost.number, 0)
    assert answer.error == f"the fork server died (-9), its log is {launcher.log}"
    answer = launcher.answer()
    assert answer.child == next_one.number
    next_one.started(answer.pid)
    assert (next_one.reap(), next_one.log.read_text()) == (0, "next\n")
    assert launcher.server_pid() != first
    os.kill(launcher.server_pid(), signal.SIGKILL)
    wait_dead(launcher.server_pid())
    assert launcher.forks.take() == []
    assert processes.is_alive(*launcher.forks.processes().popitem()), "one that has served is replaced unasked"
    lost.close()
    launcher.close()


@pytest.mark.parametrize("when", ["before the child tells its pid", "before it is read"])
def test_a_child_whose_server_dies_at_its_birth_leaves_without_a_word(tmp_path: Path, when: str) -> None:
    """Nobody knows of it: it runs nothing, and no traceback in the server's log looks like the cause of something."""
    code = (
        "import os, socket\n"
        "from nvrx_sre.events import messages as wire\n"
        "from nvrx_sre.session import forkserver\n"
        "server, child = socket.socketpair()\n"
        "if not os.fork():\n"
        "    server.close()\n"
        "    message = wire.Fork(child=1, role='worker', name='x', arguments=[], environment={})\n"
        "    os._exit(forkserver._child(message, [], child))\n"
        "child.close()\n"
        "if " + repr("read" in when) + ":\n"
        "    server.recv(1, socket.MSG_PEEK)\n"
        "server.close()\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.RETRYABLE, "", "")


def test_a_server_that_cannot_start_fails_every_request(tmp_path: Path) -> None:
    """Each says where to look; nothing is tried without a request."""
    launcher = Launcher(tmp_path, PYTHONHOME=str(tmp_path / "nowhere"))
    children = [launcher.ask(""), launcher.ask("")]
    assert [launcher.answer().error for _ in children] == [
        f"the fork server died (1), its log is {launcher.log}",
        f"the fork server died (1), its log is {launcher.log}",
    ]
    assert launcher.forks.take() == [] and launcher.forks.processes() == {}
    assert "nowhere" in launcher.log.read_text()
    for child in children:
        child.close()
    launcher.close()
