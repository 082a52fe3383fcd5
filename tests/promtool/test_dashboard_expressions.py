"""The words of the top row, judged by promtool: each situation has its own, and a run that is gone keeps its last."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from nvrx_sre.goodput.verdict import RunState
from nvrx_sre.monitoring.dashboard_run import rows
from nvrx_sre.monitoring.promql import Query, recorded
from nvrx_sre.monitoring.recordings import recording_rules
from nvrx_sre.monitoring.situation import DRAIN_LIMIT, Situation, situation
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import Metric

Q = Query(group_labels=("namespace", "run"), selectors=('run=~".*"',))
KEY = '{namespace="ml", run="r"}'
NUM_SAMPLES = 41
"""Ten minutes at 15 s."""
AT = "10m"
GONE = "stale _x2000"
WORLD = recorded(catalog.WORLD_SIZE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a run exports over ten minutes, and the number that `expr` then has."""

    name: str
    expr: str
    value: float
    series: dict[str, str]
    at: str = AT


def series(metric: Metric, **labels: str) -> str:
    """One series of the run."""
    pairs = {"namespace": "ml", "run": "r", **labels}
    text = ",".join(f'{name}="{value}"' for name, value in pairs.items())
    return f"{metric.name}{{{text}}}"


def constant(value: float, end: str = "") -> str:
    """The value at every sample; `end` follows the last one."""
    return f"{value}x{NUM_SAMPLES - 1} {end}".strip()


def clock(ahead_s: float = 0, end: str = "") -> dict[str, str]:
    """The run's own time at each sample."""
    return {
        series(catalog.RUN_START_TIMESTAMP): constant(ahead_s, end),
        series(catalog.WALL_SECONDS): f"0+15x{NUM_SAMPLES - 1} {end}".strip(),
    }


def ahead(by_s: float, still_s: float | None = None) -> dict[str, str]:
    """Clocks that are ahead, of a run that steps, or has not since `still_s` of its own time."""
    steps = f"{by_s}+15x{NUM_SAMPLES - 1}" if still_s is None else constant(still_s)
    stepping = {series(metric): steps for metric in (catalog.LAST_STEP, catalog.LAST_NEW_STEP)}
    return {**clock(by_s), **stepping, series(catalog.PHASE_ENTERED, phase="step"): constant(60 + by_s)}


def exported(state: str, entered_s: float, *, end: str = "", **changes: str) -> dict[str, str]:
    """A run with one formation at 60 s that is in `state` since `entered_s`; changes are by catalog constant."""
    values = {
        series(catalog.RUN_STATE_ENTERED, state=item): constant(entered_s if item == state else 0.0, end)
        for item in RunState
    }
    values |= clock(end=end)
    values |= {
        series(catalog.PHASE_ENTERED, phase="step"): constant(60, end),
        series(catalog.PHASE_DEADLINE, phase="step"): constant(60, end),
        series(catalog.PHASE_DEADLINE, phase="rendezvous"): constant(60, end),
        series(catalog.LIMIT, limit="caps.crash_loop_attempts"): constant(3, end),
        series(catalog.LAST_STEP): f"0+15x{NUM_SAMPLES - 1} {end}".strip(),
        series(catalog.LAST_NEW_STEP): f"0+15x{NUM_SAMPLES - 1} {end}".strip(),
        series(catalog.INCIDENT_OPENED): constant(0, end),
        series(catalog.INCIDENT_ATTEMPTS): constant(0, end),
        series(catalog.HALTED_TIMESTAMP, reason="cap"): constant(0, end),
        series(catalog.INCIDENTS, verdict="flapping"): constant(0, end),
    }
    known = {
        "opened": series(catalog.INCIDENT_OPENED),
        "attempts": series(catalog.INCIDENT_ATTEMPTS),
        "last_step": series(catalog.LAST_STEP),
        "halted": series(catalog.HALTED_TIMESTAMP, reason="cap"),
        "flapping": series(catalog.INCIDENTS, verdict="flapping"),
    }
    return values | {known[name]: value for name, value in changes.items()}


def word(name: str, wanted: Situation, values: dict[str, str], at: str = AT) -> Case:
    """The verdict in the situation `wanted`."""
    return Case(name=name, expr=situation(Q), value=float(wanted), series=values, at=at)


DATA_LIMIT, STEP_SECONDS = series(catalog.PHASE_DEADLINE, phase="data"), series(catalog.STEP_SECONDS)


def without_step(more: dict[str, str]) -> dict[str, str]:
    """A run that trains, whose newest step is 200 s old, which is beyond the deadline of a step."""
    return exported("training", 60, last_step=constant(400)) | more


def last_save(limit_s: float, started_s: float = 405) -> dict[str, str]:
    """A durable save in flight, and how long the last one may keep a run that is done."""
    return {
        series(catalog.SAVE_STARTED): constant(started_s),
        series(catalog.LIMIT, limit=DRAIN_LIMIT): constant(limit_s),
    }


VERDICTS = [
    word("training", Situation.TRAINING, exported("training", 60)),
    word("a formation that takes seconds", Situation.STARTING, exported("rendezvous", 580)),
    word("half of the deadline is gone", Situation.RENDEZVOUS_STUCK, exported("rendezvous", 560)),
    word("no step for one deadline", Situation.TRAINING, exported("training", 60, last_step=constant(520))),
    word("no step for longer than that", Situation.STALLED, exported("training", 60, last_step=constant(500))),
    word("a wait for data, which may take longer", Situation.TRAINING, without_step({DATA_LIMIT: constant(300)})),
    word("that long is too long for data as well", Situation.STALLED, without_step({DATA_LIMIT: constant(120)})),
    word("steps that take long and tell so", Situation.TRAINING, without_step({STEP_SECONDS: constant(280)})),
    word("a last save that is within its limit", Situation.TRAINING, without_step(last_save(250))),
    word("a last save that takes too long", Situation.STALLED, without_step(last_save(190))),
    word("done with its steps, and no save", Situation.STALLED, without_step(last_save(250, started_s=0))),
    word("one attempt", Situation.RECOVERING, exported("recovering", 590, opened=constant(585), attempts=constant(1))),
    word("two attempts", Situation.RECOVERING, exported("backoff", 590, opened=constant(585), attempts=constant(2))),
    word("three attempts", Situation.CRASH_LOOP, exported("backoff", 590, opened=constant(500), attempts=constant(3))),
    word("a cured crash loop", Situation.TRAINING, exported("training", 590)),
    word("flapping", Situation.FLAPPING, exported("training", 590, flapping="0x20 1x20")),
    word("halted", Situation.HALTED, exported("halted", 500, halted=constant(500), last_step=constant(400))),
    word(
        "halted, and the pod is gone for five hours", Situation.HALTED,
        exported("halted", 500, end=GONE, halted=f"{constant(500)} {GONE}"), at="5h",
    ),
    word("resumed after a halt", Situation.TRAINING, exported("training", 560, halted="500x30 0x10")),
    word("finished", Situation.FINISHED, exported("finished", 500, last_step=constant(400))),
    word("preempted", Situation.PREEMPTED, exported("preempted", 500, last_step=constant(400))),
    word("a configuration error", Situation.FAILED, exported("failed", 500, last_step=constant(400))),
    word("hosts five minutes ahead", Situation.TRAINING, {**exported("training", 360), **ahead(300)}),
    word("no step, on hosts ahead", Situation.STALLED, {**exported("training", 360), **ahead(300, still_s=800)}),
    word("the launcher vanished", Situation.SILENT, exported("training", 60, end=GONE), at="1h"),
]  # fmt: skip


def changed(
    name: str, wanted: float, config: tuple[str, str], version: tuple[str, str], last_new_s: float, ahead_s: float = 0
) -> Case:
    """A run whose pod was replaced at five minutes; identities before and after."""
    before, after = f"1x20 {GONE}", "_x20 1x20"
    values = {series(catalog.LAST_NEW_STEP): constant(last_new_s), **clock(ahead_s)}
    for index, samples in enumerate((before, after)):
        pod = f"p{index}"
        values[series(catalog.RUN_INFO, config=config[index], pod=pod)] = samples
        values[series(catalog.BUILD_INFO, version=version[index], python="3", torch="2", pod=pod)] = samples
    panel = next(item for row in rows(Q) for item in row.panels if item.title == "What changed")
    return Case(name=name, expr=panel.targets[0].expr, value=wanted, series=values)


def shown(name: str, title: str, wanted: float, values: dict[str, str], at: str = AT) -> Case:
    """The first number of a panel of the top row."""
    panel = next(item for row in rows(Q) for item in row.panels if item.title == title)
    return Case(name=name, expr=panel.targets[0].expr, value=wanted, series=values, at=at)


STILL = exported("training", 60, last_step=constant(500)) | {series(catalog.LAST_NEW_STEP): constant(500)}
GONE_SINCE_TEN_MINUTES = {name: f"{values} {GONE}" for name, values in STILL.items()}
AGES = [
    shown("by the run's own clock", "New steps now?", 100, STILL),
    shown("hosts five minutes ahead", "New steps now?", 40, {**STILL, **ahead(300, still_s=860)}),
    shown("gone for twenty minutes: until now", "New steps now?", 1_300, GONE_SINCE_TEN_MINUTES, at="30m"),
]
CHANGES = [
    changed("another pod, nothing else", 0, ("a", "a"), ("1", "1"), 290),
    changed("another configuration, no new step since", 1, ("a", "b"), ("1", "1"), 290),
    changed("another version, no new step since", 2, ("a", "a"), ("1", "2"), 290),
    changed("both", 3, ("a", "b"), ("1", "2"), 290),
    changed("it has worked since", 0, ("a", "b"), ("1", "2"), 590),
    changed("hosts ahead, no new step since", 1, ("a", "b"), ("1", "1"), 590, ahead_s=300),
]


def of_pods(*values: str, metric: Metric, **labels: str) -> dict[str, str]:
    """The same series from pod after pod."""
    return {series(metric, pod=f"p{index}", **labels): value for index, value in enumerate(values)}


# the old pod's last sample stays for five minutes where no scrape of it failed (failure case C69)
OVERLAP = of_pods("4x20", "_x20 4x20", metric=catalog.WORLD_SIZE)
RECORDED = next(rule.expr for rule in recording_rules(Values(group_labels=Q.group_labels)) if rule.name == WORLD)
OVERLAPS = [
    Case(name="a sum counts both", expr=f"sum by (namespace, run) ({catalog.WORLD_SIZE.name})", value=8,
         series=OVERLAP, at="7m"),
    Case(name="the panels' way", expr=Q.latest(catalog.WORLD_SIZE), value=4, series=OVERLAP, at="7m"),
    Case(name="the rules' way", expr=RECORDED, value=4, series=OVERLAP, at="7m"),
]  # fmt: skip
STEPS = of_pods(f"0+15x20 {GONE}", "_x20 315+15x20", metric=catalog.STEPS, kind="new")
AGAIN = of_pods(f"100+1x20 {GONE}", "_x20 0+1x20", metric=catalog.TELEMETRY_DROPPED, component="otlp")
WHOLE = [
    Case(name="a run's count goes on in the next pod", expr=f"sum ({Q.gain(catalog.STEPS, 'kind', window='10m')})",
         value=615, series=STEPS),
    Case(name="a launcher's begins again, and is no spike", value=40, series=AGAIN,
         expr=f"sum ({Q.gain(catalog.TELEMETRY_DROPPED, 'component', window='10m')})"),
]  # fmt: skip


def to_test(case: Case) -> dict[str, object]:
    """The case as promtool reads it."""
    labels = "{}" if case.expr.startswith("sum (") else KEY
    expected = {"expr": case.expr, "eval_time": case.at, "exp_samples": [{"labels": labels, "value": case.value}]}
    return {
        "name": case.name,
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [expected],
    }


def judge(cases: list[Case], directory: Path) -> None:
    """promtool agrees with every case."""
    promtool = shutil.which("promtool")
    assert promtool is not None, "install prometheus"
    file = directory / "words.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": [to_test(case) for case in cases]}))
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("cases", [VERDICTS, CHANGES, AGES], ids=["verdict", "what changed", "ages"])
def test_the_top_row_s_words(cases: list[Case], tmp_path: Path) -> None:
    """Each case has exactly one number for the run, the wanted one."""
    judge(cases, tmp_path)


def test_c69_a_replaced_pod_is_not_counted_twice(tmp_path: Path) -> None:
    """Two minutes after the change both pods still show; a world of four stays four, in panels and in rules."""
    judge(OVERLAPS, tmp_path)


def test_c70_a_replaced_pod_is_no_spike(tmp_path: Path) -> None:
    """Over the change of pods what was gained is a whole number: neither the old pod's total nor a reset is in it."""
    judge(WHOLE, tmp_path)


def test_a_wrong_word_is_found(tmp_path: Path) -> None:
    """The judge can fail: the same case with another number does."""
    wrong = word("training", Situation.STALLED, exported("training", 60))
    file = tmp_path / "words.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": [to_test(wrong)]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAILED" in done.stdout + done.stderr
