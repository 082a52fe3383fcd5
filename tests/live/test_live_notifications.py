"""Twelve situations, real launchers where one node is enough: who is told what, against the committed table."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvrx_sre.core.clock import NS_PER_S
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.schema import BudgetReset, FaultClass, FaultDetected, Phase, Record, RestoredFrom, StepsCommitted
from nvrx_sre.monitoring import assets
from tests import stories
from tests.integration import launched
from tests.live.live_site import HERE, SCRAPE_S, Site
from tests.live.told import CLOCK, LiveRun

pytestmark = [pytest.mark.live, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

EXPECTED: dict[str, dict[str, list[str]]] = yaml.safe_load((HERE / "expected_notifications.yaml").read_text())
FOREVER = 1_000_000
AT_ONCE = 3
"""Situations at the same time: the machine has two cores."""
QUIET_EVALUATIONS = 20
"""After the last situation ended: longer than every window of values.yaml."""
HALTED_EVALUATIONS = 8
"""While a loop that was halted stands still."""
RESOLVED = {
    "NvrxRunHalted": "submitted again",
    "NvrxCrashLooping": r"recovered in .+s, rollback \d+ steps?|submitted again",
    "NvrxTargetMissing": "it answers again",
    "NvrxRendezvousStuck": "the group has formed: 2 ranks",
    "NvrxLauncherStuck": "its loop turns again",
}
"""Page -> how its resolution says that it ended."""
LATENCY_MAX_S = 30.0
"""From the detection of the fault that made it a loop to the page. On an idle machine it is a scrape, an evaluation
and `group_wait`, a second each; the rest is room for a loaded one."""


def committed(run_dir: Path, popen: subprocess.Popen[str], step: int) -> None:
    """Block until a step was committed by this start."""
    epoch = max((record.epoch for record in launched.read(run_dir)), default=0)
    launched.wait_for(
        run_dir,
        popen,
        lambda record: (
            isinstance(record.event, StepsCommitted) and record.event.last_step >= step and record.epoch >= epoch
        ),
    )


def end(popen: subprocess.Popen[str], run_dir: Path, exit_code: int) -> None:
    """SIGTERM the launcher, if its run has not ended by itself, and check how it ended."""
    if popen.poll() is None:
        popen.terminate()
    ended = launched.finish(popen, run_dir)
    assert ended.exit_code == exit_code, ended.explain()


def recovery(site: Site) -> None:
    """One fault, cured in place."""
    ended = launched.finish(site.start("recovery", "--fault", "exception@0:6"), site.run_dir("recovery"))
    assert (ended.exit_code, len(ended.events(FaultDetected))) == (0, 1), ended.explain()


def finished(site: Site) -> None:
    """No fault at all."""
    assert launched.finish(site.start("finished"), site.run_dir("finished")).exit_code == 0


def preempted(site: Site) -> None:
    """SIGTERM while it trains; nobody starts it again."""
    popen, run_dir = site.start("preempted", steps=FOREVER), site.run_dir("preempted")
    site.wait_for_value('nvrx_steps_total{run="preempted",kind="new"} > 0')
    end(popen, run_dir, ExitCode.PREEMPTED)


def flapping(site: Site) -> None:
    """Six faults, each with progress before the next."""
    faults = [part for step in range(8, 56, 8) for part in ("--fault", f"exception@0:{step}")]
    popen, run_dir = site.start("flapping", *faults, steps=FOREVER), site.run_dir("flapping")
    committed(run_dir, popen, 60)
    site.wait(lambda: bool(site.notified("flapping")), "a ticket for flapping")
    end(popen, run_dir, ExitCode.PREEMPTED)


def loop(site: Site) -> None:
    """A deterministic loop in one namespace, while a run of the same name recovers in another; then resumed."""
    twin = site.start("loop", "--fault", "exception@0:6", namespace="twin", steps=FOREVER)
    popen, run_dir = site.start("loop", "--fault", "exception@0:20x*"), site.run_dir("loop")
    assert launched.finish(popen, run_dir).exit_code == ExitCode.DO_NOT_RESTART
    site.wait(lambda: bool(firing(site, "page", "loop")), "a page for the loop")
    resumed = launched.start(["resume", str(run_dir), "--reason", "the data is mended"])
    assert launched.finish(resumed, run_dir).exit_code == 0
    assert launched.finish(site.start("loop"), run_dir).exit_code == 0
    site.wait_for_page("loop", "NvrxRunHalted", "resolved")
    end(twin, site.run_dir("loop", "twin"), ExitCode.PREEMPTED)


def transient_loop(site: Site) -> None:
    """A loop of a transient fault, which the launcher goes on with: it pages, and recovers with the fifth attempt."""
    config = site.root / "transient.yaml"
    config.write_text("caps:\n  backoff_s: [0, 1, 2, 6]\n")
    faults = ["--config", str(config), "--fault", "sigkill@0:20x4"]
    popen, run_dir = site.start("transient-loop", *faults, steps=FOREVER), site.run_dir("transient-loop")
    site.wait_for_page("transient-loop", "NvrxCrashLooping")
    site.wait_for_page("transient-loop", "NvrxCrashLooping", "resolved")
    end(popen, run_dir, ExitCode.PREEMPTED)


def stopped(site: Site) -> None:
    """SIGSTOP of the launcher: it does not answer; SIGCONT, and all is well."""
    popen, run_dir = site.start("stopped", steps=FOREVER), site.run_dir("stopped")
    site.wait_for_value('nvrx_steps_total{run="stopped",kind="new"} > 0')
    popen.send_signal(signal.SIGSTOP)
    site.wait_for_page("stopped", "NvrxTargetMissing")
    popen.send_signal(signal.SIGCONT)
    site.wait_for_page("stopped", "NvrxTargetMissing", "resolved")
    end(popen, run_dir, ExitCode.PREEMPTED)


def killed(site: Site) -> None:
    """SIGKILL of the launcher; its successor is started at once."""
    first, run_dir = site.start("killed", steps=FOREVER), site.run_dir("killed")
    site.wait_for_value('nvrx_checkpoint_step{run="killed",tier="durable"} > 0')
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = site.start("killed", steps=FOREVER)
    site.wait_for_value('nvrx_launcher_starts_total{run="killed"} > 1 and nvrx_launcher_loop_timestamp_seconds')
    end(second, run_dir, ExitCode.PREEMPTED)


def rendezvous(site: Site) -> None:
    """A second node never comes."""
    run = LiveRun("rendezvous")
    run.story.start(stories_now() - 100.0)
    run.story.phase(stories_now() - 90.0, Phase.RENDEZVOUS)
    run.tell()
    site.tell(run.server.url)
    site.wait_for_page("rendezvous", "NvrxRendezvousStuck")
    run.story.form(stories_now(), 0, RestoredFrom.FRESH)
    run.tell()
    site.wait_for_page("rendezvous", "NvrxRendezvousStuck", "resolved")
    leave(site, run)


def stuck(site: Site) -> None:
    """The launcher answers, but its loop does not turn."""
    run = training(site, "stuck")
    run.fold.loop_turned(CLOCK.wall_ns() - 60 * NS_PER_S)
    run.is_turning = False
    site.wait_for_page("stuck", "NvrxLauncherStuck")
    run.is_turning = True
    site.wait_for_page("stuck", "NvrxLauncherStuck", "resolved")
    leave(site, run)


def moved(site: Site) -> None:
    """Another node takes the next epoch; both endpoints are scraped for a while."""
    first = training(site, "moved")
    site.wait_for_value('nvrx_steps_total{run="moved",kind="new"} > 0')
    second = LiveRun("moved", story=first.story)
    second.story.start(stories_now())
    begin_s = second.story.form(stories_now(), 10, RestoredFrom.DURABLE)
    second.story.steps(begin_s, begin_s + 0.1, 11, 12)
    second.tell()
    site.tell(second.server.url)
    site.wait_for_value('nvrx_launcher_starts_total{run="moved"} > 1')
    first.server.close()
    site.forget(first.server.url)
    leave(site, second)


def loop_then_halt(site: Site) -> None:
    """A loop of a transient fault pages while the launcher still tries; then it is halted, and submitted again."""
    run = training(site, "halted-loop")
    run.at_s = stories_now()
    for _ in range(3):
        run.at_s = run.fail(run.at_s, FaultClass.KILLED)
    run.tell()
    site.wait_for_page("halted-loop", "NvrxCrashLooping")
    run.story.finish(stories_now(), exit_code=93)
    run.tell()
    assert run.server.wait_for_scrapes(2, 30.0)
    run.server.close()
    seen = site.evaluations("NvrxWatchdog")
    site.wait(lambda: site.evaluations("NvrxWatchdog") > seen + HALTED_EVALUATIONS, "the watchdog")
    again = LiveRun("halted-loop", port=run.server.port, story=run.story)
    again.story.add(stories_now(), BudgetReset(reason="the cause is fixed"))
    again.story.start(stories_now())
    again.tell()
    site.wait_for_page("halted-loop", "NvrxCrashLooping", "resolved")
    leave(site, again)


SITUATIONS: tuple[Callable[[Site], None], ...] = (
    *(loop, transient_loop, stopped, flapping, killed, preempted, recovery, finished),
    *(rendezvous, stuck, moved, loop_then_halt),
)


def stories_now() -> float:
    """Now, in a story's seconds."""
    return CLOCK.wall_ns() / NS_PER_S - stories.START_S


def training(site: Site, name: str) -> LiveRun:
    """A told run that is scraped from its start on and has committed ten steps, the last one now."""
    run = LiveRun(name)
    run.story.start(stories_now())
    run.tell()
    site.tell(run.server.url)
    site.wait_for_value(f'run:nvrx_step_high_water:max{{run="{name}"}} + 1')
    begin_s = run.story.form(stories_now(), 0, RestoredFrom.FRESH)
    run.story.steps(begin_s, begin_s + 0.1, 1, 10)
    run.tell()
    return run


def leave(site: Site, run: LiveRun) -> None:
    """End a told run in order: scraped twice after its end, then gone."""
    run.story.finish(stories_now())
    run.tell()
    assert run.server.wait_for_scrapes(2, 30.0)
    site.forget(run.server.url)
    run.server.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """All situations have happened, and it has been quiet for a while since."""
    with Site(tmp_path_factory.mktemp("site")) as opened:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            ended = [pool.submit(situation, opened) for situation in SITUATIONS]
        for situation in ended:
            situation.result()
        seen = opened.evaluations("NvrxWatchdog")
        opened.wait(lambda: opened.evaluations("NvrxWatchdog") > seen + QUIET_EVALUATIONS, "the watchdog")
        yield opened


def firing(site: Site, receiver: str, run: str) -> list[dict[str, Any]]:
    """Each time that a receiver was told of a run that something fires: the first alert of the message."""
    return [item.alerts[0] for item in site.notified(run) if (item.receiver, item.status) == (receiver, "firing")]


def test_everybody_is_told_what_the_table_says(site: Site) -> None:
    """No more and no less, for each run; the watchdog alone has no run."""
    assert site.told_of() == {run: told for run, told in sorted(EXPECTED.items()) if told}


def test_c68_a_crash_loop_pages_once_from_fault_to_cure(site: Site) -> None:
    """One critical notification over all receivers, although the run halts, stands still and starts again."""
    for run in ("loop", "transient-loop", "halted-loop"):
        assert len(firing(site, "page", run)) == 1, site.notified(run)


def test_the_page_of_a_crash_loop_is_prompt_and_leads_on(site: Site) -> None:
    """From the detection of the last fault to the sending; its runbook is a page that we ship."""
    faults = [record for record in launched.read(site.run_dir("loop")) if isinstance(record.event, FaultDetected)]
    (page,) = firing(site, "page", "loop")
    latency_s = datetime.fromisoformat(page["startsAt"]).timestamp() - faults[-1].time_ns / NS_PER_S
    assert -SCRAPE_S < latency_s < LATENCY_MAX_S
    name = page["annotations"]["runbook_url"].rpartition("/")[2].removesuffix(".md")
    assert assets.runbook_text(name).startswith(f"# {page['labels']['alertname']}\n")


def test_every_page_resolved_with_its_cause(site: Site) -> None:
    """Nobody is left with an open page when all is well, and each end says how it came about."""
    for run, told in EXPECTED.items():
        namespace, name = run.split("/")
        for alert in told.get("page", []):
            resolved = site.wait_for_page(name, alert, "resolved", namespace)
            how = RESOLVED[resolved["labels"]["alertname"]]
            assert re.fullmatch(how, resolved["annotations"]["resolved"]), resolved["annotations"]


def test_a_run_of_the_same_name_elsewhere_is_not_silenced_or_told(site: Site) -> None:
    """Inhibition and grouping keep namespaces apart."""
    assert site.notified("loop", "twin") == []
    assert site.value('count_over_time(nvrx_faults_total{namespace="twin",fault="exception"}[1h])') > 0


def test_the_recorded_notification_is_still_what_is_sent(site: Site) -> None:
    """tests/recordings/notification.json has the labels and annotations of today's page and its end."""
    recording = Path(assets.assets_root()) / "tests" / "recordings" / "notification.json"
    if os.environ.get("NVRX_SRE_RECORD"):
        recording.write_text(json.dumps(payloads(site, "transient-loop", "NvrxCrashLooping"), indent=1) + "\n")
    recorded = json.loads(recording.read_text())
    for status, payload in payloads(site, "transient-loop", "NvrxCrashLooping").items():
        (was,), (now,) = recorded[status]["alerts"], payload["alerts"]
        assert set(was["labels"]) == set(now["labels"])
        assert set(was["annotations"]) == set(now["annotations"])


def payloads(site: Site, run: str, alert: str) -> dict[str, dict[str, Any]]:
    """Status -> the body of the webhook that said so."""
    found: dict[str, dict[str, Any]] = {}
    for item in site.notified(run):
        if item.receiver == "page" and item.names(item.status) == [alert]:
            found.setdefault(item.status, item.body)
    return found


def test_ten_crash_loops_that_are_killed_all_alert(tmp_path: Path) -> None:
    """The launcher dies at a random moment of the scrape interval after the attempt that made it a loop.

    Whether its end was scraped or not, somebody is paged: for the halt, or for a run that does not answer.
    """
    names = [f"loop-{number}" for number in range(10)]
    moments = random.Random(7)
    delays_s = {name: moments.uniform(0.0, SCRAPE_S) for name in names}

    def kill_in_a_loop(opened: Site, name: str) -> None:
        popen, run_dir = opened.start(name, "--fault", "exception@0:20x*"), opened.run_dir(name)
        faults: list[int] = []
        launched.wait_for(run_dir, popen, lambda record: is_third_fault(record, faults))
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(timeout=delays_s[name])
        popen.kill()
        popen.communicate()
        opened.wait(lambda: bool(firing(opened, "page", name)), f"a page for {name}")

    with Site(tmp_path) as opened, ThreadPoolExecutor(AT_ONCE) as pool:
        for ended in [pool.submit(kill_in_a_loop, opened, name) for name in names]:
            ended.result()
        told = opened.told_of()
    assert sorted(told) == sorted(f"live/{name}" for name in names)
    causes = {alert for by_receiver in told.values() for alert in by_receiver["page"]}
    assert causes <= {"NvrxRunHalted", "NvrxCrashLooping", "NvrxTargetMissing"}


def is_third_fault(record: Record, seen: list[int]) -> bool:
    """Whether the record is the third fault; `seen` remembers those before."""
    if isinstance(record.event, FaultDetected):
        seen.append(record.seq)
    return len(seen) == 3
