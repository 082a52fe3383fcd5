"""The rules replay what was scraped of real runs (tests/recordings): one of each family of alerts fires as it should.

Windows are those of the live test, because the runs last a minute and were scraped each second; the catalog's
version is set to today's, so that a recording outlives a metric that is added.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from nvrx_sre.monitoring import generate, promtool
from nvrx_sre.monitoring.alerts import alert_rules
from nvrx_sre.monitoring.promtool import Case, Expectation, Series
from nvrx_sre.monitoring.values import load_values
from nvrx_sre.telemetry import catalog
from tests.promtool.fleet import KEY

TESTS = Path(__file__).resolve().parent.parent
NAMES = ("recovery", "crash_loop", "flapping", "slow_storage", "unsaved", "stopped")
VALUES = dataclasses.replace(load_values(TESTS / "live" / "values.yaml"), saturation_for_s=3.0)
SETTLE_S = 3
"""A scrape, an evaluation, and what the recording rounds."""
MACHINE = ("NvrxSlowRank", "NvrxStepTimeRegressed", "NvrxHostMemoryPressure", "NvrxStorageNearFull", "NvrxGoodputBurn")
"""Alerts that depend on how loaded the recording machine was, or need hours."""


@cache
def recording(name: str) -> dict[str, Any]:
    """One file."""
    value: dict[str, Any] = json.loads((TESTS / "recordings" / f"{name}.json").read_text())
    return value


def series_of(name: str) -> list[Series]:
    """The recorded samples as promtool takes them."""
    found = []
    for key, points in recording(name)["series"].items():
        metric, labels = key.split("{", 1)
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if "catalog" in named:
            named["catalog"] = catalog.VERSION
        base = {"__name__": metric, "cluster": "c1", "namespace": "ml", "run": name, "pod": "p"}
        found.append(Series(labels={**base, **named}, value=_at(points)))
    return found


def _at(points: list[list[float | None]]) -> Any:
    times = [point[0] for point in points]

    def value(now: float) -> float | None:
        index = bisect.bisect_right(times, now) - 1
        return points[index][1] if index >= 0 else None

    return value


def first(name: str, metric: str, above: float, labels: str = "") -> int:
    """First second at which a recorded series is above a value."""
    points = recording(name)["series"][f"{metric}{{{labels}}}"]
    return int(next(at for at, value in points if value is not None and value > above))


def gaps(name: str) -> list[tuple[int, int]]:
    """Spans without a scrape, after the first one."""
    points = recording(name)["series"]["nvrx_wall_seconds_total{}"]
    starts = [int(at) for at, value in points if value is None]
    return [
        (start, int(min((at for at, value in points if at > start and value is not None), default=10**6)))
        for start in starts
    ]


def test_c67_recorded_runs_alert_as_they_did() -> None:
    """Recovery: nobody. Crash loop: both pages, the halt for good, and a ticket, because
    its third attempt goes one checkpoint back, to step 0. Flapping, slow storage, no room for saves, a recovery from an
    older checkpoint: tickets. SIGSTOP: a page."""
    stop, back = gaps("stopped")[0]
    assert back - stop > VALUES.target_missing_s + SETTLE_S, "the launcher was stopped for long enough"
    looped = first("crash_loop", "nvrx_budget_used", 2, 'cap="same_fingerprint"')
    halted = first("crash_loop", "nvrx_run_state_entered_timestamp_seconds", 0, 'state="halted"')
    fresh = first("crash_loop", "nvrx_fresh_starts_total", 0, 'progress="lost"')
    flaps = first("flapping", "nvrx_incidents_total", 0, 'verdict="flapping"')
    full = first("slow_storage", "nvrx_checkpoint_saturation_ratio", 1)
    unsaved = first("unsaved", "nvrx_saves_total", 1, 'outcome="failed",tier="durable"')
    older = first("unsaved", "nvrx_incidents_degraded_total", 0)
    ended = {
        name: first(name, "nvrx_run_state_entered_timestamp_seconds", 0, 'state="finished"')
        for name in ("flapping", "slow_storage", "unsaved")
    }
    spans = {
        "NvrxRunHalted": {"crash_loop": (halted, 10**6)},
        "NvrxCrashLooping": {"crash_loop": (looped, 10**6)},
        "NvrxSilentFreshStart": {"crash_loop": (fresh, halted)},
        "NvrxFlapping": {"flapping": (flaps, ended["flapping"])},
        "NvrxCheckpointSaveFailing": {"unsaved": (unsaved, ended["unsaved"])},
        "NvrxRecoveredDegraded": {"unsaved": (older, ended["unsaved"])},
        "NvrxCheckpointSaturated": {"slow_storage": (full + 3, ended["slow_storage"])},
        "NvrxScrapesMissing": {"stopped": (stop + int(VALUES.scrapes_missing_s), back)},
        "NvrxTargetMissing": {"stopped": (stop + int(VALUES.target_missing_s), back)},
    }
    until_s = max(recording(name)["until_s"] for name in NAMES)
    told = tuple(
        item
        for rule in alert_rules(VALUES)
        if rule.name not in (*MACHINE, "NvrxWatchdog")
        for item in _told(rule.name, spans.get(rule.name, {}), until_s)
    )
    case = Case(
        name="recorded",
        series=tuple(item for name in NAMES for item in series_of(name)),
        expectations=told,
        until_s=until_s,
    )
    outcome = promtool.run(generate.rules_file(VALUES), [case], 1, KEY)
    assert outcome.passed, outcome.output[:10_000]


def _told(alert: str, spans: dict[str, tuple[int, int]], until_s: int) -> list[Expectation]:
    """Every fourth second: exactly the runs within their span, while they were recorded."""
    found = []
    for at in range(4, until_s, 4):
        over = [name for name in NAMES if at > recording(name)["until_s"]]
        edge = [run for run, span in spans.items() if any(end - 1 <= at <= end + 2 * SETTLE_S for end in span)]
        firing = [run for run, (begin, end) in spans.items() if begin <= at <= end and run not in (*over, *edge)]
        labels = tuple({"cluster": "c1", "namespace": "ml", "run": run} for run in firing)
        found.append(Expectation(at_s=at, alert=alert, firing=labels, unsettled=tuple(sorted({*over, *edge}))))
    return found
