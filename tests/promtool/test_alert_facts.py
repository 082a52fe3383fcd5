"""What an alert says of its run: whose it is, where it was, what failed, what is durable, what stands idle."""

from __future__ import annotations

import re

import pytest
import yaml

from nvrx_sre.monitoring import generate, promtool
from nvrx_sre.monitoring.promtool import Expectation
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog
from tests.promtool.fleet import END, KEY, Level, Run, case_of, jump
from tests.promtool.histories import BEGIN, CRASH, HALT, LOOP, MISSING, OVERDUE, RENDEZVOUS, STALLED
from tests.promtool.test_alert_rules import QUICK

HOUR = 3_600
FRESH = "NvrxSilentFreshStart"
OWNED = (*KEY, "severity", "team", "priority")
RULES = generate.rules_file(Values())
RANKS: dict[tuple[str, ...], Level] = {(catalog.DEVICES.name, "seen"): 0}
HALTED = [*LOOP, (721, "halted")]
GONE = (("pod-0", 0, 1_000),)
ROOT: dict[tuple[str, ...], Level] = {
    (catalog.FAULT_TIMESTAMP.name, "hang"): jump(120, 0, 300),
    (catalog.FAULT_TIMESTAMP.name, "exception"): jump(600, 0, 600),
    (catalog.FAULT_TIMESTAMP.name, "killed"): 0,
    (catalog.CHECKPOINT_STEP.name, "durable"): 40,
}


def owned(run: Run, severity: str, **whose: str) -> dict[str, str]:
    """Labels of its alert."""
    return {**run.labels(), "severity": severity, **whose}


def test_alerts_carry_whose_run_it_is_also_long_after_its_pod() -> None:
    """Team and priority as the run said; else `none` and `prod`; the same alert when its pod is gone."""
    nlp = Run("nlp", HALTED, team="nlp", pods=GONE)
    dev = Run("dev", HALTED, team="nlp", priority="dev", pods=GONE)
    nobody = Run("nobody", HALTED, pods=GONE)
    unknown = Run("unknown", HALTED, pods=GONE, levels={RUN_INFO: lambda now: None})
    firing = (
        owned(nlp, "critical", team="nlp", priority="prod"),
        owned(dev, "warning", team="nlp", priority="dev"),
        owned(nobody, "critical", team="none", priority="prod"),
        owned(unknown, "critical", team="none", priority="prod"),
    )
    told = tuple(Expectation(at_s=at, alert=HALT, firing=firing) for at in (960, HOUR, 20 * HOUR))
    case = case_of("owners", [nlp, dev, nobody, unknown], told, 20 * HOUR)
    outcome = promtool.run(RULES, [case], 240, OWNED)
    assert outcome.passed, outcome.output


RUN_INFO = (catalog.RUN_INFO.name, "none", "prod", "host-7")


def test_of_two_launchers_the_newer_one_says_whose_run_it_is() -> None:
    """A dev run that is submitted again as prod pages, and a run of the same name elsewhere keeps its own owner."""
    halted = [*BEGIN, (300, "start"), (330, "train"), (600, "fault"), (601, "halted")]
    old = Run("moved", halted, team="research", priority="dev", pods=(("old", 0, 290),))
    new = Run("moved", halted, team="nlp", pods=(("new", 300, 900),))
    other = Run("moved", halted, team="vision", namespace="research", pods=(("pod-0", 0, 900),))
    firing = (
        owned(new, "critical", team="nlp", priority="prod"),
        owned(other, "critical", team="vision", priority="prod"),
    )
    told = tuple(Expectation(at_s=at, alert=HALT, firing=firing) for at in (660, 1_200, 2 * HOUR))
    outcome = promtool.run(RULES, [case_of("moved", [old, new, other], told, 2 * HOUR)], 60, OWNED)
    assert outcome.passed, outcome.output


def test_every_alert_can_be_routed_by_owner() -> None:
    """No rule is left out, nor one that is written later."""
    for text in (RULES, generate.kubernetes_rules_file(Values())):
        rules = [item for item in yaml.safe_load(text)["groups"][0]["rules"] if "alert" in item]
        assert rules
        assert not [item["alert"] for item in rules if not {"severity", "team", "priority"} <= set(item["labels"])]


def said(run: Run, alert: str, at_s: int, field: str, interval_s: int = 15) -> str:
    """One annotation of the one alert of a run."""
    text = promtool.alert_text(
        generate.rules_file(QUICK), case_of("x", [run], (), at_s + 60), interval_s, (alert, at_s)
    )
    found = re.findall(rf'{field}="([^"]*)"', text)
    assert len(found) == 1, text
    return str(found[0])


@pytest.mark.parametrize(
    ("alert", "events", "levels"),
    [(CRASH, LOOP, {}), (HALT, HALTED, {}), (HALT, HALTED, {"pods": GONE})],
    ids=["loops", "halted", "halted-and-gone"],
)
def test_a_loop_says_what_failed_and_what_is_durable(alert: str, events: list, levels: dict) -> None:  # type: ignore[type-arg]  # a Run's fields
    """The newest fault of those that there were, and the step that a new start would go on from."""
    text = said(Run("loop", events, levels=ROOT, **levels), alert, 2_400, "description", 60)
    assert "Last root: rank 3 (exception)." in text
    assert "Newest durable step: 40." in text


def test_a_loop_says_that_nothing_is_durable() -> None:
    """No step, and a page that names none."""
    text = said(Run("loop", LOOP, levels={(catalog.CHECKPOINT_STEP.name, "durable"): -1}), CRASH, 840, "description")
    assert "No step is durable." in text and "Newest" not in text


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("cap", "Retries are used up. Last root: rank 3 (exception)."),
        ("incurable", "No restart can cure the fault. Last root: rank 3 (exception)."),
        ("operator", "An operator halted it."),
        ("brake", "The brake halted it."),
    ],
)
def test_a_halt_says_the_one_reason(reason: str, sentence: str) -> None:
    """Nothing of the other reasons, and the time to the second."""
    halted = {(catalog.HALTED_TIMESTAMP.name, each): 0 for each in ("cap", "operator")}
    halted |= {(catalog.HALTED_TIMESTAMP.name, reason): lambda now: 660.658 if now >= 660.658 else 0}  # type: ignore[dict-item]  # a level
    run = Run("halt", [*BEGIN, (600, "fault"), (660.658, "halted")], levels={**ROOT, **halted})
    text = said(run, HALT, 840, "description")
    assert text.startswith(f"{sentence} The launcher ends with exit code 93: "), text
    since = "Run halt is halted (" + reason + ") since 1970-01-01 00:11:00 UTC and will not restart."
    assert said(run, HALT, 840, "summary") == since


def test_a_run_that_vanished_is_looked_for_on_its_host() -> None:
    """The node of its leader, an hour after its last word."""
    text = said(Run("gone", BEGIN, pods=(("pod-0", 0, 600),)), MISSING, HOUR, "description", 60)
    assert text.startswith("Its launcher was on host-7. ")


@pytest.mark.parametrize(
    ("alert", "events", "at_s", "levels", "idle"),
    [
        (CRASH, LOOP, 840, {}, "4 GPUs held"),
        (CRASH, LOOP, 840, RANKS, "4 ranks held"),
        (CRASH, LOOP, 840, {(catalog.WORLD_SIZE_CONFIGURED.name,): 1}, "1 GPU held"),
        (CRASH, HALTED, 840, {}, ""),
        (HALT, HALTED, 840, {}, ""),
        (STALLED, [*BEGIN, (600, "stop")], 1_200, {}, "4 GPUs held"),
        (OVERDUE, [*BEGIN, (600, "fault")], 2_340, RANKS, "4 ranks held"),
        (RENDEZVOUS, [*BEGIN, (600, "rendezvous")], 1_200, {}, "4 GPUs held"),
        ("NvrxStartupOverdue", [(60, "start")], 2_340, {}, "4 GPUs held"),
        ("NvrxWorldShrunk", BEGIN, 1_200, {(catalog.WORLD_SIZE.name,): 3}, ""),
        (
            FRESH,
            [*BEGIN, (570, "fault"), (580, "redo")],
            840,
            {(catalog.FRESH_STARTS.name, "lost"): jump(580, 0, 1)},
            "",
        ),
    ],
)
def test_idle_is_what_is_held_and_trains_nothing(
    alert: str, events: list[tuple[float, str]], at_s: int, levels: dict[tuple[str, ...], Level], idle: str
) -> None:
    """Of a run that ended, that trains, or that does old steps again nothing is idle; without a GPU it is ranks."""
    assert said(Run("run", events, levels=levels), alert, at_s, "idle", 30) == idle


def test_of_a_run_that_vanished_nothing_is_said_to_be_idle() -> None:
    """Whether it trains is not known."""
    assert said(Run("gone", BEGIN, pods=(("pod-0", 0, 600), ("late", HOUR, END))), MISSING, 1_200, "idle", 60) == ""


@pytest.mark.parametrize(
    ("num_saved", "sentence"),
    [
        (0, "No checkpoint was durable yet: the steps before are done again."),
        (3, "No checkpoint was loaded. If nobody"),
    ],
)
def test_a_fresh_start_speaks_of_old_checkpoints_only_where_there_were_any(num_saved: int, sentence: str) -> None:
    """Before the first durable one there is nothing that retention could remove."""
    saved = (catalog.SAVES.name, "durable", "committed")
    levels: dict[tuple[str, ...], Level] = {(catalog.FRESH_STARTS.name, "lost"): jump(580, 0, 1), saved: num_saved}
    text = said(Run("fresh", BEGIN, levels=levels), FRESH, 840, "description")
    assert text.startswith(sentence)
    assert ("retention" in text) == (num_saved > 0)
