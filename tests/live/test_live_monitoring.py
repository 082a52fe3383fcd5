"""Prometheus and Alertmanager for real: what fires, and who is told.

The runs are real folds (ledger, incidents, policy, metrics) behind real endpoints; only their events are written
by hand, stage by stage, each stage scraped before the next.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nvrx_sre.core.errors import InternalError
from nvrx_sre.events.schema import BudgetReset, FaultClass, IncidentClosed
from nvrx_sre.goodput.incidents import incident_trace_id
from nvrx_sre.monitoring import query
from nvrx_sre.monitoring.alerts import alert_rules
from nvrx_sre.monitoring.stack import MonitoringStack, ScrapeTarget, StackConfig
from nvrx_sre.monitoring.values import Values
from tests.live.told import STORY_S, LiveRun

pytestmark = pytest.mark.live

LABELS = {"cluster": "c1", "namespace": "ml"}
DEADLINE_S = 150.0
WATCHDOG = "NvrxWatchdog"


@pytest.fixture
def runs(now: float) -> Iterator[dict[str, LiveRun]]:
    """Four runs that train."""
    found = {name: LiveRun(name) for name in ("recovers", "loops", "halts", "ends")}
    for run in found.values():
        run.at_s = run.train()
        run.tell()
    yield found
    for run in found.values():
        run.server.close()


def scraped(*runs: LiveRun) -> None:
    """Block until Prometheus has read each run twice."""
    for run in runs:
        assert run.server.wait_for_scrapes(2, DEADLINE_S)


def pages(stack: MonitoringStack, status: str) -> list[tuple[str, list[str]]]:
    """(run, alerts) of each page with `status`, in the order of runs."""
    found = []
    for item in stack.notifications():
        if item.receiver == "page" and item.status == status:
            found.append((item.alerts[0]["labels"]["run"], item.names(status)))
    return sorted(found)


def submit_again(run: LiveRun) -> LiveRun:
    """The run's next launcher, at the same address, with its budgets refilled."""
    again = LiveRun(run.run, port=run.server.port, story=run.story)
    again.story.add(STORY_S, BudgetReset(reason="the cause is fixed"))
    again.story.start(STORY_S)
    again.tell()
    return again


def evaluations(stack: MonitoringStack, alert: str, run: str) -> float:
    """How many times the alert was seen firing."""
    selector = f'ALERTS{{alertname="{alert}",alertstate="firing",run="{run}"}}'
    return sum(item.value for item in query.instant(stack.prometheus_url, f"count_over_time({selector}[10m])"))


def exemplar_traces(stack: MonitoringStack, family: str, run: str) -> set[str]:
    """Traces that Prometheus has as exemplars of a histogram of `run`."""
    selector = urllib.parse.quote(f'{family}_bucket{{run="{run}"}}')
    url = f"{stack.prometheus_url}/api/v1/query_exemplars?query={selector}&start=0&end=32503680000"
    series = json.loads(query.http_get(url))["data"]
    return {exemplar["labels"]["trace_id"] for item in series for exemplar in item["exemplars"]}


def test_c68_a_crash_loop_pages_once_and_a_recovery_does_not(runs: dict[str, LiveRun]) -> None:
    """Recovered: silent. Looping: one page. Stopped with 93: one page, also after its endpoint is gone. All clear.

    A loop that has paged and is stopped later goes on with its page: nobody is told a second time.
    """
    recovers, loops, halts, ends = runs.values()
    looping = {"loops": loops, "ends": ends}
    config = StackConfig(
        targets=tuple(ScrapeTarget(url=run.server.url, labels=LABELS) for run in runs.values()),
        scrape_interval_s=1.0,
        group_wait_s=1.0,
        group_interval_s=1.0,
    )
    with MonitoringStack(config) as stack:
        scraped(*runs.values())
        for name, run in runs.items():
            run.at_s = run.fail(run.at_s, FaultClass.KILLED if name in looping else FaultClass.EXCEPTION)
            run.tell()
        scraped(*runs.values())
        recovers.story.steps(recovers.at_s, recovers.at_s + 1.0, 11, 11)
        for run in looping.values():
            run.at_s = run.fail(run.fail(run.at_s, FaultClass.KILLED), FaultClass.KILLED)
        halts.at_s = halts.fail(halts.at_s, FaultClass.EXCEPTION)
        halts.story.fault(halts.at_s + 0.2, halts.at_s + 0.3, FaultClass.EXCEPTION, 1)
        halts.story.finish(halts.at_s + 0.5, exit_code=93)
        for run in runs.values():
            run.tell()
        scraped(*runs.values())
        recovers.story.finish(recovers.at_s + 2.0)
        recovers.tell()
        halts.server.close()

        looped = [(name, ["NvrxCrashLooping"]) for name in looping]
        expected = sorted([("halts", ["NvrxRunHalted"]), *looped])
        assert stack.receiver.wait_for(lambda _: pages(stack, "firing") == expected, DEADLINE_S), stack.notifications()
        ends.story.finish(ends.at_s + 0.5, exit_code=93)
        ends.tell()
        scraped(ends)
        ends.server.close()
        seen = evaluations(stack, "NvrxCrashLooping", "ends")
        assert stack.wait_until(lambda: evaluations(stack, "NvrxCrashLooping", "ends") >= seen + 8, DEADLINE_S)
        assert stack.wait_until(lambda: evaluations(stack, "NvrxRunHalted", "halts") >= 8, DEADLINE_S)
        assert stack.wait_until(lambda: evaluations(stack, "NvrxCrashLooping", "loops") >= 8, DEADLINE_S)
        assert pages(stack, "firing") == expected
        assert evaluations(stack, "NvrxCrashLooping", "recovers") == evaluations(stack, "NvrxRunHalted", "ends") == 0
        (closed,) = (item.event for item in recovers.story.records if isinstance(item.event, IncidentClosed))
        assert exemplar_traces(stack, "nvrx_outage_seconds", "recovers") == {closed.trace_id}
        assert exemplar_traces(stack, "nvrx_detection_seconds", "recovers") == {incident_trace_id("recovers", 1)}

        loops.story.steps(loops.at_s, STORY_S, 11, 11)
        loops.tell()
        runs |= {f"{run.run} again": submit_again(run) for run in (halts, ends)}
        assert stack.receiver.wait_for(lambda _: len(pages(stack, "resolved")) == 3, DEADLINE_S), stack.notifications()
        resolved = dict(pages(stack, "resolved"))  # one message a run; it may name the inhibited alert as well
        assert "NvrxRunHalted" in resolved["halts"]
        assert resolved["loops"] == resolved["ends"] == ["NvrxCrashLooping"]
        assert pages(stack, "firing") == expected
        report = stack.report()
        assert {"NvrxCrashLooping", "NvrxRunHalted", WATCHDOG} <= set(report.fired)
        assert {"NvrxCrashLooping", "NvrxRunHalted", WATCHDOG} <= set(report.notified) <= set(report.fired)
        assert query.rule_problems(stack.prometheus_url) == []


def test_a_quiet_stack_reports_silence_and_leaves_nothing_behind(runs: dict[str, LiveRun]) -> None:
    """No alert, no notification; after the end neither process nor directory is left."""
    with MonitoringStack(StackConfig(targets=(ScrapeTarget(url=runs["recovers"].server.url, labels=LABELS),))) as stack:
        scraped(runs["recovers"])
        assert stack.wait_until(lambda: bool(query.instant(stack.prometheus_url, "up == 1")), DEADLINE_S)
        report = stack.report()
        pids, command = stack.pids, psutil.Process(stack.pids[0]).cmdline()
    assert (report.fired, report.pending) == ((WATCHDOG,), ())
    assert set(report.silent) == {rule.name for rule in alert_rules(Values())} - {WATCHDOG}
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    directory = next(Path(item.partition("=")[2]).parent for item in command if item.startswith("--config.file="))
    assert not directory.exists()


def test_broken_rules_end_in_one_error_and_nothing_is_left(tmp_path: Path) -> None:
    """Prometheus refuses the file: its own words are in the error, both servers are gone."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("groups: [{name: g, rules: [{alert: A, expr: 'sum('}]}]\n")
    stack = MonitoringStack(StackConfig(rules=rules))
    with pytest.raises(InternalError, match="did not become ready"), stack:
        pass
    assert stack.pids == []
