"""The shipped rules in promtool: quiet, single recovery, fires, resolves, at three scrape intervals; mutants die.

`Story` turns a short history of one run (faults, progress, halts, pods that come and go) into the series that the
run would export, with the metric names of the catalog. Every case says for which moments which runs are paged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from nvrx_sre.monitoring import generate, promtool
from nvrx_sre.monitoring.promtool import Case, Expectation, Series
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog

KEY = ("cluster", "namespace", "run")
CRASH, HALT = "NvrxCrashLooping", "NvrxRunHalted"
SCRAPES_S = (15, 30, 60)
LONG_STORY_SCRAPE_S = 240
"""promtool's time grows with the square of the samples; a week needs no finer scrape."""
MINUTE, HOUR, DAY = 60, 3_600, 86_400
LIMITS = {"same_fingerprint": 3, "consecutive": 3, "window": 5, "nonfinite": 1, "device": 3}
STATES = ("starting", "training", "recovering", "finished", "failed", "preempted", "halted")


@dataclass
class Story:
    """History of one run: (time, what) in order. What: start, train, fault, redo, progress, a final state.

    `fault` adds an attempt without progress, `advance` lets new steps flow, `progress` also refills the budgets
    (but for the window), `reset` is an operator's. `pods`: (name, from, to) in seconds; a pod exports what the
    run's history says, which the run directory keeps.
    """

    events: list[tuple[float, str]]
    pods: list[tuple[str, float, float]] = field(default_factory=lambda: [("pod-0", 0, float("inf"))])
    run: str = "demo"
    namespace: str = "ml"
    caps: tuple[str, ...] = ("same_fingerprint", "consecutive", "window")
    lost_scrapes: tuple[float, float, int] = (0, 0, 1)
    """Between two times only every n-th scrape succeeds."""

    def labels(self) -> dict[str, str]:
        return {"cluster": "c1", "namespace": self.namespace, "run": self.run}

    def _past(self, now: float) -> list[tuple[float, str]]:
        return [event for event in self.events if event[0] <= now]

    def used(self, cap: str, now: float) -> float:
        count = 0
        for _, what in self._past(now):
            refills = what == "reset" or (what == "progress" and cap != "window")
            count = 0 if refills else count + (what == "fault" and cap in self.caps)
        return count

    def last_new_step(self, now: float) -> float:
        newest, flowing = 0.0, False
        for at, what in self._past(now):
            if flowing or (what == "start" and not newest):
                newest = at - 0.2  # the step before a fault was committed a little earlier
            if what in ("train", "progress", "advance"):
                flowing, newest = True, at
            elif what != "start":
                flowing = False
        return now if flowing else newest

    def entered(self, state: str, now: float) -> float:
        names = {"start": "starting"} | dict.fromkeys(("train", "redo", "progress", "advance"), "training")
        names["fault"] = "recovering"
        return max((at for at, what in self._past(now) if names.get(what, what) == state), default=0.0)

    def series(self) -> list[Series]:
        found = []
        for pod, begin, end in self.pods:
            base = {**self.labels(), "pod": pod}

            def add(metric, value, base=base, begin=begin, end=end, **labels):
                lost_from, lost_to, nth = self.lost_scrapes

                def sample(now):
                    lost = lost_from <= now < lost_to and int(now // SCRAPES_S[0]) % nth
                    return value(now) if begin <= now < end and not lost else None

                found.append(Series(labels={"__name__": metric.name, **base, **labels}, value=sample))

            for cap, limit in LIMITS.items():
                add(catalog.BUDGET_USED, lambda now, cap=cap: self.used(cap, now), cap=cap)
                add(catalog.BUDGET_LIMIT, lambda now, limit=limit: limit, cap=cap)
            for state in STATES:
                add(catalog.RUN_STATE_ENTERED, lambda now, state=state: self.entered(state, now), state=state)
            add(catalog.LAST_NEW_STEP, self.last_new_step)
        return found


def tell(name, until_s, *stories, **moments):
    """A case; `moments` maps crash/halt to [(time, stories that are paged)], everything else must be silent."""
    expectations = []
    for alert, key in ((CRASH, "crash"), (HALT, "halt")):
        for at_s, paged in moments.get(key, []):
            firing = tuple(story.labels() for story in paged)
            expectations.append(Expectation(at_s=at_s, alert=alert, firing=firing))
    series = tuple(item for story in stories for item in story.series())
    return Case(name=name, series=series, expectations=tuple(expectations), until_s=until_s)


def silent(*times):
    """Nobody is paged at these times."""
    return [(at, ()) for at in times]


BEGIN = [(60, "start"), (120, "train")]
LOOP = [*BEGIN, (600, "fault"), (602, "redo"), (660, "fault"), (662, "redo"), (720, "fault")]
EVERY_MINUTE = tuple(range(MINUTE, 40 * MINUTE, MINUTE))


def crash_cases():
    """Stories for the crash-loop alert."""
    loop = Story(LOOP)
    recovered = Story([*BEGIN, (600, "fault"), (601, "redo"), (605, "progress")])
    twice = Story([*BEGIN, (600, "fault"), (602, "progress"), (632, "fault"), (634, "progress")])
    many = [event for n in range(8) for event in ((600 + 90 * n, "fault"), (602 + 90 * n, "progress"))]
    two = Story([*BEGIN, (600, "fault"), (602, "redo"), (660, "fault"), (662, "redo")])
    slow = Story([*BEGIN, (600, "fault"), (602, "redo"), (1140, "fault"), (1142, "redo"), (1680, "fault")])
    nonfinite = Story([*BEGIN, (600, "fault"), (601, "redo"), (900, "progress")], caps=("nonfinite",))
    device = Story([*BEGIN, *[(600 + 30 * n, "fault") for n in range(4)]], caps=("device",))
    cured = Story([*LOOP, (1200, "progress")])
    flaky = Story(LOOP, lost_scrapes=(780, 1500, 3))
    moved = Story(LOOP, pods=[("old", 0, 900), ("new", 1200, float("inf"))])
    held = Story([*LOOP, (1200, "advance"), (1500, "progress")])
    again = Story([*LOOP, (721, "halted"), (1000, "start"), (1060, "redo")])
    again.pods = [("old", 0, 850), ("new", 1000, float("inf"))]
    moved_cured = Story([*LOOP, (1210, "advance")], pods=[("old", 0, 900), ("new", 1200, float("inf"))])
    overlap = Story([*LOOP, (960, "progress")], pods=[("old", 0, 955), ("new", 940, float("inf"))])
    moved_early = Story(two.events, pods=[("old", 0, 970), ("new", 930, float("inf"))])
    reset = Story([*LOOP, (721, "halted"), (960, "reset"), (961, "start"), (980, "redo"), (1020, "fault")])
    reset.pods = [("old", 0, 850), ("new", 961, float("inf"))]
    gone = Story(LOOP, pods=[("old", 0, 900)])
    healthy = Story(BEGIN, run="other")
    namesake = Story(BEGIN, namespace="research")
    startup = Story([(60, "start"), (300, "fault"), (600, "fault"), (900, "fault")], caps=("same_fingerprint",))
    fires = [*silent(540, 660, 710), *[(at, (loop,)) for at in (840, 1200, 2340)]]
    return [
        tell("quiet", 2400, Story(BEGIN), crash=silent(*EVERY_MINUTE), halt=silent(0, *EVERY_MINUTE)),
        tell("single recovery", 2400, recovered, crash=silent(*EVERY_MINUTE)),
        tell("two recoveries 30 s apart", 2400, twice, crash=silent(*EVERY_MINUTE)),
        tell("eight recoveries with progress", 2400, Story([*BEGIN, *many]), crash=silent(*EVERY_MINUTE)),
        tell("two attempts without progress", 2400, two, crash=silent(*EVERY_MINUTE)),
        tell("one retry of a non-finite loss", 2400, nonfinite, crash=silent(*EVERY_MINUTE)),
        tell("a device is excluded", 2400, device, crash=silent(*EVERY_MINUTE)),
        tell("crash loop", 2400, loop, crash=fires, halt=silent(840, 1200)),
        tell("attempts nine minutes apart", 2400, slow, crash=[*silent(600, 1260, 1620), (1800, (slow,))]),
        tell("before the first step", 2400, startup, crash=[*silent(660, 840), (1020, (startup,)), (2340, (startup,))]),
        tell("cured", 2400, cured, crash=[(1140, (cured,)), *silent(1320, 1800, 2340)]),
        tell("two of three scrapes lost", 2400, flaky, crash=[(at, (flaky,)) for at in range(840, 1500, 60)]),
        tell("pod replaced in mid-loop", 2400, moved, crash=[(at, (moved,)) for at in (840, 960, 1140, 1260, 2340)]),
        tell("pod replaced, then cured", 2400, moved_cured, crash=[(1140, (moved_cured,)), *silent(1320, 1500)]),
        tell("pod replaced after two attempts", 2400, moved_early, crash=silent(945, *EVERY_MINUTE)),
        tell("new steps, not safe yet", 2400, held, crash=[(1140, (held,)), *silent(1320, 1440, 1560, 2340)]),
        tell("resubmitted with its budgets", 2400, again, crash=[(960, (again,)), *silent(1140, 1500, 2340)]),
        tell("old and new pod overlap", 2400, overlap, crash=[(840, (overlap,)), *silent(1080, 1200, 1500)]),
        tell("resumed, then one fault", 2400, reset, crash=[(780, (reset,)), *silent(1080, 1200, 1500, 2340)]),
        tell("series gone", 2400, gone, crash=[(1200, (gone,)), *silent(1680, 2340)]),
        tell("two runs and a namesake", 2400, loop, healthy, namesake, crash=fires),
    ]


def halt_cases():
    """Stories for the halt alert."""
    end = float("inf")
    halted = [*LOOP, (721, "halted")]
    lingering = Story(halted, pods=[("old", 0, 850)])
    again = [*halted, (1000, "start"), (1060, "train")]
    pods = [("old", 0, 850), ("new", 1000, 2000)]
    resubmitted = Story(again, pods=[("old", 0, 850), ("new", 1000, end)])
    finished = Story([*again, (1800, "finished")], pods=pods)
    twice = Story([*again, (1800, "fault"), (1801, "halted")], pods=pods)
    healthy = Story(BEGIN, run="other")
    namesake = Story(BEGIN, namespace="research")
    quiet = [
        tell(f"ends {state}", 2400, Story([*BEGIN, (900, state)], pods=[("p", 0, 1030)]), halt=silent(*EVERY_MINUTE))
        for state in ("finished", "failed", "preempted")
    ]
    recovered = Story([*BEGIN, (600, "fault"), (601, "redo"), (605, "progress")])
    return [
        *quiet,
        tell("single recovery", 2400, recovered, halt=silent(0, *EVERY_MINUTE)),
        tell(
            "halted, pod gone", 3600, lingering, halt=[*silent(660), *[(at, (lingering,)) for at in (840, 1620, 3600)]]
        ),
        tell(
            "resubmitted",
            3000,
            resubmitted,
            crash=[(780, (resubmitted,)), *silent(1140, 1800, 3000)],
            halt=[(960, (resubmitted,)), *silent(1140, 1800, 3000)],
        ),
        tell("resubmitted and finished", 3600, finished, halt=[(960, (finished,)), *silent(1140, 2100, 2700, 3600)]),
        tell("halted twice", 3600, twice, halt=[(960, (twice,)), *silent(1140), (1980, (twice,)), (3600, (twice,))]),
        tell("two runs and a namesake", 2400, lingering, healthy, namesake, halt=[*silent(660), (840, (lingering,))]),
    ]


CASES = {"crash": crash_cases(), "halt": halt_cases()}
NAMED = [(f"{kind}: {case.name}", case) for kind, cases in CASES.items() for case in cases]
RULES = generate.rules_file(Values())


@pytest.mark.parametrize("interval_s", SCRAPES_S)
@pytest.mark.parametrize("case", [case for _, case in NAMED], ids=[name for name, _ in NAMED])
def test_c68_alerts_tell_recovery_from_crash_loop(case, interval_s):
    """Each story pages exactly when it says, at 15, 30 and 60 s scrapes (C63, C66, C68, C69)."""
    outcome = promtool.run(RULES, [case], interval_s, KEY)
    assert outcome.passed, outcome.output


def long_case():
    """A run that halted and was left alone for eight days."""
    story = Story([*LOOP, (721, "halted")], pods=[("old", 0, 1000)])
    return tell("long", 8 * DAY, story, halt=[(2 * DAY, (story,)), (7 * DAY, (story,)), *silent(7 * DAY + HOUR)])


def test_halted_run_is_remembered_for_days_and_then_forgotten():
    """Two days after its pod the page still stands; past `halted_memory_s` it is gone."""
    outcome = promtool.run(RULES, [long_case()], LONG_STORY_SCRAPE_S, KEY)
    assert outcome.passed, outcome.output


def _replace(pattern, replacement):
    def mutate(text):
        changed, count = re.subn(pattern, replacement, text)
        assert count, f"{pattern} is not in the rules"
        return changed

    return mutate


RECOVERING = re.escape('run:nvrx_run_state_entered_timestamp_seconds:max{state="recovering"}')
OF_BUDGET = r"( by \(cluster, namespace, run, cap\) \((?:last_over_time\()?nvrx_budget_used)"
MUTANTS = {
    "threshold one attempt higher": _replace(r">= \((run:nvrx_budget_limit)", r"> (\1"),
    "threshold one attempt lower": _replace(r">= (\(run:nvrx_budget_limit)", r"+ 1 >= \1"),
    "threshold negated": _replace(r">= (\(run:nvrx_budget_limit)", r"< \1"),
    "gate dropped": _replace(r"\n +and on \(cluster, namespace, run\)\n.*recovering\"}\)", ""),
    "gate negated": _replace(r"(last_new_step_timestamp_seconds:max) <", r"\1 >"),
    "and becomes unless": _replace(r"\n( +)and on", r"\n\1unless on"),
    "a resubmitted run still loops": _replace(r"\n +unless on \(cluster, namespace, run\)\n.*\)\)", ""),
    "resubmission negated": _replace(r"(max_active) >", r"\1 <"),
    "remembered budgets count beside live ones": _replace(
        r"max by \(cluster, namespace, run, cap\) \(nvrx_budget_used\)\n +or\n", ""
    ),
    "gate on another state": _replace(RECOVERING, RECOVERING.replace("\\", "").replace("recovering", "starting")),
    "non-finite counts": _replace(r"same_fingerprint\|", "same_fingerprint|nonfinite|"),
    "window counts": _replace(r"same_fingerprint\|", "same_fingerprint|window|"),
    "device counts": _replace(r"same_fingerprint\|", "same_fingerprint|device|"),
    "same fingerprint does not count": _replace(r"same_fingerprint\|", ""),
    "pods are added up": _replace(rf"max{OF_BUDGET}", r"sum\1"),
    "oldest of the new steps": _replace(
        r"max (by \(cluster, namespace, run\) \(last_over_time\(nvrx_last_new)", r"min \1"
    ),
    "namespace dropped from the key": _replace(r"cluster, namespace, run", "cluster, run"),
    "run dropped from the match": _replace(r"on \(cluster, namespace, run\)", "on (cluster, namespace)"),
    "no memory": _replace(r"last_over_time\((nvrx_[a-z_]+(?:{[^}]*})?)\[10m\]\)", r"\1"),
    "memory of a day": _replace(r"\[10m\]", "[1d]"),
    "for of ten minutes": _replace(r"(- alert: NvrxCrashLooping\n)", r"\1    for: 10m\n"),
    "halt is forgotten with the pod": _replace(r"\[1w\]", "[1m]"),
    "halt is never forgotten": _replace(r"\[1w\]", "[30d]"),
    "halt gate dropped": _replace(r"\n +> on \(cluster, namespace, run\)\n +last_over_time.*\[1w\]\)", ""),
    "halt gate negated": _replace(r"\n( +)> on", r"\n\1< on"),
    "halted counts as active": _replace(r"starting\|", "starting|halted|"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_rules_die(name):
    """A wrong rule fails at least one story: the stories test the rules, not just run them."""
    mutant = MUTANTS[name](RULES)
    assert mutant != RULES
    kind = "halt" if "halt" in name else "crash"
    # most of them die in the last stories, which are the richest; `all` stops at the first death
    survived = all(promtool.run(mutant, [case], SCRAPES_S[0], KEY).passed for case in reversed(CASES[kind]))
    assert not survived or not promtool.run(mutant, [long_case()], LONG_STORY_SCRAPE_S, KEY).passed


def test_values_move_threshold_and_wait():
    """A site's multiplier and `for` reach the rule: half a budget pages two attempts in, after the wait."""
    rules = generate.rules_file(Values(crash_loop_budget_ratio=0.5, crash_loop_for_s=120))
    story = Story([*BEGIN, (600, "fault"), (602, "redo"), (660, "fault"), (662, "redo")])
    case = tell("values", 1200, story, crash=[*silent(720), (840, (story,))])
    outcome = promtool.run(rules, [case], 15, KEY)
    assert outcome.passed, outcome.output


def test_shipped_rules_pass_every_lint(tmp_path):
    """`promtool check rules` with all lints fatal."""
    (tmp_path / "rules.yaml").write_text(RULES)
    outcome = promtool.check(tmp_path / "rules.yaml")
    assert outcome.passed, outcome.output
    assert "8 rules found" in outcome.output
