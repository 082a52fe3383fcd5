"""The shipped rules in promtool: quiet, single recovery, fires, resolves, at three scrape intervals.

The stories of a theme of `histories` lie side by side in one promtool call; those of all themes would take it minutes.
The default suite asks one story for each alert, one with scrapes lost, and healthy ones, all side by side, at 60 s
scrapes, and the pages at 15 s; the build gate asks all of them at 15, 30 and 60 s, and with the shipped values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import yaml

from nvrx_sre.monitoring import generate, promtool
from nvrx_sre.monitoring.alerts import alert_rules, rules_document
from nvrx_sre.monitoring.promtool import Case, Expectation, Series
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog
from tests.promtool.fleet import END, KEY, Run, case_of, expectations, jump
from tests.promtool.histories import BEGIN, LOOP, THEMES, stories, with_ends

QUICK = Values(
    event_window_s=900,
    flapping_window_s=900,
    save_failing_window_s=900,
    retry_cap_window_s=600,
    saturation_for_s=240,
    standby_missing_for_s=240,
    slow_rank_for_s=240,
    step_time_for_s=240,
    telemetry_window_s=600,
    world_shrunk_for_s=180,
    memory_for_s=180,
    hold_s=120,
)
"""Shorter windows, so that a story fits into forty minutes."""
UNTIL_S, SHIPPED_UNTIL_S = 2_400, 6_000
HOUR = 3_600
Theme = Callable[[Values], list[Run]]
SETTLING_SCRAPES = 2.1
"""A condition is seen by the next scrape, a `for` ends with the evaluation after it."""
SIDE_BY_SIDE = 60
"""promtool refuses a query that reads more than 10,000 samples: 11 deadlines of a run, for ten minutes."""
ELSEWHERE = ("NvrxWatchdog", "NvrxGoodputBurn")
"""Alerts with tests of their own below."""


def told_alerts(values: Values) -> dict[str, str]:
    """Alerts that the stories tell about."""
    return {rule.name: rule.name for rule in alert_rules(values) if rule.name not in ELSEWHERE}


def chosen(runs: Sequence[Run], alerts: Iterable[str]) -> list[Run]:
    """Healthy runs, and for each alert its first story and the first with scrapes lost."""
    kept = [run for run in runs if not run.fires][:8]
    for alert in alerts:
        firing = [run for run in runs if alert in run.fires]
        assert firing, f"no story fires {alert}"
        kept += [firing[0], *[run for run in firing if run.lost[1]][:1]]
    return list({run.name: run for run in kept}.values())


def check(values: Values, runs: Sequence[Run], interval_s: int, until_s: int) -> promtool.Outcome:
    """Stories against all rules, asked every minute; as many side by side as promtool holds samples."""
    cases = []
    for index in range(0, len(runs), SIDE_BY_SIDE):
        some = runs[index : index + SIDE_BY_SIDE]
        told = expectations(some, told_alerts(values), range(60, until_s, 60), SETTLING_SCRAPES * interval_s)
        cases.append(case_of(f"fleet {index}", some, told, until_s))
    return promtool.run(generate.rules_file(values), cases, interval_s, KEY)


def test_c68_a_story_of_each_alert() -> None:
    """A recovery never alerts, a loop does until it is cured, at 60 s scrapes (C65 to C69, C71, C72)."""
    outcome = check(QUICK, chosen(stories(QUICK), told_alerts(QUICK)), 60, UNTIL_S)
    assert outcome.passed, outcome.output[:20_000]


def test_c66_a_story_of_each_page_at_fine_scrapes() -> None:
    """Pages at 15 s scrapes, some of them lost: a gap neither silences nor fires."""
    pages = {rule.name for rule in alert_rules(QUICK) if rule.severity == "critical"} - set(ELSEWHERE)
    outcome = check(QUICK, chosen(stories(QUICK), sorted(pages))[4:], 15, UNTIL_S)
    assert outcome.passed, outcome.output[:20_000]


by_theme = pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.__name__)


@pytest.mark.slow
@pytest.mark.timeout(600)
@by_theme
@pytest.mark.parametrize("interval_s", [15, 30, 60])
def test_every_story_alerts_exactly_when_it_says(interval_s: int, theme: Theme) -> None:
    """All alerts of all stories, every minute."""
    outcome = check(QUICK, with_ends(theme(QUICK), QUICK), interval_s, UNTIL_S)
    assert outcome.passed, outcome.output[:20_000]


@pytest.mark.slow
@pytest.mark.timeout(600)
@by_theme
def test_every_story_with_the_shipped_values(theme: Theme) -> None:
    """The same stories with the windows as they are shipped, over a hundred minutes."""
    outcome = check(Values(), with_ends(theme(Values()), Values()), 60, SHIPPED_UNTIL_S)
    assert outcome.passed, outcome.output[:20_000]


# --- the goodput objective ----------------------------------------------------------------------------------


def losing(name: str, share: float, from_s: float, to_s: float, **changes: object) -> Run:
    """A run that loses `share` of its time between two moments; its other alerts are not asked for."""
    lost = (catalog.TIME_SECONDS.name, "new")

    def new(now: float) -> float:
        gone = max(0.0, min(now, to_s) - from_s) * share
        return max(0.0, now - 120) - gone

    return Run(name, BEGIN, levels={lost: new, **changes.pop("levels", {})}, **changes)  # type: ignore[arg-type, call-overload, attr-defined]  # a Run's fields


def burn_case(
    values: Values, interval_s: int, until_s: int, told: Sequence[tuple[float, str, tuple[Run, ...]]], *runs: Run
) -> promtool.Outcome:
    """`told`: at this time, this `burn` fires for exactly these runs."""
    rules = yaml.safe_load(generate.rules_file(values))
    for rule in rules["groups"][0]["rules"]:  # asked by its label, which tells the three of one name apart
        if rule.get("alert") == "NvrxGoodputBurn":
            rule["alert"] = f"burn_{rule['labels']['burn']}"
    found = tuple(
        Expectation(at_s=at, alert=f"burn_{burn}", firing=tuple(run.labels() for run in firing))
        for at, burn, firing in told
    )
    return promtool.run(yaml.safe_dump(rules), [case_of("burn", runs, found, until_s)], interval_s, KEY)


def test_goodput_burns_fast_pages_when_it_is_costly_and_not_at_start_up() -> None:
    """An hour at half speed: a ticket; with 200 GPUs a page; evaluation, suspension and start-up do not count."""
    half = losing("half", 0.5, 2 * HOUR, 4 * HOUR)
    costly = losing("costly", 0.5, 2 * HOUR, 4 * HOUR, levels={(catalog.WORLD_SIZE_CONFIGURED.name,): 200})
    evaluating = losing(
        "evaluating",
        0.5,
        2 * HOUR,
        4 * HOUR,
        levels={(catalog.TIME_SECONDS.name, "evaluate"): lambda now: 0.5 * max(0.0, min(now, 4 * HOUR) - 2 * HOUR)},
    )
    little = losing("little", 0.3, 2 * HOUR, 4 * HOUR)
    starting = Run("starting", [(60, "start"), (3_000, "train")])
    moved = losing("moved", 0.5, 2 * HOUR, 4 * HOUR, pods=(("old", 0, 2.5 * HOUR), ("new", 2.5 * HOUR, END)))
    firing = (costly, half, moved)
    told = [
        *((at, burn, ()) for at in (1_800, HOUR, 2 * HOUR, 2.5 * HOUR) for burn in ("fast", "costly")),
        *((at, "fast", firing) for at in (3 * HOUR, 3.5 * HOUR, 4 * HOUR)),
        *((at, "costly", (costly,)) for at in (3 * HOUR, 4 * HOUR)),
        *((4.5 * HOUR, burn, ()) for burn in ("fast", "costly")),
    ]
    runs = (half, costly, evaluating, little, starting, moved)
    outcome = burn_case(Values(), 60, 5 * HOUR, told, *runs)
    assert outcome.passed, outcome.output[:10_000]


def test_goodput_of_a_run_that_was_just_resumed_does_not_burn() -> None:
    """Start-up is all that a new Prometheus sees of it at first, a halt most of what an old one saw: neither burns.
    What is lost of an hour that was watched does."""
    watched = (("new", 2 * HOUR, END),)
    resumed = losing("resumed", 1, 2 * HOUR, 2.2 * HOUR, pods=watched)
    slow_start = losing("slow-start", 1, 2 * HOUR, 2.7 * HOUR, pods=watched)
    loses = losing("loses", 0.5, 2 * HOUR, 5 * HOUR, pods=watched)
    halted = losing(
        "halted",
        1,
        2 * HOUR,
        2.6 * HOUR,
        pods=(("old", 0, 2.05 * HOUR), ("new", 2.5 * HOUR, END)),
        levels={(catalog.TIME_SECONDS.name, "halted"): jump(2.5 * HOUR, 0, 0.5 * HOUR)},
    )
    told = [
        *((at * HOUR, "fast", ()) for at in (2.05, 2.1, 2.2, 2.5, 2.6, 2.7, 2.85)),
        *((at * HOUR, "fast", (loses,)) for at in (2.95, 3, 3.5, 4.5)),
    ]
    outcome = burn_case(Values(), 60, 5 * HOUR, told, resumed, slow_start, loses, halted)
    assert outcome.passed, outcome.output[:10_000]


def test_goodput_burns_slowly() -> None:
    """A fifth lost for six hours is a slow burn, and no fast one; a tenth is the objective."""
    fifth, tenth = losing("fifth", 0.2, 8 * HOUR, 20 * HOUR), losing("tenth", 0.1, 0, 40 * HOUR)
    told = [
        *((at, "slow", ()) for at in (4 * HOUR, 8 * HOUR, 10 * HOUR, 22 * HOUR)),
        *((at, "slow", (fifth,)) for at in (14 * HOUR, 20 * HOUR)),
        *((at, "fast", ()) for at in (10 * HOUR, 20 * HOUR)),
    ]
    outcome = burn_case(Values(), 300, 24 * HOUR, told, fifth, tenth)
    assert outcome.passed, outcome.output[:10_000]


# --- severity, texts, memory ---------------------------------------------------------------------------------


def test_a_halted_run_is_remembered_for_long_and_then_forgotten() -> None:
    """Hours after its pod the page still stands; past `halted_memory_s` it is gone, a vanished run's sooner."""
    values = Values(halted_memory_s=12 * HOUR, missing_memory_s=2 * HOUR)
    halted = Run("halted", [*LOOP, (721, "halted")], pods=(("old", 0, 1_000),))
    vanished = Run("vanished", BEGIN, pods=(("old", 0, 1_000),))
    told = [
        *(Expectation(at_s=at, alert="NvrxRunHalted", firing=(halted.labels(),)) for at in (HOUR, 12 * HOUR)),
        Expectation(at_s=13 * HOUR, alert="NvrxRunHalted", firing=()),
        *(Expectation(at_s=at, alert="NvrxTargetMissing", firing=(vanished.labels(),)) for at in (HOUR, 2 * HOUR)),
        Expectation(at_s=3 * HOUR, alert="NvrxTargetMissing", firing=()),
    ]
    case = case_of("long", [halted, vanished], tuple(told), 14 * HOUR)
    outcome = promtool.run(generate.rules_file(values), [case], 240, KEY)
    assert outcome.passed, outcome.output


def test_repeated_faults_on_a_node_are_forgotten() -> None:
    """Three faults in an hour: a ticket for `device_window_s`; three in as many windows: none."""
    values = Values(device_window_s=6 * HOUR, missing_memory_s=6 * HOUR)
    faults = (catalog.NODE_FAULTS.name, "node-2", "node")
    often = Run("often", BEGIN, levels={faults: lambda now: sum(now >= at for at in (HOUR, 1.3 * HOUR, 1.6 * HOUR))})
    seldom = Run("seldom", BEGIN, levels={faults: lambda now: sum(now >= at for at in (HOUR, 8 * HOUR, 15 * HOUR))})
    firing = {HOUR: (), 2 * HOUR: (often.labels(),), 6 * HOUR: (often.labels(),), 9 * HOUR: (), 16 * HOUR: ()}
    told = tuple(Expectation(at_s=at, alert="NvrxRepeatedDeviceFault", firing=runs) for at, runs in firing.items())
    case = case_of("days", [often, seldom], told, 17 * HOUR)
    outcome = promtool.run(generate.rules_file(values), [case], 300, KEY)
    assert outcome.passed, outcome.output


def test_the_watchdog_fires_without_any_run() -> None:
    """Nothing is scraped, and it fires, with no label of the key empty."""
    nobody = {"cluster": "none", "namespace": "none", "run": "none"}
    told = tuple(Expectation(at_s=at, alert="NvrxWatchdog", firing=(nobody,)) for at in (60, 600))
    other = Series(labels={"__name__": "up", "job": "other"}, value=1)
    outcome = promtool.run(
        generate.rules_file(Values()), [Case(name="w", series=(other,), expectations=told, until_s=600)], 60, KEY
    )
    assert outcome.passed, outcome.output


def test_a_pod_that_cannot_start_is_found_by_kube_state_metrics() -> None:
    """By the run of its label, for five minutes; a container that is being created, and a foreign pod, are not."""
    waiting, labels = "kube_pod_container_status_waiting_reason", "kube_pod_labels"

    def pod(name: str, run: str | None, reason: str, value: object) -> list[Series]:
        base = {"namespace": "ml", "pod": name}
        owner = {"label_nvrx_sre_run": run} if run else {}
        return [
            Series(labels={"__name__": waiting, **base, "container": "launcher", "reason": reason}, value=value),  # type: ignore[arg-type]  # a level
            Series(labels={"__name__": labels, **base, **owner}, value=1),
        ]

    series = (
        *pod("a", "broken", "CrashLoopBackOff", lambda now: 1 if 300 <= now < 1_800 and now % 120 else None),
        *pod("b", "slow", "ContainerCreating", 1),
        *pod("c", None, "ErrImagePull", 1),
    )
    broken = {"cluster": "none", "namespace": "ml", "run": "broken"}
    told = tuple(
        Expectation(at_s=at, alert="NvrxLauncherPodFailing", firing=firing)
        for at, firing in ((240, ()), (540, ()), (720, (broken,)), (1_800, (broken,)), (2_580, ()))
    )
    rules = generate.kubernetes_rules_file(Values())
    outcome = promtool.run(rules, [Case(name="pods", series=series, expectations=told, until_s=2_700)], 60, KEY)
    assert outcome.passed, outcome.output


def test_values_move_threshold_and_wait() -> None:
    """A site's multiplier and `for` reach the rule: two thirds of a budget page two attempts in, after the wait."""
    values = Values(crash_loop_budget_ratio=0.65, crash_loop_for_s=120)
    run = Run("two", [*BEGIN, (600, "fault"), (602, "redo"), (660, "fault"), (662, "redo")])
    told = tuple(
        Expectation(at_s=at, alert="NvrxCrashLooping", firing=firing)
        for at, firing in ((720, ()), (840, (run.labels(),)))
    )
    outcome = promtool.run(generate.rules_file(values), [case_of("values", [run], told, 1_200)], 15, KEY)
    assert outcome.passed, outcome.output


def test_c70_no_rate_of_a_sum() -> None:
    """Counters are recorded with `max` over pods, never summed: a pod that begins again at 0 is no spike."""
    counters = [
        rule for rule in rules_document(Values())["groups"][0]["rules"] if "_total:max" in rule.get("record", "")
    ]
    assert len(counters) > 8
    assert not [rule["record"] for rule in counters if "sum" in rule["expr"]]
    restarted = Run(
        "restarted",
        BEGIN,
        levels={(catalog.TELEMETRY_DROPPED.name, "journal"): lambda now: 7 if now < 600 else 0},
        pods=(("old", 0, 600), ("new", 600, END)),
    )
    later = Expectation(at_s=2_000, alert="NvrxTelemetryDropping", firing=())
    case = case_of("restart", [restarted], (later,), 2_100)
    outcome = promtool.run(generate.rules_file(Values()), [case], 15, KEY)
    assert outcome.passed, outcome.output


def test_what_one_launcher_lost_hides_nothing_that_another_loses() -> None:
    """Each counts its own from 0: the one that lost most does not outshine the rest, nor one its own successor."""
    dropped = (catalog.TELEMETRY_DROPPED.name, "otlp")
    told = {"NvrxTelemetryDropping": [(60.0, 60.0 + QUICK.telemetry_window_s), (1_200.0, 1_800.0)]}
    follower = Run("wide", BEGIN, levels={dropped: jump(1_200, 0, 5)}, pods=(("pod-1", 0, END),))
    again = {dropped: lambda now: 3 * (now >= 1_200) if now >= 900 else 7 * (now >= 60)}
    runs = [
        Run("wide", BEGIN, told, levels={dropped: jump(60, 0, 7)}),
        follower,
        Run("anew", BEGIN, told, levels=again),
    ]
    outcome = check(QUICK, runs, 15, UNTIL_S)
    assert outcome.passed, outcome.output[:20_000]


@pytest.mark.parametrize("text", [generate.rules_file(Values()), generate.kubernetes_rules_file(Values())])
def test_shipped_rules_pass_every_lint(text: str, tmp_path: Path) -> None:
    """`promtool check rules` with all lints fatal."""
    (tmp_path / "rules.yaml").write_text(text)
    outcome = promtool.check(tmp_path / "rules.yaml")
    assert outcome.passed, outcome.output
    assert f"{len(yaml.safe_load(text)['groups'][0]['rules'])} rules found" in outcome.output


def test_every_alert_says_what_a_woken_person_asks() -> None:
    """Texts and labels are rendered from the samples: culprit, progress, idle devices, dashboard with the key."""
    loop = Run("loop", LOOP, levels={(catalog.WORLD_SIZE_CONFIGURED.name,): 8})
    rules = yaml.safe_load(generate.rules_file(Values()))
    rule = next(item for item in rules["groups"][0]["rules"] if item.get("alert") == "NvrxCrashLooping")
    asked = promtool.alert_text(
        generate.rules_file(Values()), case_of("text", [loop], (), 900), 15, (rule["alert"], 840)
    )
    for text in (
        'namespace="ml", priority="prod", run="loop", severity="critical", team="none"}',
        "Run loop is crash looping: 3 attempts without progress.",
        "Last root: rank 3.",
        "last new step 4m 0s ago",
        "8 GPUs held",
        "/runbooks/NvrxCrashLooping.md",
        "/d/nvrx-run/run?var-run=loop&var-cluster=c1&var-namespace=ml",
    ):
        assert text in asked, asked


@pytest.mark.parametrize("alert", ["NvrxCheckpointSaturated", "NvrxRunStalled"])
def test_the_root_of_a_closed_incident_is_no_culprit_of_anything_else(alert: str) -> None:
    """Rank 3 failed earlier and was recovered; a woken person must not take it for the cause of what fires now."""
    levels = {(catalog.CHECKPOINT_SATURATION.name,): 1.5}
    events = [*BEGIN, (300, "fault"), (310, "progress"), (540, "stop")]
    rules = generate.rules_file(QUICK)
    text = promtool.alert_text(
        rules, case_of("text", [Run("mended", events, levels=levels)], (), 900), 15, (alert, 840)
    )
    assert "Run mended" in text and "last new step" in text, text
    assert "rank 3" not in text, text


def test_a_level_bends_one_series_only() -> None:
    """The stories' own tool: what is not bent stays."""
    run = Run("bent", BEGIN, levels={(catalog.STEP_SECONDS.name,): jump(600, 1, 2)})
    values = {
        item.labels["__name__"]: item.value
        for item in run.series()
        if item.labels["__name__"] in ("nvrx_step_seconds", "nvrx_world_size")
    }
    step, world = values["nvrx_step_seconds"], values["nvrx_world_size"]
    assert callable(step)
    assert callable(world) is False or world(700) == 4
    assert (step(500), step(700)) == (1, 2)


@pytest.mark.parametrize("interval_s", [15, 30, 60])
def test_c65_one_event_is_one_whatever_the_scrape(interval_s: int) -> None:
    """One failed save of two that it takes, at an odd moment: never; two: for the window, whole numbers."""
    failed = (catalog.SAVES.name, "durable", "failed")
    one = Run("one", BEGIN, levels={failed: jump(617, 0, 1)})
    fires = {"NvrxCheckpointSaveFailing": [(683.0, 617 + QUICK.save_failing_window_s)]}
    two = Run("two", BEGIN, fires=fires, levels={failed: lambda now: (now >= 617) + (now >= 683)})
    outcome = check(QUICK, [one, two], interval_s, UNTIL_S)
    assert outcome.passed, outcome.output


def test_c72_a_counter_that_stands_still_is_no_alarm() -> None:
    """Counters at 7 for two hours and a start time that changes once: silent after the window of the first scrape."""
    counters = (catalog.INCIDENTS_DEGRADED, catalog.TELEMETRY_DROPPED, catalog.CHECKPOINT_REJECTED)
    labels = {"telemetry_dropped": ("journal",), "checkpoint_rejected": ("checksum",)}
    level = {
        (metric.name, *next((value for key, value in labels.items() if key in metric.name), ())): 7
        for metric in counters
    }
    run = Run("flat", [*BEGIN, (4_000, "start"), (4_060, "train")], levels=level)
    told = tuple(
        Expectation(at_s=at, alert=alert, firing=()) for alert in told_alerts(QUICK) for at in range(1_200, 7_200, 600)
    )
    outcome = promtool.run(generate.rules_file(QUICK), [case_of("flat", [run], told, 7_200)], 60, KEY)
    assert outcome.passed, outcome.output
