"""Mutants of the rules die: the stories test the rules, not just run them.

All mutants of a theme are judged in one promtool call (`mutants`). Those that cannot be told from the right rule are
listed with the reason; the list may only shrink. The default suite kills one mutant of each kind for three alerts
that page, the build gate all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import yaml

from nvrx_sre.monitoring import generate, promtool
from nvrx_sre.monitoring.promtool import Case
from tests.promtool.fleet import KEY, Run, case_of, expectations
from tests.promtool.histories import CRASH, HALT, MISSING, THEMES, healthy, stories, with_ends
from tests.promtool.mutants import RECORDING_CHANGES, Mutant, Rule, alert_mutants, broken_recordings
from tests.promtool.test_alert_rules import QUICK, SETTLING_SCRAPES, UNTIL_S, check, told_alerts

INTERVAL_S = 60
RULES: list[Rule] = yaml.safe_load(generate.rules_file(QUICK))["groups"][0]["rules"]
RECORDINGS = [rule for rule in RULES if "record" in rule]
ASKED = frozenset(told_alerts(QUICK))
MUTANTS = alert_mutants(RULES, ASKED)
NOTHING_BETWEEN = "it is compared with 0 to see whether there is a time or a size at all: none is below 1"
FINER = "a minute or two later: told apart at scrapes of 15 s, not at those of a minute at which mutants are judged"
EQUIVALENT = {
    **dict.fromkeys(
        (
            f"{alert}: threshold 0 becomes 1"
            for alert in (
                *("NvrxCheckpointStale", "NvrxCrashLooping", "NvrxRecoveryOverdue", "NvrxRendezvousStuck"),
                *("NvrxRunStalled", "NvrxStartupOverdue", "NvrxStorageNearFull"),
            )
        ),
        NOTHING_BETWEEN,
    ),
    "NvrxCrashLooping: max becomes min at 0": "the value is another, the moment is the same",
    "NvrxLauncherStuck: factor 12 becomes 24": FINER,
    "NvrxScrapesMissing: threshold 120 becomes 240": FINER,
    "NvrxRetryBudgetLow: threshold 0.6 becomes 0.42": "of three attempts no share lies between 0.42 and 0.6",
}
"""Mutant -> why no story can tell it from the right rule."""


def survivors(mutants: Sequence[Mutant]) -> list[str]:
    """What is wrong with the mutants that no story kills. Each is asked on the stories of its alert's themes."""
    dead: set[str] = set()
    for theme in THEMES[1:]:
        runs = [*with_ends(theme(QUICK), QUICK), *healthy(QUICK)[:5]]
        subjects = {alert for run in runs for alert in run.fires}
        dead |= _killed(runs, [item for item in mutants if item.told in subjects and item.name not in dead])
    return sorted(mutant.what for mutant in mutants if mutant.name not in dead)


def _killed(runs: Sequence[Run], mutants: Sequence[Mutant]) -> set[str]:
    """Those whose alert did not fire when and for whom the stories say, or that cannot be evaluated."""
    killed: set[str] = set()
    left = list(mutants)
    while left:
        asked = {mutant.name: mutant.told for mutant in left}
        told = expectations(runs, asked, range(60, UNTIL_S, 60), SETTLING_SCRAPES * INTERVAL_S)
        rules = needed([*RECORDINGS, *(mutant.rule for mutant in left)], frozenset(asked))
        outcome = run_rules(rules, [case_of("theme", runs, told, UNTIL_S)])
        refused = set(re.findall(r"rule: (\w+), time: ", outcome.output))  # promtool goes no further than that
        assert refused <= set(asked), outcome.output[:2_000]
        if not refused:
            return killed | set(re.findall(r'alertname=\\"(\w+)\\"', outcome.output))
        killed |= refused
        left = [mutant for mutant in left if mutant.name not in refused]
    return killed


def run_rules(rules: list[Rule], cases: Sequence[Case]) -> promtool.Outcome:
    """promtool on rules that are data."""
    document = yaml.safe_dump({"groups": [{"name": "mutants", "rules": rules}]}, sort_keys=False)
    return promtool.run(document, cases, INTERVAL_S, KEY)


def needed(rules: Sequence[Rule], alerts: frozenset[str]) -> list[Rule]:
    """Those alerts, and the recordings that they read, directly or not, in the same order."""
    recordings = {rule["record"] for rule in rules if "record" in rule}
    kept: set[str] = set(alerts)
    grown = True
    while grown:
        texts = [rule["expr"] for rule in rules if rule.get("alert", rule.get("record")) in kept]
        read = {name for text in texts for name in re.findall(r"run:[\w:]+", text)} & recordings
        grown = not read <= kept
        kept |= read
    return [rule for rule in rules if rule.get("alert", rule.get("record")) in kept]


def representative(mutants: Sequence[Mutant]) -> list[Mutant]:
    """One of each kind for the alerts that tell a crash loop from a halt and from a run that vanished."""
    kinds: dict[tuple[str, str], Mutant] = {}
    for mutant in mutants:
        kind = re.sub(r"[\d.]+", "n", mutant.what.split(": ", 1)[1])
        if mutant.told in (CRASH, HALT, MISSING) and "namespace" not in kind:
            kinds.setdefault((mutant.told, kind), mutant)
    return list(kinds.values())


ABOUT_PODS = (
    *("loop", "loop-without-cluster", "loop-pod-replaced", "loop-overlapping-pods-cured", "loop-series-gone"),
    *("loop-halted-resumed-then-one-fault", "halted-namesake", "overlapping-pods"),
)


def test_representative_mutants_die() -> None:
    """Gates negated or dropped, thresholds one off, waits: one of each kind for three alerts that page."""
    chosen = [mutant for mutant in representative(MUTANTS) if mutant.what not in EQUIVALENT]
    assert len(chosen) > 15
    assert survivors(chosen) == []


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_all_mutants_die() -> None:
    """Every mutant of every alert but those that are listed, and each listed one does survive."""
    assert len(MUTANTS) > 250
    assert survivors(MUTANTS) == sorted(EQUIVALENT)


@pytest.mark.parametrize("what", RECORDING_CHANGES)
def test_recordings_without_their_care_are_noticed(what: str) -> None:
    """Pods added up, no memory or one without end, a label lost: some story about pods goes wrong."""
    rules = broken_recordings(RECORDINGS, RECORDING_CHANGES[what])
    assert rules != RECORDINGS
    runs = [run for run in stories(QUICK) if run.name in ABOUT_PODS]
    names = told_alerts(QUICK)
    told = expectations(runs, names, range(60, UNTIL_S, 60), SETTLING_SCRAPES * INTERVAL_S)
    alerts = [rule for rule in RULES if rule.get("alert") in names]
    assert not run_rules([*rules, *alerts], [case_of("pods", runs, told, UNTIL_S)]).passed


def test_the_stories_of_pods_hold_with_the_right_recordings() -> None:
    """The counterpart of the test above, on the same stories."""
    runs = [run for run in stories(QUICK) if run.name in ABOUT_PODS]
    outcome = check(QUICK, runs, INTERVAL_S, UNTIL_S)
    assert outcome.passed, outcome.output[:5_000]
