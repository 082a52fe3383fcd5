"""The pages' commands on real launchers, each in the trouble that its alert is about, while it is in it.

Seven launches make the situations of ten pages; all lie below one directory, so that the commands have to find theirs
by the alert's label. What was injected must stand in what they print: rank, phase, error, or the process itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.schema import FaultInjected, Phase, PhaseEntered, Record, SaveFailed, WorkerStarted
from nvrx_sre.monitoring import assets, query, runbooks
from tests.integration import launched
from tests.integration.test_monitoring_runbooks import CRITICAL, shell

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

FOREVER = "1000000"
SEALED = 4
"""Before a restore a planned fault knows of the steps that all ranks have sealed, and is due at its step or after: with
a fault of one rank at step 6 that is 4 or 5, for the other rank may not be through with 5 yet."""
REFILLED = "somebody refilled it"


def run_dir(root: Path, run: str) -> Path:
    """Where a run lies: the directory's name is not the run's."""
    return root / f"dir-of-{run}"


@contextlib.contextmanager
def running(root: Path, run: str, *faults: str, steps: str = FOREVER) -> Iterator[subprocess.Popen[str]]:
    """A launcher that is killed with the block, if it has not ended, and its ranks with it."""
    config = root / "patient.yaml"
    config.write_text("deadlines: {init_s: 900, rendezvous_s: 900, load_s: 900, step_s: 900, data_s: 900}\n")
    arguments = ["train", "--config", str(config), "--run-dir", str(run_dir(root, run)), "--name", run, "--nproc", "2"]
    arguments += ["--standbys", "0", "--steps", steps, "--save-every", "8", "--seq-len", "32", "--batch-size", "4"]
    arguments += ["--metrics-linger", "0", *(word for fault in faults for word in ("--fault", fault))]
    popen = launched.start(arguments)
    try:
        yield popen
    finally:
        popen.send_signal(signal.SIGCONT)
        popen.kill()
        popen.communicate()


def page(root: Path, run: str, alert: str) -> str:
    """Output of the page's diagnosis, started from the alert's label."""
    output = "".join(shell(block, root, run) for block in runbooks.diagnosis(assets.runbook_text(alert)))
    assert f"{run_dir(root, run)}\n" in output, output
    return output


def injected(spec: str) -> Callable[[Record], bool]:
    """The record that says that a planned fault is about to happen."""
    return lambda record: isinstance(record.event, FaultInjected) and record.event.spec == spec


def entered(rank: int, phase: Phase) -> Callable[[Record], bool]:
    """The record of a rank that enters a phase."""
    return lambda record: record.rank == rank and isinstance(record.event, PhaseEntered) and record.event.phase is phase


def all_of(*wanted: Callable[[Record], bool]) -> Callable[[Record], bool]:
    """The record with which each condition has held once, in any order: ranks do not wait for each other."""
    left = list(wanted)

    def is_last(record: Record) -> bool:
        left[:] = [condition for condition in left if not condition(record)]
        return not left

    return is_last


def halted(root: Path) -> dict[str, str]:
    """A deterministic loop that is halted; then its budget is refilled and it goes on in the same place."""
    loop, directory = "exception@1:10x*", run_dir(root, "halted")
    with running(root, "halted", loop, steps="24") as popen:
        assert launched.finish(popen, directory).exit_code == ExitCode.DO_NOT_RESTART
    pages = {"NvrxRunHalted": page(root, "halted", "NvrxRunHalted")}
    resumed = launched.start(["resume", str(directory), "--reason", REFILLED])
    assert launched.finish(resumed, directory).exit_code == 0
    with running(root, "halted", loop, steps="24") as popen:
        assert launched.finish(popen, directory).exit_code == ExitCode.DO_NOT_RESTART
    return pages | {alert: page(root, "halted", alert) for alert in ("NvrxRetryCapBreached", "NvrxGoodputBurn")}


def stalled(root: Path) -> dict[str, str]:
    """A rank is stopped and the watchdog waits; then the launcher's loop hangs in a read; then it is stopped too."""
    stop, pages = "sigstop@1:6", {}
    with running(root, "stalled", stop) as popen:
        launched.wait_for(run_dir(root, "stalled"), popen, injected(stop))
        pages["NvrxRunStalled"] = page(root, "stalled", "NvrxRunStalled")
        os.mkfifo(run_dir(root, "stalled") / "halt.json")  # read each second, and nobody writes: as on dead storage
        wait_until_unhealthy(root, popen)
        pages["NvrxLauncherStuck"] = page(root, "stalled", "NvrxLauncherStuck")
        popen.send_signal(signal.SIGSTOP)
        pages["NvrxTargetMissing"] = page(root, "stalled", "NvrxTargetMissing")
    return pages


def wait_until_unhealthy(root: Path, popen: subprocess.Popen[str]) -> None:
    """Block until the launcher itself says that its loop does not turn."""
    where = json.loads((run_dir(root, "stalled") / "metrics.json").read_text())
    url = where["url"].replace("/metrics", "/healthz")
    while True:
        try:
            query.http_get(url)
        except query.QueryError as error:
            assert ": 503 " in str(error)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"the launcher ended with {popen.wait(timeout=0.2)}")


def rendezvous(root: Path) -> dict[str, str]:
    """A rank never comes back to the rendezvous after a recovery; the other waits there for it.

    What a rank does before the rendezvous it tells only if that lasts.
    """
    hang = f"hang@1:{SEALED}/rendezvous"

    def again(is_entered: Callable[[Record], bool]) -> Callable[[Record], bool]:
        return lambda record: record.generation > 1 and is_entered(record)

    waits, is_missing = again(entered(0, Phase.RENDEZVOUS)), again(entered(1, Phase.INIT))
    with running(root, "rendezvous", "exception@0:6", hang) as popen:
        launched.wait_for(run_dir(root, "rendezvous"), popen, all_of(injected(hang), waits, is_missing))
        return {"NvrxRendezvousStuck": page(root, "rendezvous", "NvrxRendezvousStuck")}


def startup(root: Path) -> dict[str, str]:
    """A rank is stopped before it has imported anything; the other waits for it."""

    def is_rank_1(record: Record) -> bool:
        return record.rank == 1 and isinstance(record.event, WorkerStarted)

    with running(root, "startup") as popen:
        started = launched.wait_for(run_dir(root, "startup"), popen, is_rank_1).event
        assert isinstance(started, WorkerStarted)
        os.kill(started.pid, signal.SIGSTOP)
        launched.wait_for(run_dir(root, "startup"), popen, entered(1, Phase.INIT))
        return {"NvrxStartupOverdue": page(root, "startup", "NvrxStartupOverdue")}


def unsaved(root: Path) -> dict[str, str]:
    """The disk is full for every save."""
    with running(root, "unsaved", "no_space@0:8/writex*") as popen:
        launched.wait_for(run_dir(root, "unsaved"), popen, lambda record: isinstance(record.event, SaveFailed))
        return {"NvrxCheckpointStale": page(root, "unsaved", "NvrxCheckpointStale")}


def overdue(root: Path) -> dict[str, str]:
    """A rank is killed, and its successor does not come past the load of the checkpoint."""
    hang = f"hang@1:{SEALED}/restore"
    with running(root, "overdue", "sigkill@1:6", hang) as popen:
        launched.wait_for(run_dir(root, "overdue"), popen, injected(hang))
        return {"NvrxRecoveryOverdue": page(root, "overdue", "NvrxRecoveryOverdue")}


STOPPED_RANK = r"\d+ T\S* .* rank 1\s+worker"
CULPRIT = r"rank 1\tstep 10\texception\t\S*InjectedError"
PAGES: dict[str, tuple[Callable[[Path], dict[str, str]], list[str]]] = {
    "NvrxRunHalted": (halted, [CULPRIT, "cap same_fingerprint", "exit 93"]),
    "NvrxRetryCapBreached": (halted, [CULPRIT, REFILLED, r"(?s)(generation \d.*){6}", "00000002.json"]),
    "NvrxGoodputBurn": (halted, [CULPRIT, r"IncidentClosed .*exhausted"]),
    "NvrxRunStalled": (stalled, [r"rank 1\tstep\n", r"\n200\n", STOPPED_RANK]),
    "NvrxLauncherStuck": (stalled, [r"\n503\n", r"nvrx_sre train .*dir-of-stalled"]),
    "NvrxTargetMissing": (stalled, [r"no answer", r"\d+ T\S* .*dir-of-stalled"]),
    "NvrxRendezvousStuck": (rendezvous, [r"rank 0\tstep 6\texception", r"rank 0\trendezvous\n", r"rank 1\tinit\n"]),
    "NvrxStartupOverdue": (startup, [r"rank 1\tinit\n", STOPPED_RANK]),
    "NvrxCheckpointStale": (unsaved, [r"SaveFailed .*no_space"]),
    "NvrxRecoveryOverdue": (overdue, [r"rank 1\tstep 6\tkilled", r"rank 1\tload\n"]),
}
"""Alert -> the story that makes its situation, and what its page must say about the injected culprit."""
_TOLD: dict[Callable[[Path], dict[str, str]], dict[str, str]] = {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of all runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("alert", PAGES)
def test_the_page_names_the_culprit_of_a_real_run(alert: str, root: Path) -> None:
    """Every block of the diagnosis runs while the run is in trouble, and together they name what was injected."""
    story, culprits = PAGES[alert]
    if story not in _TOLD:
        _TOLD[story] = story(root)
    output = _TOLD[story][alert]
    for culprit in culprits:
        assert re.search(culprit, output), f"{culprit} is not in:\n{output}"


def test_every_critical_page_is_tried_on_a_real_run() -> None:
    """Here, or on the recorded journal of a real crash loop."""
    assert sorted([*PAGES, "NvrxCrashLooping"]) == CRITICAL
