"""Targets that come and go (failure cases C66, C67, C71): what lies between two scrapes neither hides an alert, nor
ends it, nor raises one.
"""

from __future__ import annotations

from nvrx_sre.telemetry import catalog
from tests.promtool.fleet import END, Run
from tests.promtool.histories import BEGIN, CRASH, HALT, LOOP, LOW, MISSING, STALLED, STEP_S
from tests.promtool.test_alert_rules import QUICK, check

UNTIL_S = 1_500
CURED_S = 1_200
SCRAPE_S = 15
LOOPS = [*LOOP, (CURED_S, "progress")]
TOLD = {CRASH: [(720.0, CURED_S)], LOW: [(660 + QUICK.budget_low_for_s, CURED_S)]}
"""A loop until it is cured: the page, and the ticket before it."""


def blinking(up_s: int, down_s: int) -> tuple[tuple[str, float, float], ...]:
    """A pod that dies with each attempt: it answers for `up_s`, then its successor does after `down_s`."""
    period_s = up_s + down_s
    starts = range(600, CURED_S, period_s)
    return (
        ("pod-begin", 0, 600 - down_s),
        *((f"pod-{start}", start, start + up_s) for start in starts),
        ("pod-end", CURED_S, END),
    )


def passes(*runs: Run) -> None:
    """The alerts of all runs are exactly those that they say, from the first minute to the last."""
    outcome = check(QUICK, runs, SCRAPE_S, UNTIL_S)
    assert outcome.passed, outcome.output[:20_000]


def test_c66_a_loop_whose_pods_die_between_crashes_pages_until_it_is_cured() -> None:
    """Half of the time there is no series at all; the page comes with the third attempt and has no hole."""
    passes(
        Run("dies-each-minute", LOOPS, fires=TOLD, pods=blinking(30, 30)),
        Run("dies-at-once", LOOPS, fires=TOLD, pods=blinking(15, 60)),
        Run("healthy-but-blinks", BEGIN, pods=blinking(30, 30)),
    )


def test_c67_an_endpoint_that_answers_now_and_then_is_neither_missing_nor_silenced() -> None:
    """Up, up, down for hours, or one scrape in four: no page for a healthy run, and a whole one for a loop."""
    passes(
        Run("healthy-two-of-three", BEGIN, lost=(0, END, 0)),
        Run("healthy-one-of-four", BEGIN, lost=(0, END, 4)),
        Run("loops-two-of-three", LOOPS, fires=TOLD, lost=(0, END, 0)),
        Run("gone", BEGIN, fires={MISSING: [(900 + QUICK.target_missing_s, END)]}, pods=(("pod-0", 0, 900),)),
    )


def test_a_leader_that_stands_still_is_no_alarm_once_another_leads() -> None:
    """It does not notice that it was superseded, and goes on to serve what it knew."""
    before = {(catalog.LAUNCHER_LOOP.name,): lambda now: min(now, 900.0)}
    passes(
        Run("moved", BEGIN, levels=before, pods=(("pod-0", 0, END),)),
        Run("moved", [*BEGIN, (950, "start"), (955, "train")], pods=(("pod-1", 960, END),)),
    )


def test_an_exporter_with_another_clock_lends_a_run_none() -> None:
    """The launcher's own is taken, also between two of its scrapes."""
    passes(
        Run("both", BEGIN, lost=(0, END, 0)),
        Run("both", BEGIN, levels={(catalog.LAUNCHER_LOOP.name,): lambda now: None}, pods=(("e", 0, END),), ahead_s=25),
    )


def test_of_a_run_that_only_an_exporter_shows_a_dead_launcher_is_a_stall() -> None:
    """No heartbeat, so that it can be neither stuck nor missing; that its steps stopped is seen all the same."""
    no_loop = {(catalog.LAUNCHER_LOOP.name,): lambda now: None}
    stalled = {STALLED: [(600 + QUICK.stalled_ratio * STEP_S, END)]}
    passes(
        Run("trains", BEGIN, levels=no_loop),
        Run("died", [*BEGIN, (600, "stop")], fires=stalled, levels=no_loop),
        Run("ended", [*BEGIN, (600, "stop"), (630, "finished")], levels=no_loop),
    )


def test_c71_one_of_two_runs_vanishes_and_an_end_that_was_seen_is_no_absence() -> None:
    """Missing is told by run, with its labels, also when discovery forgot the target; a recorded end stays silent."""
    short = (("pod-0", 0, 900),)
    passes(
        Run("vanishes", BEGIN, fires={MISSING: [(900 + QUICK.target_missing_s, END)]}, pods=short),
        Run("vanishes", BEGIN, namespace="research"),
        Run("finishes", [*BEGIN, (870, "finished")], pods=short),
        Run("halted", [*BEGIN, (870, "halted")], fires={HALT: [(870, END)]}, pods=short),
    )


def test_c71_without_any_run_nothing_but_the_watchdog_fires() -> None:
    """No series at all is no alert of ours: which runs there should be is not for the rules to know."""
    passes()
