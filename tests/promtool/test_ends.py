"""A run that stops for good saves before it leaves: from the decision on its page is `NvrxRunHalted`.

What the launcher exports meanwhile is told in records and folded by the product: series stated by hand would show
what they are meant to.
"""

from __future__ import annotations

import pytest
import yaml

from nvrx_sre.events.schema import Action, FaultClass, Layer, Record, RestoredFrom
from nvrx_sre.monitoring import generate, promtool
from nvrx_sre.monitoring.promtool import Expectation
from nvrx_sre.telemetry import catalog
from tests.promtool.fleet import END, KEY, Run, case_of
from tests.promtool.folded import levels_of
from tests.promtool.histories import CRASH, HALT
from tests.promtool.test_alert_rules import QUICK
from tests.stories import Story

DECIDED_S, LEFT_S, AGAIN_S, UNTIL_S = 720.5, 860.5, 960, 1_500
"""The end takes more than two scrapes of a minute."""
EXPORTED = (
    *(catalog.BUDGET_USED, catalog.BUDGET_LIMIT, catalog.RUN_STATE_ENTERED, catalog.HALTED_TIMESTAMP),
    *(catalog.LAST_NEW_STEP, catalog.LAST_STEP, catalog.FAULT_TIMESTAMP),
)


def looping() -> Story:
    """Three attempts at one step; with the third it is decided to stop."""
    story = Story()
    story.start(60)
    story.steps(story.form(100, 0, RestoredFrom.FRESH), 600, 1, 100)
    for number, at_s in enumerate((600.2, 660.2, DECIDED_S)):
        story.fault(at_s - 0.1, at_s, FaultClass.EXCEPTION, 1)
        used = {"same_fingerprint": number + 1, "consecutive": number + 1}
        limits = {"same_fingerprint": 3, "consecutive": 3}
        if at_s == DECIDED_S:
            stop = {"exit_code": 93, "is_capped": True, "budget_used": used, "budget_limit": limits}
            story.decide(at_s, Layer.JOB, Action.STOP, **stop)
            break
        story.decide(at_s, Layer.WORKER, budget_used=used, budget_limit=limits)
        story.torn_down(at_s + 0.5)
        story.form(at_s + 1, 100, RestoredFrom.HOT)
    return story


def ended() -> Story:
    """It saves for two minutes, then it leaves with 93."""
    story = looping()
    story.save(LEFT_S - 1, 100)
    story.finish(LEFT_S, exit_code=93)
    return story


def started_again() -> Story:
    """The launcher was killed before it had saved; the orchestrator starts another, which trains on."""
    story = looping()
    story.start(AGAIN_S)
    story.steps(story.form(AGAIN_S + 20, 100, RestoredFrom.DURABLE), AGAIN_S + 40, 101, 120)
    return story


def run_of(name: str, records: list[Record], *pods: tuple[str, float, float]) -> Run:
    """What the fold exports of the records, from these pods."""
    return Run(name, [(60, "start"), (100, "train")], levels=levels_of(records, *EXPORTED), pods=pods)


@pytest.mark.parametrize("interval_s", [15, 60])
def test_a_loop_that_saves_before_its_end_pages_as_halted_alone(interval_s: int) -> None:
    """At no evaluation does the loop fire without the halt; a launcher that is killed while it saves hides neither,
    and a new start ends both."""
    saves = run_of("saves", ended().records, ("a", 0, 950))
    killed = run_of("killed", looping().records, ("a", 0, 790))
    again = run_of("again", started_again().records, ("a", 0, 790), ("b", AGAIN_S + 1, END))
    rules = yaml.safe_load(generate.rules_file(QUICK))
    loops, halts = (f'ALERTS{{alertname="{name}",alertstate="firing"}}' for name in (CRASH, HALT))
    rules["groups"][0]["rules"].append({"alert": "alone", "expr": f"{loops} unless on (run) {halts}"})
    begun, over = DECIDED_S + 2 * interval_s, AGAIN_S + 4 * interval_s
    times = range(600, UNTIL_S, interval_s)
    told = [Expectation(at_s=at, alert="alone", firing=()) for at in times]
    for at in times:
        if at < DECIDED_S or begun < at:
            runs = [] if at < DECIDED_S else [saves, killed] if at > over else [again, killed, saves]
            unsettled = (again.name,) if AGAIN_S <= at <= over else ()
            firing = tuple(run.labels() for run in runs if run.name not in unsettled)
            told += [Expectation(at_s=at, alert=name, firing=firing, unsettled=unsettled) for name in (HALT, CRASH)]
    case = case_of("ends", [saves, killed, again], tuple(told), UNTIL_S)
    outcome = promtool.run(yaml.safe_dump(rules), [case], interval_s, KEY)
    assert outcome.passed, outcome.output[:10_000]


def test_the_reason_and_the_fault_are_told_while_it_still_saves() -> None:
    """One reason, not all that there are; the rank, what it failed of, and since when to the second."""
    run = run_of("saves", ended().records, ("a", 0, 950))
    text = promtool.alert_text(generate.rules_file(QUICK), case_of("text", [run], (), 900), 15, (HALT, 780))
    for part in (
        "Run saves is halted (cap) since 1970-01-01 00:12:00 UTC and will not restart.",
        "Retries are used up. Last root: rank 3 (exception). The launcher ends with exit code 93",
    ):
        assert part in text, text
    assert "operator" not in text and "cure the fault" not in text, text
