"""Prometheus and Alertmanager for real: what fires, who is told, what the dashboard's queries return.

The runs are real folds (ledger, incidents, policy, metrics) behind real endpoints; only their events are written
by hand, stage by stage, each stage scraped before the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nvrx_sre.core.clock import NS_PER_S, SystemClock
from nvrx_sre.core.errors import InternalError
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events.schema import Action, BudgetReset, FaultClass, Layer, RestoredFrom
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.monitoring import assets, query
from nvrx_sre.monitoring.stack import MonitoringStack, ScrapeTarget, StackConfig
from nvrx_sre.policy.history import History
from nvrx_sre.policy.ladder import PolicyFault, decide
from nvrx_sre.telemetry.endpoint import MetricsServer
from nvrx_sre.telemetry.metrics import MetricsFold
from tests import stories

pytestmark = pytest.mark.live

CLOCK = SystemClock()
LABELS = {"cluster": "c1", "namespace": "ml"}
STORY_S = 60.0
"""Room before now for what the stories tell."""
DEADLINE_S = 30.0
EMPTY_WHEN_HEALTHY = {"Open incident", "Steps at risk"}
"""No open incident; no durable save yet."""


class PolicyStory(stories.Story):
    """A story whose restart decisions are the policy's own."""

    def decide(self, at_s: float, layer: Layer, action: Action = Action.RESTART, **changes: object) -> None:
        history = History()
        *past, last = self.records
        for record in past:
            history.apply(record)
        event = last.event
        fault = PolicyFault(fault=event.fault, fingerprint=event.fingerprint, high_water=event.high_water)
        decision = decide(history, fault, last.time_ns, CapLimits())
        super().decide(
            at_s,
            decision.layer,
            decision.action,
            restarts_since_progress=decision.restarts_since_progress,
            budget_used=decision.budget_used,
            budget_limit=decision.budget_limit,
            exit_code=decision.exit_code,
        )


class LiveRun:
    """One run: a story told in stages to a metric fold that a real endpoint serves."""

    def __init__(self, run: str, port: int | None = None, story: PolicyStory | None = None) -> None:
        self.run = run
        self.story = story or PolicyStory()
        self.ledger, self.tracker = Ledger(), IncidentTracker(run)
        self.fold = MetricsFold(run, self.ledger, self.tracker, CLOCK)
        self.server = MetricsServer(self.fold.registry, "127.0.0.1", port, lambda: True, lambda: True)
        self.server.start()
        self.num_told = 0
        self.begin_s = 0.0

    def tell(self) -> None:
        """Fold what the story has gained since."""
        for record in self.story.records[self.num_told :]:
            self.ledger.apply(record)
            self.tracker.apply(record)
            self.fold.apply(record)
        self.num_told = len(self.story.records)

    def train(self) -> float:
        """Start and ten steps; when the last one was committed."""
        self.story.start(0.0)
        self.story.steps(self.story.form(2.0, 0, RestoredFrom.FRESH), 12.4, 1, 10)
        return 12.4

    def fail(self, at_s: float, fault: FaultClass) -> float:
        """A fault at step 11 and the recovery up to the step loop; when that is entered again."""
        self.story.fault(at_s + 0.2, at_s + 0.3, fault, 1)
        self.story.torn_down(at_s + 0.4)
        return self.story.form(at_s + 0.4, 10, RestoredFrom.HOT)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The stories' time now: they begin `STORY_S` ago."""
    monkeypatch.setattr(stories, "START_S", CLOCK.wall_ns() / NS_PER_S - STORY_S)
    return STORY_S


@pytest.fixture
def runs(now: float) -> Iterator[dict[str, LiveRun]]:
    """Three runs that train."""
    found = {name: LiveRun(name) for name in ("recovers", "loops", "halts")}
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
    """(run, alerts) of each notification with `status`, in the order of runs."""
    found = []
    for item in stack.notifications():
        assert item.receiver == "page"
        if item.status == status:
            found.append((item.alerts[0]["labels"]["run"], item.names(status)))
    return sorted(found)


def evaluations(stack: MonitoringStack, alert: str, run: str) -> float:
    """How many times the alert was seen firing."""
    selector = f'ALERTS{{alertname="{alert}",alertstate="firing",run="{run}"}}'
    return sum(item.value for item in query.instant(stack.prometheus_url, f"count_over_time({selector}[10m])"))


def test_c68_a_crash_loop_pages_once_and_a_recovery_does_not(runs: dict[str, LiveRun]) -> None:
    """Recovered: silent. Looping: one page. Stopped with 93: one page, also after its endpoint is gone. Both clear."""
    recovers, loops, halts = runs.values()
    config = StackConfig(
        targets=tuple(ScrapeTarget(url=run.server.url, labels=LABELS) for run in runs.values()),
        scrape_interval_s=1.0,
        group_wait_s=1.0,
        group_interval_s=1.0,
    )
    with MonitoringStack(config) as stack:
        scraped(recovers, loops, halts)
        for run, fault in ((recovers, FaultClass.EXCEPTION), (loops, FaultClass.KILLED), (halts, FaultClass.EXCEPTION)):
            run.at_s = run.fail(run.at_s, fault)
            run.tell()
        scraped(recovers, loops, halts)
        recovers.story.steps(recovers.at_s, recovers.at_s + 1.0, 11, 11)
        loops.at_s = loops.fail(loops.fail(loops.at_s, FaultClass.KILLED), FaultClass.KILLED)
        halts.at_s = halts.fail(halts.at_s, FaultClass.EXCEPTION)
        halts.story.fault(halts.at_s + 0.2, halts.at_s + 0.3, FaultClass.EXCEPTION, 1)
        halts.story.finish(halts.at_s + 0.5, exit_code=93)
        for run in runs.values():
            run.tell()
        scraped(recovers, loops, halts)
        recovers.story.finish(recovers.at_s + 2.0)
        recovers.tell()
        halts.server.close()

        expected = [("halts", ["NvrxRunHalted"]), ("loops", ["NvrxCrashLooping"])]
        assert stack.receiver.wait_for(lambda _: pages(stack, "firing") == expected, DEADLINE_S), stack.notifications()
        assert stack.wait_until(lambda: evaluations(stack, "NvrxRunHalted", "halts") >= 8, DEADLINE_S)
        assert stack.wait_until(lambda: evaluations(stack, "NvrxCrashLooping", "loops") >= 8, DEADLINE_S)
        assert pages(stack, "firing") == expected
        assert evaluations(stack, "NvrxCrashLooping", "recovers") == 0

        loops.story.steps(loops.at_s, STORY_S, 11, 11)
        loops.tell()
        again = LiveRun("halts", port=halts.server.port, story=halts.story)
        runs["again"] = again
        again.story.add(STORY_S, BudgetReset(reason="the cause is fixed"))
        again.story.start(STORY_S)
        again.tell()
        assert stack.receiver.wait_for(lambda _: len(pages(stack, "resolved")) == 2, DEADLINE_S), stack.notifications()
        resolved = dict(pages(stack, "resolved"))  # one message a run; it may name the inhibited alert as well
        assert "NvrxRunHalted" in resolved["halts"]
        assert resolved["loops"] == ["NvrxCrashLooping"]
        assert pages(stack, "firing") == expected
        report = stack.report()
        assert report.fired == ("NvrxCrashLooping", "NvrxRunHalted")
        assert (report.pending, report.silent, report.notified) == ((), (), report.fired)
        assert query.rule_problems(stack.prometheus_url) == []


def test_every_panel_of_the_run_dashboard_gets_data(runs: dict[str, LiveRun]) -> None:
    """Each query runs on a real Prometheus and returns series, but for the short list that is empty when healthy."""
    document = json.loads(assets.asset(assets.RUN_DASHBOARD_FILE).read_text())
    variables = {"$__rate_interval": "1m", "$__range": "1h", "$cluster": ".*", "$namespace": ".*", "$run": "loops"}
    with MonitoringStack(StackConfig(targets=(ScrapeTarget(url=runs["loops"].server.url, labels=LABELS),))) as stack:
        scraped(runs["loops"])
        empty = set()
        for panel in document["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"]
                for name, value in variables.items():
                    expression = expression.replace(name, value)
                if not query.instant(stack.prometheus_url, expression):
                    empty.add(panel["title"])
        assert empty <= EMPTY_WHEN_HEALTHY
        for annotation in document["annotations"]["list"]:
            expression = annotation["expr"].replace("$__rate_interval", "1m").replace("$run", "loops")
            assert isinstance(query.instant(stack.prometheus_url, expression), list)


def test_a_quiet_stack_reports_silence_and_leaves_nothing_behind(runs: dict[str, LiveRun]) -> None:
    """No alert, no notification; after the end neither process nor directory is left."""
    with MonitoringStack(StackConfig(targets=(ScrapeTarget(url=runs["recovers"].server.url, labels=LABELS),))) as stack:
        scraped(runs["recovers"])
        assert stack.wait_until(lambda: bool(query.instant(stack.prometheus_url, "up == 1")), DEADLINE_S)
        report = stack.report()
        pids, command = stack.pids, psutil.Process(stack.pids[0]).cmdline()
    assert report.silent == ("NvrxCrashLooping", "NvrxRunHalted")
    assert (report.fired, report.pending, report.notified) == ((), (), ())
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
