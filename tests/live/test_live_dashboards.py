"""Every query of every dashboard on a real Prometheus: accepted, and filled by real runs that met real faults.

What stays empty in a run that only recovers stands in `EMPTY_WHEN_HEALTHY` with what fills it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from nvrx_sre.core.clock import NS_PER_S
from nvrx_sre.monitoring import query
from nvrx_sre.monitoring.dashboards import board_query, boards, dashboard_files
from nvrx_sre.monitoring.picture_data import View
from nvrx_sre.monitoring.situation import Situation, situation
from nvrx_sre.monitoring.stack import MonitoringStack, ScrapeTarget, StackConfig
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry.catalog import RankMetrics
from tests import stories
from tests.integration import launched
from tests.integration.leader_loop import free_port
from tests.live import told_runs

pytestmark = pytest.mark.live

Real = tuple[MonitoringStack, float, dict[str, launched.Ended]]
"""The stack, when it began, and the runs that ended."""

DEADLINE_S = 150.0
SCRAPE_S = 1.0
MANY_INCIDENTS = 24
MAX_EMPTY = 0.15
RETENTION = ("--save-every", "4", "--on-busy", "wait", "--keep", "2")
GPU = "rank {{rank}} {{node}}"
EMPTY_WHEN_HEALTHY: dict[tuple[str, str, str], str] = {
    ("run", "Open incident", "{{fault}}, rank {{rank}} {{node}}"): "open",
    **{(board.slug, "Incident opened", "{{run}}: incident"): "open" for board in boards()},
    ("run", "What changed", "changed"): "troubled",
    ("run", "Outages", "p95"): "troubled",
    ("run", "Detection", "p95"): "troubled",
    ("recovery", "Outages", "p95"): "troubled",
    ("recovery", "Detection", "p95"): "troubled",
    ("recovery", "Rollback in steps", "p95"): "troubled",
    ("checkpoints", "Parts of a save", "p95"): "troubled",
    ("checkpoints", "Deletions by retention", "p95"): "troubled",
    ("checkpoints", "Rejected", "Number"): "troubled",
    ("checkpoints", "Skipped", "Number"): "troubled",
    ("checkpoints", "Failed", "Number"): "troubled",
    ("checkpoints", "Not read back", "Number"): "troubled",
    ("ranks", "GPU utilisation", GPU): "troubled",
    ("ranks", "GPU memory", GPU): "troubled",
    ("ranks", "GPU temperature", GPU): "troubled",
    ("ranks", "Xid", GPU): "troubled",
    ("ranks", "Slowest GPU", "rank {{rank}}"): "troubled",
    ("ranks", "GPU time", "rank {{rank}}"): "troubled",
    ("ranks", "GPU time", "median"): "troubled",
    ("ranks", "GPU time", "greatest"): "summary",
    ("ranks", "GPU time", "least"): "summary",
    ("ranks", "Heartbeat age", "greatest"): "summary",
    ("ranks", "Lateness", "greatest"): "summary",
    ("ranks", "Memory of each rank", "greatest"): "summary",
    ("ranks", "Steps", "greatest"): "summary",
    ("ranks", "Steps", "least"): "summary",
}
"""(board, panel or annotation, legend) -> the told run that fills it: more incidents than a short run has, a broken
checkpoint, a save that a fault met, more time, GPUs, more ranks than fit one by one; an incident may be over before the
next scrape."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One query of a dashboard and where it stands."""

    place: tuple[str, str, str]
    expression: str


def asked() -> list[Asked]:
    """All queries of all panels and annotations."""
    found = []
    for board in boards():
        document = json.loads(dashboard_files(Values())[board.file])
        for panel in document["panels"]:
            for target in panel.get("targets", ()):
                place = (board.slug, panel["title"], target["legendFormat"])
                found.append(Asked(place=place, expression=target["expr"]))
        for item in document["annotations"]["list"]:
            found.append(Asked(place=(board.slug, item["name"], item["titleFormat"]), expression=item["expr"]))
    return found


def filled_by(view: View, item: Asked) -> bool:
    """True if the query returns a number at some moment of the view."""
    step_s = max(SCRAPE_S, (view.end_s - view.start_s) / 60)
    courses = query.over_range(view.base_url, view.fill(item.expression), view.start_s, view.end_s, step_s)
    return any(not math.isnan(value) for course in courses for _, value in course.points)


def view_of(stack: MonitoringStack, run: str, start_s: float) -> View:
    """What a person who chose `run` sees from `start_s` until now."""
    return View(
        base_url=stack.prometheus_url,
        start_s=start_s,
        end_s=told_runs.CLOCK.wall_ns() / NS_PER_S,
        variables={"cluster": ".*", "namespace": ".*", "run": run, "price": "2"},
        scrape_interval_s=SCRAPE_S,
    )


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[MonitoringStack, float]]:
    """A stack that has scraped the told runs and the GPU exporter to their ends, and when it began."""
    begin, start_s = stories.START_S, told_runs.start_s(90.0)
    stories.START_S = start_s
    try:
        troubled, trains = told_runs.troubled_story(MANY_INCIDENTS), stories.begin()[0]
        halted, still_open = stories.crash_loop_story(), told_runs.open_story()
    finally:
        stories.START_S = begin
    with ExitStack() as entered:
        servers = [
            entered.enter_context(told_runs.told("troubled", troubled, RankMetrics.ALL)),
            entered.enter_context(told_runs.told("summary", trains, RankMetrics.SUMMARY)),
            entered.enter_context(told_runs.told("halted", halted, RankMetrics.ALL)),
            entered.enter_context(told_runs.told("open", still_open, RankMetrics.ALL)),
        ]
        targets = [ScrapeTarget(url=server.url) for server in servers]
        targets.append(ScrapeTarget(url=entered.enter_context(told_runs.dcgm_exporter())))
        stack = entered.enter_context(MonitoringStack(StackConfig(targets=tuple(targets), scrape_interval_s=SCRAPE_S)))
        for server in servers:
            assert server.wait_for_scrapes(5, DEADLINE_S)
        yield stack, start_s


def test_c73_every_query_is_accepted(told: tuple[MonitoringStack, float]) -> None:
    """Prometheus evaluates each query of each panel and annotation without an error."""
    stack, start_s = told
    views = [view_of(stack, run, start_s) for run in ("troubled", ".*")]
    assert len(asked()) > 150
    for view in views:
        for item in asked():
            assert isinstance(query.instant(view.base_url, view.fill(item.expression)), list), item.place


def test_told_runs_fill_what_health_leaves_empty(told: tuple[MonitoringStack, float]) -> None:
    """Each entry of the list names the run that fills it, and that run does."""
    stack, start_s = told
    by_place = {item.place: item for item in asked()}
    for place, run in EMPTY_WHEN_HEALTHY.items():
        assert filled_by(view_of(stack, run, start_s), by_place[place]), (place, run)


def test_p95_is_hidden_below_twenty_samples(told: tuple[MonitoringStack, float]) -> None:
    """24 outages show a 95th percentile, two do not; the median is there for both."""
    stack, start_s = told
    by_place = {item.place: item for item in asked()}
    p50, p95 = (by_place["run", "Outages", name].expression for name in ("p50", "p95"))
    for run, is_shown in (("troubled", True), ("halted", False)):
        view = view_of(stack, run, start_s)
        assert bool(query.instant(view.base_url, view.fill(p95))) is is_shown
    view = view_of(stack, "troubled", start_s)
    assert query.instant(view.base_url, view.fill(p50))


def test_the_silent_rank_is_named_in_a_summary_too(told: tuple[MonitoringStack, float]) -> None:
    """Above 64 ranks only extremes are exported: whose they are stands beside them."""
    stack, start_s = told
    by_place = {item.place: item for item in asked()}
    for panel in ("Oldest heartbeat", "Slowest rank"):
        expression = by_place["ranks", panel, "rank {{rank}}"].expression
        for run in ("summary", "troubled"):
            found = query.instant(stack.prometheus_url, view_of(stack, run, start_s).fill(expression))
            assert [item.labels["rank"] in ("0", "1") for item in found] == [True], (panel, run)


def test_a_halted_run_keeps_its_word(told: tuple[MonitoringStack, float]) -> None:
    """The situation of each told run, in the number that the dashboards show as a word."""
    stack, start_s = told
    q = board_query(next(board for board in boards() if board.slug == "fleet"), Values())
    found = query.instant(stack.prometheus_url, view_of(stack, ".*", start_s).fill(situation(q)))
    words = {item.labels["run"]: Situation(int(item.value)) for item in found}
    assert words["halted"] is Situation.HALTED
    assert words["summary"] is Situation.TRAINING
    assert words["open"] in (Situation.RECOVERING, Situation.STALLED)
    assert words["troubled"] in (Situation.FLAPPING, Situation.STALLED)


@pytest.fixture(scope="module")
def real(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Real]:
    """A stack that has scraped two real runs from begin to end: one recovers from two faults, one is halted.

    They wait for the writer, so that no save is skipped on a loaded machine: retention has something to delete. The one
    that recovers has no standby: a cold start is long enough to be scraped. Both begin when they are scraped already.
    """
    directory, start_s = tmp_path_factory.mktemp("runs"), told_runs.start_s(0.0)
    faults = {
        "recovers": ("exception@1:10", "sigkill@0:18"),
        "loops": ("exception@1:10x*",),
    }
    ports = {name: free_port() for name in faults}
    targets = tuple(ScrapeTarget(url=f"http://127.0.0.1:{port}/metrics") for port in ports.values())
    with MonitoringStack(StackConfig(targets=targets, scrape_interval_s=SCRAPE_S)) as stack:
        assert stack.wait_until(lambda: len(query.instant(stack.prometheus_url, "up")) == len(ports), DEADLINE_S)
        started = {}
        for name, specs in faults.items():
            planned = [word for spec in specs for word in ("--fault", spec)]
            arguments = launched.train_arguments(directory / name, *planned)
            arguments[arguments.index("--metrics-linger") + 1] = "60"
            standbys = ("--standbys", "0") if name == "recovers" else ()
            options = (*standbys, "--metrics-port", str(ports[name]), "--step-deadline", "20", *RETENTION)
            started[name] = launched.start([*arguments, *options])
        ended = {name: launched.finish(started[name], directory / name) for name in faults}
        yield stack, start_s, ended


@pytest.mark.slow
@pytest.mark.processes
def test_every_query_is_filled_by_real_faulted_runs(
    real: tuple[MonitoringStack, float, dict[str, launched.Ended]],
) -> None:
    """All but the listed ones return numbers, and the list is short."""
    stack, start_s, ended = real
    assert {name: run.exit_code for name, run in ended.items()} == {"recovers": 0, "loops": 93}, ended[
        "recovers"
    ].output
    views = [view_of(stack, run, start_s) for run in ("recovers", "loops")]
    empty = {item.place for item in asked() if not any(filled_by(view, item) for view in views)}
    assert sorted(empty - set(EMPTY_WHEN_HEALTHY)) == []
    assert len(EMPTY_WHEN_HEALTHY) <= MAX_EMPTY * len(asked())


@pytest.mark.slow
@pytest.mark.processes
def test_the_end_in_promql_is_the_end_in_the_summary(
    real: tuple[MonitoringStack, float, dict[str, launched.Ended]],
) -> None:
    """Goodput, redone steps and incidents agree, goodput within what one scrape can move it."""
    stack, start_s, ended = real
    by_place = {item.place: item for item in asked()}
    for name, run in ended.items():
        view, summary = view_of(stack, name, start_s), run.summary

        def newest(panel: str, legend: str, view: View = view, **labels: str) -> float:
            text = view.fill(by_place["run", panel, legend].expression)
            courses = query.over_range(view.base_url, text, view.start_s, view.end_s, SCRAPE_S)
            fits = [course for course in courses if labels.items() <= course.labels.items()]
            return fits[0].points[-1][1]

        share = 2 * SCRAPE_S / summary["wall_s"]
        for kind in ("training", "infrastructure", "durable"):
            told_ratio = newest("Goodput so far", "{{kind}}", kind=kind)
            assert told_ratio == pytest.approx(summary["goodput"][kind], abs=share), (name, kind)
        assert newest("Steps so far", "{{kind}}", kind="redone") == summary["redone_steps"]
        assert newest("Steps so far", "high water") == summary["high_water"]
        recovered = [item for item in summary["incidents"] if item["verdict"] in ("recovered", "flapping")]
        opened = {item["fault"] for item in summary["incidents"]}
        assert sum(newest("Incidents", "Opened", fault=fault) for fault in opened) == len(summary["incidents"])
        assert sum(newest("Incidents", "Recovered", fault=fault) for fault in opened) == len(recovered)
